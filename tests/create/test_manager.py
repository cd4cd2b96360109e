"""What a script asks a manager: how long, what when, what was done; and where it sends its numbers."""

import math

import pytest
import torch
from torch.optim import SGD

from create.models import CNN, MODELS, prunable, sparsity, take_steps
from sparta.create import Manager, Modifier, initialize, modifier_named
from sparta.errors import ValueRangeError

STEPS = 4


def entry(name, **fields):
    return modifier_named(name)(**fields)


def manager_of(**options):
    model = CNN()
    return initialize(model, SGD(model.parameters(), lr=0.1), STEPS, **options)[0]


def test_how_long():
    assert Manager([]).max_epochs == Manager([]).min_epochs == -1
    manager = Manager([entry("EpochRange", start_epoch=1.5, end_epoch=7.25), entry("ConstantPruning")])
    assert (manager.min_epochs, manager.max_epochs) == (1, 8)
    assert Manager([entry("SetLearningRate", learning_rate=0.1, start_epoch=9)]).max_epochs == 9


def test_lists_by_kind():
    manager = manager_of(distillation=True)
    kinds = {
        "epoch": manager.epoch_modifiers,
        "learning_rate": manager.learning_rate_modifiers,
        "pruning": manager.pruning_modifiers,
        "quantization": manager.quantization_modifiers,
        "distillation": manager.distillation_modifiers,
    }
    assert all([found.kind for found in entries] == [kind] for kind, entries in kinds.items())
    assert manager.structured_modifiers == []
    assert len(list(manager.iter_modifiers())) == len(manager.modifiers) == 5
    with pytest.raises(ValueRangeError, match="kind is 'magic'"):
        manager.of_kind("magic")


def test_modifiers_that_end_first_run_first():
    late, never, early = (
        entry("EpochRange", end_epoch=9),
        entry("ConstantPruning"),
        entry("EpochRange", end_epoch=2),
    )
    assert list(Manager([late, never, early]).iter_modifiers()) == [early, late, never]


def test_phases_of_the_default_recipe():
    manager = manager_of()
    assert [manager.phase(epoch) for epoch in (0, 3, 7.5, 14, 15, 20)] == [
        None,
        None,
        "pruned",
        "pruned",
        "pruned_quantized",
        "pruned_quantized",
    ]
    assert [manager.qat_active(epoch) for epoch in (0, 14, 14.5, 15, 19)] == [False, False, True, True, True]
    assert manager_of(quantization=False, pruning=False).phase(3) == "dense"
    assert not manager_of(quantization=False).qat_active(19)


def test_phases_of_other_orders():
    pruning = entry("MagnitudePruning", start_epoch=2, end_epoch=4, final_sparsity=0.5)
    quantization = entry("Quantization", start_epoch=1)
    manager = Manager([pruning, quantization])
    assert [manager.phase(epoch) for epoch in (0, 1, 3, 5)] == ["dense", "dense_quantized", None, "quantized_pruned"]


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_one_shot(model):
    model = model()
    manager = Manager(
        [
            entry("LearningRate", lr_class="ExponentialLR", lr_kwargs={"gamma": 0.9}, init_lr=0.1),
            entry("GlobalMagnitudePruning", final_sparsity=0.8, end_epoch=10),
        ]
    )
    manager.apply(model)
    assert sparsity(model) == pytest.approx(0.8, abs=0.01)
    manager.spec().check(model)
    with pytest.raises(ValueRangeError, match="make another manager"):
        manager.apply(model)


def test_one_shot_by_movement_needs_gradients():
    make = lambda: Manager([entry("MovementPruning", final_sparsity=0.8, end_epoch=1)])  # noqa: E731
    with pytest.raises(ValueRangeError, match="neither a loss_closure nor data"):
        make().apply(CNN())
    model = CNN()
    make().apply(model, data=[model.batch(0), model.batch(1)])
    assert sparsity(model) == pytest.approx(0.8, abs=0.01)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_spec_says_what_is_zero_while_training_and_after():
    model = CNN()
    optimizer = SGD(model.parameters(), lr=0.1)
    manager, _ = initialize(model, optimizer, STEPS, quantization=False, recipe_variables={"num_epochs": 2})
    assert len(manager.spec()) == 0
    take_steps(model, optimizer, 2 * STEPS)
    during = manager.spec()
    manager.finalize()
    assert manager.spec() == during
    assert set(during) == set(prunable(model))
    assert during.density == pytest.approx(0.2, abs=0.01)
    during.check(model)


class Log:
    def __init__(self):
        self.records = []

    def log(self, record):
        self.records.append(record)


class Writer:
    def __init__(self):
        self.scalars = []

    def add_scalar(self, name, value, global_step):
        self.scalars.append((name, value, global_step))


def test_numbers_go_to_functions_writers_and_loggers():
    records, log, writer = [], Log(), Writer()
    model = CNN()
    optimizer = SGD(model.parameters(), lr=0.1)
    manager = Manager(
        [
            entry("LearningRateFunction", lr_func="linear", init_lr=1, final_lr=0, end_epoch=1),
            entry("MagnitudePruning", final_sparsity=0.5, end_epoch=1, update_frequency=1),
            entry("SparsificationLogging", update_frequency=0.5, params="fc1.weight"),
        ]
    )
    for logger in (records.append, log, writer):
        manager.add_logger(logger)
    manager.attach(model, optimizer, STEPS)
    take_steps(model, optimizer, STEPS)
    assert records == log.records
    rates = [record["learning_rate"] for record in records if "learning_rate" in record]
    assert rates == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert [(r["epoch"], r["sparsity"]) for r in records if "sparsity" in r] == [
        (0.0, pytest.approx(0.05, abs=0.01)),
        (1.0, pytest.approx(0.5, abs=0.01)),
    ]
    layers = [record["sparsity/fc1.weight"] for record in records if "sparsity/fc1.weight" in record]
    assert len(layers) == 2
    assert ("learning_rate", 0.75, 1) in writer.scalars
    with pytest.raises(ValueRangeError, match="a logger is a int"):
        manager.add_logger(7)


def test_tensorboard_takes_them(tmp_path):
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        manager = manager_of(loggers=[writer])
        manager.log({"sparsity": 0.5})
    assert list(tmp_path.iterdir())


def test_a_picture_of_the_schedule(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "schedule.png"
    figure = manager_of().plot(path)
    assert path.stat().st_size > 0
    sparsities = figure.axes[0].lines[0].get_ydata()
    assert (sparsities[0], sparsities[-1]) == (0.05, 0.8)
    assert figure.axes[1].lines[0].get_ydata()[0] == pytest.approx(1e-3)


class Silent(Modifier):
    """Claims to have had no effect."""

    kind = "distillation"

    def idle(self):
        return "nothing came of it."


def test_a_modifier_without_effect_is_warned_of_once():
    model = CNN()
    optimizer = SGD(model.parameters(), lr=0.1)
    manager = Manager([Silent(start_epoch=0, end_epoch=3)])
    manager.attach(model, optimizer, STEPS)
    take_steps(model, optimizer, STEPS - 1)
    with pytest.warns(UserWarning, match="nothing came of it"):
        take_steps(model, optimizer, 1)
    take_steps(model, optimizer, 2 * STEPS)
    manager.finalize()
    short = Manager([Silent(start_epoch=0, end_epoch=1)])
    short.attach(model, optimizer, STEPS)
    take_steps(model, optimizer, 1)
    with pytest.warns(UserWarning, match="nothing came of it"):
        short.finalize()


class Twice(Modifier):
    """Doubles the loss."""

    kind = "distillation"

    def loss(self, run, loss, inputs, outputs):
        return loss * 2


def test_losses_pass_through_what_is_active():
    model = CNN()
    manager = Manager([Twice(start_epoch=0, end_epoch=1), Twice(start_epoch=1)])
    optimizer = SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueRangeError, match="attach first"):
        manager.loss_update(torch.tensor(1.0))
    manager.attach(model, optimizer, STEPS)
    assert float(manager.loss_update(torch.tensor(1.0))) == 2.0
    with pytest.raises(ValueRangeError, match="make another manager"):
        manager.attach(model, optimizer, STEPS)


def test_recipes_are_saved_with_their_variables(tmp_path):
    manager = manager_of(recipe_variables={"num_epochs": 10})
    manager.save(tmp_path / "recipe.yaml")
    text = (tmp_path / "recipe.yaml").read_text()
    assert text == str(manager)
    assert "${" in text
    bare = Manager([entry("MagnitudePruning", final_sparsity=0.5, end_epoch=1)])
    assert "MagnitudePruning" in str(bare)


@pytest.mark.parametrize(
    "change",
    [
        {"step": -5},
        {"step": 1.5},
        {"step": None},
        {"step": True},
        {"steps_per_epoch": 0},
        {"steps_per_epoch": "4"},
        {"version": "1"},
        {"version": torch.ones(2)},
        {"modifiers": 3},
        {"modifiers": {1: {}}},
        {"generator": None},
        {"generator": torch.zeros(3)},
        {"generator": torch.zeros(3, dtype=torch.uint8)},
    ],
    ids=str,
)
def test_a_state_that_is_none_is_refused(change):
    manager = manager_of()
    state = manager.state_dict()
    with pytest.raises(ValueRangeError):
        manager.load_state_dict({**state, **change})
    with pytest.raises(ValueRangeError):
        manager.load_state_dict({name: value for name, value in state.items() if name not in change})
    manager.load_state_dict(state)
    assert manager.step == 0


@pytest.mark.parametrize(
    "window", [3, {}, *({"started": True, "ended": False, "last_update": at} for at in (-5, 1e308, math.inf, math.nan))]
)
def test_a_state_of_a_modifier_that_is_none_is_refused(window):
    manager = manager_of()
    state = manager.state_dict()
    name = next(iter(state["modifiers"]))
    with pytest.raises(ValueRangeError):
        manager.load_state_dict({**state, "modifiers": {**state["modifiers"], name: {"window": window, "own": {}}}})

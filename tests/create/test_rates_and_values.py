"""Learning rates follow their closed forms at every step; values are written, moved and given back."""

import math
import warnings

import pytest
import torch
from torch.optim import SGD, AdamW

from create.models import CNN, take_steps
from sparta.create import Manager, initialize, modifier_named
from sparta.errors import NameNotFoundError, ValueRangeError

STEPS = 4


def trace(entries, epochs, optimizer=None, model=None):
    """Train and return the rates of the first group that each step was taken with, one more than epochs * STEPS."""
    model = model or CNN()
    optimizer = optimizer or SGD(model.parameters(), lr=123.0)
    manager = Manager([*entries, modifier_named("EpochRange")(end_epoch=epochs + 1)])
    manager.attach(model, optimizer, STEPS)
    rates = []
    for step in range(epochs * STEPS + 1):
        take_steps(model, optimizer, 1, step)
        rates.append(float(optimizer.param_groups[0]["lr"]))
    return rates


def function(kind, init=0.1, final=0.01, end=4, **fields):
    return modifier_named("LearningRateFunction")(lr_func=kind, init_lr=init, final_lr=final, end_epoch=end, **fields)


FORMS = {
    "linear": lambda x: 0.1 + (0.01 - 0.1) * x,
    "cosine": lambda x: 0.01 + 0.09 * (1 + math.cos(math.pi * x)) / 2,
    "exponential": lambda x: 0.1 * 0.1**x,
    "constant": lambda x: 0.1,
    "cyclic_linear": lambda x: 0.1 - 0.09 * (x * 4 % 1) * STEPS / (STEPS - 1) if x < 1 else 0.01,
    "stepped": lambda x: 0.1 * 0.1 ** (min(3, math.floor(x * 4)) / 3),
}


@pytest.mark.parametrize("kind", FORMS)
def test_rates_are_the_closed_form_at_every_step(kind):
    rates = trace([function(kind)], 4)
    assert rates == pytest.approx([FORMS[kind](step / 16) for step in range(17)])


def test_a_cosine_may_rise():
    assert trace([function("cosine", init=0.0, final=1.0)], 4)[::8] == pytest.approx([0.0, 0.5, 1.0])


def test_a_cycle_of_one_step_is_no_division_by_zero():
    assert trace([function("cyclic_linear", cycle_epochs=0.25)], 4)[:3] == pytest.approx([0.1, 0.1, 0.1])


def test_rates_above_one_are_rates_too():
    assert trace([function("linear", init=2.0, final=0.0)], 4)[0] == 2.0


TORCH = {
    "StepLR": {"step_size": 2, "gamma": 0.5},
    "MultiStepLR": {"milestones": [1, 3], "gamma": 0.3},
    "ExponentialLR": {"gamma": 0.9},
    "CosineAnnealingWarmRestarts": {"T_0": 2, "T_mult": 2, "eta_min": 0.01},
}


@pytest.mark.parametrize("name", TORCH)
def test_schedules_of_torch_agree_at_whole_epochs(name):
    reference = SGD(CNN().parameters(), lr=0.5)
    schedule = getattr(torch.optim.lr_scheduler, name)(reference, **TORCH[name])
    expected = []
    for _ in range(6):
        expected.append(reference.param_groups[0]["lr"])
        reference.step()
        schedule.step()
    entry = modifier_named("LearningRate")(lr_class=name, lr_kwargs=TORCH[name], init_lr=0.5)
    assert [entry.rate_at(epoch) for epoch in range(6)] == pytest.approx(expected)
    assert trace([entry], 5)[::STEPS] == pytest.approx(expected)


def test_only_the_named_groups_change_and_tensors_stay_tensors():
    model = CNN()
    first, *rest = model.parameters()
    optimizer = AdamW([{"params": [first], "lr": torch.tensor(7.0)}, {"params": rest, "lr": 5.0}], capturable=False)
    held = optimizer.param_groups[0]["lr"]
    trace([function("linear", param_groups=[0])], 2, optimizer, model)
    assert optimizer.param_groups[0]["lr"] is held
    assert float(held) == pytest.approx(FORMS["linear"](0.5))
    assert optimizer.param_groups[1]["lr"] == 5.0
    with pytest.raises(ValueRangeError, match="0 to 1: the optimizer has 2"):
        trace([function("linear", param_groups=[2])], 1, AdamW(optimizer.param_groups), model)


def test_rates_hand_over_from_one_modifier_to_the_next():
    later = modifier_named("SetLearningRate")(learning_rate=0.5, start_epoch=2)
    assert trace([function("linear", end=1), later], 3)[::STEPS] == pytest.approx([0.1, 0.01, 0.5, 0.5])


@pytest.mark.parametrize(
    ("name", "fields", "text"),
    [
        ("LearningRateFunction", {"lr_func": "exponential", "init_lr": 1, "final_lr": 0, "end_epoch": 1}, "above 0"),
        ("LearningRateFunction", {"lr_func": "linear", "init_lr": -1, "final_lr": 0, "end_epoch": 1}, "init_lr"),
        ("LearningRateFunction", {"lr_func": "linear", "init_lr": 1, "final_lr": 0, "end_epoch": -1}, "end_epoch"),
        ("LearningRateFunction", {"lr_func": "linear", "init_lr": 1, "final_lr": 0}, "end_epoch is missing"),
        ("LearningRateFunction", {"lr_func": "wavy", "init_lr": 1, "final_lr": 0, "end_epoch": 1}, "lr_func"),
        ("LearningRate", {"lr_class": "StepLR", "lr_kwargs": {"size": 1}, "init_lr": 1}, "keyword argument of StepLR"),
        ("LearningRate", {"lr_class": "StepLR", "init_lr": 1}, "StepLR without step_size"),
        ("GradualParam", {"init_val": 0, "final_val": 1, "end_epoch": -1}, "final_val is reached"),
    ],
)
def test_bad_fields_are_refused(name, fields, text):
    with pytest.raises(ValueRangeError, match=text):
        modifier_named(name)(**fields)


# ---------------------------------------------------------------------- two writers of one rate


def test_a_scheduler_attached_before_is_warned_of():
    model = CNN()
    optimizer = SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 2)
    with pytest.warns(UserWarning, match="both set the learning rate"):
        initialize(model, optimizer, STEPS, quantization=False)


def test_a_scheduler_attached_later_is_warned_of_once():
    model = CNN()
    optimizer = SGD(model.parameters(), lr=0.1)
    _, optimizer = initialize(model, optimizer, STEPS, quantization=False)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(6):
            take_steps(model, optimizer, 1, step)
            schedule.step()
    assert len(caught) == 1
    assert "lr=None" in str(caught[0].message)


def test_lr_none_leaves_the_rate_to_the_scripts_own_scheduler():
    model = CNN()
    optimizer = SGD(model.parameters(), lr=0.8)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    _, optimizer = initialize(model, optimizer, STEPS, quantization=False, lr=None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(3):
            take_steps(model, optimizer, 1, step)
            schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)


# ---------------------------------------------------------------------- values


def test_weight_decay_is_set_when_its_time_comes():
    model = CNN()
    optimizer = SGD(model.parameters(), lr=0.1)
    Manager([modifier_named("SetWeightDecay")(weight_decay=0.25, start_epoch=1)]).attach(model, optimizer, STEPS)
    take_steps(model, optimizer, STEPS)
    assert optimizer.param_groups[0]["weight_decay"] == 0
    take_steps(model, optimizer, 1)
    assert optimizer.param_groups[0]["weight_decay"] == 0.25


def test_an_optimizer_without_weight_decay_is_refused():
    model = CNN()
    with pytest.raises(ValueRangeError, match="has no weight decay"):
        Manager([modifier_named("SetWeightDecay")(weight_decay=0.1)]).attach(
            model, torch.optim.LBFGS(model.parameters()), STEPS
        )


def test_parameters_rest_for_a_window_and_learn_again():
    model = CNN()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    model.fc2.bias.requires_grad_(requires_grad=False)
    entry = modifier_named("TrainableParams")(params=["fc1.weight", "fc2.bias"], trainable=False, end_epoch=2)
    Manager([entry]).attach(model, optimizer, STEPS)
    before = model.fc1.weight.detach().clone()
    take_steps(model, optimizer, 2 * STEPS)
    assert torch.equal(model.fc1.weight, before)
    take_steps(model, optimizer, 2)
    assert model.fc1.weight.requires_grad
    assert not model.fc2.bias.requires_grad, "it was off before, and is given back as it was"
    take_steps(model, optimizer, 1)
    assert not torch.equal(model.fc1.weight, before)


def test_parameters_are_set_and_moved():
    model = CNN()
    optimizer = SGD(model.parameters(), lr=0.0)
    entries = [
        modifier_named("SetParam")(params="fc1.bias", val=3.0, start_epoch=1),
        modifier_named("GradualParam")(params="fc2.bias", init_val=0, final_val=8, end_epoch=2, inter_func="cubic"),
    ]
    Manager(entries).attach(model, optimizer, STEPS)
    take_steps(model, optimizer, STEPS + 1)
    assert set(model.fc1.bias.tolist()) == {3.0}
    assert set(model.fc2.bias.tolist()) == {7.0}
    take_steps(model, optimizer, STEPS)
    assert set(model.fc2.bias.tolist()) == {8.0}


def test_names_that_match_nothing_are_errors_unless_that_is_fine():
    model = CNN()
    optimizer = SGD(model.parameters(), lr=0.1)
    strict = modifier_named("SetParam")(params=["fc1.bias", "fc9.bias"], val=0)
    with pytest.raises(NameNotFoundError, match=r"did you mean .*'fc1\.bias'"):
        Manager([strict]).attach(model, optimizer, STEPS)
    lax = modifier_named("SetParam")(params=["fc1.bias", "fc9.bias"], val=0, params_strict=False)
    Manager([lax]).attach(model, optimizer, STEPS)
    with pytest.raises(ValueRangeError, match="params is empty"):
        Manager([modifier_named("MagnitudePruning")(params=[], final_sparsity=0.5, end_epoch=1)]).attach(
            model, optimizer, STEPS
        )

"""Pruning follows its schedule exactly, keeps its pattern, holds its masks, and empties no layer."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD, Adam

from create.models import CNN, MODELS, loss_of, prunable, sparsity, take_steps
from sparta.create import Manager, Run, modifier_named
from sparta.errors import NameNotFoundError, ShapeError, ValueRangeError
from sparta.tesa.patterns import NM

STEPS = 4
MAGNITUDE, GLOBAL = modifier_named("MagnitudePruning"), modifier_named("GlobalMagnitudePruning")


def start(model, *entries, optimizer=None, **extras):
    optimizer = optimizer or SGD(model.parameters(), lr=0.05, momentum=0.9)
    manager = Manager(list(entries))
    manager.attach(model, optimizer, STEPS, **extras)
    return manager, optimizer


def zeros(weight):
    return int((weight == 0).sum())


# ---------------------------------------------------------------------- when and how much


def test_the_cubic_trace():
    """Known values of 0.05 to 0.8 over ten epochs with an update an epoch."""
    model = CNN()
    longer = modifier_named("EpochRange")(end_epoch=11)
    manager, optimizer = start(model, GLOBAL(final_sparsity=0.8, end_epoch=10, update_frequency=1), longer)
    seen = {}
    for step in range(10 * STEPS + 1):
        take_steps(model, optimizer, 1, step)
        seen[step / STEPS] = manager.spec().density
    measured = [round(1 - seen[epoch], 3) for epoch in (0, 1, 2, 5, 9, 10)]
    assert measured == pytest.approx([0.05, 0.2532, 0.416, 0.7063, 0.7993, 0.8], abs=1e-3)
    assert all(seen[epoch] == seen[float(int(epoch))] for epoch in seen), "masks change at updates only"


CURVES = {
    "linear": lambda x: x,
    "cubic": lambda x: 1 - (1 - x) ** 3,
    "inverse_cubic": lambda x: 1 - (1 - x) ** (1 / 3),
}


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_every_update_has_the_sparsity_of_the_curve_in_every_layer(model, curve):
    model = model()
    entry = MAGNITUDE(init_sparsity=0.1, final_sparsity=0.7, start_epoch=1, end_epoch=3, inter_func=curve)
    _, optimizer = start(model, entry, modifier_named("EpochRange")(end_epoch=4))
    for step in range(3 * STEPS + 1):
        take_steps(model, optimizer, 1, step)
        progress = (step / STEPS - 1) / 2
        for weight in prunable(model).values():
            expected = 0 if progress < 0 else round(weight.numel() * (0.1 + 0.6 * CURVES[curve](progress)))
            assert abs(zeros(weight) - expected) <= 1
    assert all(zeros(weight) == round(0.7 * weight.numel()) for weight in prunable(model).values())


def test_the_last_sparsity_is_reached_without_an_extra_step():
    model = CNN()
    _, optimizer = start(model, GLOBAL(final_sparsity=0.8, end_epoch=3, update_frequency=1))
    take_steps(model, optimizer, 3 * STEPS)
    assert sparsity(model) == pytest.approx(0.8, abs=1e-3)
    take_steps(model, optimizer, 1)
    assert sparsity(model) == pytest.approx(0.8, abs=1e-3)


def test_a_run_resumed_late_catches_up_at_its_first_step():
    model = CNN()
    _, optimizer = start(model, GLOBAL(final_sparsity=0.8, end_epoch=3, update_frequency=1), epoch=2.0)
    take_steps(model, optimizer, 1)
    assert sparsity(model) == pytest.approx(0.05 + 0.75 * (1 - (1 / 3) ** 3), abs=1e-3)


def test_a_start_from_the_zeros_that_are_there():
    model = CNN()
    with torch.no_grad():
        model.fc1.weight[:8] = 0
    there = model.fc1.weight == 0
    entry = MAGNITUDE(
        params=["fc1.weight", "fc2.weight"], init_sparsity="__FROM_PARAM__", final_sparsity=0.75, end_epoch=2
    )
    _, optimizer = start(model, entry)
    take_steps(model, optimizer, 1)
    assert torch.equal(model.fc1.weight == 0, there)
    assert zeros(model.fc2.weight) == 0
    take_steps(model, optimizer, 2 * STEPS)
    assert zeros(model.fc1.weight) == round(0.75 * model.fc1.weight.numel())


def test_a_final_sparsity_for_each_parameter():
    model = CNN()
    entry = MAGNITUDE(
        params=[], final_sparsity={0.9: ["fc1.weight"], 0.5: ["re:conv.*weight"], 0.0: ["fc2.weight"]}, end_epoch=1
    )
    _, optimizer = start(model, entry)
    take_steps(model, optimizer, STEPS)
    shares = {name: zeros(weight) / weight.numel() for name, weight in prunable(model).items()}
    assert shares == pytest.approx(
        {"conv1.weight": 0.5, "conv2.weight": 0.5, "fc1.weight": 0.9, "fc2.weight": 0.0}, abs=0.01
    )
    with pytest.raises(ValueRangeError, match=r"names 'fc1\.weight' twice"):
        start(CNN(), MAGNITUDE(params=[], final_sparsity={0.9: ["fc1.weight"], 0.5: ["fc1.*"]}, end_epoch=1))


def test_let_go_at_the_end_weights_may_grow_again():
    model = CNN()
    manager, optimizer = start(model, GLOBAL(final_sparsity=0.8, end_epoch=1, leave_enabled=False))
    take_steps(model, optimizer, STEPS)
    assert sparsity(model) == pytest.approx(0.8, abs=1e-3)
    take_steps(model, optimizer, 2)
    assert sparsity(model) < 0.7
    assert len(manager.spec()) == 0, "it claims nothing that no longer holds"


# ---------------------------------------------------------------------- masks


@settings(max_examples=15)
@given(
    final=st.floats(0.3, 0.97),
    together=st.booleans(),
    seed=st.integers(0, 99),
    mask=st.sampled_from(["unstructured", "block4", [2, 2]]),
)
def test_sparsity_is_right_over_patterns_and_budgets(final, together, seed, mask):
    model = CNN(seed)
    entry = modifier_named("GMPruning")(
        init_sparsity=0.0, final_sparsity=final, end_epoch=0, mask_type=mask, global_sparsity=together
    )
    Manager([entry]).apply(model)
    units = 1 if mask == "unstructured" else 4
    for weight in prunable(model).values():
        if not together:
            assert abs(zeros(weight) / weight.numel() - final) <= max(0.011, (units + 1) / weight.numel())
    total = sum(weight.numel() for weight in prunable(model).values())
    assert abs(sum(map(zeros, prunable(model).values())) / total - final) <= max(0.011, 4 * units / total)


def test_block4_is_four_input_channels():
    one, two = CNN(), CNN()
    Manager([GLOBAL(final_sparsity=0.5, end_epoch=0, mask_type="block4")]).apply(one)
    Manager([GLOBAL(final_sparsity=0.5, end_epoch=0, mask_type=[1, 4])]).apply(two)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    groups = (one.conv2.weight == 0).unflatten(1, (2, 4))
    assert bool((groups.all(2) | ~groups.any(2)).all())


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_gradients_and_weights_of_what_is_pruned_are_zero_with_momentum(model):
    model = model()
    optimizer = Adam(model.parameters(), lr=0.05, weight_decay=0.1)
    manager, _ = start(model, GLOBAL(final_sparsity=0.8, end_epoch=1), optimizer=optimizer)
    take_steps(model, optimizer, STEPS)
    gone = {name: weight == 0 for name, weight in prunable(model).items()}
    for step in range(6):
        take_steps(model, optimizer, 1, step)
        for name, weight in prunable(model).items():
            assert bool((weight[gone[name]] == 0).all())
            assert bool((weight.grad[gone[name]] == 0).all())
            assert bool((optimizer.state[weight]["exp_avg"][gone[name]] == 0).all())
    manager.spec().check(model)


def test_a_global_budget_is_met_and_layers_differ():
    model = CNN()
    with torch.no_grad():
        model.fc1.weight *= 10
    Manager([GLOBAL(final_sparsity=0.6, end_epoch=0)]).apply(model)
    assert sparsity(model) == pytest.approx(0.6, abs=1e-3)
    shares = {round(zeros(weight) / weight.numel(), 2) for weight in prunable(model).values()}
    assert len(shares) > 1


def tiny_layer():
    model = CNN()
    with torch.no_grad():
        model.fc1.weight *= 1e-6
    return model


@pytest.mark.parametrize("sparsity_", [0.5, 0.8, 0.95, 0.995])
def test_no_layer_is_emptied_by_a_global_threshold(sparsity_):
    model = tiny_layer()
    Manager([GLOBAL(final_sparsity=sparsity_, end_epoch=0)]).apply(model)
    assert sparsity(model) == pytest.approx(sparsity_, abs=0.01)
    floor = (1 - sparsity_) / 10
    assert all(zeros(w) <= max(w.numel() * (1 - floor), 0) and zeros(w) < w.numel() for w in prunable(model).values())


def test_the_floor_is_a_choice():
    model = tiny_layer()
    Manager([GLOBAL(final_sparsity=0.5, end_epoch=0, layer_floor=0.0)]).apply(model)
    assert zeros(model.fc1.weight) == model.fc1.weight.numel() - 1
    model = tiny_layer()
    Manager([GLOBAL(final_sparsity=0.5, end_epoch=0, layer_floor=0.25)]).apply(model)
    assert zeros(model.fc1.weight) == 0.75 * model.fc1.weight.numel()


# ---------------------------------------------------------------------- N:M


@pytest.mark.parametrize("kind", [MAGNITUDE, GLOBAL])
def test_n_of_m_comes_gradually_and_along_input_channels(kind):
    model = CNN()
    _, optimizer = start(model, kind(init_sparsity=0.0, mask_type="2:4", end_epoch=2, update_frequency=0.5))
    seen = []
    for step in range(2 * STEPS):
        take_steps(model, optimizer, 1, step)
        seen.append(sparsity(model))
    assert seen[0] == 0
    assert seen == sorted(seen)
    assert len(set(seen)) > 3
    for weight in prunable(model).values():
        kept = (weight != 0).movedim(1, -1).reshape(-1, 4)
        assert bool((kept.sum(1) == 2).all())


def test_no_group_crosses_a_row():
    model = nn.Sequential(nn.Linear(6, 5))
    Manager([MAGNITUDE(init_sparsity=0.0, mask_type="2:4", end_epoch=0)]).apply(model)
    kept = model[0].weight != 0
    assert kept[:, :4].sum(1).tolist() == [2] * 5
    assert kept[:, 4:].sum(1).tolist() == [2] * 5
    NM(2, 4).validate(kept)


def test_n_of_m_and_more_sparsity_than_its_own_is_still_n_of_m():
    model = CNN()
    Manager([MAGNITUDE(mask_type="2:4", final_sparsity=0.75, end_epoch=0)]).apply(model)
    for weight in prunable(model).values():
        assert zeros(weight) == round(0.75 * weight.numel())
        NM(2, 4).validate(weight != 0)


def test_tensorrt_is_two_of_four():
    assert MAGNITUDE(mask_type="tensorrt", end_epoch=1).pattern == NM(2, 4)


# ---------------------------------------------------------------------- movement, constant


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_movement_prunes_what_moves_towards_zero_and_lets_weights_come_back(model, together):
    model = model()
    entry = modifier_named("MovementPruning")(final_sparsity=0.7, end_epoch=3, global_sparsity=together)
    manager, optimizer = start(model, entry)
    dropped, back = None, 0
    for step in range(3 * STEPS):
        take_steps(model, optimizer, 1, step)
        now = torch.cat([(weight == 0).flatten() for weight in prunable(model).values()])
        if dropped is not None:
            back += int((dropped & ~now).sum())
        dropped = now
    assert sparsity(model) == pytest.approx(0.7, abs=0.01)
    assert back > 0
    manager.finalize()
    assert sparsity(model) == pytest.approx(0.7, abs=0.01)


def test_movement_scores_are_minus_weight_times_gradient_summed():
    model = nn.Linear(4, 3, bias=False)
    optimizer = SGD(model.parameters(), lr=0.1)
    entry = modifier_named("MovementPruning")(final_sparsity=0.5, start_epoch=5, end_epoch=6)
    Manager([entry]).attach(model, optimizer, 1)
    expected = torch.zeros(3, 4)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.randn(2, 4, generator=torch.Generator().manual_seed(step))).square().sum().backward()
        expected -= model.weight.detach() * model.weight.grad
        optimizer.step()
    assert torch.allclose(entry.state_dict()["score"]["weight"], expected)


def test_a_constant_mask_never_changes():
    model = CNN()
    with torch.no_grad():
        for weight in prunable(model).values():
            weight.masked_fill_(torch.rand_like(weight) < 0.7, 0)
    before = {name: weight == 0 for name, weight in prunable(model).items()}
    optimizer = Adam(model.parameters(), lr=0.05)
    manager, _ = start(model, modifier_named("ConstantPruning")(), optimizer=optimizer)
    take_steps(model, optimizer, 3)
    with torch.no_grad():
        model.fc1.weight.view(-1)[model.fc1.weight.grad.abs().argmax()] = 0  # passes through zero by accident
    take_steps(model, optimizer, 5)
    assert all(torch.equal(weight == 0, before[name]) for name, weight in prunable(model).items())
    manager.finalize()


# ---------------------------------------------------------------------- names and bad input


def test_what_is_left_out_stays_dense():
    model = CNN()
    _, optimizer = start(model, GLOBAL(final_sparsity=0.8, end_epoch=1), ignore=["conv1.*", "fc2.weight"])
    take_steps(model, optimizer, STEPS)
    assert zeros(model.conv1.weight) == zeros(model.fc2.weight) == 0
    model = CNN()
    _, optimizer = start(model, GLOBAL(final_sparsity=0.8, end_epoch=1), include="re:fc.*weight")
    take_steps(model, optimizer, STEPS)
    assert zeros(model.conv1.weight) == zeros(model.conv2.weight) == 0
    assert zeros(model.fc1.weight) > 0


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"final_sparsity": 1.0, "end_epoch": 1}, r"in \[0, 1\)"),
        ({"final_sparsity": -0.1, "end_epoch": 1}, r"in \[0, 1\)"),
        ({"final_sparsity": 0.03, "end_epoch": 1}, "above final_sparsity"),
        ({"final_sparsity": 0.5, "end_epoch": -1}, "final_sparsity is reached"),
        ({"init_sparsity": 1.5, "final_sparsity": 0.5, "end_epoch": 1}, "init_sparsity is"),
        ({"init_sparsity": "from", "final_sparsity": 0.5, "end_epoch": 1}, "init_sparsity"),
        ({"end_epoch": 1}, "final_sparsity is missing"),
        ({"final_sparsity": 0.25, "mask_type": "2:4", "end_epoch": 1}, "leave final_sparsity out"),
        ({"final_sparsity": {0.5: ["fc1.weight"]}, "end_epoch": 1}, r"params: \[\]"),
        ({"final_sparsity": 0.5, "end_epoch": 1, "layer_floor": 1.0}, "layer_floor"),
        ({"final_sparsity": 0.5, "end_epoch": 1, "mask_type": [4]}, "two sizes"),
    ],
)
def test_bad_fields_are_refused(fields, text):
    with pytest.raises(ValueRangeError, match=text):
        MAGNITUDE(**fields)


def test_bad_names_and_patterns_are_refused_before_the_first_step():
    with pytest.raises(ValueRangeError, match="several final sparsities"):
        GLOBAL(final_sparsity={0.5: ["a"]}, params=[], end_epoch=1)
    with pytest.raises(NameNotFoundError, match="unknown pattern"):
        MAGNITUDE(final_sparsity=0.5, end_epoch=1, mask_type="stripes")
    with pytest.raises(NameNotFoundError, match=r"did you mean .*'conv1\.weight'"):
        start(CNN(), MAGNITUDE(final_sparsity=0.5, end_epoch=1, params=["conv3.weight"]))
    with pytest.raises(ShapeError, match=r"fc1\.bias"):
        start(CNN(), MAGNITUDE(end_epoch=1, params=["fc1.bias"], mask_type=[2, 2], final_sparsity=0.5))
    with pytest.raises(ValueRangeError, match="leave nothing to prune"):
        start(CNN(), MAGNITUDE(final_sparsity=0.5, end_epoch=1, params=["fc1.weight"]), ignore="fc1.*")
    with pytest.raises(ValueRangeError, match="holds none of the 4 layers"):
        start(CNN(), MAGNITUDE(final_sparsity=0.5, end_epoch=1), optimizer=SGD(CNN().parameters(), lr=0.1))


def test_a_failed_start_leaves_the_optimizer_alone():
    model = CNN()
    optimizer = SGD(model.parameters(), lr=0.1)
    bad = MAGNITUDE(final_sparsity=0.5, end_epoch=1, params=["nothing"])
    with pytest.raises(NameNotFoundError):
        Manager([GLOBAL(final_sparsity=0.8, end_epoch=0), bad]).attach(model, optimizer, STEPS)
    before = sparsity(model)
    loss_of(model).backward()
    optimizer.step()
    assert sparsity(model) == before


def test_a_preview_tells_what_will_be_and_changes_nothing():
    model, twin = CNN(), CNN()
    entry = GLOBAL(final_sparsity=0.8, end_epoch=0)
    manager = Manager([entry])
    told = entry.preview(Run(model, SGD(model.parameters(), lr=0.1)))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    manager.apply(model)
    assert told == pytest.approx({name: zeros(weight) / weight.numel() for name, weight in prunable(model).items()})

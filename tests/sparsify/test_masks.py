"""Masks hold: exact zeros after every step of every optimizer, exact resume, several models at once."""

import copy
import io

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from sparsify.models import Everything, tokens, train_step, two_layers
from sparta.errors import NameNotFoundError, ShapeError, ValueRangeError
from sparta.sparsify import ERK, Global, Masks, Schedule, Sparsifier, find_layers, make_masks, measure_sensitivity
from sparta.sparsify.scores import Magnitude
from sparta.tesa.patterns import NM, Block, Channel, Unstructured

SGD, ADAM = torch.optim.SGD, torch.optim.Adam
OPTIMIZERS = {
    "sgd": lambda p: SGD(p, lr=0.1),
    "momentum": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "momentum foreach": lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, foreach=True),
    "momentum fused": lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, fused=True),
    "adam amsgrad": lambda p: ADAM(p, lr=0.1, amsgrad=True, weight_decay=0.1),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.3, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.3, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9),
    "rprop": torch.optim.Rprop,
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}


def zeros_are_where_masks_say(masks):
    return all(bool((layer.parameter.detach()[~masks[name]] == 0).all()) for name, layer in masks.layers.items())


@pytest.mark.parametrize("gradients", ["masked", "dense"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_pruned_weights_are_zero_after_every_step(optimizer, gradients):
    model = two_layers()
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    train_step(model, optimizer)  # gives the optimizer a state before anything is pruned
    ramp = Schedule.linear(0.8, end=4, every=2)
    sparsifier = Sparsifier(model, ramp, allocation=Global(), gradients=gradients).attach(optimizer)
    for step in range(7):
        train_step(model, optimizer, step)
        assert zeros_are_where_masks_say(sparsifier.masks)
        before = sparsifier.masks.to_dict()
        changed = sparsifier.step()
        assert changed == (step in {0, 2, 4})
        assert changed or all(torch.equal(before[name], mask) for name, mask in sparsifier.masks.to_dict().items())
        assert zeros_are_where_masks_say(sparsifier.masks)
    assert sum(sparsifier.masks.pruned_counts().values()) == round(0.8 * (12 * 16 + 16 * 8))


@pytest.mark.parametrize("optimizer", ["momentum foreach", "adamw fused", "adam amsgrad"])
def test_the_optimizer_state_of_pruned_weights_is_zero_and_stays_so(optimizer):
    model = two_layers()
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    train_step(model, optimizer)
    sparsifier = Sparsifier(model, 0.5).attach(optimizer)
    sparsifier.step()
    for step in range(3):
        train_step(model, optimizer, step)
        for name, layer in sparsifier.masks.layers.items():
            moments = [v for v in optimizer.state[layer.parameter].values() if v.shape == layer.parameter.shape]
            assert moments
            assert all(bool((moment[~sparsifier.masks[name]] == 0).all()) for moment in moments)


def test_the_optimizer_state_can_be_kept():
    model = two_layers()
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    train_step(model, optimizer)
    before = optimizer.state[model[0].weight]["momentum_buffer"].clone()
    sparsifier = Sparsifier(model, 0.5, optimizer_state="keep").attach(optimizer)
    sparsifier.step()
    assert torch.equal(optimizer.state[model[0].weight]["momentum_buffer"], before)


PATTERNS = [Unstructured(), NM(2, 4), Block(2, 2), Channel(0), Channel(1)]


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_every_kind_of_layer_under_every_pattern(pattern):
    model = Everything()
    ignore = ["norm.weight"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    sparsifier = Sparsifier(model, 0.5, pattern=pattern, include="*weight", ignore=ignore).attach(optimizer)
    assert len(sparsifier.layers) == 9
    sparsifier.step()
    for _ in range(2):
        optimizer.zero_grad()
        model(tokens()).square().mean().backward()
        optimizer.step()
    assert zeros_are_where_masks_say(sparsifier.masks)
    for layer in sparsifier.layers:
        turned = NM(2, 4, layer.input_axis) if isinstance(pattern, NM) else pattern
        turned.validate(sparsifier.masks[layer.name])
        if isinstance(pattern, Unstructured):
            assert sparsifier.masks.pruned_counts()[layer.name] == round(layer.parameter.numel() / 2)
    spec = sparsifier.finish()
    spec.check(model)
    before = model.head.weight.detach().clone()
    model(tokens()).square().mean().backward()
    optimizer.step()
    assert not torch.equal(model.head.weight[before == 0], before[before == 0])  # nobody holds it any more


def test_nm_needs_no_sparsity_and_runs_along_input_channels():
    model = nn.ConvTranspose2d(8, 3, 2)
    sparsifier = Sparsifier(model, 0.5, pattern="2:4")
    sparsifier.update()
    NM(2, 4, axis=0).validate(sparsifier.masks["weight"])
    assert sparsifier.masks.sparsity == 0.5


@given(st.floats(0, 0.99), st.sampled_from([Global(), ERK(), Global(normalize="lamp")]), st.integers(0, 9))
def test_a_budget_over_several_layers_is_exact(sparsity, allocation, seed):
    layers = find_layers(two_layers(seed))
    masks = make_masks(layers, Magnitude(), Unstructured(), sparsity, allocation)
    total = sum(mask.numel() for mask in masks.values())
    if round(sparsity * total) <= total - 2:
        assert sum(int((~mask).sum()) for mask in masks.values()) == round(sparsity * total)


# ---------------------------------------------------------------------- what becomes of pruned weights


def test_forgotten_weights_come_back_as_zero_and_kept_ones_as_they_were():
    for pruned in ("forget", "keep"):
        model = two_layers()
        before = model[0].weight.detach().clone()
        masks = Masks(find_layers(model), pruned=pruned)
        masks.set({"0.weight": torch.arange(192).reshape(16, 12) % 2 == 0})
        masks.set({"0.weight": torch.ones(16, 12)})
        assert torch.equal(model[0].weight, before) == (pruned == "keep")


def test_straight_through_trains_what_the_forward_pass_does_not_see():
    x = torch.randn(5, 4)
    model, reference = nn.Linear(4, 2, bias=False), nn.Linear(4, 2, bias=False)
    reference.load_state_dict(model.state_dict())
    mask = torch.tensor([[1, 0, 1, 0], [0, 1, 1, 0]]).bool()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    other = SGD(reference.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    masks = Masks(find_layers(model), pruned="train", optimizer_state="keep").attach(optimizer)
    masks.set({"weight": mask})
    for _ in range(4):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
        other.zero_grad()
        effective = reference.weight.detach() * mask
        effective.requires_grad_()
        (x @ effective.T).square().sum().backward()
        reference.weight.grad = effective.grad  # straight through the mask
        other.step()
        torch.testing.assert_close(model.weight.detach(), reference.weight.detach() * mask)
    with masks.exposed():
        torch.testing.assert_close(model.weight, reference.weight)
    assert bool((model.weight[~mask] == 0).all())


def test_movement_pruning_brings_weights_back():
    model = two_layers()
    optimizer = SGD(model.parameters(), lr=0.5)
    ramp = Schedule.linear(0.5, begin=1, end=20)
    sparsifier = Sparsifier(model, ramp, score="movement", pruned="train").attach(optimizer)
    returned = 0
    before = sparsifier.masks["0.weight"]
    for step in range(40):
        train_step(model, optimizer, step)
        sparsifier.step()
        now = sparsifier.masks["0.weight"]
        returned += int((now & ~before).sum())
        before = now
    assert returned > 0
    assert sparsifier.masks.pruned_counts()["0.weight"] == 96


# ---------------------------------------------------------------------- resuming

RUNS = {
    "gradual": {"allocation": Global()},
    "movement": {"score": "movement", "pruned": "train"},
    "taylor": {"score": "taylor", "gradients": "dense"},
    "kept": {"pruned": "keep", "pattern": "2:4"},
}


@pytest.mark.parametrize("run", RUNS)
@settings(max_examples=6)
@given(st.integers(1, 7))
def test_resuming_anywhere_is_exact(run, cut):
    ramp = Schedule.cubic(0.5, begin=1, end=6, every=2)

    def start():
        model = two_layers()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
        return model, optimizer, Sparsifier(model, ramp, **RUNS[run]).attach(optimizer)

    def go(model, optimizer, sparsifier, steps):
        for step in steps:
            train_step(model, optimizer, step)
            sparsifier.step()

    straight = start()
    go(*straight, range(9))
    first = start()
    go(*first, range(cut))
    file = io.BytesIO()
    torch.save([part.state_dict() for part in first], file)
    file.seek(0)
    second = start()
    for part, state in zip(second, torch.load(file, weights_only=True), strict=True):
        part.load_state_dict(state)
    go(*second, range(cut, 9))
    assert all(torch.equal(a, b) for a, b in zip(straight[0].parameters(), second[0].parameters(), strict=True))
    masks, others = straight[2].masks.to_dict(), second[2].masks.to_dict()
    assert all(torch.equal(masks[name], others[name]) for name in masks)


def test_a_state_is_small_and_refuses_what_does_not_fit():
    model = nn.Linear(64, 64)
    sparsifier = Sparsifier(model, 0.5)
    sparsifier.step()
    state = sparsifier.state_dict()
    assert state["masks"]["masks"]["weight"].numel() == 64 * 64 // 8
    other = Sparsifier(nn.Linear(64, 32), 0.5)
    with pytest.raises(ShapeError, match="512 bytes"):
        other.load_state_dict(state)
    with pytest.raises(NameNotFoundError, match="weight"):
        Sparsifier(nn.Sequential(nn.Linear(4, 4)), 0.5).load_state_dict(state)
    with pytest.raises(ValueRangeError, match="version 9"):
        sparsifier.masks.load_state_dict({"version": 9})
    with pytest.raises(ValueRangeError, match="without"):
        sparsifier.load_state_dict({"position": 1})


# ---------------------------------------------------------------------- around the model


def test_several_models_in_one_process_do_not_meet():
    together = [two_layers(seed) for seed in (1, 2)]
    alone = copy.deepcopy(together)
    optimizers = [SGD(model.parameters(), lr=0.1) for model in together]
    sparsifiers = [Sparsifier(m, s).attach(o) for m, s, o in zip(together, (0.5, 0.9), optimizers, strict=True)]
    for step in range(3):
        for model, optimizer, sparsifier in zip(together, optimizers, sparsifiers, strict=True):
            train_step(model, optimizer, step)
            sparsifier.step()
    for model, sparsity, trained in zip(alone, (0.5, 0.9), together, strict=True):
        optimizer = SGD(model.parameters(), lr=0.1)
        sparsifier = Sparsifier(model, sparsity).attach(optimizer)
        for step in range(3):
            train_step(model, optimizer, step)
            sparsifier.step()
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), trained.parameters(), strict=True))


def test_a_shared_weight_is_one_layer():
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model[1].weight = model[0].weight
    assert [layer.name for layer in find_layers(model)] == ["0.weight"]


def test_two_optimizers_hold_their_layers():
    model = two_layers()
    optimizers = SGD(model[0].parameters(), lr=0.1), ADAM(model[2].parameters(), lr=0.1)
    sparsifier = Sparsifier(model, 0.5).attach(*optimizers)
    sparsifier.step()
    model(torch.randn(2, 12)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    assert zeros_are_where_masks_say(sparsifier.masks)


def test_compiled_models_train_with_masks_and_keep_their_plain_names():
    model = two_layers()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    sparsifier = Sparsifier(compiled, Schedule.linear(0.5, end=2), include="*.weight").attach(optimizer)
    for step in range(4):
        train_step(compiled, optimizer, step)
        sparsifier.step()
        assert zeros_are_where_masks_say(sparsifier.masks)
    assert list(sparsifier.masks.layers) == ["0.weight", "2.weight"]
    assert sparsifier.finish().density == 0.5


def test_gradient_accumulation_steps_when_the_optimizer_does():
    model, together = two_layers(), two_layers()
    for net, parts in ((model, 2), (together, 1)):
        optimizer = SGD(net.parameters(), lr=0.1)
        sparsifier = Sparsifier(net, 0.5).attach(optimizer)
        sparsifier.step()
        x = torch.randn(4, 12, generator=torch.Generator().manual_seed(1))
        for part in x.chunk(parts):
            net(part).square().sum().backward()
        optimizer.step()
    for a, b in zip(model.parameters(), together.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_sensitivity_is_measured_layer_by_layer():
    model = two_layers()
    x, before = torch.randn(8, 12), copy.deepcopy(model.state_dict())
    y = model(x).detach()
    curves = measure_sensitivity(find_layers(model), lambda: float((model(x) - y).square().mean()), [0.5, 0.9])
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    for curve in curves.values():
        assert [sparsity for sparsity, _ in curve] == [0.0, 0.5, 0.9]
        assert curve[0][1] == 0 < curve[1][1] < curve[2][1]


# ---------------------------------------------------------------------- bad input


def test_bad_input_is_named():
    model = two_layers()
    layers = find_layers(model)
    with pytest.raises(ValueRangeError, match="holds none of the 2 layers"):
        Masks(layers).attach(SGD(two_layers().parameters(), lr=0.1))
    with pytest.warns(UserWarning, match=r"no optimizer holds 2\.weight"):
        Masks(layers).attach(SGD(model[0].parameters(), lr=0.1))
    with pytest.raises(NameNotFoundError, match="did you mean 'masked'"):
        Masks(layers, gradients="maskd")
    with pytest.raises(NameNotFoundError, match="value of pruned"):
        Masks(layers, pruned="gone")
    with pytest.raises(ShapeError, match=r"allowed: \(16, 12\)"):
        Masks(layers).set({"0.weight": torch.ones(2, 2)})
    with pytest.raises(NameNotFoundError, match="tensor name"):
        Sparsifier(model, 0.5, include="encoder.*")
    with pytest.raises(NameNotFoundError, match="no parameter to prune"):
        Sparsifier(nn.ReLU(), 0.5)
    with pytest.raises(ShapeError, match=r"0\.weight: block 64×64"):
        Sparsifier(model, 0.5, pattern=Block(64, 64))
    with pytest.raises(ValueRangeError, match="no sparsity for unstructured"):
        Sparsifier(model, 0.5).update()
    assert Masks(layers).sparsity == 0
    assert bool(Masks(layers)["0.weight"].all())


@pytest.mark.parametrize("allocation", [Global(), ERK()], ids=str)
def test_an_uneven_budget_ends_at_the_pattern_in_every_layer(allocation):
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 8))
    with torch.no_grad():
        model[0].weight.mul_(100)  # one threshold alone would spare this layer and empty the other
    layers = find_layers(model)
    for sparsity in (0.3, 0.5):
        masks = make_masks(layers, Magnitude(), NM(2, 4), sparsity, allocation)
        assert sum(int((~mask).sum()) for mask in masks.values()) == round(sparsity * 768)
        assert all(int((~mask).unflatten(1, (-1, 4)).sum(2).max()) <= 2 for mask in masks.values())
    for mask in masks.values():
        NM(2, 4).validate(mask)
    sparser = make_masks(layers, Magnitude(), NM(2, 4), 0.75, allocation)  # more than the pattern asks for
    assert sum(int((~mask).sum()) for mask in sparser.values()) == 576


def test_two_of_four_is_reached_gradually_and_never_overshot():
    """Each event prunes more of the groups, and what it prunes lies within the final pattern's reach."""
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    schedule = Schedule.linear(0.5, begin=0, end=5)
    sparsifier = Sparsifier(model, schedule, pattern="2:4").attach(optimizer)
    for step in range(7):
        train_step(model, optimizer, step)
        sparsifier.step()
        wanted = schedule.at(step)
        for layer in sparsifier.layers:
            mask = sparsifier.masks[layer.name]
            assert int((~mask).sum()) == round(wanted * mask.numel())
            assert int((~mask).unflatten(1, (-1, 4)).sum(2).max()) <= 2
    for layer in sparsifier.layers:
        NM(2, 4).validate(sparsifier.masks[layer.name])

"""Allocation: exact budgets, fixed vectors, no emptied layer, limits that hold."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparta.errors import NameNotFoundError, ValueRangeError
from sparta.sparsify import ERK, Candidate, Energy, Global, Sensitivity, Uniform, erk_densities, lamp

CURVES = {name: [(0.0, 0.1), (0.5, 0.2 + 0.1 * place), (0.9, 1.0 + place)] for place, name in enumerate("abcd")}
EXACT = [
    Global(),
    Global(normalize="l1"),
    Global(normalize="l2"),
    lamp(),
    ERK(),
    ERK(power=0.5),
    ERK(include_kernel=False),
    Energy(),
    Energy(share={"a": 0.5}),
    Sensitivity(curves=CURVES),
]


@st.composite
def networks(draw):
    shapes = draw(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    kind = draw(st.sampled_from(["normal", "ties", "zeros"]))
    layers = []
    for name, shape in zip("abcd", shapes, strict=False):
        scores = torch.randn(shape, generator=generator).abs()
        scores = {"normal": scores, "ties": scores.round(), "zeros": scores * 0}[kind]
        layers.append(Candidate(name, shape, shape[0] * shape[1], scores.flatten()))
    return layers


@pytest.mark.parametrize("allocation", EXACT, ids=str)
@given(networks(), st.floats(0, 1))
def test_the_budget_is_met_to_the_last_element_and_no_layer_is_emptied(allocation, layers, sparsity):
    total = sum(layer.elements for layer in layers)
    budget = round(sparsity * total)
    if sparsity < 1 and budget > total - len(layers):
        with pytest.raises(ValueRangeError, match="may be pruned"):
            allocation.counts(layers, sparsity)
        return
    counts = allocation.counts(layers, sparsity)
    assert sum(counts) == budget
    assert all(0 <= count <= layer.units for count, layer in zip(counts, layers, strict=True))
    assert sparsity == 1 or all(count < layer.units for count, layer in zip(counts, layers, strict=True))


@given(networks(), st.floats(0, 0.99), st.integers(0, 20), st.sampled_from(["none", "l2", "lamp"]))
def test_a_floor_keeps_as_many_units_of_every_layer(layers, sparsity, floor, normalize):
    budget = round(sparsity * sum(layer.elements for layer in layers))
    room = sum(max(0, layer.units - max(1, floor)) for layer in layers)
    if budget > room:
        with pytest.raises(ValueRangeError, match="may be pruned"):
            Global(normalize=normalize, floor=floor).counts(layers, sparsity)
        return
    counts = Global(normalize=normalize, floor=floor).counts(layers, sparsity)
    assert sum(counts) == budget
    assert all(layer.units - count >= min(floor, layer.units) for count, layer in zip(counts, layers, strict=True))


def test_a_floor_spares_a_layer_of_low_scores_and_is_checked():
    layers = [Candidate("low", (8,), 8, torch.full((8,), 0.01)), Candidate("high", (32,), 32, torch.rand(32) + 1)]
    assert Global().counts(layers, 0.5) == [7, 13]
    assert Global(floor=5).counts(layers, 0.5) == [3, 17]
    for floor in (-1, 0.5, True):
        with pytest.raises(ValueRangeError, match="floor is"):
            Global(floor=floor)
    with pytest.raises(ValueRangeError, match="may be pruned"):
        Global(floor=1).counts(layers, 1.0)


@given(networks(), st.floats(0, 1))
def test_uniform_prunes_each_layer_by_the_same_fraction_and_empties_none(layers, sparsity):
    for count, layer in zip(Uniform().counts(layers, sparsity), layers, strict=True):
        wanted = round(sparsity * layer.units)
        assert count == (min(wanted, layer.units - 1) if sparsity < 1 else wanted)


@given(networks(), st.sampled_from([Global, ERK, Energy, Uniform]), st.floats(0.2, 0.9))
def test_a_limit_holds_and_the_others_take_the_rest(layers, kind, limit):
    allocation = kind(max_sparsity=limit)
    available = sum(layer.most(limit, 0.5) for layer in layers)
    total = sum(layer.elements for layer in layers)
    counts = allocation.counts(layers, 0.9 * available / total)
    assert all(count <= layer.most(limit, 0.5) for count, layer in zip(counts, layers, strict=True))
    if kind is not Uniform:
        assert sum(counts) == round(0.9 * available / total * total)


def test_erk_has_the_published_densities():
    densities = erk_densities([(16, 3, 3, 3), (32, 4, 3, 3), (10, 32)], 0.5)
    assert [1 - d for d in densities] == pytest.approx([0.454118, 0.656095, 0.0], abs=1e-6)
    assert erk_densities([(4, 4), (8, 8)], 0.5, power=0) == [0.5, 0.5]
    assert erk_densities([(0, 4), (8, 8)], 0.5)[0] == 1.0


def test_global_is_one_threshold():
    layers = [
        Candidate("a", (4,), 4, torch.tensor([1.0, 4, 5, 9])),
        Candidate("b", (4,), 4, torch.tensor([2.0, 3, 8, 7])),
    ]
    assert Global().counts(layers, 0.5) == [2, 2]
    assert Global().counts(layers, 0.25) == [1, 1]
    assert Global(max_sparsity=0.25).counts(layers, 0.25) == [1, 1]


def test_norms_make_layers_of_different_scale_comparable():
    small = torch.tensor([1.0, 2.0, 3.0, 4.0])
    layers = [Candidate("a", (4,), 4, small), Candidate("b", (4,), 4, 1000 * small)]
    assert Global().counts(layers, 0.375) == [3, 0]
    for normalize in ("l1", "l2", "lamp"):
        assert sorted(Global(normalize=normalize).counts(layers, 0.5)) == [2, 2]


def test_lamp_divides_by_what_is_not_smaller():
    # scores 1, 4/5 and 9/10, 1: the second layer's lowest goes first although it is larger
    layers = [Candidate("a", (2,), 2, torch.tensor([2.0, 1.0])), Candidate("b", (2,), 2, torch.tensor([1.0, 3.0]))]
    assert lamp().counts(layers, 0.25) == [0, 1]


@pytest.mark.parametrize("scale", [1.0, 1e-20, 1e15])
def test_lamp_is_the_published_formula(scale):
    def published(scores):
        values, order = scores.double().square().sort()
        found = torch.empty_like(values)
        found[order] = values / values.flip(0).cumsum(0).flip(0)
        return found

    torch.manual_seed(0)
    sizes = {"a": (3000, 1.0), "b": (900, 9.0), "c": (40, 0.1)}
    layers = [Candidate(n, (k,), k, (torch.randn(k) * size * scale).abs()) for n, (k, size) in sizes.items()]
    lowest = torch.cat([published(layer.scores / scale) for layer in layers]).argsort()[: round(0.8 * 3940)]
    wanted = [int((lowest < 3000).sum()), int(((lowest >= 3000) & (lowest < 3900)).sum()), int((lowest >= 3900).sum())]
    found = lamp().counts(layers, 0.8)
    assert sum(found) == sum(wanted)
    assert all(abs(one - other) <= 2 for one, other in zip(found, wanted, strict=True))


def test_energy_counts_what_lies_within_a_share_of_the_squares():
    layer = Candidate("a", (4,), 4, torch.tensor([1.0, 2.0, 3.0, 4.0]))  # cumulated 3.3, 16.7, 46.7, 100 %
    assert Energy().counts([layer], 0.5) == [2]
    other = Candidate("b", (4,), 4, torch.tensor([1.0, 1.0, 1.0, 1.0]))
    assert Energy().counts([layer, other], 0.25) == [2, 0]
    assert Energy(share={"a": 0.0}).counts([layer, other], 0.375) == [0, 3]


def test_sensitive_layers_lose_less():
    layers = [Candidate(name, (100,), 100, torch.rand(100)) for name in "ab"]
    curves = {"a": [(0.0, 1.0), (0.5, 1.1), (0.9, 1.2)], "b": [(0.0, 1.0), (0.5, 2.0), (0.9, 5.0)]}
    first, second = Sensitivity(curves=curves).counts(layers, 0.5)
    assert first > 2 * second


def test_blocks_and_channels_come_as_near_to_the_budget_as_whole_units_allow():
    layers = [Candidate("a", (4, 8), 4, torch.tensor([1.0, 2, 3, 4])), Candidate("b", (6, 2), 6, torch.arange(6.0))]
    for allocation in (Global(), ERK(), Energy()):
        counts = allocation.counts(layers, 0.5)
        assert 22 - 8 < counts[0] * 8 + counts[1] * 2 <= 22


def test_bad_input_is_named():
    layer = Candidate("a", (4,), 4, torch.tensor([1.0, -2.0, 3.0, 4.0]))
    with pytest.raises(NameNotFoundError, match="did you mean 'lamp'"):
        Global(normalize="lam")
    with pytest.raises(ValueRangeError, match="negative score"):
        lamp().counts([layer], 0.5)
    with pytest.raises(NameNotFoundError, match="among the measured"):
        Sensitivity(curves={"b": [(0.5, 1.0)]}).counts([layer], 0.5)
    with pytest.raises(ValueRangeError, match="sensitivity curve"):
        Sensitivity(curves={"a": [(0.5, float("nan"))]}).counts([layer], 0.5)
    with pytest.raises(ValueRangeError, match=r"max_sparsity 0\.5"):
        Global(max_sparsity=0.5).counts([layer], 0.75)
    with pytest.raises(ValueRangeError, match=r"sparsity is 1\.5"):
        Uniform().counts([layer], 1.5)
    assert Uniform().counts([], 0.5) == []


@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=8), min_size=1, max_size=4), st.data())
def test_under_one_threshold_a_layer_at_its_limit_leaves_the_rest_to_the_others(scores, data):
    limits = [data.draw(st.floats(0, 1)) for _ in scores]
    layers = [
        Candidate(str(place), (len(found),), len(found), torch.tensor(found).float(), limit=limit)
        for place, (found, limit) in enumerate(zip(scores, limits, strict=True))
    ]
    most = [layer.most(1.0, 0.5) for layer in layers]
    total = sum(map(len, scores))
    budget = data.draw(st.integers(0, sum(most)))
    expected = [0] * len(scores)
    for _, place in sorted((score, place) for place, found in enumerate(scores) for score in found):
        if expected[place] < most[place] and sum(expected) < budget:
            expected[place] += 1
    assert Global().counts(layers, budget / total) == expected

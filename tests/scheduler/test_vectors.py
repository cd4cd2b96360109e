"""The formulas: fixed vectors for fake sparsity, mask generators, calculators and projections."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrize

from sparta.errors import NameNotFoundError, ValueRangeError
from sparta.scheduler import (
    FakeSparse,
    FPGMMaskGenerator,
    NMMaskGenerator,
    NormalMaskGenerator,
    NuclearMaskGenerator,
    ProbMaskFakeSparse,
    ProbMaskGenerator,
    STRFakeSparse,
    STRMaskGenerator,
    mask_calculator,
)
from sparta.scheduler.probmask import project_scores
from sparta.tesa.patterns import NM

# ---------------------------------------------------------------------- fake sparsity


def test_str_has_the_published_values_and_gradients():
    weight = torch.tensor([[0.5, -0.2, 0.05]], requires_grad=True)
    fake = STRFakeSparse(weight, sInit_value=-2)
    sparse = fake(weight)
    sparse.backward(torch.tensor([[1.0, 2.0, 3.0]]))
    torch.testing.assert_close(sparse.detach(), torch.tensor([[0.380797, -0.080797, 0.0]]), atol=1e-6, rtol=0)
    torch.testing.assert_close(weight.grad, torch.tensor([[1.0, 2.0, 0.0]]))
    assert float(fake.scores.grad) == pytest.approx(0.104994, abs=1e-6)
    assert fake.scores.shape == (1, 1)


def test_str_far_below_zero_is_dense_until_weight_decay_raises_it():
    weight = torch.randn(4, 4)
    assert torch.equal(STRFakeSparse(weight)(weight), weight)
    with pytest.raises(ValueRangeError, match="sInit_value is 3"):
        STRFakeSparse(weight, sInit_value=3)


def test_fake_sparse_is_dense_until_a_mask_is_set_and_gives_pruned_weights_no_gradient():
    layer = nn.Linear(3, 2, bias=False)
    fake = FakeSparse(layer.weight)
    parametrize.register_parametrization(layer, "weight", fake)
    assert torch.equal(layer.weight, layer.parametrizations.weight.original)
    mask = torch.tensor([[1, 0, 1], [0, 1, 1]]).bool()
    fake.set_mask(mask, layer.parametrizations.weight.original.detach())
    layer(torch.randn(4, 3)).square().sum().backward()
    gradient = layer.parametrizations.weight.original.grad
    assert bool((gradient[~mask] == 0).all())
    assert bool((gradient[mask] != 0).all())
    fake.enabled = False
    assert bool((layer.weight != 0).all())


def test_a_pruned_weight_that_is_not_finite_is_zero_all_the_same():
    fake = FakeSparse(torch.zeros(2))
    fake.set_mask(torch.tensor([True, False]), torch.zeros(2))
    assert fake(torch.tensor([1.0, float("inf")])).tolist() == [1.0, 0.0]


def test_a_static_mask_stays():
    fake = FakeSparse(torch.zeros(2), mask_is_static=True)
    fake.set_mask(torch.tensor([True, False]), torch.zeros(2))
    fake.set_mask(torch.tensor([False, True]), torch.zeros(2))
    assert fake.mask.tolist() == [True, False]


def test_weight_correction_keeps_mean_and_spread_of_each_channel():
    weight = torch.randn(6, 40)
    before = weight.clone()
    mask = torch.rand(6, 40) > 0.3
    fake = FakeSparse(weight, weight_correction=True)
    fake.set_mask(mask, weight)
    stretch = before.std(1) / ((before * mask).std(1) + 1e-9)
    shift = before.mean(1) - (stretch[:, None] * before * mask).mean(1)
    torch.testing.assert_close(weight, stretch[:, None] * before + shift[:, None])


def test_probmask_draws_masks_near_its_probabilities():
    weight = torch.ones(40, 50)
    fake = ProbMaskFakeSparse(weight)
    fake.scores.data.fill_(0.3)
    fake.tau.fill_(33.3)
    drawn = fake(weight)
    assert float(drawn.detach().mean()) == pytest.approx(0.3, abs=0.05)
    assert float(((drawn < 0.05) | (drawn > 0.95)).float().mean()) > 0.8
    drawn.sum().backward()
    assert bool((fake.scores.grad >= 0).all())
    assert float(fake.scores.grad.sum()) > 0


def test_probmask_is_deterministic_in_evaluation_and_when_fixed():
    weight = torch.ones(4)
    fake = ProbMaskFakeSparse(weight)
    fake.scores.data.copy_(torch.tensor([0.1, 0.5, 0.9, 0.4]))
    fake.eval()
    assert fake(weight).tolist() == [0, 1, 1, 0]
    fake.train()
    fake.fix(torch.tensor([True, False, False, True]))
    assert fake(weight).tolist() == [1, 0, 0, 1]
    fake.release()
    assert fake.eval()(weight).tolist() == [0, 1, 1, 0]
    with pytest.raises(ValueRangeError, match="a probability"):
        ProbMaskFakeSparse(weight, score_init_constant=2)


def test_the_projection_has_the_published_values():
    scores = torch.tensor([1.0, 0.9, 0.5, 0.1])
    assert float(project_scores([scores], 1.5)) == pytest.approx(0.3)
    torch.testing.assert_close(scores, torch.tensor([0.7, 0.6, 0.2, 0.0]))
    low = torch.tensor([0.2, -0.1, 1.2])
    assert float(project_scores([low], 2.0)) == 0
    assert low.tolist() == pytest.approx([0.2, 0.0, 1.0])


@given(st.integers(0, 50), st.integers(1, 40), st.floats(0.01, 0.99))
def test_the_projection_meets_the_budget_and_keeps_the_order(seed, count, fraction):
    before = torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    after = before.clone()
    project_scores([after[: count // 2], after[count // 2 :]], fraction * count)
    assert float(after.sum()) <= fraction * count * (1 + 1e-6)
    if float(before.sum()) > fraction * count:
        assert float(after.sum()) == pytest.approx(fraction * count, rel=1e-6)
    order = before.argsort()
    assert bool((after[order].diff() >= 0).all())


# ---------------------------------------------------------------------- mask generators


@pytest.mark.parametrize(("sparsity", "count", "pruned"), [(0.9, 10, 9), (0.9, 1000, 900), (0.8, 1000, 800)])
def test_counts_are_exact_also_where_floats_are_not(sparsity, count, pruned):
    mask = NormalMaskGenerator().generate_mask(torch.randn(count), sparsity)
    assert int((~mask).sum()) == pruned


def test_ties_do_not_empty_a_layer():
    mask = NormalMaskGenerator().generate_mask(torch.ones(10, 10), 0.5)
    assert int(mask.sum()) == 50


@pytest.mark.parametrize("generator", [NormalMaskGenerator(True), NormalMaskGenerator(True, "p1"), FPGMMaskGenerator(),
                                       FPGMMaskGenerator("l1"), FPGMMaskGenerator("cos"), NuclearMaskGenerator()],
                         ids=lambda g: type(g).__name__ + str(getattr(g, "func", "")))  # fmt: skip
@pytest.mark.parametrize("axis", [1, 0])
def test_filters_are_pruned_whole_exactly_and_never_all(generator, axis):
    weight = torch.randn(8, 6, 3, 3) if axis == 1 else torch.randn(6, 8, 3, 3)
    for sparsity, pruned in ((0.0, 0), (0.5, 4), (0.99, 7), (1.0, 8)):
        mask = generator.generate_mask(weight, sparsity, axis)
        filters = (mask if axis == 1 else mask.transpose(0, 1)).flatten(1)
        assert torch.equal(filters.any(1), filters.all(1))
        assert int((~filters.any(1)).sum()) == pruned


def test_norms_choose_different_filters():
    weight = torch.tensor([[3.0, 0.0, 0.0], [1.5, 1.4, 1.3]])  # L1: 3.0 < 4.2; L2: 3.0 > 2.4
    assert NormalMaskGenerator(True, "p1").generate_mask(weight, 0.5)[:, 0].tolist() == [False, True]
    assert NormalMaskGenerator(True, "p2").generate_mask(weight, 0.5)[:, 0].tolist() == [True, False]


def test_fpgm_prunes_the_filter_in_the_middle():
    weight = torch.tensor([[0.0, 0.0], [5.0, 5.0], [10.0, 10.0]])
    for func in ("l1", "l2"):
        assert FPGMMaskGenerator(func).generate_mask(weight, 1 / 3)[:, 0].tolist() == [True, False, True]
    same = torch.tensor([[1.0, 0.0], [2.0, 0.1], [0.0, 1.0]])
    assert FPGMMaskGenerator("cos").generate_mask(same, 1 / 3)[:, 0].tolist()[2] is True


def test_nuclear_prunes_what_shrinks_the_norm_least():
    weight = torch.randn(5, 4, 2, 2)
    rows = weight.flatten(1).double()
    whole = torch.linalg.svdvals(rows).sum()
    importance = [whole - torch.linalg.svdvals(rows[torch.arange(5) != i]).sum() for i in range(5)]
    expected = torch.stack(importance).argsort()[:2].sort().values
    mask = NuclearMaskGenerator().generate_mask(weight, 0.4)
    assert torch.equal((~mask.flatten(1).any(1)).nonzero().flatten(), expected)


def test_nm_runs_along_input_channels_of_any_layer():
    for shape, axis in (((8, 16), 1), ((8, 10, 3, 3), 1), ((6, 5, 3), 1), ((12, 4, 2, 2), 0)):
        mask = NMMaskGenerator().generate_mask(torch.randn(shape), 0.5, axis)
        NM(2, 4, axis).validate(mask)
    NM(1, 8).validate(NMMaskGenerator(1, 8).generate_mask(torch.randn(4, 16), 0.9))
    assert bool(NMMaskGenerator().generate_mask(torch.randn(4, 16), 0.0).all())


def test_filter_generators_take_structured_and_nothing_but_true():
    weight = torch.randn(8, 4, 3, 3)
    for generator in (FPGMMaskGenerator, NuclearMaskGenerator):
        assert torch.equal(
            generator(structured=True).generate_mask(weight, 0.5), generator().generate_mask(weight, 0.5)
        )
        with pytest.raises(ValueRangeError, match="structured=False"):
            generator(structured=False)


def test_generators_of_learnt_masks_say_so():
    for generator in (STRMaskGenerator(), ProbMaskGenerator()):
        with pytest.raises(ValueRangeError, match=r"a sparsity of 0\.5"):
            generator.generate_mask(torch.ones(4), 0.5)
    with pytest.raises(ValueRangeError, match="tau is 0"):
        ProbMaskGenerator(0.0)
    with pytest.raises(ValueRangeError, match="without structured"):
        NormalMaskGenerator(func="p1")


# ---------------------------------------------------------------------- calculators


def test_m4n2_1d_has_the_published_value():
    weight = torch.tensor([[0.1, -0.5, 0.3, 0.2]])
    assert mask_calculator("m4n2_1d")(weight, 1).tolist() == [[False, True, True, False]]


@pytest.mark.parametrize("name", ["m4n2_2d_best", "m4n2_2d_greedy"])
@pytest.mark.parametrize(("shape", "axis"), [((8, 12), 1), ((8, 16, 3, 3), 1), ((8, 4, 3), 1), ((12, 8, 2, 2), 0)])
def test_two_dimensional_masks_are_nm_both_ways(name, shape, axis):
    mask = mask_calculator(name)(torch.randn(shape), axis)
    NM(2, 4, 0).validate(mask)
    NM(2, 4, 1).validate(mask)
    if name.endswith("best"):
        assert float(mask.float().mean()) == 0.5


def test_best_is_the_best_of_all_ninety():
    weight = torch.randn(4, 4)
    rows = [torch.tensor([i in kept for i in range(4)]) for kept in itertools.combinations(range(4), 2)]
    tiles = [torch.stack(tile) for tile in itertools.product(rows, repeat=4)]
    tiles = [tile for tile in tiles if bool((tile.sum(0) == 2).all())]
    assert len(tiles) == 90
    best = max(float((weight.abs() * tile).sum()) for tile in tiles)
    found = float((weight.abs() * mask_calculator("m4n2_2d_best")(weight, 1)).sum())
    greedy = float((weight.abs() * mask_calculator("m4n2_2d_greedy")(weight, 1)).sum())
    assert found == pytest.approx(best)
    assert greedy <= found + 1e-6


def test_rows_and_columns_that_fill_no_tile_stay_dense():
    mask = mask_calculator("m4n2_2d_best")(torch.randn(6, 7), 1)
    assert bool(mask[4:].all())
    assert bool(mask[:, 4:].all())
    assert int(mask[:4, :4].sum()) == 8


def test_other_numbers_and_unknown_names():
    NM(1, 2).validate(mask_calculator("m2n1_2d_best")(torch.randn(6, 6), 1))
    NM(3, 8).validate(mask_calculator("m8n3_1d")(torch.randn(6, 16), 1))
    with pytest.raises(NameNotFoundError, match="did you mean 'm4n2_1d'"):
        mask_calculator("m4n2-1d")
    with pytest.raises(ValueRangeError, match="n is 5 and m is 4"):
        mask_calculator("m4n5_1d")
    with pytest.raises(ValueRangeError, match="use m8n4_2d_greedy"):
        mask_calculator("m8n4_2d_best")

"""block_mask: whole blocks, exact counts, reproducible."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparta.errors import NameNotFoundError, ShapeError, ValueRangeError
from sparta.testing import block_mask

sparsities = st.floats(0.0, 1.0)
seeds = st.integers(0, 2**31)


@st.composite
def shapes_and_blocks(draw, min_dims=1, max_dims=4):
    """A shape, and one block entry for each of its dimensions."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=min_dims, max_size=max_dims)))
    block = tuple(draw(st.integers(1, size)) for size in shape)
    return shape, block


def blocks_of(mask, block):
    """The grid of kept blocks; fails unless every block is uniform."""
    grid = mask
    for dim, extent in enumerate(block):
        starts = torch.arange(0, mask.shape[dim], extent)
        grid = grid.index_select(dim, starts)
    rebuilt = grid
    for dim, extent in enumerate(block):
        rebuilt = rebuilt.repeat_interleave(extent, dim).narrow(dim, 0, mask.shape[dim])
    assert torch.equal(rebuilt, mask)
    return grid


@settings(deadline=None, max_examples=60)
@given(shapes_and_blocks(), sparsities, st.sampled_from(["rand", "balanced", "topk"]), seeds)
def test_the_number_of_pruned_blocks_is_exact(shape_and_block, sparsity, algo, seed):
    shape, block = shape_and_block
    score = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) if algo == "topk" else None
    mask = block_mask(shape, block, sparsity, algo, seed=seed, score=score)
    assert mask.shape == shape
    assert mask.dtype == torch.bool
    kept = blocks_of(mask, block)
    assert int((~kept).sum()) == round(sparsity * kept.numel())


@settings(deadline=None, max_examples=30)
@given(shapes_and_blocks(3, 4), sparsities, st.sampled_from(["rand", "balanced"]), seeds)
def test_each_leading_index_has_a_mask_of_its_own(shape_and_block, sparsity, algo, seed):
    shape, block = shape_and_block
    mask = block_mask(shape, block[-2:], sparsity, algo, seed=seed)
    kept = blocks_of(mask, (1,) * (len(shape) - 2) + block[-2:])
    pruned = (~kept).flatten(-2).sum(-1)
    assert set(pruned.flatten().tolist()) == {round(sparsity * math.prod(kept.shape[-2:]))}


def test_leading_masks_differ_from_each_other():
    mask = block_mask((4, 16, 16), (2, 2), 0.5, seed=0)
    assert len({tuple(matrix.flatten().tolist()) for matrix in mask}) == 4


@settings(deadline=None, max_examples=60)
@given(shapes_and_blocks(2, 4), sparsities, seeds)
def test_balanced_rows_keep_the_same_number_or_one_more(shape_and_block, sparsity, seed):
    shape, block = shape_and_block
    kept = blocks_of(block_mask(shape, block, sparsity, "balanced", seed=seed), block)
    each = kept.flatten(0, -2).sum(1)
    assert int(each.max() - each.min()) <= 1


def test_random_masks_reach_every_block_equally_often():
    kept = sum(block_mask((4, 4), sparsity=0.75, seed=seed).double() for seed in range(400)) / 400
    torch.testing.assert_close(kept, torch.full_like(kept, 0.25), atol=0.1, rtol=0)


def test_balanced_masks_reach_every_block_equally_often():
    # 10 kept in 4 rows: each row keeps 2 or 3, whichever rows they are.
    kept = sum(block_mask((4, 4), sparsity=0.375, algo="balanced", seed=seed).double() for seed in range(400)) / 400
    torch.testing.assert_close(kept, torch.full_like(kept, 0.625), atol=0.12, rtol=0)


def test_topk_keeps_the_blocks_with_the_highest_mean():
    score = torch.tensor([[1.0, 1.0, 5.0], [1.0, 1.0, 0.0], [9.0, -9.0, 2.0]])
    # Block means: 1, 2.5 (a cut block of 5 and 0), 0 (cut), 2 (cut).
    mask = block_mask((3, 3), (2, 2), 0.5, "topk", score=score)
    assert mask.int().tolist() == [[0, 0, 1], [0, 0, 1], [0, 0, 1]]


def test_topk_breaks_ties_by_lowest_index():
    mask = block_mask((2, 6), (1, 2), 0.5, "topk", score=torch.zeros(2, 6))
    assert mask.int().tolist() == [[1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]]


def test_topk_takes_integer_and_strided_and_infinite_scores():
    score = torch.arange(12).reshape(3, 4).T
    assert block_mask((4, 3), sparsity=0.75, algo="topk", score=score).nonzero().tolist() == [[1, 2], [2, 2], [3, 2]]
    infinite = torch.tensor([-math.inf, 0.0, math.inf])
    assert block_mask((3,), sparsity=2 / 3, algo="topk", score=infinite).tolist() == [False, False, True]


@settings(deadline=None, max_examples=20)
@given(st.sampled_from(["rand", "balanced"]), seeds)
def test_an_int_seed_reproduces_and_leaves_the_global_generator_alone(algo, seed):
    state = torch.random.get_rng_state()
    first = block_mask((13, 17), (2, 3), 0.5, algo, seed=seed)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.rand(3)
    assert torch.equal(first, block_mask((13, 17), (2, 3), 0.5, algo, seed=seed))


@pytest.mark.parametrize("algo", ["rand", "balanced"])
def test_without_a_seed_the_global_generator_reproduces(algo):
    torch.manual_seed(7)
    first, second = (block_mask((32, 32), sparsity=0.5, algo=algo) for _ in range(2))
    torch.manual_seed(7)
    assert torch.equal(first, block_mask((32, 32), sparsity=0.5, algo=algo))
    assert not torch.equal(first, second)


def test_the_ways_to_write_a_block():
    def mask(block):
        return block_mask((2, 8, 8), block, 0.5, seed=3)

    assert torch.equal(mask(4), mask((4, 4)))
    assert torch.equal(mask([4, 4]), mask((4, 4)))
    vector = [block_mask((10,), block, 0.5, seed=3) for block in (3, (3,), (1, 3))]
    assert torch.equal(vector[0], vector[1])
    assert torch.equal(vector[0], vector[2])
    assert block_mask((10,), seed=0).shape == (10,)


def test_positional_granularity_with_device():
    mask = block_mask((8, 8), (4, 4), 0.5, device="cpu")
    assert mask.device.type == "cpu"
    assert int(mask.sum()) == 32


def test_the_default_device_is_followed():
    with torch.device("meta"):
        assert block_mask((4, 4), sparsity=0.5, seed=0).device.type == "meta"
    assert block_mask((4, 4), sparsity=0.5, seed=0).device == torch.get_default_device()


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0), (2, 0, 3), (0, 3, 3)])
@pytest.mark.parametrize("algo", ["rand", "balanced", "topk"])
def test_an_empty_shape_gives_an_empty_mask(shape, algo):
    score = torch.zeros(shape) if algo == "topk" else None
    assert block_mask(shape, sparsity=0.5, algo=algo, score=score).shape == shape


@pytest.mark.parametrize("algo", ["rand", "balanced"])
def test_sparsity_0_keeps_all_and_1_none(algo):
    assert block_mask((5, 7), (2, 2), 0.0, algo).all()
    assert not block_mask((5, 7), (2, 2), 1.0, algo).any()


@pytest.mark.parametrize("sparsity", [-0.01, 1.01, math.nan, math.inf])
def test_a_sparsity_outside_0_to_1_is_an_error(sparsity):
    with pytest.raises(ValueRangeError, match=r"sparsity is .*; allowed: a number in \[0, 1\]"):
        block_mask((4, 4), sparsity=sparsity)


@pytest.mark.parametrize(
    ("shape", "block"),
    [((4, 4), (5, 1)), ((4, 4), (1, 8)), ((4, 4), (0, 1)), ((4, 4), (-1, 1)), ((3, 4, 4), (4, 2, 2)), ((4, 4), 5)],
)
def test_a_block_that_does_not_fit_is_an_error(shape, block):
    with pytest.raises(ShapeError, match="for shape"):
        block_mask(shape, block, 0.5)


@pytest.mark.parametrize(("shape", "block"), [((4, 4), (2,)), ((4, 4, 4, 4), (2, 2, 2)), ((4,), (2, 2))])
def test_a_block_of_another_rank_is_an_error(shape, block):
    with pytest.raises(ShapeError, match="one entry for each dimension"):
        block_mask(shape, block, 0.5)


@pytest.mark.parametrize("shape", [(), (3, -1)])
def test_a_shape_needs_dimensions_of_some_size(shape):
    with pytest.raises(ShapeError, match="one dimension or more"):
        block_mask(shape, sparsity=0.5)


def test_an_int_for_a_shape_says_what_to_write():
    with pytest.raises(ShapeError, match=r"pass \(8,\)"):
        block_mask(8, sparsity=0.5)


def test_an_unknown_algorithm_names_the_nearest():
    with pytest.raises(NameNotFoundError, match="did you mean 'balanced'"):
        block_mask((4, 4), sparsity=0.5, algo="balance")


def test_topk_needs_a_score():
    with pytest.raises(ValueRangeError, match="without a score"):
        block_mask((4, 4), sparsity=0.5, algo="topk")


def test_a_score_for_another_algorithm_is_an_error():
    with pytest.raises(ValueRangeError, match="algo 'rand' with a score"):
        block_mask((4, 4), sparsity=0.5, score=torch.rand(4, 4))


def test_a_score_of_another_shape_is_an_error():
    with pytest.raises(ShapeError, match=r"a score of shape \(4, 3\)"):
        block_mask((4, 4), sparsity=0.5, algo="topk", score=torch.rand(4, 3))


def test_scores_that_cannot_be_ordered_are_an_error():
    with pytest.raises(ValueRangeError, match="score holds NaN"):
        block_mask((2,), sparsity=0.5, algo="topk", score=torch.tensor([math.nan, 1.0]))
    with pytest.raises(ValueRangeError, match="both inf and -inf"):
        block_mask((2,), (2,), 0.5, "topk", score=torch.tensor([math.inf, -math.inf]))

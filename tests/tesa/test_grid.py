"""A grid says exactly what the dense tensor says, under every operation, and in as few cells as can be."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparta.errors import ShapeError, ValueRangeError
from sparta.tesa.grid import Grid, reshape_groups
from strategies import grids, shapes


def same(a, b):
    return a.shape == b.shape and torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


@given(grids())
def test_canonical_says_the_same_and_is_unique(grid):
    canonical = grid.canonical()
    assert same(canonical.dense(), grid.dense())
    again = Grid.from_dense(grid.dense())
    assert again.block == canonical.block
    assert again.same_as(grid)


@given(grids())
def test_canonical_blocks_end_only_where_values_change(grid):
    canonical, dense = grid.canonical(), grid.dense()
    for dim, (block, size) in enumerate(zip(canonical.block, grid.shape, strict=True)):
        if 0 < block < size:
            starts = range(block, size, block)
            changes = [not same(dense.select(dim, s), dense.select(dim, s - 1)) for s in starts]
            doubled = [c for s, c in zip(starts, changes, strict=True) if s % (2 * block)]
            assert any(changes)
            assert any(doubled)


@given(grids())
def test_count_counts_elements_not_cells(grid):
    assert grid.count() == int((grid.dense() != 0).sum())


@given(grids(), st.randoms(use_true_random=False))
def test_permute(grid, random):
    order = list(range(len(grid.shape)))
    random.shuffle(order)
    assert same(grid.permute(order).dense(), grid.dense().permute(order))


@st.composite
def reshapes(draw):
    grid = draw(grids(draw(shapes)))
    left, sizes = math.prod(grid.shape), []
    while left > 1 or (len(sizes) < 5 and draw(st.booleans())):
        size = draw(st.sampled_from([d for d in range(1, left + 1) if left % d == 0]))
        sizes.append(size)
        left //= size
    return grid, tuple(sizes)


@given(reshapes())
def test_reshape(case):
    grid, shape = case
    assert same(grid.reshape(shape).dense(), grid.dense().reshape(shape))


def test_reshape_makes_no_more_cells_than_the_knowledge_needs():
    channels = Grid((2, 64, 56, 56), (2, 1, 56, 56), torch.arange(64).reshape(1, 64, 1, 1))
    flat = channels.reshape((2, 64 * 56 * 56))
    assert flat.block == (2, 56 * 56)
    assert flat.cells.numel() == 64
    assert flat.reshape((2, 64, 56 * 56)).cells.numel() == 64


@given(grids(), st.data())
def test_take(grid, data):
    dims = [d for d, s in enumerate(grid.shape) if s]
    if dims:
        dim = data.draw(st.sampled_from(dims))
        index = torch.tensor(data.draw(st.lists(st.integers(0, grid.shape[dim] - 1), max_size=8)), dtype=torch.long)
        assert same(grid.take(dim, index).dense(), grid.dense().index_select(dim, index))


@given(grids(), st.data())
def test_broadcast_costs_no_cells(grid, data):
    lead = data.draw(st.lists(st.integers(1, 3), max_size=2))
    shape = [*lead, *(data.draw(st.integers(0, 4)) if s == 1 else s for s in grid.shape)]
    wide = grid.broadcast_to(shape)
    assert same(wide.dense(), grid.dense().broadcast_to(shape))
    assert wide.cells.numel() <= grid.cells.numel()


@given(st.data())
def test_cat(data):
    first = data.draw(grids(data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple))))
    dim = data.draw(st.integers(0, len(first.shape) - 1))
    sizes = data.draw(st.lists(st.integers(0, 5), max_size=3))
    parts = [first, *(data.draw(grids((*first.shape[:dim], n, *first.shape[dim + 1 :]))) for n in sizes)]
    assert same(Grid.cat(parts, dim).dense(), torch.cat([g.dense() for g in parts], dim))


@given(st.data())
def test_combine_is_element_wise(data):
    first = data.draw(grids())
    second = data.draw(grids(first.shape))
    combined = Grid.combine(lambda a, b: a - 2 * b, first, second)
    assert same(combined.dense(), first.dense() - 2 * second.dense())


@given(grids(values=st.sampled_from([0.0, 0.0, 1.0])), st.data())
def test_any_in_blocks_of_any_size(grid, data):
    block = tuple(data.draw(st.integers(1, 7)) for _ in grid.shape)
    expected = torch.zeros([-(-s // b) for s, b in zip(grid.shape, block, strict=True)], dtype=torch.bool)
    for position in grid.dense().nonzero().tolist():
        expected[tuple(p // b for p, b in zip(position, block, strict=True))] = True
    assert torch.equal(grid.any_in_blocks(block), expected)


def test_a_grid_shares_no_memory_with_the_tensor_it_was_made_from():
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    grid = Grid.from_dense(values)
    values.zero_()
    assert grid.dense().tolist() == [[1.0, 2.0], [3.0, 4.0]]
    grid.dense().zero_()
    assert grid.dense().tolist() == [[1.0, 2.0], [3.0, 4.0]]


def test_groups_cover_both_shapes():
    assert reshape_groups((), (1, 1)) == [(slice(0, 0), slice(0, 1)), (slice(0, 0), slice(1, 2))]
    assert reshape_groups((4, 1, 6), (2, 2, 6)) == [
        (slice(0, 1), slice(0, 2)),
        (slice(1, 3), slice(2, 3)),
    ]


@pytest.mark.parametrize(("block", "cells"), [((2,), (2, 1)), ((2, 0), (2, 1)), ((2, 4), (3, 1))])
def test_wrong_blocks_and_cells_are_refused(block, cells):
    with pytest.raises(ShapeError, match="allowed"):
        Grid((4, 4), block, torch.zeros(cells))


def test_blocks_that_do_not_divide_are_refused():
    grid = Grid((6,), (3,), torch.arange(2))
    with pytest.raises(ShapeError, match="cannot be cut"):
        grid.refined((2,))
    with pytest.raises(ValueRangeError, match="at least 1"):
        grid.any_in_blocks((0,))
    with pytest.raises(ShapeError, match="each dim"):
        grid.any_in_blocks((1, 1))


def test_a_uniform_grid_does_not_keep_the_cells_it_was_found_in():
    grid = Grid((64, 64), (1, 1), torch.zeros(64, 64)).canonical()
    assert grid.is_uniform
    assert grid.cells.untyped_storage().nbytes() == grid.cells.nbytes

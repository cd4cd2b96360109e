"""Block index and block formats: sorted, deterministic, equal to the slow definition, convertible into each other."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparta.errors import ShapeError
from sparta.tesa.formats import BCSC, BCSR, BCSRC, BlockIndex

FORMATS = {"bcsr": BCSR, "bcsc": BCSC, "bcsrc": BCSRC}


@st.composite
def masks_and_blocks(draw):
    rows, cols = draw(st.integers(0, 14)), draw(st.integers(0, 14))
    block = (draw(st.integers(1, max(rows, 1))), draw(st.integers(1, max(cols, 1))))
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    mask = torch.from_numpy(rng.random((rows, cols)) < draw(st.sampled_from([0.0, 0.05, 0.3, 1.0])))
    return (mask.T.contiguous().T if draw(st.booleans()) else mask), block


def kept_blocks(mask, block):
    """Coordinates of the blocks with a live element, row by row, written the slow way."""
    h, w = block
    rows, cols = mask.shape
    return [
        (r // h, c // w) for r in range(0, rows, h) for c in range(0, cols, w) if bool(mask[r : r + h, c : c + w].any())
    ]


@given(masks_and_blocks())
def test_index_is_what_a_loop_over_blocks_finds(case):
    mask, block = case
    index = BlockIndex.from_mask(mask, block)
    by_row = kept_blocks(mask, block)
    by_column = sorted(by_row, key=lambda place: (place[1], place[0]))
    grid_rows, grid_cols = index.grid
    assert index.kept == len(by_row)
    assert index.col_idx.tolist() == [c for _, c in by_row]
    assert index.row_ptr.tolist() == [sum(r < k for r, _ in by_row) for k in range(grid_rows + 1)]
    assert index.row_idx.tolist() == [r for r, _ in by_column]
    assert index.col_ptr.tolist() == [sum(c < k for _, c in by_row) for k in range(grid_cols + 1)]
    assert [by_row[i] for i in index.csc_to_csr.tolist()] == by_column
    assert [by_column[i] for i in index.csr_to_csc.tolist()] == by_row
    for name in ("row_ptr", "col_idx", "col_ptr", "row_idx", "csc_to_csr", "csr_to_csc"):
        assert getattr(index, name).dtype == torch.int32
    block_mask = torch.zeros(index.grid, dtype=torch.bool)
    for place in by_row:
        block_mask[place] = True
    assert torch.equal(index.block_mask(), block_mask)
    whole = block_mask.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    assert torch.equal(index.element_mask(), whole[: mask.shape[0], : mask.shape[1]])


@given(masks_and_blocks())
def test_transposing_the_index_is_indexing_the_transpose(case):
    mask, (h, w) = case
    transposed, expected = BlockIndex.from_mask(mask, (h, w)).transpose(), BlockIndex.from_mask(mask.T, (w, h))
    assert (transposed.shape, transposed.block) == (expected.shape, expected.block)
    assert torch.equal(transposed.row_ptr, expected.row_ptr)
    assert torch.equal(transposed.col_idx, expected.col_idx)


@given(masks_and_blocks(), st.sampled_from(sorted(FORMATS)), st.booleans())
def test_every_block_format_converts_into_every_other(case, name, batched):
    mask, block = case
    rows, cols = mask.shape
    dense = torch.arange(1.0, 1 + 2 * rows * cols).view(2, rows, cols)
    dense = dense if batched else dense[0]
    packed = FORMATS[name].pack(dense, mask, block=block)
    for target, cls in FORMATS.items():
        converted = getattr(packed, f"to_{target}")()
        direct = cls.pack(dense, mask, block=block)
        assert type(converted) is cls
        assert torch.equal(converted.values, direct.values)
        for key, tensor in direct.index_tensors().items():
            assert torch.equal(converted.index_tensors()[key], tensor)


def test_values_stand_in_the_order_of_the_format():
    dense = torch.arange(1, 5).reshape(2, 2)
    mask = dense > 0
    assert BCSR.pack(dense, mask, block=(1, 1)).values.flatten().tolist() == [1, 2, 3, 4]
    assert BCSC.pack(dense, mask, block=(1, 1)).values.flatten().tolist() == [1, 3, 2, 4]
    both = BCSRC.pack(dense, mask, block=(1, 1))
    assert both.values.flatten().tolist() == [1, 2, 3, 4]
    assert both.values.flatten()[both.index.csc_to_csr].tolist() == [1, 3, 2, 4]


def test_edge_blocks_are_filled_with_zeros():
    packed = BCSR.pack(torch.ones(3, 3), torch.ones(3, 3, dtype=torch.bool), block=(2, 2))
    assert packed.values.tolist() == [[[1, 1], [1, 1]], [[1, 0], [1, 0]], [[1, 1], [0, 0]], [[1, 0], [0, 0]]]


def test_more_than_65535_blocks_along_an_axis():
    mask = torch.zeros(1, 70_001, dtype=torch.bool)
    mask[0, -1] = True
    dense = torch.ones(1, 70_001)
    packed = BCSRC.pack(dense, mask, block=(1, 1))
    assert packed.index.col_idx.tolist() == [70_000]
    assert torch.equal(packed.unpack(), mask.float())


def test_packing_is_differentiable_in_the_dense_tensor():
    dense = torch.ones(3, 4, requires_grad=True)
    mask = torch.eye(3, 4, dtype=torch.bool)
    packed = BCSC.pack(dense, mask, block=(2, 2))
    (gradient,) = torch.autograd.grad(packed.values.sum(), dense)
    assert torch.equal(gradient, mask.float())


def test_moving_an_index_returns_the_moved_one():
    index = BlockIndex.from_mask(torch.eye(4, dtype=torch.bool), (2, 2))
    assert index.to("cpu") is index
    moved = index.to("meta")
    assert (moved.device.type, moved.row_ptr.device.type) == ("meta", "meta")
    assert index.device.type == "cpu"


def test_repr_tells_how_many_blocks_are_kept():
    index = BlockIndex.from_mask(torch.eye(4, dtype=torch.bool), (2, 2))
    assert repr(index) == "BlockIndex(shape=(4, 4), block=(2, 2), kept=2 of 4)"


@pytest.mark.parametrize("block", [(0, 1), (1, -1), (2,), (1, 1, 1), 4, (1.5, 2), "22", None])
def test_a_block_is_two_positive_integers(block):
    with pytest.raises(ShapeError, match="two integers"):
        BCSR.pack(torch.zeros(4, 4), torch.zeros(4, 4, dtype=torch.bool), block=block)


@pytest.mark.parametrize("block", [(5, 1), (1, 5), (8, 8)])
def test_a_block_larger_than_the_matrix_is_refused(block):
    with pytest.raises(ShapeError, match=r"larger than the matrix \(4, 4\)"):
        BCSR.pack(torch.zeros(4, 4), torch.zeros(4, 4, dtype=torch.bool), block=block)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_an_empty_matrix_takes_any_block(shape):
    packed = BCSRC.pack(torch.zeros(shape), torch.zeros(shape, dtype=torch.bool), block=(3, 8))
    assert packed.unpack().shape == shape
    assert packed.sum(-1).shape == shape[:1]
    assert packed.sum(-2).shape == shape[1:]


def test_a_block_mask_of_another_grid_is_refused():
    with pytest.raises(ShapeError, match=r"block mask has shape \(3, 2\)"):
        BlockIndex.from_block_mask(torch.ones(3, 2, dtype=torch.bool), (4, 4), (2, 2))
    with pytest.raises(ShapeError, match="two dimensions"):
        BlockIndex.from_mask(torch.ones(4, dtype=torch.bool), (2, 2))


def test_more_blocks_than_an_index_can_count_are_refused(monkeypatch):
    monkeypatch.setattr("sparta.tesa.formats.block_index._INDEX_LIMIT", 3)
    with pytest.raises(ShapeError, match="choose larger blocks"):
        BlockIndex.from_mask(torch.ones(2, 2, dtype=torch.bool), (1, 1))

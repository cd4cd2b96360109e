"""The original's block functions under their own names."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparta.errors import ShapeError, ValueRangeError
from sparta.tesa.formats import (
    BCSR,
    BCSCIndexes,
    BCSRCIndexes,
    BCSRIndexes,
    TeSAFunctionContext,
    TeSAIndexes,
    get_bcs_function,
)

SIZES = [4, 8, 16, 32, 64, 128]
KINDS = {BCSRIndexes: (True, False), BCSCIndexes: (False, True), BCSRCIndexes: (True, True)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block_h", SIZES)
@pytest.mark.parametrize("block_w", SIZES)
def test_convert_inverse_and_sum_at_the_originals_sizes(kind, block_h, block_w):
    """1024 x 768, 0.1 % live without structure, two matrices over one index."""
    mask = torch.rand(1024, 768) < 0.001
    indexes = get_bcs_function(block_h, block_w, *KINDS[kind]).build_indexes(mask.to(torch.uint8))
    assert type(indexes) is kind
    tiles = mask.view(1024 // block_h, block_h, 768 // block_w, block_w)
    block_mask = tiles.any(3).any(1)
    assert torch.equal(indexes.get_block_mask(), block_mask)
    assert indexes.nnz == int(block_mask.sum())

    rows, cols = block_mask.nonzero(as_tuple=True)
    assert torch.equal(indexes.col_idx.long(), cols)
    assert torch.equal(indexes.row_ptr.diff().long(), block_mask.sum(1))
    columns, rows_by_column = block_mask.T.nonzero(as_tuple=True)
    assert torch.equal(indexes.row_idx.long(), rows_by_column)
    assert torch.equal(indexes.col_ptr.diff().long(), block_mask.sum(0))
    assert torch.equal(rows[indexes.csc_to_csr], rows_by_column)
    assert torch.equal(cols[indexes.csc_to_csr], columns)

    dense = torch.rand(2, 1024, 768) * mask
    values = indexes.convert(dense)
    assert values.shape == (2, indexes.nnz * block_h * block_w)
    assert torch.equal(indexes.inverse(values), dense)
    torch.testing.assert_close(indexes.sum(values, axis=-1), dense.sum(-1))
    torch.testing.assert_close(indexes.sum(values, axis=-2), dense.sum(-2))


@given(
    st.integers(1, 9),
    st.integers(1, 9),
    st.sampled_from(sorted(KINDS, key=str)),
    st.sampled_from([torch.bool, torch.uint8, torch.int32, torch.int64]),
    st.integers(0, 99),
    st.data(),
)
def test_whole_blocks_are_kept_for_any_shape_mask_dtype_and_stride(rows, cols, kind, dtype, seed, data):
    block = (data.draw(st.integers(1, rows)), data.draw(st.integers(1, cols)))
    torch.manual_seed(seed)
    mask = (torch.rand(cols, rows) < 0.2).T
    dense = torch.rand(cols, rows, 3).permute(2, 1, 0)
    indexes = get_bcs_function(*block, *KINDS[kind]).build_indexes(mask.to(dtype))
    kept = indexes.get_mask()
    assert kept.shape == (rows, cols)
    assert not (mask & ~kept).any()
    values = indexes.convert(dense)
    assert torch.equal(indexes.inverse(values), torch.where(kept, dense, 0))
    torch.testing.assert_close(indexes.sum(values), torch.where(kept, dense, 0).sum(-1))
    exact = indexes.convert(dense, mask=mask)
    assert torch.equal(indexes.inverse(exact), torch.where(mask, dense, 0))


@pytest.mark.parametrize("kind", KINDS)
def test_conversions_are_differentiable(kind):
    mask = torch.tensor([[1, 0, 0, 0, 0], [0, 1, 0, 0, 0], [0, 0, 0, 0, 1]], dtype=torch.bool)
    indexes = get_bcs_function(2, 2, *KINDS[kind]).build_indexes(mask)
    dense = torch.rand(2, 3, 5, dtype=torch.float64, requires_grad=True)
    values = indexes.convert(dense).detach().requires_grad_()
    assert torch.autograd.gradcheck(indexes.convert, (dense,))
    assert torch.autograd.gradcheck(indexes.inverse, (values,))
    assert torch.autograd.gradcheck(lambda v: indexes.sum(v, axis=-1), (values,))
    assert torch.autograd.gradcheck(lambda v: indexes.sum(v, axis=-2), (values,))
    indexes.convert(dense, mask=mask).sum().backward()
    assert torch.equal(dense.grad, mask.double().expand(2, 3, 5))


def test_values_are_those_of_the_packed_formats():
    mask = torch.rand(6, 8) < 0.2
    dense = torch.rand(6, 8)
    packed = BCSR.pack(dense, mask, block=(2, 2))
    indexes = get_bcs_function(2, 2).build_indexes(mask)
    assert torch.equal(indexes.convert(dense, mask=mask), packed.values.flatten())


def test_the_same_arguments_give_the_same_function():
    assert get_bcs_function(4, 8) is get_bcs_function(4, 8, BCSR=True, BCSC=False)
    assert get_bcs_function(4, 8) is not get_bcs_function(8, 4)
    assert isinstance(get_bcs_function(4, 8), TeSAFunctionContext)
    assert issubclass(BCSRIndexes, TeSAIndexes)


def test_moving_indexes_returns_the_moved_ones():
    indexes = get_bcs_function(2, 2).build_indexes(torch.ones(4, 4, dtype=torch.bool))
    moved = indexes.to("meta")
    assert type(moved) is type(indexes)
    assert (moved.row_ptr.device.type, indexes.row_ptr.device.type) == ("meta", "cpu")


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueRangeError, match="both False"):
        get_bcs_function(4, 4, BCSR=False, BCSC=False)
    with pytest.raises(ShapeError, match="two integers"):
        get_bcs_function(0, 4)
    with pytest.raises(ShapeError, match="larger than the matrix"):
        get_bcs_function(4, 4).build_indexes(torch.ones(2, 8, dtype=torch.bool))
    with pytest.raises(ValueRangeError, match="values other than 0 and 1"):
        get_bcs_function(1, 1).build_indexes(torch.full((2, 2), 2))
    with pytest.raises(ShapeError, match="two dimensions"):
        get_bcs_function(1, 1).build_indexes(torch.ones(2, 2, 2, dtype=torch.bool))


def test_tensors_that_do_not_fit_the_indexes_are_refused():
    indexes = get_bcs_function(2, 2).build_indexes(torch.eye(4, dtype=torch.bool))
    for shape in ((4,), (4, 5), (4, 4, 1)):
        with pytest.raises(ShapeError, match=r"\(\*batch, 4, 4\)"):
            indexes.convert(torch.zeros(shape))
    with pytest.raises(ShapeError, match="the tensor has shape"):
        indexes.convert(torch.zeros(4, 4), mask=torch.ones(3, 4, dtype=torch.bool))
    for method in (indexes.inverse, indexes.sum):
        with pytest.raises(ShapeError, match=r"\(\*batch, 8\): 2 kept blocks of 2 x 2"):
            method(torch.zeros(7))
        with pytest.raises(ShapeError, match=r"values have shape \(\)"):
            method(torch.zeros(()))
        with pytest.raises(ValueRangeError, match="the tensor is on meta"):
            method(torch.zeros(8, device="meta"))
    with pytest.raises(ShapeError, match="axis is 0"):
        indexes.sum(torch.zeros(8), axis=0)

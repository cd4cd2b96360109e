"""To and from PyTorch's sparse tensors."""

import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparta.errors import ShapeError, ValueRangeError
from sparta.tesa.formats import (
    BCSC,
    BCSR,
    BCSRC,
    Bitmap,
    NMPacked,
    Packed24,
    from_torch,
    to_torch_bsc,
    to_torch_bsr,
    to_torch_csr,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*beta state:UserWarning")


@st.composite
def divisible(draw):
    """(dense, mask, block): a batched matrix that its block divides."""
    h, w = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    rows, cols = h * draw(st.integers(1, 4)), w * draw(st.integers(1, 4))
    batch = draw(st.sampled_from([(), (2,), (2, 3)]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    mask = torch.rand(rows, cols, generator=generator) < draw(st.sampled_from([0.0, 0.2, 1.0]))
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int32]))
    dense = torch.randint(1, 99, (*batch, rows, cols), generator=generator).to(dtype)
    return dense, mask, (h, w)


@given(divisible(), st.sampled_from([BCSR, BCSC, BCSRC]))
def test_block_layouts_hold_the_same_matrix_and_come_back(case, cls):
    dense, mask, block = case
    packed = cls.pack(dense, mask, block=block)
    for sparse, layout, same in (
        (to_torch_bsr(packed), torch.sparse_bsr, packed.to_bcsr()),
        (to_torch_bsc(packed), torch.sparse_bsc, packed.to_bcsc()),
    ):
        assert sparse.layout == layout
        assert sparse.shape == dense.shape
        assert torch.equal(sparse.to_dense(), packed.unpack())
        back = from_torch(sparse)
        assert type(back) is type(same)
        for name, tensor in same.state()[0].items():
            assert torch.equal(back.state()[0][name], tensor)


@given(divisible())
def test_csr_holds_every_stored_element_and_comes_back(case):
    dense, mask, block = case
    for packed in (Bitmap.pack(dense, mask), BCSC.pack(dense, mask, block=block)):
        sparse = to_torch_csr(packed)
        assert sparse.layout == torch.sparse_csr
        assert sparse.shape == dense.shape
        assert sparse.values().shape[-1] == int(packed.stored_mask().sum())
        back = from_torch(sparse)
        assert isinstance(back, Bitmap)
        assert torch.equal(back.stored_mask(), packed.stored_mask())
        assert torch.equal(back.unpack(), packed.unpack())


@given(divisible())
def test_what_pytorch_makes_can_be_read(case):
    dense, mask, block = case
    matrix = torch.where(mask, dense, 0).reshape(-1, *mask.shape)[0]
    for sparse in (matrix.to_sparse_csr(), matrix.to_sparse_bsr(block), matrix.to_sparse_bsc(block)):
        assert torch.equal(from_torch(sparse).unpack(), matrix)


@pytest.mark.parametrize("shape", [(3, 7), (0, 5), (5, 0)])
def test_csr_takes_any_shape_and_any_format(shape):
    mask = torch.zeros(shape, dtype=torch.bool)
    mask[:, ::3] = True
    dense = torch.arange(1.0, 1 + mask.numel()).view(shape)
    for packed in (
        Bitmap.pack(dense, mask),
        NMPacked.pack(dense, mask, n=2, m=4),
        Packed24.pack(dense, mask),
        BCSRC.pack(dense, mask, block=(2, 2)),
    ):
        assert torch.equal(to_torch_csr(packed).to_dense(), packed.unpack())


def test_no_beta_warning_reaches_the_caller():
    packed = BCSR.pack(torch.eye(4), torch.eye(4, dtype=torch.bool), block=(2, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        to_torch_bsr(packed)
        to_torch_bsc(packed)
        to_torch_csr(packed)


def test_a_product_with_the_sparse_tensor_is_the_dense_product():
    mask = torch.rand(8, 8) < 0.3
    dense, other = torch.randn(8, 8), torch.randn(8, 3)
    packed = BCSR.pack(dense, mask, block=(2, 2))
    torch.testing.assert_close(to_torch_csr(packed) @ other, torch.where(mask, dense, 0) @ other)


def test_unsorted_indices_are_sorted():
    sparse = torch.sparse_csr_tensor(
        torch.tensor([0, 2, 3]), torch.tensor([2, 0, 1]), torch.tensor([1.0, 2.0, 3.0]), (2, 3), check_invariants=False
    )
    packed = from_torch(sparse)
    assert packed.values.tolist() == [2.0, 1.0, 3.0]
    assert packed.unpack().tolist() == [[2.0, 0.0, 1.0], [0.0, 3.0, 0.0]]


def test_repeated_entries_are_refused():
    sparse = torch.sparse_csr_tensor(
        torch.tensor([0, 2]), torch.tensor([1, 1]), torch.tensor([1.0, 2.0]), (1, 3), check_invariants=False
    )
    with pytest.raises(ValueRangeError, match="several entries for one place"):
        from_torch(sparse)


@pytest.mark.parametrize("convert", [to_torch_bsr, to_torch_bsc])
def test_a_ragged_shape_is_refused_with_the_fix(convert):
    packed = BCSR.pack(torch.ones(3, 4), torch.ones(3, 4, dtype=torch.bool), block=(2, 2))
    with pytest.raises(ShapeError, match=r"pad the dense matrix to \(4, 4\) before packing, or use to_torch_csr"):
        convert(packed)


@pytest.mark.parametrize("tensor", [torch.eye(3), torch.ones(3), torch.eye(3).to_sparse()])
def test_other_layouts_are_refused(tensor):
    with pytest.raises(ValueRangeError, match="the tensor has layout"):
        from_torch(tensor)


def test_batches_must_share_one_index():
    different = torch.stack([torch.eye(2), torch.eye(2).flip(0)]).to_sparse_csr()
    with pytest.raises(ShapeError, match="different indices"):
        from_torch(different)
    none = torch.zeros(0, 3, dtype=torch.int64), torch.zeros(0, 1, dtype=torch.int64), torch.zeros(0, 1)
    empty = torch.sparse_csr_tensor(*none, (0, 2, 2), check_invariants=False)
    with pytest.raises(ShapeError, match="the batch is empty"):
        from_torch(empty)


def test_dense_dimensions_are_refused():
    hybrid = torch.ones(2, 2, 3).to_sparse_csr(dense_dim=1)
    with pytest.raises(ShapeError, match="1 dense dimensions"):
        from_torch(hybrid)

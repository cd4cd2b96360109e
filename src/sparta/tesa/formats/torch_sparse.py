"""To and from PyTorch's own sparse tensors: BSR, BSC and CSR.

For handing a packed matrix to library kernels and for reading what other code made. PyTorch's block layouts need a
shape that the block divides, while CSR takes any shape; stored zeros stay stored.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from sparta.errors import ShapeError, ValueRangeError, message
from sparta.tesa.formats.base import Packed
from sparta.tesa.formats.bcs import BCSC, BCSR, BlockPacked
from sparta.tesa.formats.bitmap import Bitmap
from sparta.tesa.formats.block_index import BlockIndex
from sparta.tesa.formats.live import true_positions
from sparta.tesa.formats.mask_bits import pack_bits

__all__ = ["from_torch", "to_torch_bsc", "to_torch_bsr", "to_torch_csr"]


def to_torch_bsr(packed: BlockPacked) -> Tensor:
    """Return a ``torch.sparse_bsr`` tensor of shape ``packed.shape``, from any of the block formats.

    >>> packed = BCSR.pack(torch.eye(4), torch.eye(4, dtype=torch.bool), block=(2, 2))
    >>> to_torch_bsr(packed).layout
    torch.sparse_bsr
    """
    _check_divisible(packed)
    bcsr = packed.to_bcsr()
    return _build(torch.sparse_bsr_tensor, bcsr.index.row_ptr, bcsr.index.col_idx, bcsr)


def to_torch_bsc(packed: BlockPacked) -> Tensor:
    """Return a ``torch.sparse_bsc`` tensor of shape ``packed.shape``, from any of the block formats.

    >>> packed = BCSR.pack(torch.eye(4), torch.eye(4, dtype=torch.bool), block=(2, 2))
    >>> to_torch_bsc(packed).layout
    torch.sparse_bsc
    """
    _check_divisible(packed)
    bcsc = packed.to_bcsc()
    return _build(torch.sparse_bsc_tensor, bcsc.index.col_ptr, bcsc.index.row_idx, bcsc)


def to_torch_csr(packed: Packed) -> Tensor:
    """Return a ``torch.sparse_csr`` tensor of shape ``packed.shape``, from any format.

    It has an entry for each stored element, zeros inside kept blocks and groups included.

    >>> to_torch_csr(Bitmap.pack(torch.eye(2), torch.eye(2, dtype=torch.bool))).col_indices()
    tensor([0, 1])
    """
    bitmap = packed if isinstance(packed, Bitmap) else Bitmap.pack(packed.unpack(), packed.stored_mask())
    columns = true_positions(bitmap.stored_mask()) % max(1, bitmap.cols)
    return _build(torch.sparse_csr_tensor, bitmap.row_ptr, columns, bitmap)


def from_torch(tensor: Tensor) -> Packed:
    """Return a packed matrix from a PyTorch sparse tensor: BSR as BCSR, BSC as BCSC, CSR as a bitmap.

    Unsorted indices are sorted. A batched tensor must have the same indices in every matrix of the batch.

    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("ignore")  # PyTorch calls its sparse layouts beta
    ...     sparse = torch.eye(4).to_sparse_bsr((2, 2))
    >>> from_torch(sparse)
    BCSR(shape=(4, 4), block=[2, 2], dtype=torch.float32, device=cpu, nbytes=52)
    """
    if tensor.layout not in {torch.sparse_csr, torch.sparse_bsr, torch.sparse_bsc}:
        raise ValueRangeError(
            message(
                f"the tensor has layout {tensor.layout}",
                "torch.sparse_bsr, torch.sparse_bsc or torch.sparse_csr",
                "convert it with .to_sparse_csr(), or pack a dense tensor with pack(dense, mask, format=...)",
            )
        )
    rows, cols = tensor.shape[-2:]
    if tensor.layout == torch.sparse_bsc:
        pointers, indices, values = _one_index(tensor, tensor.ccol_indices(), tensor.row_indices())
        h, w = values.shape[-2:]
        # The columns of a matrix are the rows of its transpose.
        transposed, order = _sorted_index((cols, rows), (w, h), pointers, indices)
        return BCSC(values.index_select(-3, order), transposed.transpose())
    pointers, indices, values = _one_index(tensor, tensor.crow_indices(), tensor.col_indices())
    if tensor.layout == torch.sparse_bsr:
        h, w = values.shape[-2:]
        index, order = _sorted_index((rows, cols), (h, w), pointers, indices)
        return BCSR(values.index_select(-3, order), index)
    index, order = _sorted_index((rows, cols), (1, 1), pointers, indices)
    bits = pack_bits(index.block_mask())
    return Bitmap(values.index_select(-1, order), bits, index.row_ptr.to(torch.int64), cols, index.kept)


@contextmanager
def _notices_ignored() -> Iterator[None]:
    """Silence PyTorch's once-a-process notices: sparse layouts are in beta, and their indices are not checked."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(beta state|invariant checks)", category=UserWarning)
        yield


def _build(constructor: Callable[..., Tensor], pointers: Tensor, indices: Tensor, packed: Packed) -> Tensor:
    """Call a sparse constructor with the one index repeated over the batch, as PyTorch wants it."""
    batch = packed.batch_shape
    with _notices_ignored():
        return constructor(
            pointers.expand(*batch, -1).contiguous(),
            indices.expand(*batch, -1).contiguous(),
            packed.values,
            size=packed.shape,
            check_invariants=False,
        )


def _check_divisible(packed: BlockPacked) -> None:
    """Raise if the block does not divide the shape."""
    (rows, cols), (h, w) = packed.matrix_shape, packed.block
    if rows % h or cols % w:
        raise ShapeError(
            message(
                f"a matrix of shape ({rows}, {cols}) in blocks of ({h}, {w})",
                "for PyTorch's block layouts, a shape that the block divides",
                f"pad the dense matrix to {packed.index.padded_shape} before packing, or use to_torch_csr",
            )
        )


def _one_index(tensor: Tensor, pointers: Tensor, indices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return pointers, indices and values with the index of one matrix of the batch, which all must share."""
    values = tensor.values()
    batch = pointers.ndim - 1
    if tensor.dense_dim():
        raise ShapeError(
            message(f"the sparse tensor has {tensor.dense_dim()} dense dimensions", "(*batch, rows, cols)")
        )
    if batch == 0:
        return pointers, indices, values
    flat_pointers, flat_indices = pointers.flatten(0, batch - 1), indices.flatten(0, batch - 1)
    if flat_pointers.shape[0] == 0:
        raise ShapeError(message("the batch is empty", "at least one matrix: its indices are the index"))
    same = (flat_pointers == flat_pointers[:1]).all() & (flat_indices == flat_indices[:1]).all()
    if not bool(same):
        raise ShapeError(
            message(
                "the matrices of the batch have different indices",
                "one index for the whole batch",
                "convert the matrices one by one, or pack them all with the union of their masks",
            )
        )
    return flat_pointers[0], flat_indices[0], values


def _sorted_index(
    shape: tuple[int, int], block: tuple[int, int], pointers: Tensor, indices: Tensor
) -> tuple[BlockIndex, Tensor]:
    """Return the index of possibly unsorted entries, and the order in which their values come."""
    grid_rows, grid_cols = -(-shape[0] // block[0]), -(-shape[1] // block[1])
    rows = torch.arange(grid_rows, device=indices.device)
    entry_rows = torch.repeat_interleave(rows, pointers.diff(), output_size=indices.numel())
    flat, order = torch.sort(entry_rows * grid_cols + indices, stable=True)
    if bool((flat.diff() == 0).any()):
        raise ValueRangeError(
            message(
                "the sparse tensor has several entries for one place",
                "one",
                "call .coalesce() on its COO form",
            )
        )
    col_idx = indices.index_select(0, order).to(torch.int32)
    return BlockIndex(shape, block, pointers.to(torch.int32), col_idx), order

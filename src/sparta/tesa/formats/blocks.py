"""Moving blocks between a dense matrix and a value array: gather, scatter, sum.

The arithmetic shared by the BCS formats and by the original's functions. A matrix is *viewed* as (grid rows, grid cols,
h, w), which costs nothing for any strides, and one indexing operation moves all kept blocks; all is plain PyTorch, so
autograd follows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparta.tesa.formats.block_index import BlockIndex, Order
from sparta.tesa.formats.dtypes import as_movable
from sparta.tesa.formats.sums import check_axis, segment_sum, sum_dims

__all__ = ["gather_blocks", "pad_matrix", "reorder_blocks", "scatter_blocks", "sum_blocks"]


def pad_matrix(dense: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return `dense`, ``(*batch, rows, cols)``, extended with zeros to `shape`; itself when it already fits.

    >>> pad_matrix(torch.ones(1, 2), (2, 3))
    tensor([[1., 1., 0.],
            [0., 0., 0.]])
    """
    rows, cols = dense.shape[-2:]
    if (rows, cols) == shape:
        return dense
    return torch.nn.functional.pad(dense, (0, shape[1] - cols, 0, shape[0] - rows))


def gather_blocks(dense: Tensor, index: BlockIndex, order: Order, mask: Tensor | None = None) -> Tensor:
    """Copy the kept blocks out of `dense`.

    Parameters
    ----------
    dense
        Shape ``(*batch, rows, cols)``.
    index, order
        Which blocks, and in which order.
    mask
        Shape (rows, cols), bool. Elements that are False become exactly 0, whatever `dense` holds there.

    Returns
    -------
    Tensor
        Shape ``(*batch, kept, h, w)``, contiguous.

    >>> index = BlockIndex.from_mask(torch.eye(2, dtype=torch.bool), (1, 1))
    >>> gather_blocks(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), index, "csr").flatten()
    tensor([1., 4.])
    """
    tiles = _as_tiles(pad_matrix(as_movable(dense), index.padded_shape), index)
    block_rows, block_cols = index.coordinates(order)
    values = tiles[..., block_rows, block_cols, :, :].contiguous()
    if mask is not None:
        values = values.masked_fill_(~gather_blocks(mask, index, order), 0)
    return values if values.dtype == dense.dtype else values.view(dense.dtype)


def scatter_blocks(values: Tensor, index: BlockIndex, order: Order) -> Tensor:
    """Undo :func:`gather_blocks`: ``(*batch, kept, h, w)`` to ``(*batch, rows, cols)``, zero outside the kept blocks.

    >>> index = BlockIndex.from_mask(torch.eye(2, dtype=torch.bool), (1, 1))
    >>> scatter_blocks(torch.tensor([1.0, 4.0]).reshape(2, 1, 1), index, "csr")
    tensor([[1., 0.],
            [0., 4.]])
    """
    movable = as_movable(values)
    padded = movable.new_zeros((*values.shape[:-3], *index.padded_shape))
    block_rows, block_cols = index.coordinates(order)
    _as_tiles(padded, index)[..., block_rows, block_cols, :, :] = movable
    dense = padded[..., : index.shape[0], : index.shape[1]].contiguous()
    return dense if dense.dtype == values.dtype else dense.view(values.dtype)


def reorder_blocks(values: Tensor, index: BlockIndex, source: Order, target: Order) -> Tensor:
    """Return the values ``(*batch, kept, h, w)`` in another order of blocks; themselves when it is the same.

    >>> index = BlockIndex.from_mask(torch.ones(2, 2, dtype=torch.bool), (1, 1))
    >>> reorder_blocks(torch.arange(4).reshape(4, 1, 1), index, "csr", "csc").flatten()
    tensor([0, 2, 1, 3])
    """
    if source == target:
        return values
    return values.index_select(-3, index.csc_to_csr if target == "csc" else index.csr_to_csc)


def sum_blocks(values: Tensor, index: BlockIndex, order: Order, axis: int) -> Tensor:
    """Sum the rows (axis -1) or the columns (axis -2) of the matrix that `values` are the blocks of.

    Returns
    -------
    Tensor
        Shape ``(*batch, rows)`` or ``(*batch, cols)``, dtype :func:`~.dtypes.sum_dtype` of the values.

    >>> index = BlockIndex.from_mask(torch.ones(2, 2, dtype=torch.bool), (1, 2))
    >>> sum_blocks(torch.arange(4.0).reshape(2, 1, 2), index, "csr", axis=-1)
    tensor([1., 5.])
    """
    check_axis(axis)
    by_row = axis == -1
    # First inside each block, then over the blocks of one block row (column), side by side in that order.
    partial = sum_dims(values, (axis,)).unsqueeze(axis)
    partial = reorder_blocks(partial, index, order, "csr" if by_row else "csc").flatten(-2)
    pointers = index.row_ptr if by_row else index.col_ptr
    sums = segment_sum(partial.movedim(-2, 0), pointers)
    return sums.movedim(0, -2).flatten(-2)[..., : index.shape[0 if by_row else 1]]


def _as_tiles(padded: Tensor, index: BlockIndex) -> Tensor:
    """View ``(*batch, grid rows * h, grid cols * w)`` as ``(*batch, grid rows, grid cols, h, w)``."""
    (grid_rows, grid_cols), (h, w) = index.grid, index.block
    by_column = torch.unflatten(padded, -1, (grid_cols, w))
    return torch.unflatten(by_column, -3, (grid_rows, h)).transpose(-2, -3)

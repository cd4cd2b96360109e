"""The block-index functions under the names of the original SparTA: ``get_bcs_function`` and what it returns.

A thin face over :class:`~.block_index.BlockIndex`, for code written against the original and for kernels that want flat
values ``(*batch, kept * h * w)``. These work on whole blocks, so ``inverse(convert(x))`` equals ``x`` where
:meth:`TeSAIndexes.get_mask` is True; pass the element mask to ``convert`` when it is finer than the block.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from sparta.errors import ShapeError, ValueRangeError, message
from sparta.tesa.formats.block_index import BlockIndex, Order, check_block
from sparta.tesa.formats.blocks import gather_blocks, scatter_blocks, sum_blocks
from sparta.tesa.formats.live import MaskLike, check_matrix, live_mask

__all__ = [
    "BCSCIndexes",
    "BCSRCIndexes",
    "BCSRIndexes",
    "TeSAFunctionContext",
    "TeSAIndexes",
    "get_bcs_function",
]


@dataclass(frozen=True, eq=False)
class TeSAIndexes:
    """Indexes of the kept blocks of a mask, and differentiable conversions over them.

    The subclasses differ in the order of blocks in the values: row by row for :class:`BCSRIndexes` and
    :class:`BCSRCIndexes`, column by column for :class:`BCSCIndexes`.

    >>> indexes = get_bcs_function(2, 2).build_indexes(torch.eye(4, dtype=torch.uint8))
    >>> indexes.row_ptr.tolist(), indexes.col_idx.tolist()
    ([0, 1, 2], [0, 1])
    >>> dense = torch.ones(4, 4)
    >>> values = indexes.convert(dense)
    >>> values.shape, indexes.sum(values).tolist()
    (torch.Size([8]), [2.0, 2.0, 2.0, 2.0])
    """

    order: ClassVar[Order] = "csr"

    index: BlockIndex

    @property
    def row_ptr(self) -> Tensor:
        """Shape (grid rows + 1,), int32: where each block row begins, blocks row by row."""
        return self.index.row_ptr

    @property
    def col_idx(self) -> Tensor:
        """Shape (kept,), int32: block column of each block, row by row."""
        return self.index.col_idx

    @property
    def col_ptr(self) -> Tensor:
        """Shape (grid cols + 1,), int32: where each block column begins, blocks column by column."""
        return self.index.col_ptr

    @property
    def row_idx(self) -> Tensor:
        """Shape (kept,), int32: block row of each block, column by column."""
        return self.index.row_idx

    @property
    def csc_to_csr(self) -> Tensor:
        """Shape (kept,), int32: for each block, column by column, its place row by row."""
        return self.index.csc_to_csr

    @property
    def nnz(self) -> int:
        """Number of kept blocks."""
        return self.index.kept

    def get_block_mask(self) -> Tensor:
        """Return which blocks are kept: bool, shape (grid rows, grid cols)."""
        return self.index.block_mask()

    def get_mask(self) -> Tensor:
        """Return which elements lie in kept blocks: bool, shape (rows, cols)."""
        return self.index.element_mask()

    def convert(self, dense: Tensor, mask: MaskLike | None = None) -> Tensor:
        """Return the kept blocks of `dense`, shape ``(*batch, rows, cols)``, as ``(*batch, kept * h * w)``.

        With `mask`, of shape (rows, cols), elements that are not live become exactly 0 and get no gradient.
        """
        if dense.ndim < 2 or tuple(dense.shape[-2:]) != self.index.shape:
            raise ShapeError(
                message(
                    f"the tensor has shape {tuple(dense.shape)}",
                    f"(*batch, {self.index.shape[0]}, {self.index.shape[1]}), as the mask of these indexes",
                )
            )
        live = None
        if mask is not None:
            check_matrix(dense, mask)
            live = live_mask(mask, dense.device)
        return gather_blocks(dense, self._index_on(dense), self.order, live).flatten(-3)

    def inverse(self, values: Tensor) -> Tensor:
        """Undo :meth:`convert`: ``(*batch, kept * h * w)`` to ``(*batch, rows, cols)``, zero elsewhere."""
        return scatter_blocks(self._as_blocks(values), self._index_on(values), self.order)

    def sum(self, values: Tensor, axis: int = -1) -> Tensor:
        """Return the row sums (axis -1) or column sums (axis -2) of the matrix whose blocks are `values`."""
        return sum_blocks(self._as_blocks(values), self._index_on(values), self.order, axis)

    def to(self, device: torch.device | str) -> TeSAIndexes:
        """Return these indexes on `device`."""
        return type(self)(self.index.to(device))

    def _as_blocks(self, values: Tensor) -> Tensor:
        """View ``(*batch, kept * h * w)`` as ``(*batch, kept, h, w)``."""
        h, w = self.index.block
        if values.ndim < 1 or values.shape[-1] != self.nnz * h * w:
            raise ShapeError(
                message(
                    f"values have shape {tuple(values.shape)}",
                    f"(*batch, {self.nnz * h * w}): {self.nnz} kept blocks of {h} x {w}",
                    "make them with convert",
                )
            )
        return torch.unflatten(values, -1, (self.nnz, h, w))

    def _index_on(self, tensor: Tensor) -> BlockIndex:
        """Return the index, or raise if it is not where `tensor` is."""
        if tensor.device != self.index.device:
            raise ValueRangeError(
                message(
                    f"the tensor is on {tensor.device}",
                    f"{self.index.device}, where the indexes are",
                    "move the indexes once with indexes.to(device)",
                )
            )
        return self.index


class BCSRIndexes(TeSAIndexes):
    """Indexes whose values are stored row by row."""


class BCSCIndexes(TeSAIndexes):
    """Indexes whose values are stored column by column."""

    order = "csc"


class BCSRCIndexes(TeSAIndexes):
    """Indexes whose values are stored row by row and can be read column by column through ``csc_to_csr``."""


@dataclass(frozen=True)
class TeSAFunctionContext:
    """A block size and an order of blocks; makes indexes from masks.

    Attributes
    ----------
    block
        (h, w).
    indexes
        The class of indexes it makes.
    """

    block: tuple[int, int]
    indexes: type[TeSAIndexes]

    def build_indexes(self, mask: MaskLike) -> TeSAIndexes:
        """Return the indexes of the blocks that hold a live element, on the mask's device.

        Parameters
        ----------
        mask
            TeSA or tensor of shape (rows, cols), bool or 0/1 in any dtype, any strides.

        >>> get_bcs_function(1, 2).build_indexes(torch.tensor([[0, 0, 1]])).get_mask()
        tensor([[False, False,  True]])
        """
        index = BlockIndex.from_mask(mask, self.block)
        return self.indexes(index)


def get_bcs_function(  # the original's names, order and defaults
    block_H: int,  # noqa: N803
    block_W: int,  # noqa: N803
    BCSR: bool = True,  # noqa: FBT001, FBT002, N803
    BCSC: bool = False,  # noqa: FBT001, FBT002, N803
) -> TeSAFunctionContext:
    """Return the functions for one block size and one block format; the same object for the same arguments.

    Parameters
    ----------
    block_H, block_W
        Block size, each at least 1.
    BCSR, BCSC
        Index by rows, by columns, or both; at least one.

    >>> get_bcs_function(32, 64, BCSR=True, BCSC=True).indexes.__name__
    'BCSRCIndexes'
    """
    h, w = check_block((block_H, block_W), (0, 0))
    if not (BCSR or BCSC):
        raise ValueRangeError(
            message("BCSR and BCSC are both False", "at least one of them", "pass BCSR=True for an index by rows")
        )
    return _bcs_function(h, w, by_row=bool(BCSR), by_column=bool(BCSC))


@cache
def _bcs_function(h: int, w: int, *, by_row: bool, by_column: bool) -> TeSAFunctionContext:
    """Return the one context of these arguments."""
    if by_row and by_column:
        return TeSAFunctionContext((h, w), BCSRCIndexes)
    return TeSAFunctionContext((h, w), BCSRIndexes if by_row else BCSCIndexes)

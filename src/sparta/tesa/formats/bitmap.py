"""Bitmap storage: one bit per element says where, and the live values follow row by row.

What the kernels for unstructured sparsity decode: a smaller index than 32-bit columns wherever more than one element in
32 is live. The position of a value is the number of set bits before it, so no column indices are stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sparta.tesa.formats.base import Packed, register_format
from sparta.tesa.formats.dtypes import as_movable
from sparta.tesa.formats.live import MaskLike, check_matrix, live_mask, true_positions
from sparta.tesa.formats.mask_bits import pack_bits, unpack_bits
from sparta.tesa.formats.state import JSON, StateReader
from sparta.tesa.formats.sums import check_axis, segment_sum, slab_sum

__all__ = ["Bitmap"]


@register_format
@dataclass(frozen=True, eq=False, repr=False)
class Bitmap(Packed):
    """A bit for each element and the live values in row order.

    Attributes
    ----------
    values
        Shape ``(*batch, nnz)``: the live elements, row by row.
    bits
        Shape (rows, ceil(cols / 8)), uint8: column c is bit ``c % 8`` of byte ``c // 8``; padding bits are 0.
    row_ptr
        Shape (rows + 1,), int64: the values of row r are ``values[..., row_ptr[r]:row_ptr[r + 1]]``.
    cols, nnz
        Number of columns, and of stored elements.

    >>> packed = Bitmap.pack(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[True, False, True]]))
    >>> packed.values, packed.bits, packed.row_ptr
    (tensor([1., 3.]), tensor([[5]], dtype=torch.uint8), tensor([0, 2]))
    """

    format_name: ClassVar[str] = "bitmap"

    bits: Tensor
    row_ptr: Tensor
    cols: int
    nnz: int

    @classmethod
    def pack(cls, dense: Tensor, tesa: MaskLike) -> Bitmap:
        """Pack the live elements of `dense`, shape ``(*batch, rows, cols)``.

        >>> Bitmap.pack(torch.eye(2), torch.eye(2, dtype=torch.bool)).values
        tensor([1., 1.])
        """
        rows, cols = check_matrix(dense, tesa)
        mask = live_mask(tesa, dense.device)
        positions = true_positions(mask)
        row_starts = torch.arange(rows + 1, device=dense.device) * cols
        row_ptr = torch.searchsorted(positions, row_starts)
        values = as_movable(dense).flatten(-2).index_select(-1, positions)
        values = values if values.dtype == dense.dtype else values.view(dense.dtype)
        return cls(values, pack_bits(mask), row_ptr, cols, positions.numel())

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """(rows, cols) of the matrix that is packed."""
        return self.bits.shape[0], self.cols

    @property
    def value_shape(self) -> tuple[int, ...]:
        """(nnz,)."""
        return (self.nnz,)

    def index_tensors(self) -> dict[str, Tensor]:
        """Return ``bits`` and ``row_ptr``."""
        return {"bits": self.bits, "row_ptr": self.row_ptr}

    def index_meta(self) -> dict[str, JSON]:
        """Return the shape of the matrix."""
        return {"shape": list(self.matrix_shape)}

    @classmethod
    def read_state(cls, reader: StateReader) -> Bitmap:
        """Make a bitmap matrix from a checked file."""
        rows, cols = reader.pair("shape", minimum=0)
        bits = reader.index("bits", torch.uint8, (rows, -(-cols // 8)))
        mask = unpack_bits(bits, cols)
        reader.require(holds=torch.equal(pack_bits(mask), bits), problem="bits are set beyond the last column")
        counts = mask.sum(-1)
        nnz = int(counts.sum())
        row_ptr = reader.pointers("row_ptr", rows, nnz, torch.int64)
        reader.require(
            holds=torch.equal(row_ptr.diff(), counts),
            problem="row_ptr does not agree with the bits of each row",
        )
        return cls(reader.values((nnz,)), bits, row_ptr, cols, nnz)

    def unpack(self) -> Tensor:
        """Return the dense tensor, shape ``(*batch, rows, cols)``."""
        return _scatter(self.values, self.stored_mask())

    def stored_mask(self) -> Tensor:
        """Return which elements are stored: bool, shape (rows, cols)."""
        return unpack_bits(self.bits, self.cols)

    def sum(self, axis: int) -> Tensor:
        """Return row sums (axis -1, shape ``(*batch, rows)``) or column sums (axis -2, shape ``(*batch, cols)``)."""
        check_axis(axis)
        if axis == -1:
            return segment_sum(self.values.movedim(-1, 0), self.row_ptr).movedim(0, -1)
        starts = self.row_ptr.tolist()

        def rows_between(start: int, stop: int) -> Tensor:
            mask = unpack_bits(self.bits[start:stop], self.cols)
            return _scatter(self.values[..., starts[start] : starts[stop]], mask)

        return slab_sum(rows_between, self.shape, self.dtype, self.device)


def _scatter(values: Tensor, mask: Tensor) -> Tensor:
    """Write values ``(*batch, nnz)`` to the True places of mask (rows, cols), in row order; zero elsewhere."""
    movable = as_movable(values)
    dense = movable.new_zeros((*values.shape[:-1], *mask.shape))
    # Each matrix of the batch takes the next nnz values, which is the order they are stored in.
    dense = dense.masked_scatter(mask, movable)
    return dense if dense.dtype == values.dtype else dense.view(values.dtype)

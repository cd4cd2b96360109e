"""Block compressed storage: BCSR (row by row), BCSC (column by column), BCSRC (both, over one value array).

The formats of the block-sparse kernels; any block size, any shape. A kept block is stored whole, h x w, with zeros
where an element is dead or outside the matrix, so a kernel needs no mask inside a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self, TypeVar

import torch
from torch import Tensor

from sparta.tesa.formats.base import Packed, register_format
from sparta.tesa.formats.block_index import BlockIndex, Order
from sparta.tesa.formats.blocks import gather_blocks, reorder_blocks, scatter_blocks, sum_blocks
from sparta.tesa.formats.dtypes import as_movable
from sparta.tesa.formats.live import MaskLike, check_matrix, live_mask
from sparta.tesa.formats.state import JSON, StateReader

__all__ = ["BCSC", "BCSR", "BCSRC", "BlockPacked"]


@dataclass(frozen=True, eq=False, repr=False)
class BlockPacked(Packed):
    """What the three block formats share: values of shape ``(*batch, kept, h, w)`` over a :class:`BlockIndex`.

    Attributes
    ----------
    values
        Shape ``(*batch, kept, h, w)``, in the format's :attr:`order` of blocks.
    index
        Which blocks are kept.
    """

    order: ClassVar[Order]
    """Order of the blocks in the value array."""

    index: BlockIndex

    @classmethod
    def pack(cls, dense: Tensor, tesa: MaskLike, *, block: tuple[int, int]) -> Self:
        """Pack the blocks of `dense` that hold a live element.

        Parameters
        ----------
        dense
            Shape ``(*batch, rows, cols)``.
        tesa
            TeSA or bool mask of shape (rows, cols).
        block
            (h, w), each at least 1 and at most the matrix; edge blocks are padded with zeros.

        >>> mask = torch.tensor([[True, False, False], [False, False, True]])
        >>> BCSR.pack(torch.arange(6).reshape(2, 3), mask, block=(1, 2)).values.tolist()
        [[[0, 0]], [[5, 0]]]
        """
        check_matrix(dense, tesa)
        mask = live_mask(tesa, dense.device)
        # A TeSA finds the kept blocks from its grid, which is quicker than from the mask.
        index = BlockIndex.from_mask(mask if isinstance(tesa, Tensor) else tesa, block, dense.device)
        # A kept block of one element has nothing dead in it.
        inside = None if index.block == (1, 1) else mask
        return cls(gather_blocks(dense, index, cls.order, inside), index)

    @property
    def block(self) -> tuple[int, int]:
        """Block size (h, w)."""
        return self.index.block

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """(rows, cols) of the matrix that is packed."""
        return self.index.shape

    @property
    def value_shape(self) -> tuple[int, ...]:
        """(kept, h, w)."""
        return (self.index.kept, *self.index.block)

    def index_meta(self) -> dict[str, JSON]:
        """Return the shape of the matrix and of the blocks."""
        return {"shape": list(self.matrix_shape), "block": list(self.block)}

    def unpack(self) -> Tensor:
        """Return the dense tensor, shape ``(*batch, rows, cols)``, zero outside the kept blocks."""
        return scatter_blocks(self.values, self.index, self.order)

    def stored_mask(self) -> Tensor:
        """Return which elements lie in kept blocks: bool, shape (rows, cols)."""
        return self.index.element_mask()

    def sum(self, axis: int) -> Tensor:
        """Return row sums (axis -1, shape ``(*batch, rows)``) or column sums (axis -2, shape ``(*batch, cols)``)."""
        return sum_blocks(self.values, self.index, self.order, axis)

    def to_bcsr(self) -> BCSR:
        """Return the same matrix as BCSR."""
        return BCSR(reorder_blocks(self.values, self.index, self.order, "csr"), self.index)

    def to_bcsc(self) -> BCSC:
        """Return the same matrix as BCSC."""
        return BCSC(reorder_blocks(self.values, self.index, self.order, "csc"), self.index)

    def to_bcsrc(self) -> BCSRC:
        """Return the same matrix as BCSRC."""
        return BCSRC(reorder_blocks(self.values, self.index, self.order, "csr"), self.index)


@register_format
class BCSR(BlockPacked):
    """Block compressed sparse row: blocks row by row; index ``row_ptr`` and ``col_idx``.

    >>> packed = BCSR.pack(torch.eye(4), torch.eye(4, dtype=torch.bool), block=(2, 2))
    >>> packed
    BCSR(shape=(4, 4), block=[2, 2], dtype=torch.float32, device=cpu, nbytes=52)
    >>> packed.index.col_idx.tolist(), packed.sum(-1).tolist()
    ([0, 1], [1.0, 1.0, 1.0, 1.0])
    """

    format_name = "bcsr"
    order = "csr"

    def index_tensors(self) -> dict[str, Tensor]:
        """Return ``row_ptr`` and ``col_idx``."""
        return {"row_ptr": self.index.row_ptr, "col_idx": self.index.col_idx}

    @classmethod
    def read_state(cls, reader: StateReader) -> BCSR:
        """Make a BCSR matrix from a checked file."""
        shape, block = _read_shapes(reader)
        index = _read_index(reader, shape, block, ("row_ptr", "col_idx"))
        return _checked(cls(reader.values((index.kept, *block)), index), reader)


@register_format
class BCSC(BlockPacked):
    """Block compressed sparse column: blocks column by column; index ``col_ptr`` and ``row_idx``.

    >>> packed = BCSC.pack(torch.ones(2, 2), torch.ones(2, 2, dtype=torch.bool), block=(1, 1))
    >>> packed.index.col_ptr.tolist(), packed.index.row_idx.tolist()
    ([0, 2, 4], [0, 1, 0, 1])
    """

    format_name = "bcsc"
    order = "csc"

    def index_tensors(self) -> dict[str, Tensor]:
        """Return ``col_ptr`` and ``row_idx``."""
        return {"col_ptr": self.index.col_ptr, "row_idx": self.index.row_idx}

    @classmethod
    def read_state(cls, reader: StateReader) -> BCSC:
        """Make a BCSC matrix from a checked file."""
        shape, block = _read_shapes(reader)
        # The columns of a matrix are the rows of its transpose, so one reader serves both.
        transposed = _read_index(reader, shape[::-1], block[::-1], ("col_ptr", "row_idx"))
        return _checked(cls(reader.values((transposed.kept, *block)), transposed.transpose()), reader)


@register_format
class BCSRC(BlockPacked):
    """BCSR with a column index as well: values row by row, found column by column through ``csc_to_csr``.

    For operands that one kernel reads by rows and another by columns (a weight and its backward pass).

    >>> packed = BCSRC.pack(torch.ones(2, 2), torch.ones(2, 2, dtype=torch.bool), block=(1, 1))
    >>> packed.index.csc_to_csr.tolist()
    [0, 2, 1, 3]
    """

    format_name = "bcsrc"
    order = "csr"

    def index_tensors(self) -> dict[str, Tensor]:
        """Return ``row_ptr``, ``col_idx``, ``col_ptr``, ``row_idx`` and ``csc_to_csr``."""
        index = self.index
        return {
            "row_ptr": index.row_ptr,
            "col_idx": index.col_idx,
            "col_ptr": index.col_ptr,
            "row_idx": index.row_idx,
            "csc_to_csr": index.csc_to_csr,
        }

    @classmethod
    def read_state(cls, reader: StateReader) -> BCSRC:
        """Make a BCSRC matrix from a checked file."""
        shape, block = _read_shapes(reader)
        index = _read_index(reader, shape, block, ("row_ptr", "col_idx"))
        derived = {"col_ptr": index.col_ptr, "row_idx": index.row_idx, "csc_to_csr": index.csc_to_csr}
        for name, expected in derived.items():
            stored = reader.index(name, torch.int32, tuple(expected.shape))
            reader.require(
                holds=torch.equal(stored, expected), problem=f"{name} does not agree with row_ptr and col_idx"
            )
        return _checked(cls(reader.values((index.kept, *block)), index), reader)


B = TypeVar("B", bound=BlockPacked)


def _checked(packed: B, reader: StateReader) -> B:
    """Return `packed`, or raise if an edge block holds anything outside the matrix: kernels rely on zeros there."""
    places = packed.index.coordinates(packed.order)
    for axis in (0, 1):
        size, step, count = packed.matrix_shape[axis], packed.block[axis], packed.index.grid[axis]
        inside = size - (count - 1) * step
        at_edge = as_movable(packed.values)[..., places[axis] == count - 1, :, :]
        outside = at_edge.narrow(axis - 2, inside, step - inside) if count else at_edge
        reader.require(holds=not bool(outside.ne(0).any()), problem="values other than 0 stand outside the matrix")
    return packed


def _read_shapes(reader: StateReader) -> tuple[tuple[int, int], tuple[int, int]]:
    """Read the shape of the matrix and of the blocks."""
    shape, block = reader.pair("shape", minimum=0), reader.pair("block", minimum=1)
    fits = 0 in shape or all(b <= size for size, b in zip(shape, block, strict=True))
    reader.require(holds=fits, problem=f"block {block} is larger than the matrix {shape}")
    return shape, block


def _read_index(
    reader: StateReader, shape: tuple[int, int], block: tuple[int, int], names: tuple[str, str]
) -> BlockIndex:
    """Read pointers and indices, and check that they are in range, sorted and free of repeats."""
    pointer_name, idx_name = names
    idx = reader.index(idx_name, torch.int32, (None,))
    grid_rows, grid_cols = -(-shape[0] // block[0]), -(-shape[1] // block[1])
    pointers = reader.pointers(pointer_name, grid_rows, idx.numel(), torch.int32)
    in_range = bool(((idx >= 0) & (idx < grid_cols)).all())
    reader.require(holds=in_range, problem=f"{idx_name} has entries outside 0 to {grid_cols - 1}")
    index = BlockIndex(shape, block, pointers, idx)
    major = index.coordinates("csr")[0].long()
    rising = bool(((major * grid_cols + idx).diff() > 0).all())
    reader.require(holds=rising, problem=f"{idx_name} is not sorted within {pointer_name}, or repeats a block")
    return index

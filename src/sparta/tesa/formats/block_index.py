"""Which blocks of a matrix are kept, in row order and in column order.

The index of every block format (BCSR, BCSC, BCSRC) and of the kernels that read them. It is built from a block mask
alone and always sorted, so the same mask gives the same index, and the same order of summation, on every device and
every run.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from sparta.errors import ShapeError, message
from sparta.tesa.formats.live import MaskLike, live_blocks, true_positions

__all__ = ["BlockIndex", "Order", "check_block"]

Order: TypeAlias = Literal["csr", "csc"]
"""Order of blocks in a value array: ``csr`` row by row, ``csc`` column by column."""

_INDEX_LIMIT = 2**31 - 1


def check_block(block: tuple[int, int], shape: tuple[int, int]) -> tuple[int, int]:
    """Return `block` as (h, w), or raise if it is not two positive sizes that fit into a matrix of `shape`.

    An empty matrix takes any block size: there is nothing to cut.

    >>> check_block((2, 4), (8, 8))
    (2, 4)
    """
    sizes = tuple(block) if isinstance(block, (tuple, list)) else ()
    if len(sizes) != 2 or not all(isinstance(size, int) and size >= 1 for size in sizes):
        raise ShapeError(message(f"block is {block!r}", "two integers (h, w) of at least 1"))
    h, w = sizes
    rows, cols = shape
    if 0 not in shape and (h > rows or w > cols):
        raise ShapeError(
            message(
                f"block ({h}, {w}) is larger than the matrix ({rows}, {cols})",
                f"at most ({rows}, {cols})",
                "choose a smaller block; it need not divide the shape",
            )
        )
    return h, w


@dataclass(frozen=True, eq=False, repr=False)
class BlockIndex:
    """Positions of the kept blocks of a (rows, cols) matrix cut into blocks of (h, w).

    Make one with :meth:`from_mask` or :meth:`from_block_mask`. All index tensors are int32, so the number of
    blocks along an axis is limited only by memory. Blocks at the right and lower edge may be partly outside
    the matrix.

    Attributes
    ----------
    shape
        (rows, cols) of the matrix, in elements.
    block
        (h, w).
    row_ptr
        Shape (grid rows + 1,): the kept blocks of block row r are the entries ``row_ptr[r]`` to ``row_ptr[r +
        1]``.
    col_idx
        Shape (kept,): block column of each entry, row by row, ascending within a row.

    >>> index = BlockIndex.from_block_mask(torch.tensor([[True, True], [True, False]]), (4, 6), (2, 3))
    >>> index.row_ptr.tolist(), index.col_idx.tolist()
    ([0, 2, 3], [0, 1, 0])
    >>> index.col_ptr.tolist(), index.row_idx.tolist(), index.csc_to_csr.tolist()
    ([0, 2, 3], [0, 1, 0], [0, 2, 1])
    """

    shape: tuple[int, int]
    block: tuple[int, int]
    row_ptr: Tensor
    col_idx: Tensor

    @classmethod
    def from_block_mask(cls, block_mask: Tensor, shape: tuple[int, int], block: tuple[int, int]) -> BlockIndex:
        """Build the index of the True entries of `block_mask`, shape ceil(shape / block).

        >>> BlockIndex.from_block_mask(torch.ones(2, 2, dtype=torch.bool), (3, 3), (2, 2)).kept
        4
        """
        h, w = check_block(block, shape)
        grid_rows, grid_cols = -(-shape[0] // h), -(-shape[1] // w)
        if tuple(block_mask.shape) != (grid_rows, grid_cols):
            raise ShapeError(
                message(
                    f"the block mask has shape {tuple(block_mask.shape)}",
                    f"({grid_rows}, {grid_cols}), the blocks of {h} x {w} in {shape[0]} x {shape[1]}",
                )
            )
        positions = true_positions(block_mask)
        if positions.numel() > _INDEX_LIMIT:
            raise ShapeError(
                message(f"{positions.numel()} blocks are kept", f"at most {_INDEX_LIMIT}", "choose larger blocks")
            )
        starts = torch.arange(grid_rows + 1, device=positions.device) * grid_cols
        row_ptr = torch.searchsorted(positions, starts)
        entry_starts = torch.repeat_interleave(starts[:-1], row_ptr.diff(), output_size=positions.numel())
        col_idx = positions - entry_starts
        return cls((shape[0], shape[1]), (h, w), row_ptr.to(torch.int32), col_idx.to(torch.int32))

    @classmethod
    def from_mask(cls, tesa: MaskLike, block: tuple[int, int], device: torch.device | str | None = None) -> BlockIndex:
        """Build the index of the blocks that hold a live element of a TeSA or a mask.

        >>> BlockIndex.from_mask(torch.eye(4, dtype=torch.bool), (2, 2)).col_idx
        tensor([0, 1], dtype=torch.int32)
        """
        rows, cols = _matrix_shape(tesa)
        block = check_block(block, (rows, cols))
        return cls.from_block_mask(live_blocks(tesa, block, device), (rows, cols), block)

    @property
    def grid(self) -> tuple[int, int]:
        """Number of blocks along each axis."""
        return -(-self.shape[0] // self.block[0]), -(-self.shape[1] // self.block[1])

    @property
    def padded_shape(self) -> tuple[int, int]:
        """Shape of the matrix with its edge blocks made whole."""
        return self.grid[0] * self.block[0], self.grid[1] * self.block[1]

    @property
    def kept(self) -> int:
        """Number of kept blocks."""
        return self.col_idx.numel()

    @property
    def device(self) -> torch.device:
        """Where the index tensors are."""
        return self.col_idx.device

    @cached_property
    def _by_column(self) -> tuple[Tensor, Tensor]:
        """Block columns ascending and, for each, the entry it came from; equal columns keep row order."""
        return torch.sort(self.col_idx, stable=True)

    @cached_property
    def csc_to_csr(self) -> Tensor:
        """Shape (kept,): for each entry in column order, its position in row order."""
        return self._by_column[1].to(torch.int32)

    @cached_property
    def csr_to_csc(self) -> Tensor:
        """Shape (kept,): for each entry in row order, its position in column order."""
        inverse = torch.empty_like(self.csc_to_csr)
        inverse[self.csc_to_csr.long()] = torch.arange(self.kept, dtype=torch.int32, device=self.device)
        return inverse

    @cached_property
    def col_ptr(self) -> Tensor:
        """Shape (grid cols + 1,): the kept blocks of block column c, in column order."""
        columns = torch.arange(self.grid[1] + 1, dtype=torch.int32, device=self.device)
        return torch.searchsorted(self._by_column[0], columns, out_int32=True)

    @cached_property
    def row_idx(self) -> Tensor:
        """Shape (kept,): block row of each entry, column by column, ascending within a column."""
        return self.coordinates("csr")[0].index_select(0, self.csc_to_csr)

    def coordinates(self, order: Order) -> tuple[Tensor, Tensor]:
        """Return the block row and the block column of each entry, in this order of entries.

        >>> index = BlockIndex.from_block_mask(torch.ones(2, 2, dtype=torch.bool), (2, 2), (1, 1))
        >>> [t.tolist() for t in index.coordinates("csc")]
        [[0, 1, 0, 1], [0, 0, 1, 1]]
        """
        if order == "csc":
            return self.row_idx, self._by_column[0]
        rows = torch.arange(self.grid[0], dtype=torch.int32, device=self.device)
        return torch.repeat_interleave(rows, self.row_ptr.diff(), output_size=self.kept), self.col_idx

    def block_mask(self) -> Tensor:
        """Return which blocks are kept: a bool tensor of shape :attr:`grid`."""
        rows, cols = self.coordinates("csr")
        mask = torch.zeros(self.grid, dtype=torch.bool, device=self.device)
        # index_fill, unlike assignment of a number, does not wait for the GPU.
        mask.view(-1).index_fill_(0, rows.long() * self.grid[1] + cols, True)  # noqa: FBT003
        return mask

    def element_mask(self) -> Tensor:
        """Return which elements lie in kept blocks: a bool tensor of shape (rows, cols).

        >>> BlockIndex.from_mask(torch.eye(3, dtype=torch.bool), (2, 2)).element_mask().int()
        tensor([[1, 1, 0],
                [1, 1, 0],
                [0, 0, 1]], dtype=torch.int32)
        """
        (h, w), (grid_rows, grid_cols) = self.block, self.grid
        expanded = self.block_mask()[:, None, :, None].expand(grid_rows, h, grid_cols, w)
        cropped = expanded.reshape(self.padded_shape)[: self.shape[0], : self.shape[1]]
        return cropped.contiguous()

    def transpose(self) -> BlockIndex:
        """Return the index of the transposed matrix: its rows are the columns of this one.

        >>> index = BlockIndex.from_mask(torch.tensor([[True, True, False]]), (1, 1))
        >>> index.transpose().row_ptr
        tensor([0, 1, 2, 2], dtype=torch.int32)
        """
        rows, cols = self.shape
        h, w = self.block
        return BlockIndex((cols, rows), (w, h), self.col_ptr, self.row_idx)

    def to(self, device: torch.device | str) -> BlockIndex:
        """Return this index on `device`; itself when it is already there."""
        target = torch.device(device)
        row_ptr, col_idx = self.row_ptr.to(target), self.col_idx.to(target)
        if col_idx is self.col_idx:
            return self
        return BlockIndex(self.shape, self.block, row_ptr, col_idx)

    def __repr__(self) -> str:
        grid_rows, grid_cols = self.grid
        return f"BlockIndex(shape={self.shape}, block={self.block}, kept={self.kept} of {grid_rows * grid_cols})"


def _matrix_shape(tesa: MaskLike) -> tuple[int, int]:
    """Return the (rows, cols) of a mask, leaving its validation to the reduction when it is not a matrix."""
    shape = tuple(tesa.shape)
    if len(shape) != 2:
        raise ShapeError(message(f"the mask has shape {shape}", "two dimensions, (rows, cols)"))
    return shape[0], shape[1]

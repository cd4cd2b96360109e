"""The grid: one small array of cells that says something about every element of a large tensor.

A grid of a tensor of `shape` has a `block` shape and ``ceil(shape[i] / block[i])`` cells along dim ``i``; all elements
of a block share the value of its cell. A block as large as the dim means "uniform along it", a block of 1 means "per
element", so channel, block and element knowledge share one representation and cost follows the knowledge, not the
tensor. Every operation returns the *coarsest* grid that says the same (its canonical form), so two grids that say the
same are equal cell by cell, and nothing grows without need.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparta.errors import ShapeError, ValueRangeError, message

__all__ = ["Grid", "cells_shape", "reshape_groups", "solved_shape"]

_MANY, _LINES = 1 << 16, 8  # cells that take time to look at, and how many lines of them are looked at first


@dataclass(frozen=True, eq=False)
class Grid:
    """An attribute of every element of a tensor, one cell per block.

    Parameters
    ----------
    shape
        Shape of the tensor that is described.
    block
        Block size along each dim, at least 1.
    cells
        Tensor of shape ``ceil(shape / block)``. Treated as immutable from here on.

    Examples
    --------
    A channel mask of a 4-D activation costs one cell per channel:

    >>> live = torch.zeros(8, 64, 56, 56, dtype=torch.bool)
    >>> live[:, ::2] = True
    >>> grid = Grid.from_dense(live)
    >>> grid.block, grid.cells.numel()
    ((8, 1, 56, 56), 64)
    """

    shape: tuple[int, ...]
    block: tuple[int, ...]
    cells: Tensor

    def __post_init__(self) -> None:
        if len(self.block) != len(self.shape) or any(b < 1 for b in self.block):
            raise ShapeError(
                message(
                    f"block {self.block} for a tensor of shape {self.shape}",
                    "one size of at least 1 for each dim",
                    "give as many block sizes as the tensor has dims",
                )
            )
        expected = cells_shape(self.shape, self.block)
        if tuple(self.cells.shape) != expected:
            raise ShapeError(
                message(
                    f"cells of shape {tuple(self.cells.shape)} for shape {self.shape} in blocks {self.block}",
                    f"cells of shape {expected}, which is ceil(shape / block)",
                )
            )

    # ------------------------------------------------------------------ making

    @staticmethod
    def uniform(shape: Sequence[int], value: float, dtype: torch.dtype) -> Grid:
        """Return the grid that holds `value` everywhere, in one cell."""
        shape = tuple(shape)
        block = tuple(max(1, s) for s in shape)
        return Grid(shape, block, torch.full(cells_shape(shape, block), value, dtype=dtype))

    @staticmethod
    def from_dense(values: Tensor) -> Grid:
        """Return the coarsest grid that describes `values` exactly, with its cells on the CPU."""
        shape = tuple(values.shape)
        return Grid(shape, (1,) * len(shape), values.detach()).canonical()._owned()

    def _owned(self) -> Grid:
        """Return the same grid with cells that share no memory with a caller's tensor."""
        cells = self.cells.to("cpu", copy=True).contiguous()
        return Grid(self.shape, self.block, cells)

    # ------------------------------------------------------------------ asking

    @property
    def is_uniform(self) -> bool:
        """Whether one value holds for the whole tensor."""
        return self.cells.numel() <= 1

    def varies_along(self, dim: int) -> bool:
        """Whether elements that differ only in their index along `dim` may hold different values."""
        return self.cells.shape[dim] > 1

    def value(self) -> Any:
        """Return the one value of a uniform grid."""
        return self.cells.reshape(-1)[0].item()

    def same_as(self, other: Grid) -> bool:
        """Whether both describe the same tensor in the same way."""
        mine, theirs = self.canonical(), other.canonical()
        return (
            mine.shape == theirs.shape
            and mine.block == theirs.block
            and not bool(_differs(mine.cells, theirs.cells).any())
        )

    def count(self) -> int:
        """Return how many elements of the tensor hold a true cell (edge blocks count their real size)."""
        counts = self.cells != 0
        if all(size % block == 0 for size, block in zip(self.shape, self.block, strict=True)):
            return int(counts.count_nonzero()) * math.prod(self.block)
        for dim in reversed(range(len(self.shape))):
            cells, block = counts.shape[dim], self.block[dim]
            if cells == 0:
                return 0
            tail = self.shape[dim] - (cells - 1) * block
            counts = counts.narrow(dim, 0, cells - 1).sum(dim) * block + counts.select(dim, cells - 1) * tail
        return int(counts)

    def dense(self, device: torch.device | str | None = None) -> Tensor:
        """Return the tensor of all values, a fresh one of `shape` (this is the only operation that costs so much)."""
        cells = self.cells if device is None else self.cells.to(device)
        wide: list[int] = []
        view: list[int] = []
        for count, block in zip(cells.shape, self.block, strict=True):
            view += [count, 1]
            wide += [count, block]
        full = cells.reshape(view).expand(wide).reshape([n * b for n, b in zip(cells.shape, self.block, strict=True)])
        for dim, size in enumerate(self.shape):
            full = full.narrow(dim, 0, size)
        return full.clone(memory_format=torch.contiguous_format)

    def any_in_blocks(self, block: Sequence[int]) -> Tensor:
        """Return, for each block of the tensor, whether any of its elements holds a true cell.

        Parameters
        ----------
        block
            Block size along each dim; it need not be related to the grid's own.

        Returns
        -------
        Tensor
            bool, of shape ``ceil(shape / block)``.
        """
        block = tuple(block)
        _check_block(block, self.shape)
        grid = Grid(self.shape, self.block, self.cells != 0)
        steps = tuple(
            min(b, s) if mine >= s else math.gcd(mine, b)
            for mine, b, s in zip(grid.block, block, (max(1, s) for s in self.shape), strict=True)
        )
        cells = grid.refined(steps).cells
        for dim, (step, wanted) in enumerate(zip(steps, block, strict=True)):
            cells = _pool_any(cells, dim, max(1, wanted // step))
        return cells.contiguous()

    # ------------------------------------------------------------------ shape operations, all exact

    def canonical(self) -> Grid:
        """Return the coarsest grid that says the same: along each dim, blocks end only where values change."""
        block, cells = list(self.block), self.cells
        for dim in range(len(self.shape)):
            cells, block[dim] = _coarsened(cells, dim, block[dim], self.shape[dim])
        return Grid(self.shape, tuple(block), cells)

    def refined(self, block: Sequence[int]) -> Grid:
        """Return the same grid in smaller blocks; each size must divide the present one (or the dim be uniform)."""
        cells = self.cells
        for dim, (old, new, size) in enumerate(zip(self.block, block, self.shape, strict=True)):
            if old == new or size == 0:
                continue
            count = -(-size // new)
            if old >= size:
                cells = cells.expand([count if d == dim else -1 for d in range(cells.dim())])
            elif old % new == 0:
                cells = cells.index_select(dim, torch.arange(count, device=cells.device) * new // old)
            else:
                raise ShapeError(message(f"blocks of {old} cannot be cut into blocks of {new}", "a divisor"))
        return Grid(self.shape, tuple(max(1, b) for b in block), cells)

    def take(self, dim: int, index: Tensor) -> Grid:
        """Return the grid of ``tensor.index_select(dim, index)``."""
        size = index.numel()
        shape = _replaced(self.shape, dim, size)
        if not self.varies_along(dim):
            cells = self.cells if size and self.shape[dim] else self.cells.narrow(dim, 0, 0)
            return Grid(shape, _replaced(self.block, dim, max(1, size)), cells)
        cells = self.cells.index_select(dim, index.to(self.cells.device) // self.block[dim])
        return Grid(shape, _replaced(self.block, dim, 1), cells).canonical()

    def permute(self, dims: Sequence[int]) -> Grid:
        """Return the grid of ``tensor.permute(dims)``."""
        return Grid(
            tuple(self.shape[d] for d in dims),
            tuple(self.block[d] for d in dims),
            self.cells.permute(*dims) if dims else self.cells,
        )

    def broadcast_to(self, shape: Sequence[int]) -> Grid:
        """Return the grid of ``tensor.broadcast_to(shape)``; the cells stay as few as they are."""
        shape = tuple(shape)
        lead = len(shape) - len(self.shape)
        cells = self.cells.reshape((1,) * lead + tuple(self.cells.shape))
        old_shape, block = (1,) * lead + self.shape, [*(1,) * lead, *self.block]
        for dim, (old, new) in enumerate(zip(old_shape, shape, strict=True)):
            if old != new:
                block[dim] = max(1, new)
                cells = cells.narrow(dim, 0, min(1, new))
        return Grid(shape, tuple(block), cells)

    def reshape(self, shape: Sequence[int]) -> Grid:
        """Return the grid of ``tensor.reshape(shape)``; the sizes must multiply to the same number of elements."""
        shape = tuple(shape)
        if math.prod(shape) == 0:
            empty = tuple(max(1, s) for s in shape)
            return Grid(shape, empty, self.cells.new_zeros(cells_shape(shape, empty)))
        block, cells = [1] * len(shape), self.cells
        for old, new in reversed(reshape_groups(self.shape, shape)):
            cells, block[new] = _regrouped(cells, old, self.shape[old], self.block[old], shape[new])
        return Grid(shape, tuple(block), cells).canonical()

    # ------------------------------------------------------------------ combining

    @staticmethod
    def combine(function: Callable[..., Tensor], *grids: Grid) -> Grid:
        """Apply an element-wise `function` of the cells to grids of one shape, on their coarsest common blocks."""
        shape = grids[0].shape
        common = _common_block(grids)
        # A uniform dim keeps its single cell: tensor broadcasting spreads it for free.
        fitted = [
            g.refined([b if g.varies_along(d) else g.block[d] for d, b in enumerate(common)]).cells for g in grids
        ]
        return Grid(shape, common, function(*fitted).expand(cells_shape(shape, common))).canonical()

    @staticmethod
    def cat(grids: Sequence[Grid], dim: int) -> Grid:
        """Return the grid of ``torch.cat(tensors, dim)``."""
        block = list(_common_block(grids))
        sizes = [g.shape[dim] for g in grids]
        # Blocks must not cross a seam: every size but the last is a multiple of the block.
        own = [g.block[dim] for g in grids if g.varies_along(dim)]
        block[dim] = max(1, math.gcd(*own, *sizes[:-1]) if len(grids) > 1 else block[dim])
        pieces = [g.refined(block).cells for g in grids if g.shape[dim]]
        shape = _replaced(grids[0].shape, dim, sum(sizes))
        if not pieces:
            return grids[0]
        return Grid(shape, tuple(block), torch.cat(pieces, dim)).canonical()


def cells_shape(shape: Sequence[int], block: Sequence[int]) -> tuple[int, ...]:
    """Return the number of cells along each dim: ``ceil(shape / block)``."""
    return tuple(-(-s // b) for s, b in zip(shape, block, strict=True))


def reshape_groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[slice, slice]]:
    """Match the dims of two shapes of equal, non-zero size into the smallest groups that hold the same elements.

    >>> reshape_groups((2, 3, 4), (6, 2, 2))
    [(slice(0, 2, None), slice(0, 1, None)), (slice(2, 3, None), slice(1, 3, None))]
    """
    groups: list[tuple[slice, slice]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        i0, j0 = i, j
        have = want = 1
        if i < len(old):
            have, i = old[i], i + 1
        if j < len(new):
            want, j = new[j], j + 1
        while have != want:
            if have < want:
                have, i = have * old[i], i + 1
            else:
                want, j = want * new[j], j + 1
        groups.append((slice(i0, i), slice(j0, j)))
    return groups


def solved_shape(shape: Sequence[int], old: Sequence[int]) -> tuple[int, ...]:
    """Return the new shape of a reshape with its -1 filled in.

    >>> solved_shape((2, -1), (4, 3))
    (2, 6)
    """
    numel = math.prod(old)
    known = math.prod(s for s in shape if s != -1)
    sizes = tuple(numel // max(1, known) if s == -1 else s for s in shape)
    if list(shape).count(-1) > 1 or any(s < -1 for s in shape) or math.prod(sizes) != numel:
        raise ShapeError(
            message(
                f"shape {tuple(shape)} for {numel} elements of shape {tuple(old)}",
                "the same number of elements",
            )
        )
    return sizes


# ---------------------------------------------------------------------- one dim at a time


def _differs(a: Tensor, b: Tensor) -> Tensor:
    """Element-wise `a != b`, with NaN equal to NaN."""
    different = a != b
    return different & ~(a.isnan() & b.isnan()) if a.is_floating_point() else different


def _replaced(values: tuple[int, ...], at: int, value: int) -> tuple[int, ...]:
    return (*values[:at], value, *values[at:][1:])


def _check_block(block: tuple[int, ...], shape: tuple[int, ...]) -> None:
    if len(block) != len(shape):
        raise ShapeError(message(f"block {block} for shape {shape}", "one block size for each dim"))
    if any(b < 1 for b in block):
        raise ValueRangeError(message(f"block {block}", "sizes of at least 1"))


def _coarsened(cells: Tensor, dim: int, block: int, size: int) -> tuple[Tensor, int]:
    """Merge cells along `dim` into the largest blocks inside which nothing changes."""
    count = cells.shape[dim]
    if count <= 1:
        return cells, max(1, size)
    if cells.numel() > _MANY and math.gcd(*_changes(_first_lines(cells, dim), dim)) == 1:
        return cells, block  # whatever the others are
    changes = _changes(cells, dim)
    if not changes:
        return cells.narrow(dim, 0, 1).clone(), size  # a view would keep all cells in memory
    step = math.gcd(*changes)
    index = torch.arange(0, count, step, device=cells.device)
    return (cells if step == 1 else cells.index_select(dim, index)), block * step


def _changes(cells: Tensor, dim: int) -> list[int]:
    """Return the places along `dim` at which some cell differs from the one before it."""
    count = cells.shape[dim]
    changed = _differs(cells.narrow(dim, 1, count - 1), cells.narrow(dim, 0, count - 1))
    others = [d for d in range(cells.dim()) if d != dim]
    places: list[int] = ((changed.any(dim=others) if others else changed).nonzero().flatten() + 1).tolist()
    return places


def _first_lines(cells: Tensor, dim: int) -> Tensor:
    """Return a part of the cells that is whole along `dim`: a few lines of them."""
    for other in range(cells.dim()):
        if other != dim:
            cells = cells.narrow(other, 0, min(_LINES, cells.shape[other]))
    return cells


def _common_block(grids: Sequence[Grid]) -> tuple[int, ...]:
    """Return the largest blocks that divide all the grids' blocks (uniform dims do not count)."""
    common = []
    for dim, size in enumerate(grids[0].shape):
        blocks = [g.block[dim] for g in grids if g.varies_along(dim)]
        common.append(math.gcd(*blocks) if blocks else max(1, size))
    return tuple(common)


def _pool_any(cells: Tensor, dim: int, group: int) -> Tensor:
    """Reduce each `group` of neighbouring cells along `dim` by "or"; the last group may be shorter."""
    count = cells.shape[dim]
    if group == 1 or count == 0:
        return cells
    groups = -(-count // group)
    missing = groups * group - count
    if missing:
        padding = [*cells.shape]
        padding[dim] = missing
        cells = torch.cat([cells, cells.new_zeros(padding)], dim)
    return torch.unflatten(cells, dim, (groups, group)).any(dim + 1)


def _regrouped(
    cells: Tensor, dims: slice, sizes: tuple[int, ...], blocks: tuple[int, ...], new_sizes: tuple[int, ...]
) -> tuple[Tensor, list[int]]:
    """Reshape the dims of one group; returns the new cells and the block sizes of the new dims.

    The group is flattened in runs: aligned stretches of `run` elements that share a cell. Only as many cells as
    there are runs are made, so that flattening a channel mask of (C, H, W) makes C cells, not C*H*W.
    """
    before, after = tuple(cells.shape[: dims.start]), tuple(cells.shape[dims.stop :])
    run, steps = 1, [1] * len(sizes)
    for d in reversed(range(len(sizes))):
        steps[d] = sizes[d] if blocks[d] >= sizes[d] else math.gcd(blocks[d], sizes[d])
        run *= steps[d]
        if steps[d] < sizes[d]:
            break
    ones = (1,) * len(before), (1,) * len(after)
    local = (
        Grid((*before, *sizes, *after), (*ones[0], *blocks, *ones[1]), cells)
        .refined((*ones[0], *steps, *ones[1]))
        .cells
    )
    flat = local.reshape((*before, -1, *after))

    new_blocks = [1] * len(new_sizes)
    for d in reversed(range(len(new_sizes))):
        new_blocks[d] = math.gcd(run, new_sizes[d])
        if new_blocks[d] < new_sizes[d]:
            if new_blocks[d] < run:
                flat = flat.repeat_interleave(run // new_blocks[d], dim=dims.start)
            break
        run //= new_blocks[d]
    counts = cells_shape(new_sizes, new_blocks)
    return flat.reshape((*before, *counts, *after)), new_blocks

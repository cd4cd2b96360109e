"""What is known of the value of a tensor while the graph is walked: which elements are constants, and which.

:class:`Known` is the part of a TeSA that flows from inputs to outputs; *observed* grids (bool, true where a later op or
the caller can see the element) flow the other way and stay plain :class:`~sparta.tesa.grid.Grid` objects. Both are
grids, so a fact of one channel costs one cell whatever the batch and the image are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparta.tesa.grid import Grid, cells_shape

__all__ = [
    "Known",
    "aligned",
    "any_over",
    "einsum_any",
    "nothing",
    "spread",
    "unbroadcast",
    "with_dims",
]


@dataclass(frozen=True, eq=False)
class Known:
    """Which elements of a tensor are constants.

    Parameters
    ----------
    const
        Grid of bool: the element is always the same number.
    value
        Grid of float64: that number; 0 elsewhere.
    """

    const: Grid
    value: Grid

    @staticmethod
    def live(shape: Sequence[int]) -> Known:
        """Return the knowledge of nothing."""
        return Known(Grid.uniform(shape, 0, torch.bool), Grid.uniform(shape, 0.0, torch.float64))

    @staticmethod
    def of(tensor: Tensor) -> Known:
        """Return the knowledge of every element of a tensor that will not change."""
        values = Grid.from_dense(tensor.detach().to(torch.float64))
        return Known(Grid.uniform(tensor.shape, 1, torch.bool), values)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        return self.const.shape

    @property
    def any(self) -> bool:
        """Whether anything is known."""
        return bool(self.const.cells.any())

    @property
    def all(self) -> bool:
        """Whether every element is a constant."""
        return bool(self.const.cells.all())

    @property
    def cells(self) -> int:
        """Stored cells: what the knowledge costs."""
        return self.const.cells.numel() + self.value.cells.numel()

    def zero(self) -> Grid:
        """Return where the element is the constant 0."""
        return Grid.combine(lambda c, v: c & (v == 0), self.const, self.value)

    def fixed(self) -> Grid:
        """Return where the element is a constant other than 0."""
        return Grid.combine(lambda c, v: c & (v != 0), self.const, self.value)

    def map(self, change: Callable[[Grid], Grid]) -> Known:
        """Return the knowledge of the tensor after a shape operation, given as it acts on a grid."""
        return Known(change(self.const), change(self.value))

    def only(self, where: Grid) -> Known:
        """Return what is known inside `where`; elsewhere the element is taken for live."""
        const = Grid.combine(torch.logical_and, self.const, where)
        return Known(const, Grid.combine(lambda c, v: torch.where(c, v, 0.0), const, self.value))

    def finite(self) -> Known:
        """Return the same without the constants that are infinite or NaN."""
        if bool(self.value.cells.isfinite().all()):
            return self
        return self.only(Grid(self.value.shape, self.value.block, self.value.cells.isfinite()))

    def uniform_over(self, dims: Sequence[int]) -> Known:
        """Return what is known of all elements along `dims` alike; those dims then have size 1."""
        const, value = self.const, self.value
        common = Grid.combine(lambda c, v: torch.where(c, v, math.nan), const, value)
        cells = common.cells
        for dim in dims:
            first = cells.narrow(dim, 0, 1)
            same = (cells == first).all(dim, keepdim=True)
            cells = torch.where(same, first, math.nan)
        grid = with_dims(common, dims, cells)
        known = ~grid.cells.isnan()
        return Known(
            Grid(grid.shape, grid.block, known).canonical(),
            Grid(grid.shape, grid.block, torch.where(known, grid.cells, 0.0)).canonical(),
        )


def nothing(shape: Sequence[int]) -> Grid:
    """Return the observed grid of a tensor that no one looks at."""
    return Grid.uniform(shape, 0, torch.bool)


def with_dims(grid: Grid, dims: Sequence[int], cells: Tensor) -> Grid:
    """Return a grid like `grid` whose `dims` have size 1, with the given cells."""
    shape = tuple(1 if d in dims else s for d, s in enumerate(grid.shape))
    block = tuple(1 if d in dims else b for d, b in enumerate(grid.block))
    return Grid(shape, block, cells).canonical()


def any_over(grid: Grid, dims: Sequence[int]) -> Grid:
    """Return whether any element along `dims` holds; those dims then have size 1.

    >>> grid = Grid.from_dense(torch.tensor([[True, False], [False, False]]))
    >>> any_over(grid, [1]).dense().tolist()
    [[True], [False]]
    """
    cells = grid.cells
    for dim in dims:
        cells = cells.any(dim, keepdim=True)
    return with_dims(grid, dims, cells)


def unbroadcast(grid: Grid, shape: Sequence[int]) -> Grid:
    """Return what is observed of an operand of `shape` that was broadcast to the grid's shape."""
    lead = len(grid.shape) - len(shape)
    dims = [d for d in range(len(grid.shape)) if d < lead or (shape[d - lead] == 1 and grid.shape[d] != 1)]
    reduced = any_over(grid, dims)
    return Grid(reduced.shape[lead:], reduced.block[lead:], reduced.cells.reshape(reduced.cells.shape[lead:]))


def spread(grid: Grid, dim: int, index: Tensor, size: int) -> Grid:
    """Return the observed grid of a tensor of `size` along `dim` of which ``index_select(dim, index)`` is observed."""
    cells = grid.refined([1 if d == dim else b for d, b in enumerate(grid.block)]).cells
    shape = [size if d == dim else s for d, s in enumerate(cells.shape)]
    wide = torch.zeros(shape, dtype=torch.int32).index_add(dim, index.long(), cells.to(torch.int32).contiguous()) != 0
    full = tuple(size if d == dim else s for d, s in enumerate(grid.shape))
    block = tuple(1 if d == dim else b for d, b in enumerate(grid.block))
    return Grid(full, block, wide).canonical()


def aligned(grids: Sequence[Grid], letters: Sequence[str]) -> tuple[list[Tensor], dict[str, tuple[int, int]]]:
    """Return the cells of several grids cut so that a letter has the same cells in each, and (size, block) by letter.

    Parameters
    ----------
    letters
        One letter a dim for each grid, as in einsum; a letter means the same size everywhere.
    """
    blocks: dict[str, tuple[int, int]] = {}
    for name in dict.fromkeys("".join(letters)):
        found = [(g, word.index(name)) for g, word in zip(grids, letters, strict=True) if name in word]
        size = found[0][0].shape[found[0][1]]
        varying = [g.block[d] for g, d in found if g.varies_along(d)]
        blocks[name] = size, math.gcd(*varying) if varying else max(1, size)
    cut = [g.refined([blocks[name][1] for name in word]).cells for g, word in zip(grids, letters, strict=True)]
    return cut, blocks


def einsum_any(first: Grid, second: Grid, letters: tuple[str, str, str]) -> Grid:
    """Return the einsum of two bool grids with "or" for + and "and" for ×.

    >>> a = Grid.from_dense(torch.tensor([[True, False]]))
    >>> b = Grid.from_dense(torch.tensor([[False, True], [True, True]]))
    >>> einsum_any(a, b, ("mk", "kn", "mn")).dense().tolist()
    [[False, True]]
    """
    (a, b), blocks = aligned([first, second], letters[:2])
    counts = torch.einsum(f"{letters[0]},{letters[1]}->{letters[2]}", a.float(), b.float())
    return grid_of_letters(counts > 0, letters[2], blocks)


def grid_of_letters(cells: Tensor, word: str, blocks: dict[str, tuple[int, int]]) -> Grid:
    """Return the grid whose dims are the letters of `word`, from cells cut by :func:`aligned`."""
    shape = tuple(blocks[name][0] for name in word)
    block = tuple(blocks[name][1] for name in word)
    return Grid(shape, block, cells.expand(cells_shape(shape, block))).canonical()

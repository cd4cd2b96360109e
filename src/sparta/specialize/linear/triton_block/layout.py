"""The layout: which blocks of a weight the kernel reads, in which order, and how a weight is packed that way.

A :class:`BlockLayout` is made once from a mask; weights are packed through it again and again. The blocks of a block
row stand in one fixed order in steps of equal size, and block rows are scheduled longest first, so sums are always
rounded in the same way and no long row is left for the end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from sparta.errors import ShapeError, message
from sparta.specialize.linear.triton_block.tile import BlockTile
from sparta.tesa.attribute import TeSA
from sparta.tesa.formats.blocks import pad_matrix

__all__ = ["BlockLayout", "LayoutIndex", "kept_grid"]


def kept_grid(weight: TeSA, block: tuple[int, int]) -> Tensor:
    """Return which blocks hold a live element: bool of ceil(shape / block); the block may be larger than the weight.

    >>> kept_grid(TeSA.from_mask(torch.eye(20, dtype=torch.bool)), (16, 32)).tolist()
    [[True], [True]]
    """
    return weight.kept_blocks(tuple(min(b, max(1, s)) for b, s in zip(block, weight.shape, strict=True)))


class LayoutIndex(NamedTuple):
    """The tensors of a layout on one device.

    Attributes
    ----------
    columns
        int32 (steps * blocks + padding,): the first input channel of each block, K or more for a block that only
        fills up a step.
    schedule
        int32 (block rows, 4): block row, first step, end of steps, first column; longest first.
    tile_row, tile_column
        int64 (steps * blocks,): where each block is in the weight.
    live
        bool, broadcasts to (steps, h, step): where a stored element is live; None when all are.
    """

    columns: Tensor
    schedule: Tensor
    tile_row: Tensor
    tile_column: Tensor
    live: Tensor | None


@dataclass(frozen=True, eq=False)
class BlockLayout:
    """How a weight (N, K) with a known mask is packed for one tile.

    Examples
    --------
    >>> mask = torch.zeros(64, 64, dtype=torch.bool)
    >>> mask[:16, 16:48] = True
    >>> layout = BlockLayout(TeSA.from_mask(mask), BlockTile(height=16, width=16, blocks=2))
    >>> layout.values(torch.ones(64, 64)).shape
    torch.Size([1, 16, 32])
    """

    weight: TeSA
    tile: BlockTile
    _on: dict[torch.device, LayoutIndex] = field(default_factory=dict, init=False, repr=False)

    @property
    def grid(self) -> tuple[int, int]:
        """Number of blocks along each axis."""
        n, k = self.weight.shape
        return -(-n // self.tile.height), -(-k // self.tile.width)

    @property
    def whole(self) -> bool:
        """Whether every stored block is one of the weight's and lies wholly inside it along K."""
        columns = self.index(torch.device("cpu")).columns[: -self.tile.blocks]
        return self.weight.shape[1] % self.tile.width == 0 and bool((columns < self.weight.shape[1]).all())

    def index(self, device: torch.device) -> LayoutIndex:
        """Return the index tensors on `device`, made there once."""
        if device not in self._on:
            on_cpu = self._index() if device.type == "cpu" else self.index(torch.device("cpu"))
            live = None if on_cpu.live is None else on_cpu.live.to(device)
            columns, schedule, row, column = (tensor.to(device) for tensor in on_cpu[:4])
            self._on[device] = LayoutIndex(columns, schedule, row, column, live)
        return self._on[device]

    def values(self, weight: Tensor) -> Tensor:
        """Return the kept blocks of a weight (N, K), shape (steps, h, step); dead elements are exactly 0."""
        if tuple(weight.shape) != tuple(self.weight.shape):
            raise ShapeError(
                message(f"a weight of shape {tuple(weight.shape)}", f"{tuple(self.weight.shape)}, as when built")
            )
        index, tile = self.index(weight.device), self.tile
        gathered = self._tiles(weight.detach())[index.tile_row, index.tile_column]
        steps = torch.unflatten(gathered, 0, (-1, tile.blocks)).transpose(1, 2).flatten(2).contiguous()
        return steps if index.live is None else steps.masked_fill_(~index.live, 0)

    def _tiles(self, matrix: Tensor) -> Tensor:
        """View (N, K) as (grid rows, grid columns, h, w), extended by zeros."""
        (rows, columns), (h, w) = self.grid, (self.tile.height, self.tile.width)
        padded = pad_matrix(matrix, (rows * h, columns * w))
        return torch.unflatten(torch.unflatten(padded, 1, (columns, w)), 0, (rows, h)).transpose(1, 2)

    def _index(self) -> LayoutIndex:
        tile, (rows, columns) = self.tile, self.grid
        kept = kept_grid(self.weight, (tile.height, tile.width)).cpu()
        steps = -(-kept.sum(1) // tile.blocks)
        ends = steps.cumsum(0)
        total = max(1, int(ends[-1]) if rows else 0)  # an empty tensor has no address
        row, column = kept.nonzero(as_tuple=True)
        place = kept.cumsum(1)[row, column] - 1 + (ends - steps)[row] * tile.blocks
        tile_row, tile_column = torch.zeros(2, total * tile.blocks, dtype=torch.int64)
        tile_row[place], tile_column[place] = row, column
        filled = torch.zeros(total * tile.blocks, dtype=torch.bool)
        filled[place] = True
        first = torch.where(filled, tile_column * tile.width, columns * tile.width)
        # The kernel reads one step ahead.
        first = torch.nn.functional.pad(first, (0, tile.blocks))
        order = torch.argsort(steps, descending=True, stable=True)
        begins = ends - steps
        schedule = torch.stack([order, begins[order], ends[order], first[begins * tile.blocks][order]], 1)
        return LayoutIndex(
            columns=first.to(torch.int32),
            schedule=schedule.to(torch.int32),
            tile_row=tile_row,
            tile_column=tile_column,
            live=self._live(tile_row, tile_column, filled, self.inside(row, column)),
        )

    def _live(self, tile_row: Tensor, tile_column: Tensor, filled: Tensor, inside: int) -> Tensor | None:
        """Return which stored elements are live; None when all are."""
        if self.weight.count("live") == inside:
            if bool(filled.all()):
                return None
            live = filled[:, None, None].expand(-1, 1, self.tile.width)
        else:
            live = self._tiles(self.weight.mask().cpu())[tile_row, tile_column] & filled[:, None, None]
        return torch.unflatten(live, 0, (-1, self.tile.blocks)).transpose(1, 2).flatten(2).contiguous()

    def inside(self, row: Tensor, column: Tensor) -> int:
        """Return how many elements of the weight lie in kept blocks; edge blocks reach beyond it."""
        (n, k), tile = self.weight.shape, self.tile
        high = (n - row * tile.height).clamp(max=tile.height)
        wide = (k - column * tile.width).clamp(max=tile.width)
        return int((high * wide).sum())

"""The lists of batched products and softmax: the kept tiles of a mask by row and by column, and where they are.

They extend the lists of fused attention by what a stored matrix needs: the block of compressed values that holds a
tile. What lies beyond the edges of the matrix is dead, so a tile at an edge is only partly live, and wholly live tiles
need no bounds.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from sparta.specialize.blocks.attention_lists import attention_lists
from sparta.specialize.blocks.sparse_plan import SparsePlan
from sparta.specialize.blocks.tiled_matrix import block_places

__all__ = ["TileLists", "tile_lists"]


class TileLists(NamedTuple):
    """The tensors of one mask (groups, rows, cols) cut into tiles.

    Bounds are int32 (groups * tiles, 4): a tile, where its list begins, where its wholly live part ends, where it ends.
    Entries are int32 (lists + 1, 4): the tile that is met, its pattern (-1 where it is wholly live), the block of
    compressed values that holds it, and the tile that meets it.

    Attributes
    ----------
    row_bounds, row_entries
        For each row of tiles its columns; in each group the longest list first.
    column_bounds, column_entries
        For each column of tiles its rows.
    patterns
        uint8 (patterns, height, width): the distinct partly live tiles; 1 is live.
    ends
        int32 (groups + 1,): where the row entries of each group begin, and their end.
    table
        int32 (block rows * block columns,): which of the compressed blocks it is, -1 for none.
    """

    row_bounds: Tensor
    row_entries: Tensor
    column_bounds: Tensor
    column_entries: Tensor
    patterns: Tensor
    ends: Tensor
    table: Tensor


def tile_lists(mask: Tensor, block: tuple[int, int] | None, tile: tuple[int, int]) -> tuple[TileLists, SparsePlan]:
    """Return the lists of masks (groups, rows, cols), and the plan of a matrix that is stored in blocks, or whole.

    >>> lists, plan = tile_lists(torch.ones(1, 64, 64, dtype=torch.bool).tril(), (32, 32), (16, 16))
    >>> plan.longest, plan.most, plan.kept, plan.complete
    (4, 10, 3, 0)
    >>> lists.row_entries[:3].tolist()
    [[0, 0, 0, 0], [0, -1, 0, 1], [1, 0, 0, 1]]
    """
    mask = mask.cpu()
    (groups, rows, cols), (h, w) = mask.shape, tile
    grid = (-(-rows // h), -(-cols // w))
    # Beyond the edges nothing lives, not even in rows that nobody reads: their memory is not ours.
    lists = attention_lists(functional.pad(mask, (0, grid[1] * w - cols, 0, grid[0] * h - rows)), tile)
    table, kept = _table(mask, block)
    slots = _slots(table, block, tile, grid)
    by_row = _entries(lists.query_bounds, lists.query_entries, slots)
    by_column = _entries(lists.key_bounds, lists.key_entries, slots.t())
    counts = (lists.query_bounds[:, 3] - lists.query_bounds[:, 1]).reshape(groups, grid[0]).sum(1)
    ends = functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
    high, wide = block or (0, 0)
    most = int(counts.max()) if groups else 0
    plan = SparsePlan(rows, cols, high, wide, kept, h, w, lists.longest, most, complete=0)
    stored = kept * high * wide if block else grid[0] * grid[1] * h * w
    if plan.address < 2 and int(counts.sum()) * h * w == groups * stored:
        plan = replace(plan, complete=1)
    made = TileLists(lists.query_bounds, by_row, lists.key_bounds, by_column, lists.patterns, ends, table.flatten())
    return made, plan


def _table(mask: Tensor, block: tuple[int, int] | None) -> tuple[Tensor, int]:
    """Return which of the compressed blocks is at each place, and how many there are."""
    if block is None:
        return torch.full((1, 1), -1, dtype=torch.int32), 0
    places = block_places(mask, block)
    grid = [max(1, -(-size // step)) for size, step in zip(mask.shape[-2:], block, strict=True)]
    table = torch.full(grid, -1, dtype=torch.int32)
    table[places[1], places[2]] = torch.arange(places.shape[1], dtype=torch.int32)
    return table, places.shape[1]


def _slots(table: Tensor, block: tuple[int, int] | None, tile: tuple[int, int], grid: tuple[int, int]) -> Tensor:
    """Return the block that holds the first element of each tile, which holds all of it or is not used."""
    if block is None:
        return torch.zeros(grid, dtype=torch.int32)
    row, column = (torch.arange(count) * step // b for count, step, b in zip(grid, tile, block, strict=True))
    return table[row[:, None], column[None, :]]


def _entries(bounds: Tensor, listed: Tensor, slots: Tensor) -> Tensor:
    """Return (lists + 1, 4) from the entries (lists + 1, 2) of attention; kernels read one entry ahead."""
    met, pattern = listed[:-1].unbind(1)
    # Empty lists begin where another one does; wherever they are sorted, they own nothing.
    tile, begin, whole, end = bounds[torch.argsort(bounds[:, 1], stable=True)].unbind(1)
    owner, wholly = (of.repeat_interleave((end - begin).long()) for of in (tile, whole))
    pattern = torch.where(torch.arange(len(met)) < wholly, -1, pattern)
    entries = torch.stack([met, pattern, slots[owner.long(), met.long()], owner], 1)
    return functional.pad(entries, (0, 0, 0, 1)).to(torch.int32).contiguous()

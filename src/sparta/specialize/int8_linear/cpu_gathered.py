"""The layout of an int8 weight for tile registers: groups of 16 rows that share one list of places of four channels.

A place is in the list of a group if any of its 16 rows has a live weight there; lists are filled up to whole tiles of
16 places with weights of 0. The kernel gathers the activations of a tile's places, so that no pattern is too narrow.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from sparta.errors import ShapeError, message
from sparta.specialize.cpu.packing import Bools, Ints, Layout, columns_of, offset_table, running_sums, value_sources
from sparta.specialize.cpu.tile import Tile

__all__ = ["gathered_entries", "gathered_layout"]

TILE = 16  # rows, and places, of a tile of weights
_BLOCK_ROWS = 32  # kBlockRows of native/spmm.h


def gathered_layout(units: Bools, tile: Tile, lanes: int) -> Layout:
    """Return the layout of the live places (N, ceil(K / 4)) of a weight.

    Examples
    --------
    >>> layout = gathered_layout(np.ones((2, 3), dtype=np.bool_), Tile("gathered", 16), lanes=16)
    >>> len(layout.source), layout.source[:3].tolist(), layout.arrays["starts"].tolist()
    (256, [0, 1, 2], [0, 16])
    """
    places = units.shape[1]
    row_bytes = 4 * tile.mv * lanes
    if places * row_bytes >= 2**31:
        raise ShapeError(message(f"a weight of {4 * places} input channels", f"up to {2**33 // row_bytes - 4}"))
    layout, _, column = gathered_entries(units)
    return replace(layout, arrays={**layout.arrays, "offsets": offset_table(column * row_bytes)})


def gathered_entries(units: Bools) -> tuple[Layout, Ints, Ints]:
    """Return the layout of live places (N, places) without offsets, and first row and column of each of its entries.

    Columns count places, of a convolution tap by tap.
    """
    outputs, places = units.shape
    counts, column = columns_of(units, TILE)
    whole = -(-counts // TILE) * TILE
    starts, groups = running_sums(whole), len(counts)
    # Every entry's number within its group; those beyond the last are copies of the first without weights.
    number = np.arange(int(starts[-1])) - np.repeat(starts[:-1], whole)
    there = number < np.repeat(counts, whole)
    first = np.repeat(running_sums(counts)[:-1], whole)
    entry = first + np.where(there, number, 0)
    filled = column[entry] if len(column) else entry
    first_row = np.repeat(np.arange(groups) * TILE, whole)
    source = np.where(there[:, None], value_sources(units, first_row, filled, TILE).reshape(-1, TILE), -1)
    by_tile = source.reshape(-1, TILE, TILE).transpose(0, 2, 1).reshape(-1)
    index = np.arange(groups) * TILE // _BLOCK_ROWS
    cost = np.bincount(index, whole * TILE + 8 * TILE, minlength=-(-outputs // _BLOCK_ROWS)).astype(np.int64)
    arrays = {
        "starts": torch.from_numpy(starts),
        "rows": torch.from_numpy((np.arange(groups) * TILE).astype(np.int32)),
        "costs": torch.from_numpy(running_sums(cost)),
        "chunk_columns": torch.tensor([0, places]),
    }
    positions = torch.from_numpy(by_tile.astype(np.int32 if units.size < 2**31 else np.int64))
    layout = Layout((outputs, places), groups, arrays, positions, padded=bool((by_tile < 0).any()))
    return layout, first_row, filled

"""Pack a mask: the index arrays that a kernel reads, and where in the dense weight each stored value comes from.

One function for each form, vectorised in numpy, which is faster here than torch on a busy machine. A layout depends on
the mask only, so new values for the same mask are one gather (:meth:`Layout.values`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparta.errors import ShapeError, message
from sparta.specialize.cpu.tile import MOST_AHEAD, Tile

__all__ = [
    "BLOCK_ROWS",
    "QUAD_ROWS",
    "Bools",
    "Ints",
    "Layout",
    "columns_of",
    "is_float",
    "offset_table",
    "pack_entries",
    "pack_mask",
    "running_sums",
    "value_sources",
]

BLOCK_ROWS = 32  # kBlockRows of native/spmm.h
CHUNK_INPUTS = 32  # kChunkInputs of native/gemv.h
QUAD_ROWS = 4  # kQuadRows of native/quads.h
_LANES = 16  # rows side by side in the permuted form
_FARTHEST = 255  # chunks that one step can go on
_LONGEST_LIST = 2**16 - 1  # columns of one chunk that four rows may share
_LISTS = 2**QUAD_ROWS  # kQuadLists of native/quads.h
_ROWS_OF_LIST: NDArray[np.int64] = np.array([number.bit_count() for number in range(_LISTS)])
_SINGLES = [1 << row for row in range(QUAD_ROWS)]  # lists of one row
_VECTORS = 4  # kVectors of native/quads.h
_LEAST_COLUMNS = 2  # of a list, on average
_PADDING = 16  # values that a kernel may load beyond the last one

Ints = NDArray[np.integer]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Layout:
    """The arrays of a packed mask by the names of the C structures, and the source of each value.

    Attributes
    ----------
    shape
        (N, K) of the weight.
    groups
        Lists of entries; see ``native/spmm.h`` and ``native/gemv.h``.
    arrays
        Index arrays.
    source
        (values,): position in the flattened weight of each stored value, -1 where a block holds a pruned one.
    padded
        Whether there is any such -1.
    """

    shape: tuple[int, int]
    groups: int
    arrays: Mapping[str, Tensor]
    source: Tensor
    padded: bool

    def values(self, weight: Tensor) -> Tensor:
        """Return the values of a dense weight (N, K) in the order of this layout, with padding after them.

        What lies in the pruned places of the weight, NaN included, is not read into the result.
        """
        flat = weight.detach().to("cpu", torch.float32).reshape(-1)
        stored = torch.zeros(self.length)
        if self.padded:
            live = self.source >= 0
            stored[: len(live)][live] = flat.index_select(0, self.source[live])
        else:
            torch.index_select(flat, 0, self.source, out=stored[: len(self.source)])
        return stored

    @property
    def length(self) -> int:
        """How many floats :meth:`values` returns, padding included."""
        return len(self.source) + _PADDING

    @property
    def nbytes(self) -> int:
        """Bytes that a kernel reads: index arrays and values."""
        return sum(array.nbytes for array in self.arrays.values()) + 4 * len(self.source)


def is_float(tensor: Tensor) -> bool:
    """Tell whether a kernel can read a tensor as it is: contiguous float32 on the CPU.

    >>> is_float(torch.zeros(2, 3)), is_float(torch.zeros(2, 3).t())
    (True, False)
    """
    return tensor.dtype is torch.float32 and tensor.is_contiguous() and tensor.is_cpu and not tensor.is_neg()


def pack_mask(mask: Tensor, tile: Tile, lanes: int) -> Layout:
    """Return the layout of a mask.

    Parameters
    ----------
    mask
        (N, K), bool, True = live, on the CPU.
    tile
        How to lay it out.
    lanes
        Floats in a vector of the library that will run it.

    Examples
    --------
    >>> layout = pack_mask(torch.eye(4, dtype=torch.bool), Tile(block=4), lanes=4)
    >>> layout.values(torch.full((4, 4), 7.0))[:8].tolist()
    [7.0, 0.0, 0.0, 0.0, 0.0, 7.0, 0.0, 0.0]
    """
    live = mask.numpy()
    if tile.form == "panel":
        return _pack_panel(live, tile, lanes)
    if tile.form == "permuted":
        return _pack_permuted(live)
    if tile.form == "bitmap":
        return _pack_bitmap(live)
    return _pack_stream(live, tile)


def _pack_panel(mask: Bools, tile: Tile, lanes: int) -> Layout:
    row_bytes = 4 * tile.mv * lanes
    if mask.shape[1] * row_bytes >= 2**31:
        given = f"a weight of {mask.shape[1]} input channels with mv={tile.mv}"
        raise ShapeError(message(given, f"up to {2**31 // row_bytes - 1} of them", "use a smaller mv"))
    layout, _, column = pack_entries(mask, tile)
    offsets = {"offsets": offset_table(column * row_bytes)}
    return replace(layout, arrays={**layout.arrays, **offsets})


def pack_entries(mask: Bools, tile: Tile, alike: int = BLOCK_ROWS) -> tuple[Layout, Ints, Ints]:
    """Return a panel layout without its offsets, and the first row and the column of each of its entries.

    Four rows that share what they load are of the same `alike` rows; what is their first is a place in their order.
    """
    if tile.interleave == QUAD_ROWS:
        return _pack_quads(mask, tile, math.gcd(alike, BLOCK_ROWS))
    outputs, inputs = mask.shape
    kept = _any_in_blocks(mask, tile.block)
    order: Ints = np.arange(len(kept))
    if tile.interleave > 1:
        order = _alike_rows_together(kept)
        kept = kept[order]
    rows = order * tile.block
    step = tile.k_chunk or max(inputs, 1)
    bounds = [*range(0, inputs, step), inputs] if inputs else [0, 0]
    lists = [_lists(kept[:, begin:end]) for begin, end in itertools.pairwise(bounds)]
    counts = np.concatenate([count for count, _ in lists])
    column = np.concatenate([column + begin for (_, column), begin in zip(lists, bounds, strict=False)])
    first_row = np.repeat(np.tile(rows, len(lists)), counts)
    source, padded = _sources(mask, first_row, column, tile.block)
    arrays = {
        "starts": running_sums(counts),
        "rows": rows.astype(np.int32),
        "costs": _block_costs(counts.reshape(len(lists), -1).sum(0), tile.block, outputs),
        "chunk_columns": np.array(bounds),
    }
    return _layout(mask, len(kept), arrays, source, padded=padded), first_row, column


def _pack_quads(mask: Bools, tile: Tile, window: int) -> tuple[Layout, Ints, Ints]:
    """Lay out four rows at a time: their columns, listed by which of the four have a weight there.

    In every chunk rows stand in an order of its own, those that are about as long beside each other: nearly all that
    each has alone is then in steps, and few lists are left that are short.
    """
    outputs, inputs = mask.shape
    quads = -(-outputs // QUAD_ROWS)
    step = min(tile.k_chunk or max(inputs, 1), _LONGEST_LIST)
    bounds = np.array([*range(0, inputs, step), inputs] if inputs else [0, 0])
    whole = np.zeros((quads * QUAD_ROWS, inputs), dtype=np.uint8)
    rows = np.arange(QUAD_ROWS, dtype=np.uint8)
    order = np.zeros((len(bounds) - 1, len(whole)), dtype=np.int64)
    for chunk, (begin, end) in enumerate(itertools.pairwise(bounds)):
        order[chunk, :outputs] = _alike_rows_together(mask[:, begin:end], window)
        whole[:outputs, begin:end] = mask[order[chunk, :outputs], begin:end]
    lists = (whole.reshape(quads, QUAD_ROWS, inputs) << rows[:, None]).sum(axis=1, dtype=np.uint8)
    quad, column = np.nonzero(lists)
    parts = (len(bounds) - 1) * quads
    entries = np.stack([column // step * quads + quad, column, lists[quad, column].astype(np.int64)])
    found = _without_short_lists(entries, parts, tile.mv)
    (part, column, which), counts = _with_steps(_with_pairs(found), parts)
    starts = np.empty((parts, 2 + _LISTS // QUAD_ROWS), dtype=np.int64)
    starts[:, 0] = running_sums(np.bincount(part, minlength=parts))[:-1]
    starts[:, 1] = running_sums(np.bincount(part, _ROWS_OF_LIST[which], parts).astype(np.int64))[:-1]
    starts[:, 2:] = counts.astype("<u2").view("<i8")
    first_row = part % max(quads, 1) * QUAD_ROWS
    places = order[(part // max(quads, 1))[:, None], first_row[:, None] + rows] * inputs + column[:, None]
    arrays = {
        "starts": starts.reshape(-1),
        "rows": order[:, :outputs].reshape(-1).astype(np.int32),
        "costs": _block_costs(np.count_nonzero(mask, axis=1), 1, outputs),
        "chunk_columns": bounds,
    }
    source = places[(which[:, None] >> rows & 1).astype(np.bool_)]
    return _layout(mask, outputs, arrays, source, padded=False), first_row, column


def _without_short_lists(found: Ints, parts: int, vectors: int) -> Ints:
    """Return (part, column, list) of each entry, where lists that would be short on average are parts of longer ones.

    The end of a list is a branch that the processor guesses wrong; sharing loads must save more than that. Wide tiles
    have registers for what two rows share.
    """
    for size in range(QUAD_ROWS, 1, -1):
        short, lists = _ROWS_OF_LIST[found[2]] == size, math.comb(QUAD_ROWS, size)
        least = np.inf if vectors > _VECTORS and size > 2 else max(_LEAST_COLUMNS, vectors / 2)
        if 0 < np.count_nonzero(short) < least * parts * lists:
            found = np.concatenate([found[:, ~short], *_halves(found[:, short])], axis=1)
    return found


def _halves(found: Ints) -> tuple[Ints, Ints]:
    """Return entries of several rows as entries of their first rows, two at most, and of the others."""
    halves = found.copy(), found.copy()
    single = _ROWS_OF_LIST[found[2]] == 2
    lowest = found[2] & -found[2]
    rest = found[2] ^ lowest
    halves[0][2] = np.where(single, lowest, lowest | (rest & -rest))
    halves[1][2] = found[2] ^ halves[0][2]
    return halves


def _with_pairs(found: Ints) -> Ints:
    """Return entries list by list; those of several rows are of even length, what is left over is in lists of one."""
    found = found[:, np.lexsort((found[1], found[2], found[0]))]
    places = found[0] * _LISTS + found[2]
    _, first, counts = np.unique(places, return_index=True, return_counts=True)
    last = first + counts - 1
    odd = last[(counts % 2 == 1) & (_ROWS_OF_LIST[found[2, last]] > 1)]
    singles = [found[:, odd] for _ in range(QUAD_ROWS)]
    for row, single in enumerate(singles):
        single[2] &= 1 << row
    left = np.concatenate([np.delete(found, odd, axis=1), *(single[:, single[2] > 0] for single in singles)], axis=1)
    return left[:, np.lexsort((left[1], left[2], left[0]))]


def _with_steps(found: Ints, parts: int) -> tuple[Ints, Ints]:
    """Return entries with those first that all four rows have alone, row by row in turn, and the lengths of all lists.

    The first length is of steps, each of which is one entry of every row.
    """
    part, _, which = found
    counts = np.bincount(part * _LISTS + which, minlength=parts * _LISTS).reshape(parts, _LISTS)
    first = running_sums(counts.reshape(-1))[part * _LISTS + which]
    place = np.arange(found.shape[1]) - first  # in its list
    steps = counts[:, _SINGLES].min(axis=1)
    in_step = (_ROWS_OF_LIST[which] == 1) & (place < steps[part])
    order = np.lexsort((which, place, np.where(in_step, 0, which), part))
    counts[:, _SINGLES] -= steps[:, None]
    counts[:, 0] = steps
    return found[:, order], counts


def offset_table(offsets: Ints) -> Tensor:
    """Return byte offsets of entries as kernels read them, with room for prefetching after them."""
    return _tensor(_with_padding(offsets.astype(np.int32), MOST_AHEAD))


def columns_of(mask: Bools, height: int) -> tuple[Ints, Ints]:
    """Return how many columns of each block of `height` rows have a live weight, and which, block after block."""
    return _lists(_any_in_blocks(mask, height))


def value_sources(mask: Bools, first_row: Ints, column: Ints, height: int) -> Ints:
    """Return where the values of columns lie in the flattened weight, -1 for pruned ones."""
    return _sources(mask, first_row, column, height)[0]


def _pack_stream(mask: Bools, tile: Tile) -> Layout:
    kept = _any_in_blocks(mask, tile.block)
    counts, column = _lists(kept)
    source, padded = _sources(mask, np.repeat(np.arange(len(kept)) * tile.block, counts), column, tile.block)
    # 16 bits hold 65536 input channels, read as unsigned.
    index_type = np.uint16 if mask.shape[1] <= 2**16 else np.uint32
    arrays = {
        "starts": running_sums(counts),
        "indices": _with_padding(column.astype(index_type), _PADDING),
        "costs": running_sums(counts * tile.block + 4),
    }
    return _layout(mask, len(kept), arrays, source, padded=padded)


def _pack_permuted(mask: Bools) -> Layout:
    """Lay out 16 rows side by side: in each chunk of 32 inputs, step s holds the s-th live weight of every row."""
    outputs, inputs = mask.shape
    groups, chunks = -(-outputs // _LANES), -(-inputs // CHUNK_INPUTS)
    table, most = _live_by_step(mask)
    halves = table.view(np.uint64)
    steps = np.flatnonzero(halves[:, 0] | halves[:, 1])
    lists = table[steps].reshape(-1)
    live = lists != 0
    step_group, step_chunk = np.divmod(steps // most, max(chunks, 1))
    first = step_group * (_LANES * inputs) + step_chunk * CHUNK_INPUTS
    position = np.int32 if mask.size < 2**31 else np.int64  # half the memory to go through
    places = first.astype(position)[:, None] + (np.arange(_LANES) * inputs).astype(position)
    index = lists[live] - np.uint8(1)
    source = places.reshape(-1)[live] + index
    advances, before = _advances(step_group, step_chunk)
    lanes = np.packbits(live, bitorder="little").view("<u2")
    group_steps = np.bincount(np.insert(step_group, before, step_group[before]), minlength=groups)
    rows = np.pad(np.count_nonzero(mask, axis=1), (0, groups * _LANES - outputs))
    arrays = {
        "starts": running_sums(rows.reshape(groups, _LANES).sum(axis=1)),
        "indices": _with_padding(index, _PADDING),
        "step_starts": running_sums(group_steps),
        "step_lanes": _with_padding(np.insert(lanes, before, 0), _PADDING),
        "step_advances": _with_padding(advances, _PADDING),
        "costs": running_sums(group_steps + 4),
    }
    return _layout(mask, groups, arrays, source, padded=False)


def _live_by_step(mask: Bools) -> tuple[NDArray[np.uint8], int]:
    """Return (groups * chunks * steps, 16) and the number of steps: 1 + the place in its chunk of a lane's s-th weight.

    A chunk of a row is one word of 32 bits. Every step takes the lowest bit of all words at once; what is left of a
    word without any is 0.
    """
    outputs, inputs = mask.shape
    groups, chunks = -(-outputs // _LANES), -(-inputs // CHUNK_INPUTS)
    whole = np.zeros((groups * _LANES, chunks * CHUNK_INPUTS), dtype=np.bool_)
    whole[:outputs, :inputs] = mask
    bits = np.packbits(whole, axis=1, bitorder="little").view("<u4").reshape(groups, _LANES, chunks)
    words = np.ascontiguousarray(bits.transpose(0, 2, 1)).reshape(-1, _LANES)
    taken: list[NDArray[np.uint8]] = []
    lowest, place = np.empty_like(words), np.empty(words.shape, dtype=np.int32)
    while not taken or words.any():
        np.bitwise_and(words, np.negative(words, out=lowest), out=lowest)
        words ^= lowest
        # A power of two as a float has its exponent in the upper bits; of 0 they are 0.
        np.right_shift(lowest.astype(np.float32).view(np.int32), 23, out=place)
        place -= 126
        taken.append(np.maximum(place, 0, out=place).astype(np.uint8))
    return np.stack(taken, axis=1).reshape(-1, _LANES), len(taken)


def _advances(group: Ints, chunk: Ints) -> tuple[Ints, Ints]:
    """Return how many chunks to go on before each step, and the steps before which an empty one is put.

    An advance is one byte; where a longer way is to go, empty steps go parts of it.
    """
    first = np.concatenate([[True], group[1:] != group[:-1]])[: len(group)]
    advance = np.where(first, chunk, chunk - np.roll(chunk, 1))
    empty = np.maximum(advance - 1, 0) // _FARTHEST
    before = np.repeat(np.arange(len(group)), empty)
    return np.insert(advance - empty * _FARTHEST, before, _FARTHEST).astype(np.uint8), before


def _pack_bitmap(mask: Bools) -> Layout:
    outputs, inputs = mask.shape
    whole = np.zeros((outputs, -(-inputs // CHUNK_INPUTS) * CHUNK_INPUTS), dtype=np.bool_)
    whole[:, :inputs] = mask
    bits = np.packbits(whole, axis=1, bitorder="little").view("<u2").reshape(-1)
    counts = np.count_nonzero(mask, axis=1)
    arrays = {
        "starts": running_sums(counts),
        "step_lanes": _with_padding(bits, _PADDING),
        "costs": running_sums(counts + 4),
    }
    return _layout(mask, outputs, arrays, np.flatnonzero(mask), padded=False)


def _layout(mask: Bools, groups: int, arrays: Mapping[str, Ints], source: Ints, *, padded: bool) -> Layout:
    # Positions in 32 bits where they fit.
    positions = source.astype(np.int32) if mask.size < 2**31 else source
    tensors = {name: _tensor(array) for name, array in arrays.items()}
    return Layout((mask.shape[0], mask.shape[1]), groups, tensors, torch.from_numpy(positions), padded)


def _tensor(array: Ints) -> Tensor:
    """Return an array as a tensor with the same bits; signed, because torch cannot pickle its wider unsigned ones."""
    plain = np.ascontiguousarray(array)
    signed = {2: np.int16, 4: np.int32}.get(plain.itemsize)
    return torch.from_numpy(plain if signed is None else plain.view(signed))


def _any_in_blocks(mask: Bools, height: int) -> Bools:
    """Return (ceil(N / height), K): True where any of the `height` rows of a block is live."""
    if height == 1:
        return mask
    whole = len(mask) // height
    blocks = mask[: whole * height].reshape(whole, height, mask.shape[1])
    kept = np.bitwise_or.reduce(blocks, axis=1)
    rest = mask[whole * height :]
    return np.concatenate([kept, rest.any(axis=0, keepdims=True)]) if len(rest) else kept


def _lists(kept: Bools) -> tuple[Ints, Ints]:
    """Return how many columns of each row are live, and which, row after row."""
    counts = np.count_nonzero(kept, axis=1)
    flat = np.flatnonzero(kept)
    return counts, flat - np.repeat(np.arange(len(kept)) * kept.shape[1], counts)


def _alike_rows_together(kept: Bools, window: int = BLOCK_ROWS) -> Ints:
    """Return an order of rows that sorts those of each window by their length, the longest first."""
    return np.lexsort((-np.count_nonzero(kept, axis=1), np.arange(len(kept)) // window))


def _sources(mask: Bools, first_row: Ints, column: Ints, height: int) -> tuple[Ints, bool]:
    """Return where the values of each entry lie in the flattened weight, -1 for pruned ones, and whether any is."""
    inputs = mask.shape[1]
    first = first_row * inputs + column
    if height == 1:
        return first, False
    flat = first[:, None] + np.arange(height) * inputs
    if len(flat) * height == np.count_nonzero(mask):
        return flat.reshape(-1), False  # every stored value is live
    inside = flat < mask.size
    live = mask.reshape(-1)[np.where(inside, flat, 0)] & inside
    return np.where(live, flat, -1).reshape(-1), True


def _block_costs(entries: Ints, block: int, outputs: int) -> Ints:
    """Return running costs of blocks of output rows: every entry costs its loads, every row its store."""
    index = np.arange(len(entries)) * block // BLOCK_ROWS
    cost = np.bincount(index, entries * (block + 1) + 8 * block, minlength=-(-outputs // BLOCK_ROWS))
    return running_sums(cost.astype(np.int64))


def running_sums(counts: Ints) -> Ints:
    """Return 0 and the running sums of counts."""
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts, dtype=np.int64)])


def _with_padding(array: Ints, count: int) -> Ints:
    return np.concatenate([array, np.zeros(count, dtype=array.dtype)])

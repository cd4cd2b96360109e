"""Which tiles are worth timing for a layer: a handful, by the number of tokens and by how blocks cover the mask.

:func:`candidates` lists them, the best guess first. A mask may be stored in blocks that are finer than its own (more
index, more programs: good for few tokens) or coarser (some zeros are multiplied: good where larger blocks run so much
faster that it pays), and a small cost model, fitted on an H200, decides which are tried.
"""

from __future__ import annotations

import itertools
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from sparta.specialize.linear.triton_block.layout import kept_grid
from sparta.specialize.linear.triton_block.tile import BlockTile
from sparta.tesa.attribute import TeSA

__all__ = ["candidates", "coverage"]

Covered: TypeAlias = dict[tuple[int, int], float]
"""The fraction of a weight that kept blocks (h, w) cover."""

_FINEST = 16
_HEIGHTS = (128, 64, 32, 16)
_WIDTHS = (128, 64, 32, 16)
_COVERS = 3  # coverings of the mask that are tried
_SHARED = 227 * 1024
_CACHED = 40 << 20  # an x of up to this size stays in the L2 cache whatever the order of tiles
_MANY_OUTPUTS = 8192
_SHORTEST = 32  # channels that the matrix unit takes at once of numbers of one byte
_FEW, _SOME = 32, 192  # up to here, reading the weight bounds the time; up to there, starting programs does

# TFLOP/s on stored blocks for many tokens, by height and width: reading x from the L2 cache bounds low blocks.
_RATES = {
    128: {128: 640, 64: 740, 32: 600, 16: 430},
    64: {128: 440, 64: 480, 32: 450, 16: 390},
    32: {128: 270, 64: 270, 32: 255, 16: 200},
    16: {128: 130, 64: 130, 32: 120, 16: 90},
}


def coverage(weight: TeSA, blocks: list[tuple[int, int]]) -> Covered:
    """Return for each block (h, w), multiples of 16, the fraction of the weight that kept blocks cover.

    >>> mask = torch.zeros(64, 64, dtype=torch.bool)
    >>> mask[0, 0] = True
    >>> coverage(TeSA.from_mask(mask), [(16, 16), (32, 64)])
    {(16, 16): 0.0625, (32, 64): 0.5}
    """
    known: dict[int, Tensor] = weight.found.setdefault("kept blocks", {})
    if _FINEST not in known:
        known[_FINEST] = kept_grid(weight, (_FINEST, _FINEST)).float()
    finest = known[_FINEST]
    return {(h, w): _covered(finest, h // _FINEST, w // _FINEST) for h, w in blocks}


def candidates(weight: TeSA, tokens: int, itemsize: int, *, tma: bool) -> list[BlockTile]:
    """Return the tiles worth timing for a weight (N, K) and a number of tokens, the best guess first.

    Parameters
    ----------
    itemsize
        Bytes of an element.
    tma
        Whether the bulk copy engine can be used.

    Examples
    --------
    >>> mask = torch.eye(4, dtype=torch.bool).repeat_interleave(128, 0).repeat_interleave(128, 1)
    >>> candidates(TeSA.from_mask(mask), 4096, 2, tma=True)[0].height
    128
    """
    covered = coverage(weight, list(itertools.product(_HEIGHTS, _WIDTHS)))
    if tokens <= _FEW:
        tiles = _few_tokens(covered, tokens, weight.shape[0])
    elif tokens <= _SOME:
        tiles = _some_tokens(covered, tokens)
    else:
        fits = tokens * weight.shape[1] * itemsize <= _CACHED
        tiles = _many_tokens(covered, tokens, -(-tokens // 128) if fits else 2)
    if itemsize == 1:
        tiles = [_in_bytes(tile, covered) for tile in tiles]
    fitted = [_fitted(tile, itemsize, tma=tma) for tile in tiles]
    return list(dict.fromkeys(tile for tile in fitted if tile.shared_bytes(itemsize) <= _SHARED))


def _covered(finest: Tensor, high: int, wide: int) -> float:
    rows, columns = finest.shape
    padded = functional.pad(finest, (0, -columns % wide, 0, -rows % high))
    coarse = torch.unflatten(torch.unflatten(padded, 1, (-1, wide)), 0, (-1, high)).amax((1, 3))
    return float(coarse.mean()) if coarse.numel() else 0.0


def _widest(covered: Covered, height: int, most: int) -> int:
    """Return the widest block of a height that stores no more than the narrowest one, give or take 5 %."""
    least = covered[height, _FINEST]
    return next(w for w in _WIDTHS if (w <= most and covered[height, w] <= 1.05 * least) or w == _FINEST)


def _few_tokens(covered: Covered, tokens: int, outputs: int) -> list[BlockTile]:
    """Return tiles that stream the weight: small programs, but not so many that fetching their index takes longer."""
    rows = 16 if tokens <= 16 else 32
    low, higher, high = _widest(covered, 16, 128), _widest(covered, 32, 128), _widest(covered, 64, 64)
    tiles = [
        BlockTile(rows, 16, low, stages=4, warps=1, tma=1, group=1, early=1),
        BlockTile(rows, 32, higher, stages=7, warps=1, tma=1, group=1, early=1),
        BlockTile(rows, 64, high, stages=4, tma=1, weight_first=1, group=1, early=1),
        BlockTile(rows, 32, higher, stages=4, warps=4, tma=1, group=1, early=1),
    ]
    if low < 64:  # narrow boxes waste the copy engine; loads put blocks side by side
        tiles.insert(0, BlockTile(rows, 16, low, blocks=64 // low, stages=4, warps=2, group=1))
    elif outputs >= _MANY_OUTPUTS:
        tiles.insert(0, tiles.pop(2))
    return tiles


def _some_tokens(covered: Covered, tokens: int) -> list[BlockTile]:
    """Return tiles for a batch that one program takes whole or in two; deep pipelines, as rows are short."""
    whole = 64 if tokens <= 64 else 128
    tiles = []
    for height, width in _coverings(covered):
        low, other = min(height, 64), min(height, 32)
        if width < 64:
            tiles.append(BlockTile(64, low, width, blocks=64 // width, stages=4, group=2))
        tiles += [
            BlockTile(whole, low, width, stages=8 if whole == 64 else 5, tma=1, group=1, early=1),
            BlockTile(64, low, width, stages=5, tma=1, group=2, early=1),
            BlockTile(64, other, width, stages=10, tma=1, group=2, early=1),
        ]
        if width >= 64:
            tiles.append(BlockTile(128, other, width, stages=4, tma=1, group=2, early=1))
    return tiles


def _many_tokens(covered: Covered, tokens: int, group: int) -> list[BlockTile]:
    """Return large tiles.

    A small group lets programs that run together read the same tile of x; a large one leaves only short rows for the
    end.
    """
    tiles: list[BlockTile] = []
    for height, width in _coverings(covered):
        dense = covered[height, width] > (0.3 if height == 128 else 0.15)
        if width == _FINEST:
            # Boxes of 32 bytes are slow by the copy engine; loads put four blocks side by side.
            own = [
                BlockTile(256, height, width, 4, 3, 8, 0, int(height >= 64), group=2),
                BlockTile(128, height, width, 4, 3, 4, group=group),
            ]
        elif height == 128:
            own = [
                BlockTile(128, 128, width, stages=3, tma=1, group=group, early=1),
                BlockTile(128, 128, 32, stages=4, tma=1, group=2, early=1),
                BlockTile(256, 128, width, stages=3, warps=8, tma=2, weight_first=1, group=4, early=1),
                BlockTile(256, 128, width, stages=4, warps=8, tma=1, weight_first=1, ctas=1, flatten=1, group=2),
            ]
        elif height == 64:
            own = [
                BlockTile(256, 64, width, stages=2, tma=1, weight_first=1, group=2, early=1),
                BlockTile(256, 64, 32, stages=3, tma=1, weight_first=1, group=1, early=1),
                BlockTile(128, 64, width, stages=3, tma=1, group=group, early=1),
                BlockTile(256, 64, width, stages=4, tma=1, weight_first=1, group=1, early=1),
            ]
        else:
            own = [
                BlockTile(256, height, width, stages=4, tma=1, group=1, early=1),
                BlockTile(128, height, width, stages=4, tma=1, group=group, early=1),
            ]
        # Long rows fill the deep pipelines of the latter two; short ones want many programs to overlap.
        few_tiles = height == 64 and tokens < 4096
        tiles += own[2:] + own[:2] if len(own) > 3 and ((dense and tokens >= 4096) or few_tiles) else own
    return tiles


def _coverings(covered: Covered) -> list[tuple[int, int]]:
    """Return the blocks that the cost model puts first, at most one width for each height."""
    best = {
        height: min((w for w in _WIDTHS if w <= 64), key=lambda w: covered[height, w] / _RATES[height][w])
        for height in _HEIGHTS
    }
    ranked = sorted(best, key=lambda height: covered[height, best[height]] / _RATES[height][best[height]])
    return [(height, best[height]) for height in ranked[:_COVERS]]


def _in_bytes(tile: BlockTile, covered: Covered) -> BlockTile:
    """Return a tile for numbers of one byte: twice the channels where blocks allow it, and 32 at once at least."""
    fields = vars(tile).copy()
    wider = min(_WIDTHS[0], 2 * tile.width)
    if covered[tile.height, wider] <= 1.05 * covered[tile.height, tile.width]:
        fields["width"] = wider
    if fields["width"] < _SHORTEST:  # loads put blocks side by side, the copy engine does not
        fields.update(blocks=max(tile.blocks, _SHORTEST // fields["width"]), tma=0, flatten=0, early=0)
    return BlockTile(**fields)


def _fitted(tile: BlockTile, itemsize: int, *, tma: bool) -> BlockTile:
    """Return the tile as this dtype and this device can run it."""
    fields = vars(tile).copy()
    if itemsize > 2:  # the same bytes a tile, in half the channels
        fields["width"] = max(_FINEST, tile.width // 2)
        fields["tokens"] = min(128, tile.tokens)
    if not tma:
        fields.update(tma=0, flatten=0, early=0)
        fields["stages"] = min(3, tile.stages)
    return BlockTile(**fields)

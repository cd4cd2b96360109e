"""Mask calculators: N:M masks in one dimension, and in two, where the transpose is N:M as well.

Names are ``m4n2_1d``, ``m4n2_2d_best``, ``m4n2_2d_greedy``, and the same with other numbers: m in a group, n kept.
Groups run along input channels, separately for each kernel position; two-dimensional masks also keep at most n of m
along output channels, so that the gradient of the input can be sparse too.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from sparta.errors import NameNotFoundError, ValueRangeError, did_you_mean, message
from sparta.tesa.patterns import NM

__all__ = ["mask_calculator"]

_NAME = re.compile(r"m(\d+)n(\d+)_(1d|2d_best|2d_greedy)")
_MOST_PATTERNS = 100_000


def mask_calculator(name: str) -> Callable[[Tensor, int], Tensor]:
    """Return the function from (weight, axis of the input channels) to a bool mask, True for kept.

    >>> mask_calculator("m4n2_1d")(torch.tensor([[0.1, -0.5, 0.3, 0.2]]), 1)
    tensor([[False,  True,  True, False]])
    """
    found = _NAME.fullmatch(name)
    if found is None:
        raise NameNotFoundError(
            did_you_mean(
                name, ["m4n2_1d", "m4n2_2d_best", "m4n2_2d_greedy"], "mask calculator (mXnY_1d, _2d_best, ...)"
            )
        )
    m, n, kind = int(found[1]), int(found[2]), found[3]
    NM(n, m)  # checks 1 <= n <= m
    if kind == "1d":
        return lambda weight, axis: NM(n, m, axis).project(weight.detach().abs())
    if kind == "2d_best":
        tiles = _doubly_sparse(m, n)
        return lambda weight, axis: _in_tiles(weight, axis, m, lambda blocks: _best(blocks, tiles))
    return lambda weight, axis: _in_tiles(weight, axis, m, lambda blocks: _greedy(blocks, n))


@lru_cache(maxsize=8)
def _doubly_sparse(m: int, n: int) -> Tensor:
    """Return all m × m matrices of 0 and 1 whose rows and columns all sum to n: 90 of them for 4 and 2."""
    rows = [tuple(int(place in kept) for place in range(m)) for kept in itertools.combinations(range(m), n)]
    partial: list[tuple[tuple[int, ...], ...]] = [()]
    for _ in range(m):
        grown = []
        for above in partial:
            sums = [sum(column) for column in zip(*above, strict=True)] if above else [0] * m
            grown += [(*above, row) for row in rows if all(s + r <= n for s, r in zip(sums, row, strict=True))]
        partial = grown
        if len(partial) > _MOST_PATTERNS:
            raise ValueRangeError(
                message(f"m{m}n{n}_2d_best has too many tiles to try", "m up to 5", f"use m{m}n{n}_2d_greedy")
            )
    return torch.tensor([tile for tile in partial if all(sum(c) == n for c in zip(*tile, strict=True))])


def _in_tiles(weight: Tensor, axis: int, m: int, choose: Callable[[Tensor], Tensor]) -> Tensor:
    """Cut the weight into m × m tiles over output and input channels, choose in each, and put the masks together.

    Rows and columns that do not fill a tile stay dense.
    """
    matrix = weight.detach().abs().float()
    if axis == 0:
        matrix = matrix.movedim(1, 0)
    matrix = matrix.reshape(*matrix.shape[:2], -1).movedim(2, 0)  # (kernel positions, O, I)
    positions, rows, columns = matrix.shape
    whole_rows, whole_columns = rows - rows % m, columns - columns % m
    mask = torch.ones_like(matrix, dtype=torch.bool)
    if whole_rows and whole_columns and positions:
        tiled = matrix[:, :whole_rows, :whole_columns].reshape(positions, whole_rows // m, m, whole_columns // m, m)
        blocks = tiled.transpose(2, 3)
        kept = choose(blocks.reshape(-1, m, m)).reshape(blocks.shape).transpose(2, 3)
        mask[:, :whole_rows, :whole_columns] = kept.reshape(positions, whole_rows, whole_columns)
    shape = weight.movedim(1, 0).shape if axis == 0 else weight.shape
    mask = mask.movedim(0, 2).reshape(shape)
    return (mask.movedim(1, 0) if axis == 0 else mask).contiguous()


def _best(blocks: Tensor, tiles: Tensor) -> Tensor:
    """Return for each block the tile that keeps most; blocks of shape (B, m, m)."""
    flat = tiles.reshape(len(tiles), -1).to(blocks.device)
    scores = blocks.flatten(1) @ flat.to(blocks.dtype).T
    return tiles.to(blocks.device)[scores.argmax(1)].bool()


def _greedy(blocks: Tensor, n: int) -> Tensor:
    """Visit the entries of each block from the largest down; keep one whose row and column have less than n."""
    count, m, _ = blocks.shape
    order = blocks.flatten(1).argsort(dim=1, descending=True, stable=True)
    every = torch.arange(count, device=blocks.device)
    rows = torch.zeros(count, m, dtype=torch.int64, device=blocks.device)
    columns = torch.zeros_like(rows)
    mask = torch.zeros(count, m * m, dtype=torch.bool, device=blocks.device)
    for place in range(m * m):
        entry = order[:, place]
        row, column = entry // m, entry % m
        keep = (rows[every, row] < n) & (columns[every, column] < n)
        mask[every, entry] = keep
        rows[every, row] += keep
        columns[every, column] += keep
    return mask.view(count, m, m)

"""The lists of fused attention: which tiles of keys each tile of queries meets, and which of them need a mask.

Made once from a mask of elements, for any pattern: blocks, causal, windows with global tokens, or no pattern at all. A
tile that is wholly live needs no mask, and partly live tiles share one copy of each pattern that occurs, so a causal
mask of any length costs one small triangle.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["AttentionLists", "attention_lists", "covered"]


class AttentionLists(NamedTuple):
    """The tensors of one mask (groups, M, N) cut into tiles.

    A walk is a pair of tensors: the *bounds* (groups * tiles, 4), int32: a tile, and where its list begins, where its
    wholly live part ends, and where it ends. The *entries* (lists, 2), int32, are the tile that is met, and the number
    of its pattern.

    Attributes
    ----------
    query_bounds, query_entries
        For each tile of queries the tiles of keys; in each group the longest list first.
    key_bounds, key_entries
        For each tile of keys the tiles of queries; in the order of tiles.
    patterns
        uint8 (patterns, queries, keys): the distinct partly live tiles; 1 is live.
    unclean
        What must be kept away in partly live tiles, since it may be NaN: 1 for keys that no query sees, 2 for queries
        that see no key, 3 for both, 0 for neither.
    longest
        The length of the longest list of a tile of queries.
    """

    query_bounds: Tensor
    query_entries: Tensor
    key_bounds: Tensor
    key_entries: Tensor
    patterns: Tensor
    unclean: int
    longest: int

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that kernels read."""
        return self[:5]


def attention_lists(mask: Tensor, tile: tuple[int, int]) -> AttentionLists:
    """Return the lists of a mask (groups, M, N), bool, for tiles (queries, keys), on its device.

    >>> lists = attention_lists(torch.ones(1, 64, 64, dtype=torch.bool).tril(), (16, 16))
    >>> lists.query_bounds.tolist()
    [[3, 6, 9, 10], [2, 3, 5, 6], [1, 1, 2, 3], [0, 0, 0, 1]]
    >>> lists.patterns.shape
    torch.Size([1, 16, 16])
    """
    tiles = _tiles(mask, tile)
    some = tiles.any(4).any(3)
    partly = some & ~tiles.all(4).all(3)
    number = torch.zeros_like(some, dtype=torch.int32)
    patterns = tiles[partly]
    unclean = _unclean(mask, tile, partly)
    if patterns.shape[0]:
        patterns, which = _distinct(patterns)
        number[partly] = which
    else:  # an empty tensor has no address
        patterns = patterns.new_zeros(1, *tile)
    by_query = _walk(some, partly, number, longest_first=True)
    by_key = _walk(*(grid.transpose(1, 2) for grid in (some, partly, number)), longest_first=False)
    longest = int(some.sum(2).max()) if some.numel() else 0
    return AttentionLists(*by_query, *by_key, patterns.to(torch.uint8).contiguous(), unclean, longest)


def covered(mask: Tensor, tile: tuple[int, int]) -> float:
    """Return the fraction of a mask (groups, M, N) that tiles with something live cover.

    >>> covered(torch.eye(64, dtype=torch.bool)[None], (16, 32))
    0.5
    """
    some = _tiles(mask, tile).any(4).any(3)
    return float(some.float().mean()) if some.numel() else 0.0


def _tiles(mask: Tensor, tile: tuple[int, int]) -> Tensor:
    """Return (groups, grid rows, grid columns, h, w); keys beyond the last are dead, queries beyond it repeat it."""
    (groups, rows, columns), (h, w) = mask.shape, tile
    if columns % w:
        mask = functional.pad(mask, (0, -columns % w))
    if rows % h:  # repeated, so that the rows that nobody reads do not make a tile partly live
        mask = torch.cat([mask, mask[:, -1:].expand(groups, -rows % h, mask.shape[2])], 1)
    return torch.unflatten(torch.unflatten(mask, 2, (-1, w)), 1, (-1, h)).transpose(2, 3)


def _unclean(mask: Tensor, tile: tuple[int, int], partly: Tensor) -> int:
    """Return what a partly live tile holds of keys that are never seen (1) and of queries that see nothing (2)."""
    keys = torch.unflatten(functional.pad(~mask.any(1), (0, -mask.shape[2] % tile[1])), 1, (-1, tile[1])).any(2)
    queries = torch.unflatten(functional.pad(~mask.any(2), (0, -mask.shape[1] % tile[0])), 1, (-1, tile[0])).any(2)
    return int((keys[:, None, :] & partly).any()) + 2 * int((queries[:, :, None] & partly).any())


def _distinct(patterns: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct ones of (count, h, w), and which of them each is."""
    flat = patterns.flatten(1)
    weights = 2 ** torch.arange(8, device=flat.device, dtype=torch.uint8)
    packed = (torch.unflatten(flat.to(torch.uint8), 1, (-1, 8)) * weights).sum(2, dtype=torch.uint8)
    _, which = torch.unique(packed, dim=0, return_inverse=True)
    count = int(which.max()) + 1
    # `scatter` with duplicates may keep any of them; they are equal.
    first = torch.empty(count, dtype=torch.int64, device=flat.device)
    first.scatter_(0, which, torch.arange(len(which), device=flat.device))
    return patterns[first], which.to(torch.int32)


def _walk(some: Tensor, partly: Tensor, number: Tensor, *, longest_first: bool) -> tuple[Tensor, Tensor]:
    """Return bounds and entries for the rows of a grid (groups, rows, columns)."""
    # Wholly live tiles first, then partly live ones, each in order: a stable sort keeps it.
    rank, order = torch.sort(torch.where(some, partly.to(torch.uint8), 2), dim=2, stable=True)
    entries = torch.stack([order, number.gather(2, order)], 3)[rank < 2]
    lengths, full = some.sum(2), (some & ~partly).sum(2)
    ends = lengths.flatten().cumsum(0).reshape(lengths.shape)
    begins = ends - lengths
    work = lengths if longest_first else torch.zeros_like(lengths)
    tile = torch.argsort(work, dim=1, descending=True, stable=True)
    bounds = torch.stack([tile, *(t.gather(1, tile) for t in (begins, begins + full, ends))], 2)
    entries = functional.pad(entries, (0, 0, 0, 1))  # kernels read one entry ahead
    return bounds.flatten(0, 1).to(torch.int32).contiguous(), entries.to(torch.int32).contiguous()

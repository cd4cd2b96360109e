"""Channel permutation: an order of input channels under which N:M keeps more magnitude.

Channels can be reordered freely inside a network, and in a good order the large weights of a row spread over the groups
instead of competing in one. The search tries all ways to share the channels of two groups between them, takes the best
pairs first, and never returns an order that keeps less than the one it was given.
"""

from __future__ import annotations

import itertools
from functools import lru_cache

import torch
from torch import Tensor

from sparta.errors import ShapeError, ValueRangeError, message

__all__ = ["kept_magnitude", "search_permutation"]

_CHUNK = 1 << 16  # pairs of stripes times rows handled at once, so that temporaries stay in cache
_WORK = 1 << 24  # pairs of stripes times rows in one search, at most
_NEGLIGIBLE = 1e-3  # a loss that no order can improve on noticeably


def kept_magnitude(matrix: Tensor, n: int = 2, m: int = 4) -> float:
    """Return the sum of the `n` largest magnitudes of each run of `m` columns; shape (R, C) with C a multiple of m.

    >>> kept_magnitude(torch.tensor([[1.0, -2.0, 3.0, 4.0]]))
    7.0
    """
    if not 1 <= n <= m:
        raise ValueRangeError(message(f"{n}:{m}", "n:m with 1 <= n <= m"))
    if matrix.dim() != 2 or matrix.shape[1] % m:
        raise ShapeError(message(f"a matrix of shape {tuple(matrix.shape)}", f"(R, C) with C a multiple of {m}"))
    rows, columns = matrix.shape
    groups = matrix.abs().reshape(rows, columns // m, m)
    return float(groups.topk(n, dim=2).values.sum(dtype=torch.float64))


def search_permutation(matrix: Tensor, n: int = 2, m: int = 4, *, escapes: int = 10, seed: int = 0) -> Tensor:
    """Return an order of the columns under which N:M keeps at least as much magnitude as it does now.

    Parameters
    ----------
    matrix
        Shape (R, C), C a multiple of `m`. For a convolution, rows are output channels and kernel positions.
    escapes
        How often a converged search is disturbed and goes on; the best order seen is returned.
    seed
        The search is the same for the same seed.

    Returns
    -------
    Tensor
        Indices, shape (C,): column ``j`` of the new matrix is column ``order[j]`` of the given one.

    Examples
    --------
    >>> matrix = torch.tensor([[9.0, 8, 7, 6, 1, 1, 1, 1]]).repeat(3, 1)
    >>> order = search_permutation(matrix)
    >>> kept_magnitude(matrix), kept_magnitude(matrix[:, order])
    (57.0, 90.0)
    """
    if escapes < 0:
        raise ValueRangeError(message(f"escapes={escapes}", "0 or more"))
    magnitudes = matrix.detach().abs().float()
    best_kept = kept_magnitude(magnitudes, n, m)
    columns = matrix.shape[1]
    best = torch.arange(columns, device=matrix.device)
    total = float(magnitudes.sum(dtype=torch.float64))
    if columns < 2 * m or total - best_kept <= _NEGLIGIBLE * total:
        return best
    generator = torch.Generator().manual_seed(seed)
    order = best.clone()
    stripes = columns // m
    changed = set(range(stripes))
    work = 0
    for _ in range(escapes + 1):
        while changed and work < _WORK:
            pairs = [(i, j) for i, j in itertools.combinations(range(stripes), 2) if i in changed or j in changed]
            most = max(1, (_WORK - work) // max(1, matrix.shape[0]))
            if len(pairs) > most:
                picked = torch.randperm(len(pairs), generator=generator)[:most].sort().values.tolist()
                pairs = [pairs[place] for place in picked]
            work += len(pairs) * matrix.shape[0]
            changed = _improve(magnitudes, order, pairs, n, m)
        kept = kept_magnitude(magnitudes[:, order], n, m)
        if kept > best_kept:
            best, best_kept = order.clone(), kept
        if work >= _WORK:
            break
        first, second = torch.randperm(stripes, generator=generator)[:2].tolist()
        a = first * m + int(torch.randint(m, (), generator=generator))
        b = second * m + int(torch.randint(m, (), generator=generator))
        order[[a, b]] = order[[b, a]]
        changed = {first, second}
    return best


@lru_cache(maxsize=8)
def _halves(m: int) -> tuple[Tensor, Tensor]:
    """Return every way to halve 2m columns, without mirror images: the places of the first half, and the rest."""
    first = [half for half in itertools.combinations(range(2 * m), m) if 0 in half]
    rest = [tuple(place for place in range(2 * m) if place not in half) for half in first]
    return torch.tensor(first), torch.tensor(rest)


def _kept_by_way(values: Tensor, n: int, m: int) -> Tensor:
    """Return what each way to halve the columns keeps of each pair of stripes.

    Parameters
    ----------
    values
        Magnitudes, shape (2m, pairs, R).

    Returns
    -------
    Tensor
        float64, shape (pairs, ways).
    """
    first, rest = _halves(m)
    if (n, m) != (2, 4):
        parts = [
            values[half.to(values.device)].topk(n, dim=1).values.sum((1, 3), dtype=torch.float64).T
            for half in (first, rest)
        ]
        return parts[0] + parts[1]
    # the two largest of four are both in one half of the four, or one in each
    places = {pair: place for place, pair in enumerate(itertools.combinations(range(8), 2))}
    left, right = (torch.tensor(side, device=values.device) for side in zip(*places, strict=True))
    sums = values[left] + values[right]
    larger = torch.maximum(values[left], values[right])

    def kept(four: list[int]) -> Tensor:
        a, b = places[four[0], four[1]], places[four[2], four[3]]
        best = torch.maximum(larger[a] + larger[b], sums[a])
        return torch.maximum(best, sums[b], out=best).sum(1, dtype=torch.float64)

    return torch.stack([kept(a) + kept(b) for a, b in zip(first.tolist(), rest.tolist(), strict=True)], 1)


def _improve(magnitudes: Tensor, order: Tensor, pairs: list[tuple[int, int]], n: int, m: int) -> set[int]:
    """Re-share the columns of the pairs of stripes that gain most, each stripe once; return those that changed."""
    first, rest = (half.to(order.device) for half in _halves(m))
    columns = order.view(-1, m)[torch.tensor(pairs, device=order.device)].flatten(1)  # (pairs, 2m)
    by_column = magnitudes.T.contiguous()
    gains, ways = [], []
    step = max(1, _CHUNK // max(1, magnitudes.shape[0]))
    for chunk in torch.split(columns, step):
        kept = _kept_by_way(by_column[chunk.T], n, m)
        gain = kept - kept[:, :1]  # the first way leaves both as they are
        best = gain.max(1)
        gains.append(best.values)
        ways.append(best.indices)
    gain, way = torch.cat(gains), torch.cat(ways)
    changed: set[int] = set()
    threshold = 1e-9 * float(magnitudes.sum(dtype=torch.float64))
    for place in gain.argsort(descending=True, stable=True).tolist():
        if float(gain[place]) <= threshold:
            break
        if changed.isdisjoint(pairs[place]):
            left, right = pairs[place]
            order[left * m : (left + 1) * m] = columns[place, first[way[place]]]
            order[right * m : (right + 1) * m] = columns[place, rest[way[place]]]
            changed.update(pairs[place])
    return changed

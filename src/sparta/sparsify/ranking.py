"""Ranking over processes: the lowest scores of several tensors together, wherever their elements are.

The threshold is found by histograms of the scores, some bits of them in a round, summed over the processes: no score
is ever gathered, and the choice is bit for bit the one that a single process would make. Scores that are equal
to the threshold are told apart in the same way by where they stand in the whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from sparta.errors import ValueRangeError, message
from sparta.sparsify.shards import WHOLE, Shards, summed
from sparta.tesa.select import comparable, lowest

__all__ = ["lowest_of"]

_DIGIT = 11  # bits that one histogram tells apart: three rounds for float32, each a message of 16 KiB
_BLOCK = 1 << 20  # scores looked at together, so that temporaries stay small
_PLACES = 48  # bits of a place among all elements of all tensors


def lowest_of(
    parts: Sequence[Tensor],
    count: int,
    shards: Shards | Sequence[Shards] = WHOLE,
    among: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """Return masks of exactly `count` elements of several tensors together: the first in pruning order.

    Parameters
    ----------
    parts
        Real tensors of any shapes, in order: among equal scores, an earlier tensor's are chosen first. Of sharded
        tensors, what this process holds.
    count
        How many to choose, over all tensors and all processes.
    shards
        How the tensors are spread, each of them or all alike.
    among
        Optional bool tensors of the same shapes: the candidates.

    Returns
    -------
    list of Tensor
        Bool tensors of the shapes of `parts`.

    Examples
    --------
    >>> lowest_of([torch.tensor([3.0, 1.0]), torch.tensor([1.0, 2.0])], 2)
    [tensor([False,  True]), tensor([ True, False])]
    """
    spread = [shards] * len(parts) if isinstance(shards, Shards) else list(shards)
    if all(each.is_whole for each in spread):
        device = parts[0].device
        scores = torch.cat([comparable(part).flatten().to(device) for part in parts])
        candidates = None if among is None else torch.cat([part.flatten().to(device) for part in among])
        chosen = torch.split(lowest(scores, count, candidates), [part.numel() for part in parts])
        return [mask.reshape(part.shape).to(part.device) for mask, part in zip(chosen, parts, strict=True)]
    return _Ranking(parts, spread, among).lowest(count)


class _Ranking:
    """Scores of which some or all are spread over processes, and the candidates among them, flat."""

    def __init__(self, parts: Sequence[Tensor], spread: list[Shards], among: Sequence[Tensor] | None) -> None:
        self.shapes = [part.shape for part in parts]
        self.scores = [comparable(part).flatten() for part in parts]
        self.device = self.scores[0].device
        self.candidates = None if among is None else [mask.flatten() for mask in among]
        self.spread = spread
        # Counts of tensors that are spread alike are summed together; the order is the same in every process.
        self.kinds = list({shards.groups: shards for shards in spread}.values())
        found = [kind.groups for kind in self.kinds]
        self.kind = [found.index(shards.groups) for shards in spread]

    def lowest(self, count: int) -> list[Tensor]:
        """Return the masks of the `count` lowest."""
        chosen = [torch.zeros_like(score, dtype=torch.bool) for score in self.scores]
        if count:
            is_wide = any(score.dtype in {torch.float64, torch.int64} for score in self.scores)
            edge, missing, equal = self._edge(self._keys, count, 64 if is_wide else 32)
            tied = self._choose_below(edge, chosen)
            if missing < equal:
                tied = self._first_of(tied, missing)
            for mask, indices in zip(chosen, tied, strict=True):
                mask[indices] = True
        return [mask.reshape(shape) for mask, shape in zip(chosen, self.shapes, strict=True)]

    def _blocks(self) -> Iterator[tuple[int, slice, Tensor, Tensor | None]]:
        """Yield pieces of the tensors: which tensor, where in it, keys in the order of the scores, candidates."""
        for place, score in enumerate(self.scores):
            for start in range(0, len(score), _BLOCK):
                piece = slice(start, start + _BLOCK)
                among = None if self.candidates is None else self.candidates[place][piece]
                yield place, piece, _ordered(score[piece]), among

    def _keys(self) -> Iterator[tuple[int, Tensor]]:
        for place, _, keys, among in self._blocks():
            yield place, keys if among is None else keys[among]

    def _total(self, sums: Tensor) -> Tensor:
        """Return the sum over all tensors and processes of what is here, one row for each kind of spread."""
        return torch.stack([summed(row, kind) for row, kind in zip(sums, self.kinds, strict=True)]).sum(0)

    def _edge(self, keys: Callable[[], Iterator[tuple[int, Tensor]]], count: int, bits: int) -> tuple[int, int, int]:
        """Return the key of the `count`-th candidate, how many of its equals are still missing, how many there are."""
        found, missing, equal, half = 0, count, 0, 1 << (_DIGIT - 1)
        rounds = -(-bits // _DIGIT)
        for shift in range((rounds - 1) * _DIGIT, -1, -_DIGIT):
            is_first = shift == (rounds - 1) * _DIGIT  # keys are signed
            sums = torch.zeros(len(self.kinds), 1 << _DIGIT, dtype=torch.int64, device=self.device)
            for place, block in keys():
                inside = block if is_first else block[(block >> (shift + _DIGIT)) == found]
                digits = (inside >> shift) + half if is_first else (inside >> shift) & ((1 << _DIGIT) - 1)
                sums[self.kind[place]] += torch.bincount(digits, minlength=1 << _DIGIT).to(self.device)
            steps = self._total(sums).cumsum(0)
            if not 0 <= missing <= int(steps[-1]):
                raise ValueRangeError(message(f"count is {count}", f"0 to {int(steps[-1])}, the number of candidates"))
            digit = int(torch.searchsorted(steps, missing))
            before = int(steps[digit - 1]) if digit else 0
            missing, equal = missing - before, int(steps[digit]) - before
            found = digit - half if is_first else (found << _DIGIT) | digit
        return found, missing, equal

    def _choose_below(self, edge: int, chosen: list[Tensor]) -> list[Tensor]:
        """Choose the candidates below the edge; return the indices of those at it, for each tensor."""
        tied: list[list[Tensor]] = [[] for _ in self.scores]
        for place, piece, keys, among in self._blocks():
            below, equal = keys < edge, keys == edge
            if among is not None:
                below, equal = below & among, equal & among
            chosen[place][piece] = below
            tied[place].append(equal.nonzero().flatten() + piece.start)
        none = torch.zeros(0, dtype=torch.int64)
        return [torch.cat([none.to(score.device), *found]) for found, score in zip(tied, self.scores, strict=True)]

    def _first_of(self, tied: list[Tensor], missing: int) -> list[Tensor]:
        """Return the first `missing` of tied elements: earlier tensors first, then by their place in the whole."""
        places, start = [], 0
        for indices, score, shards in zip(tied, self.scores, self.spread, strict=True):
            places.append(shards.positions(indices) + start)
            start += len(score) if shards.is_whole else math.prod(shards.shape)
        last, _, _ = self._edge(lambda: iter(enumerate(places)), missing, _PLACES)
        return [indices[where <= last] for indices, where in zip(tied, places, strict=True)]


def _ordered(values: Tensor) -> Tensor:
    """Return int64 keys in the order of the scores: a float's bits, read as an integer, order as the float does."""
    if not values.is_floating_point():
        return values.to(torch.int64)
    values = values + 0.0  # -0.0 ties with 0.0
    kind, bits = (torch.int32, 31) if values.dtype == torch.float32 else (torch.int64, 63)
    raw = values.view(kind)
    return torch.where(raw < 0, raw ^ ((1 << bits) - 1), raw).to(torch.int64)

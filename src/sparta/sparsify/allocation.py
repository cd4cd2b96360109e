"""Allocation: how much of a budget each layer gives.

An allocation turns one sparsity for the network into a number of units to prune in each layer. The counts are exact.
Where the units are single elements they sum to the rounded budget to the last element, and no layer is ever emptied
unless everything is asked for.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

from sparta.errors import NameNotFoundError, ShapeError, ValueRangeError, did_you_mean, message
from sparta.sparsify.ranking import lowest_of
from sparta.sparsify.shards import WHOLE, Shards, gathered, summed, summed_counts
from sparta.tesa.select import check_sparsity, pruned_count

__all__ = ["ERK", "Allocation", "Candidate", "Energy", "Global", "Sensitivity", "Uniform", "erk_densities", "lamp"]

_RANGE = 13  # last bits of a float32 that ranges of scores do not tell apart: they are 0.1 % wide
_BISECTIONS = 100  # halves an interval of floats until nothing lies between its ends


@dataclass(frozen=True, eq=False)
class Candidate:
    """One layer as an allocation sees it.

    Parameters
    ----------
    name, shape
        Of the whole parameter.
    units
        How many units its pattern has.
    scores
        The score of each unit that this process holds, 1-D.
    shards
        How the units are spread over processes.
    limit
        Largest sparsity of this layer; 0 keeps it dense.
    """

    name: str
    shape: tuple[int, ...]
    units: int
    scores: Tensor
    shards: Shards = WHOLE
    limit: float = 1.0

    @property
    def elements(self) -> int:
        """Number of elements of the parameter."""
        return math.prod(self.shape)

    def most(self, max_sparsity: float, sparsity: float) -> int:
        """Return how many units may be pruned: not all of them, unless all is asked for."""
        if sparsity >= 1 and self.limit >= 1:
            return self.units
        return max(0, min(self.units - 1, math.floor(min(max_sparsity, self.limit) * self.units + 1e-9)))


@dataclass(frozen=True)
class Allocation(ABC):
    """How much of a budget each layer gives.

    Parameters
    ----------
    max_sparsity
        No layer is pruned beyond this; at least one unit of each stays in any case.
    """

    max_sparsity: float = 1.0

    def __post_init__(self) -> None:
        check_sparsity(self.max_sparsity)

    def counts(self, candidates: Sequence[Candidate], sparsity: float) -> list[int]:
        """Return how many units to prune in each layer for a network of `sparsity`.

        Parameters
        ----------
        candidates
            The layers, in the model's order.
        sparsity
            Fraction of all elements of all layers, in [0, 1].
        """
        sparsity = check_sparsity(sparsity)
        if not candidates:
            return []
        most = [candidate.most(self.max_sparsity, sparsity) for candidate in candidates]
        return self._counts(candidates, sparsity, most)

    @abstractmethod
    def _counts(self, candidates: Sequence[Candidate], sparsity: float, most: list[int]) -> list[int]:
        """Return the counts, each at most the one in `most`."""


@dataclass(frozen=True)
class Uniform(Allocation):
    """The same sparsity in each layer.

    >>> layers = [Candidate("a", (10,), 10, torch.rand(10)), Candidate("b", (4,), 4, torch.rand(4))]
    >>> Uniform().counts(layers, 0.5)
    [5, 2]
    """

    def _counts(self, candidates: Sequence[Candidate], sparsity: float, most: list[int]) -> list[int]:
        return [min(pruned_count(c.units, sparsity), limit) for c, limit in zip(candidates, most, strict=True)]


@dataclass(frozen=True)
class Global(Allocation):
    """One threshold for all layers: the lowest scores of the whole network are pruned.

    Parameters
    ----------
    normalize
        What makes scores of different layers comparable: ``"none"``; ``"l1"`` or ``"l2"``, the score divided by the
        layer's norm; ``"lamp"``, the square divided by the sum of all squares in the layer that are not smaller.
    floor
        At least this many units of each layer stay (all of them where it has fewer), whatever the scores say.

    Examples
    --------
    >>> layers = [Candidate("a", (3,), 3, torch.tensor([1.0, 2.0, 3.0])), Candidate("b", (3,), 3, torch.ones(3) / 2)]
    >>> Global().counts(layers, 0.5)  # three of six; one of each layer always stays
    [1, 2]
    >>> Global(floor=2).counts(layers, 0.3)
    [1, 1]
    """

    normalize: str = "none"
    floor: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.floor, bool) or not isinstance(self.floor, int) or self.floor < 0:
            raise ValueRangeError(message(f"floor is {self.floor!r}", "a number of units, 0 or more"))
        if self.normalize not in {"none", "l1", "l2", "lamp"}:
            raise NameNotFoundError(did_you_mean(self.normalize, ["none", "l1", "l2", "lamp"], "normalisation"))

    def _counts(self, candidates: Sequence[Candidate], sparsity: float, most: list[int]) -> list[int]:
        budget = pruned_count(sum(c.elements for c in candidates), sparsity)
        most = [min(limit, max(0, c.units - self.floor)) for c, limit in zip(candidates, most, strict=True)]
        has_blocks = any(c.units != c.elements for c in candidates)
        if has_blocks:  # units of different sizes are taken in order while they fit, and are few
            candidates = [_gathered(c) for c in candidates]
        scores = [self._comparable(c) for c in candidates]
        available = sum(limit * c.elements / max(1, c.units) for c, limit in zip(candidates, most, strict=True))
        _check_reachable(budget, available, self.max_sparsity)
        if has_blocks:
            # Within a layer the order is fixed, so a limit on a layer is the same as sparing its highest scores.
            spared = [lowest_of([s], limit)[0] for s, limit in zip(scores, most, strict=True)]
            return _lowest_units(candidates, scores, spared, budget)
        return _under_limits(scores, [c.shards for c in candidates], most, budget)

    def _comparable(self, candidate: Candidate) -> Tensor:
        scores = candidate.scores.float()
        if self.normalize == "none" or candidate.elements == 0:  # a process that holds nothing of a layer sums too
            return scores
        if self.normalize == "lamp":
            return _lamp_scores(scores, candidate)
        power = 1 if self.normalize == "l1" else 2
        total = summed(scores.double().abs().pow(power).sum(), candidate.shards) ** (1 / power)
        return (scores.double() / total.clamp(min=torch.finfo(torch.float64).tiny)).float()


def lamp(max_sparsity: float = 1.0) -> Global:
    """Return the allocation by layer-adaptive magnitudes (LAMP)."""
    return Global(max_sparsity, "lamp")


@dataclass(frozen=True)
class ERK(Allocation):
    """Erdős-Rényi-Kernel: a layer's density goes with ``(sum of dims / product of dims) ** power``.

    Parameters
    ----------
    power
        1 is the published form; 0 is uniform.
    include_kernel
        Whether the kernel's dims count, or the channels only.
    """

    power: float = 1.0
    include_kernel: bool = True

    def _counts(self, candidates: Sequence[Candidate], sparsity: float, most: list[int]) -> list[int]:
        densities = erk_densities(
            [c.shape for c in candidates], sparsity, self.power, include_kernel=self.include_kernel
        )
        wanted = [(1 - density) * c.units for c, density in zip(candidates, densities, strict=True)]
        return _settled(candidates, wanted, most, sparsity)


def erk_densities(
    shapes: Sequence[Sequence[int]], sparsity: float, power: float = 1.0, *, include_kernel: bool = True
) -> list[float]:
    """Return the ERK density of each layer.

    >>> [round(1 - d, 6) for d in erk_densities([(16, 3, 3, 3), (32, 4, 3, 3), (10, 32)], 0.5)]
    [0.454118, 0.656095, 0.0]
    """
    if not 0 <= sparsity <= 1 or not math.isfinite(power):
        raise ValueRangeError(message(f"sparsity {sparsity} and power {power}", "a sparsity in [0, 1], a finite power"))
    if any(size < 0 for shape in shapes for size in shape):
        raise ShapeError(message(f"shapes {list(map(tuple, shapes))}", "sizes of at least 0"))
    sizes = [math.prod(shape) for shape in shapes]
    dims = [shape if include_kernel else shape[:2] for shape in shapes]
    odds = [(sum(shape) / math.prod(shape)) ** power if math.prod(shape) else 0.0 for shape in dims]
    dense: set[int] = {place for place, size in enumerate(sizes) if size == 0}
    while True:
        active = [place for place in range(len(shapes)) if place not in dense]
        kept = (1 - sparsity) * sum(sizes) - sum(sizes[place] for place in dense)
        weight = sum(odds[place] * sizes[place] for place in active)
        scale = kept / weight if weight else 0.0
        highest = max((scale * odds[place] for place in active), default=0.0)
        if highest <= 1:
            break
        dense |= {place for place in active if scale * odds[place] == highest}
    return [1.0 if place in dense else max(0.0, scale * odds[place]) for place in range(len(shapes))]


@dataclass(frozen=True)
class Energy(Allocation):
    """Energy levels: each layer loses the same share of its energy (the sum of its squared scores).

    Parameters
    ----------
    share
        Optional factors by layer name: how large a share a layer loses, beside the others' 1; 0 keeps it dense.
    """

    share: Mapping[str, float] = field(default_factory=dict, hash=False)

    def _counts(self, candidates: Sequence[Candidate], sparsity: float, most: list[int]) -> list[int]:
        factors = [float(self.share.get(c.name, 1.0)) for c in candidates]
        cumulated = [_cumulated_energy(_gathered(c).scores) for c in candidates]
        limits = [limit if factor > 0 else 0 for limit, factor in zip(most, factors, strict=True)]

        def pruned_at(energy: float) -> list[int]:
            return [
                min(limit, int(torch.searchsorted(steps, energy * factor, right=True)))
                for steps, factor, limit in zip(cumulated, factors, limits, strict=True)
            ]

        ceiling = 2.0 / min((factor for factor in factors if factor > 0), default=1.0)
        return _solved(candidates, pruned_at, limits, sparsity, ceiling)


@dataclass(frozen=True)
class Sensitivity(Allocation):
    """Measured sensitivity: each layer is pruned until it costs the same loss as the others.

    Parameters
    ----------
    curves
        For each layer its measured losses: pairs of sparsity and loss, as
        :func:`~sparta.sparsify.sensitivity.measure_sensitivity` returns them.
    """

    curves: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict, hash=False)

    def _counts(self, candidates: Sequence[Candidate], sparsity: float, most: list[int]) -> list[int]:
        curves = []
        for candidate in candidates:
            if candidate.name not in self.curves:
                raise NameNotFoundError(did_you_mean(candidate.name, self.curves, "layer among the measured"))
            curves.append(_rising(self.curves[candidate.name]))

        def pruned_at(loss: float) -> list[int]:
            return [
                min(limit, int(c.units * _inverse(curve, loss)))
                for c, curve, limit in zip(candidates, curves, most, strict=True)
            ]

        worst = max(curve[-1][1] for curve in curves)
        return _solved(candidates, pruned_at, most, sparsity, max(worst, 1e-12) * (1 + 1e-9))


# ---------------------------------------------------------------------- the parts they share


def _solved(
    candidates: Sequence[Candidate],
    pruned_at: Callable[[float], list[int]],
    most: list[int],
    sparsity: float,
    ceiling: float,
) -> list[int]:
    """Find the level in [0, `ceiling`] at which the layers together lose the budget; `pruned_at` rises with it."""
    budget = pruned_count(sum(c.elements for c in candidates), sparsity)
    sizes = [c.elements / max(1, c.units) for c in candidates]
    _check_reachable(budget, sum(limit * size for limit, size in zip(most, sizes, strict=True)), None)
    low, high = -1.0, ceiling
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if _elements(pruned_at(middle), sizes) <= budget:
            low = middle
        else:
            high = middle
    base, above = pruned_at(low), pruned_at(high)
    # what several layers would lose at one and the same level is given out in the model's order, then anywhere
    for limits in (above, most):
        _fill(base, limits, sizes, budget)
    return base


def _fill(counts: list[int], limits: list[int], sizes: list[float], budget: float) -> None:
    """Raise `counts` towards `limits` in order, while the elements stay within the budget."""
    for place, limit in enumerate(limits):
        room = math.floor((budget - _elements(counts, sizes)) / sizes[place] + 1e-9) if sizes[place] else 0
        counts[place] += max(0, min(limit - counts[place], room))


def _settled(candidates: Sequence[Candidate], wanted: list[float], most: list[int], sparsity: float) -> list[int]:
    """Round wanted counts so that the elements sum to the budget: the largest remainders are rounded up."""
    budget = pruned_count(sum(c.elements for c in candidates), sparsity)
    sizes = [c.elements / max(1, c.units) for c in candidates]
    _check_reachable(budget, sum(limit * size for limit, size in zip(most, sizes, strict=True)), None)
    counts = [min(math.floor(want + 1e-9), limit) for want, limit in zip(wanted, most, strict=True)]
    order = sorted(range(len(wanted)), key=lambda place: (math.floor(wanted[place] + 1e-9) - wanted[place], place))
    for place in order:
        if counts[place] < most[place] and _elements(counts, sizes) + sizes[place] <= budget + 1e-6:
            counts[place] += 1
    # a layer at its limit leaves a rest: the others take it in proportion to what they have left, then in order
    rest = budget - _elements(counts, sizes)
    free = sum((limit - count) * size for count, limit, size in zip(counts, most, sizes, strict=True))
    if rest > 0 and free > 0:
        for place, limit in enumerate(most):
            counts[place] += math.floor((limit - counts[place]) * rest / free)
        _fill(counts, most, sizes, budget)
    return counts


def _elements(counts: Sequence[int], sizes: Sequence[float]) -> float:
    return sum(count * size for count, size in zip(counts, sizes, strict=True))


def _under_limits(scores: list[Tensor], spread: list[Shards], most: list[int], budget: int) -> list[int]:
    """Return how many of the `budget` lowest elements are in each layer, none with more than its limit.

    A layer beyond its limit stays at it, and the others take the rest: with the higher threshold that this needs, no
    such layer would come below its limit again.
    """
    counts: dict[int, int] = {}
    while True:
        free = [place for place in range(len(scores)) if place not in counts]
        if not free:
            break
        parts, shards = [scores[place] for place in free], [spread[place] for place in free]
        chosen = lowest_of(parts, budget - sum(counts.values()), shards)
        found = summed_counts([torch.count_nonzero(mask) for mask in chosen], shards)
        beyond = {place: most[place] for place, count in zip(free, found, strict=True) if count > most[place]}
        if not beyond:
            counts |= dict(zip(free, found, strict=True))
            break
        counts |= beyond
    return [counts[place] for place in range(len(scores))]


def _lowest_units(
    candidates: Sequence[Candidate], scores: list[Tensor], allowed: list[Tensor], budget: int
) -> list[int]:
    """Choose units of different sizes in the order of their scores, while they fit into the budget of elements."""
    device = scores[0].device
    values = torch.cat([s.to(device) for s in scores])
    sizes = torch.cat(
        [
            torch.full((len(s),), c.elements / max(1, c.units), device=device, dtype=torch.float64)
            for c, s in zip(candidates, scores, strict=True)
        ]
    )
    places = torch.cat([mask.to(device) for mask in allowed]).nonzero().flatten()
    order = places[values[places].argsort(stable=True)]
    chosen = order[sizes[order].cumsum(0) <= budget + 0.5]
    owner = torch.repeat_interleave(torch.tensor([len(s) for s in scores], device=device))
    return torch.bincount(owner[chosen], minlength=len(scores)).tolist()


def _lamp_scores(scores: Tensor, candidate: Candidate) -> Tensor:
    """Return the roots of LAMP's scores of what is here: each score over the norm of all that are not smaller.

    The norms come from how many scores lie in each of many narrow ranges. Counts are summed over the processes of a
    sharded layer, so nothing is gathered or sorted, and every process finds the same numbers.
    """
    scores = scores.float().flatten()
    if int(summed(torch.count_nonzero(scores < 0), candidate.shards)):
        raise ValueRangeError(message(f"a negative score of {candidate.name!r} for LAMP", "scores of 0 or more"))
    ranges = scores.abs().view(torch.int32) >> _RANGE  # the bits of floats that are not negative have their order
    counts = summed(torch.bincount(ranges, minlength=1 << (31 - _RANGE)), candidate.shards)
    middles = torch.arange(len(counts), dtype=torch.int32, device=counts.device) << _RANGE | 1 << (_RANGE - 1)
    squares = torch.where(counts > 0, counts * middles.view(torch.float32).double().square(), 0.0)
    not_smaller = squares.flip(0).cumsum(0).flip(0).clamp(min=torch.finfo(torch.float64).tiny).sqrt()
    return (scores / not_smaller[ranges]).float()


def _cumulated_energy(scores: Tensor) -> Tensor:
    """Return the share of a layer's energy in its 1, 2, ... lowest units."""
    steps = scores.double().square().sort().values.cumsum(0)
    return steps / steps[-1].clamp(min=torch.finfo(torch.float64).tiny) if len(steps) else steps


def _rising(curve: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return a measured curve from (0, 0) to sparsity 1 whose losses never fall."""
    points = sorted((check_sparsity(s), float(loss)) for s, loss in curve)
    if not points or any(not math.isfinite(loss) for _, loss in points):
        raise ValueRangeError(message(f"a sensitivity curve {points}", "finite losses at one sparsity or more"))
    first = points[0][1] if points[0][0] == 0 else min(loss for _, loss in points)
    rising, highest = [(0.0, 0.0)], 0.0
    for sparsity, loss in points:
        highest = max(highest, loss - first)
        if sparsity > 0:
            rising.append((sparsity, highest))
    if rising[-1][0] < 1:
        rising.append((1.0, 2 * highest + 1.0))
    return rising


def _inverse(curve: list[tuple[float, float]], loss: float) -> float:
    """Return the largest sparsity of a rising curve that costs at most `loss`."""
    if loss < 0:
        return 0.0
    reached = 0.0
    for (left, low), (right, high) in pairwise(curve):
        if high <= loss:
            reached = right
        elif low <= loss:
            reached = left + (right - left) * (loss - low) / (high - low)
    return reached


def _gathered(candidate: Candidate) -> Candidate:
    """Return a candidate with the scores of all its units, also where processes share them."""
    if candidate.shards.is_whole:
        return candidate
    return replace(candidate, scores=gathered(candidate.scores, candidate.shards).flatten(), shards=WHOLE)


def _check_reachable(budget: float, available: float, max_sparsity: float | None) -> None:
    if budget > available + 0.5:
        cap = "" if max_sparsity in {None, 1.0} else f" with max_sparsity {max_sparsity}"
        raise ValueRangeError(
            message(
                f"the budget prunes {budget:g} elements, but only {available:g} may be pruned{cap}",
                "a sparsity that the limits of the layers leave room for",
                "ask for less, raise `max_sparsity`, or prune more layers",
            )
        )

"""The table: for every group of layers what it may become, with the time, the memory and the cost of each.

It is filled by measurement and then corrected by it: the whole model never takes the sum of its layers, so what a
measured whole took beside the sum decides how the next sums are read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sparta.oneshot.targets import Target
from sparta.planning.layers import Group
from sparta.planning.options import BF16, CHANNELS, DENSE, Option
from sparta.planning.solve import Front, front_of
from sparta.tesa.patterns import Pattern

__all__ = ["Assignment", "Bundle", "Table", "picked"]

Assignment = Mapping[str, Option]
"""What each layer becomes; layers that stay dense are left out."""

_PER_GROUP = 100  # points of a group that has several units
_FACTORS = (0.3, 3.0)
_INDEX_BYTES = 2.0  # of each unit that is kept, about


@dataclass(frozen=True)
class Bundle:
    """One choice of a group.

    Parameters
    ----------
    dense, sparse
        Milliseconds of its layers that stay dense, and of the others.
    megabytes
        Of all its weights, about.
    cost
        Squared relative change of the model's outputs.
    options
        What its layers become, those that stay dense left out.
    """

    dense: float
    sparse: float
    megabytes: float
    cost: float
    options: Mapping[str, Option] = field(default_factory=dict)


@dataclass(eq=False)
class Table:
    """Everything that is known of a model's options.

    Parameters
    ----------
    times
        By layer: milliseconds of each option, dense among them.
    costs
        By layer: the cost of each option.
    narrow
        By group: milliseconds of all its layers when its channels go.
    given_ms, given_mb
        The model as given.
    rest_ms
        What is not in these layers.
    factor, dense_factor
        How many times as long sparse and dense layers take in the compiled whole as they take alone.
    """

    groups: Sequence[Group]
    targets: Mapping[str, Target]
    times: dict[str, dict[Option, float]]
    costs: dict[str, dict[Option, float]]
    narrow: dict[int, dict[Option, float]]
    given_ms: float
    given_mb: float
    rest_ms: float = 0.0
    factor: float = 1.0
    dense_factor: float = 1.0
    memory_factor: float = 1.0
    _seen: list[tuple[float, float, float]] = field(default_factory=list)
    _losers: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        layers_ms = sum(times[DENSE] for times in self.times.values())
        if layers_ms > self.given_ms:  # one by one they may take longer than together; what counts is the whole
            scale = self.given_ms / layers_ms
            self.times = {name: {o: ms * scale for o, ms in times.items()} for name, times in self.times.items()}
            self.narrow = {number: {o: ms * scale for o, ms in times.items()} for number, times in self.narrow.items()}
        self.rest_ms = max(0.0, self.given_ms - layers_ms)
        self.rest_mb = max(0.0, self.given_mb - sum(self.megabytes(name, DENSE) for name in self.targets))

    # ------------------------------------------------------------------ questions

    def front(self, *, memory: bool = False) -> tuple[Front, list[list[Bundle]]]:
        """Return all best choices by time, or by memory, and the bundles of each group that they pick from."""
        bundles = [self._bundles(number, memory=memory) for number in range(len(self.groups))]
        rows = [[(self.megabytes_of(b) if memory else self.milliseconds(b), b.cost) for b in each] for each in bundles]
        return front_of(rows), bundles

    def milliseconds(self, bundle: Bundle) -> float:
        """Return the time of a bundle as it is in the whole."""
        return self.dense_factor * bundle.dense + self.factor * bundle.sparse

    def megabytes_of(self, bundle: Bundle) -> float:
        """Return the memory of a bundle as it is in the whole."""
        return bundle.megabytes * (self.memory_factor if bundle.options else 1.0)

    @property
    def fastest_ms(self) -> float:
        """The time of the fastest model that the table knows."""
        return self.rest_ms + float(self.front()[0].times[0])

    @property
    def bound(self) -> float:
        """The speed-up if all layers that can be pruned took no time at all."""
        return self.given_ms / self.rest_ms if self.rest_ms > 0 else math.inf

    def megabytes(self, name: str, option: Option) -> float:
        """Return the memory of one weight, about."""
        parameter = self.targets[name].parameter
        size = parameter.element_size() if option.precision is None else 2 if option.precision == BF16 else 1
        whole = parameter.numel() * size / 1e6
        if not option.prunes or option.pattern == CHANNELS:
            return whole * option.density
        shape = self.targets[name].layout.shape
        units = option.made.unit_count(shape) * option.density
        return whole * option.density + units * _INDEX_BYTES / 1e6

    def fastest(self, unit: tuple[str, ...], precision: str | None, *, prunes: bool) -> Option | None:
        """Return the fastest option of a precision that all layers of a unit have; None where there is none.

        Parameters
        ----------
        prunes
            Whether weights may go.
        """
        bundles = [bundle for bundle in self._unit(unit) if bundle.options]
        options = {next(iter(bundle.options.values())): bundle.sparse for bundle in bundles}
        able = [option for option in options if option.precision == precision and (prunes or not option.prunes)]
        return min(able, key=lambda option: options[option], default=None)

    def sums(self, assignment: Assignment) -> tuple[float, float]:
        """Return the milliseconds of the layers that stay dense, as they are in the whole, and of the others alone."""
        dense = sparse = 0.0
        for number, group in enumerate(self.groups):
            chosen = {assignment[name] for name in group.names if name in assignment}
            wide = next((option for option in chosen if option.pattern == CHANNELS), None)
            if wide is not None:
                sparse += self.narrow[number][wide]
                continue
            for name in group.names:
                option = assignment.get(name, DENSE)
                time = self.times.get(name, {}).get(option, self.times.get(name, {}).get(DENSE, 0.0))
                dense, sparse = (dense + time, sparse) if option == DENSE else (dense, sparse + time)
        return self.dense_factor * dense, sparse

    def pattern_of(self, name: str, option: Option) -> Pattern | None:
        """Return the pattern that lies on a layer's weight; None where nothing is pruned."""
        if option.pattern != CHANNELS:
            return option.made if option.prunes else None
        return next(each.pattern for group in self.groups for each in group.channels if each.reader == name)

    def loss(self, assignment: Assignment) -> float:
        """Return the estimated relative change of the outputs."""
        return math.sqrt(sum(self.costs[name][option] for name, option in assignment.items()))

    # ------------------------------------------------------------------ answers

    def correct(self, assignment: Assignment, ms: float, megabytes: float, dense: frozenset[str]) -> None:
        """Learn from a measured whole: how sums are to be read, and which layers ran dense after all."""
        for name in sorted(dense & assignment.keys()):
            if assignment[name].pattern != CHANNELS:
                self._lost(name, assignment[name])
        here = self.sums(assignment)
        if not assignment:
            # All is dense: what compiling alone gains, layers and the rest have in common.
            gained = min(max(ms / (self.rest_ms + here[0]), _FACTORS[0]), _FACTORS[1])
            self.dense_factor, self.rest_ms = gained * self.dense_factor, gained * self.rest_ms
            return
        seen = next((point for point in reversed(self._seen) if abs(point[1] - here[1]) > 0.05 * here[1]), None)
        self._seen.append((*here, ms))
        if seen is not None:
            # Two wholes tell the share of the layers from the rest.
            factor = ((ms - here[0]) - (seen[2] - seen[0])) / (here[1] - seen[1])
        else:
            factor = (ms - self.rest_ms - here[0]) / here[1] if here[1] > 0 else self.factor
        self.factor = min(max(factor, _FACTORS[0]), _FACTORS[1])
        self.rest_ms = max(0.0, ms - here[0] - self.factor * here[1])
        estimated = sum(
            self.megabytes(name, assignment.get(name, DENSE)) for name in self.targets if name in assignment
        )
        others = sum(self.megabytes(name, DENSE) for name in self.targets if name not in assignment)
        if estimated > 0:
            self.memory_factor = max(0.1, (megabytes - self.rest_mb - others) / estimated)

    # ------------------------------------------------------------------ within

    def _lost(self, name: str, option: Option) -> None:
        """Forget the options of a layer that cannot win in the whole: those not faster than one that lost, then all."""
        times = self.times[name]
        limit = 0.0 if name in self._losers else times[option]
        self._losers.add(name)
        self.times[name] = {other: ms for other, ms in times.items() if other == DENSE or ms < limit}

    def _bundles(self, number: int, *, memory: bool) -> list[Bundle]:
        group = self.groups[number]
        units = [self._unit(unit) for unit in group.units]
        if len(units) == 1:
            found = units[0]
        else:
            rows = [[(self.megabytes_of(b) if memory else self.milliseconds(b), b.cost) for b in u] for u in units]
            front = front_of(rows, _PER_GROUP)
            found = [_joined([u[i] for u, i in zip(units, front.chosen(p), strict=True)]) for p in range(len(front))]
        dense = sum(self.times.get(name, {}).get(DENSE, 0.0) for name in group.names)
        for option, time in self.narrow.get(number, {}).items():
            chosen = _narrowed(group, option)
            if time < dense and all(each in self.costs.get(name, {}) for name, each in chosen.items()):
                cost = sum(self.costs[name][each] for name, each in chosen.items())
                size = sum(self.megabytes(name, option) for name in group.names)
                found.append(Bundle(0.0, time, size, cost, chosen))
        return found

    def _unit(self, unit: tuple[str, ...]) -> list[Bundle]:
        """Return what the layers of one unit may become: the same, all of them."""
        known = [name for name in unit if name in self.times]
        dense = sum(self.times[name][DENSE] for name in known)
        size = sum(self.megabytes(name, DENSE) for name in unit)
        found = [Bundle(dense, 0.0, size, 0.0)]
        if not known or len(known) < len(unit):
            return found
        for option in dict.fromkeys(option for name in known for option in self.times[name]):
            if option == DENSE or not all(option in self.times[n] and option in self.costs.get(n, {}) for n in known):
                continue
            time = sum(self.times[name][option] for name in known)
            if time < dense:
                cost = sum(self.costs[name][option] for name in known)
                held = sum(self.megabytes(name, option) for name in known)
                found.append(Bundle(0.0, time, held, cost, dict.fromkeys(known, option)))
        return _undominated(found)


def picked(bundles: Sequence[Sequence[Bundle]], chosen: Sequence[int]) -> dict[str, Option]:
    """Return what the layers become when each group takes the bundle that was chosen for it."""
    taken = [each[place].options for each, place in zip(bundles, chosen, strict=True)]
    return {name: option for options in taken for name, option in options.items()}


def _undominated(bundles: Sequence[Bundle]) -> list[Bundle]:
    """Return the choices that no other beats in cost, and in time and memory as well; the first is dense."""
    kept = [bundles[0]]
    for bundle in sorted(bundles[1:], key=lambda each: (each.cost, each.sparse, each.megabytes)):
        if not any(each.sparse <= bundle.sparse and each.megabytes <= bundle.megabytes for each in kept[1:]):
            kept.append(bundle)
    return kept


def _narrowed(group: Group, option: Option) -> dict[str, Option]:
    """Return what the layers of a group become when channels go: where they are rounded, all of them are."""
    plain = Option("dense", precision=option.precision)
    others = {} if option.precision is None else dict.fromkeys(group.names, plain)
    return {**others, **{each.reader: option for each in group.channels}}


def _joined(parts: Sequence[Bundle]) -> Bundle:
    return Bundle(
        sum(part.dense for part in parts),
        sum(part.sparse for part in parts),
        sum(part.megabytes for part in parts),
        sum(part.cost for part in parts),
        {name: option for part in parts for name, option in part.options.items()},
    )

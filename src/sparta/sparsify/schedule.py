"""Schedules: how sparse at which moment, and at which moments masks change.

A schedule is a value: a pure function of the position (a step or an epoch, as the caller counts), so that resuming
needs nothing but the position. Masks change only at *events*, and everything in between is plain training with fixed
masks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction

from sparta.errors import NameNotFoundError, ValueRangeError, did_you_mean, message
from sparta.tesa.select import check_sparsity

__all__ = ["Schedule", "level_starts"]

_SHAPES: dict[str, Callable[[float], float]] = {
    "constant": lambda _: 1.0,
    "linear": lambda progress: progress,
    "cubic": lambda progress: 1.0 - (1.0 - progress) ** 3,
    "inverse_cubic": lambda progress: 1.0 - (1.0 - progress) ** (1 / 3),
    "cosine": lambda progress: 0.5 - 0.5 * math.cos(math.pi * progress),
}

_MOST_LEVELS = 1_000_000


def level_starts(total: int, levels: int) -> list[int]:
    """Return where each of `levels` equal parts of `total` positions starts.

    >>> level_starts(10, 4)
    [0, 2, 5, 7]
    """
    if not 0 <= levels <= _MOST_LEVELS:
        raise ValueRangeError(message(f"{levels} levels", f"0 to {_MOST_LEVELS:,}"))
    return [place * total // levels for place in range(levels)]


@dataclass(frozen=True)
class Schedule:
    """Sparsity as a function of the position.

    Make one with :meth:`constant`, :meth:`linear`, :meth:`cubic`, :meth:`cosine` or :meth:`levels`.

    Parameters
    ----------
    shape
        Name of the curve from `initial` at `begin` to `final` at `end`: ``constant``, ``linear``, ``cubic`` (much
        early), ``inverse_cubic`` (much late), ``cosine``; or ``levels``.
    initial, final
        Sparsities in [0, 1].
    begin, end
        Positions of the first and the last event.
    every
        Positions between two events.
    table
        The sparsities of a schedule of levels, one after the other, each for an equal part of ``begin`` to ``end``.

    Examples
    --------
    >>> ramp = Schedule.cubic(0.9, begin=0, end=100, every=10)
    >>> ramp.at(0), round(ramp.at(50), 4), ramp.at(1000)
    (0.0, 0.7875, 0.9)
    >>> [position for position in range(200) if ramp.is_event(position)][:3]
    [0, 10, 20]
    """

    shape: str
    final: float
    initial: float = 0.0
    begin: float = 0
    end: float = 0
    every: float = 1
    table: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.shape not in {*_SHAPES, "levels"}:
            raise NameNotFoundError(did_you_mean(self.shape, [*_SHAPES, "levels"], "schedule"))
        for sparsity in (self.initial, self.final, *self.table):
            check_sparsity(sparsity)
        if not 0 <= self.begin <= self.end or not math.isfinite(self.end):
            raise ValueRangeError(message(f"begin is {self.begin} and end is {self.end}", "0 <= begin <= end"))
        if not self.every > 0:
            raise ValueRangeError(message(f"every is {self.every}", "a number above 0"))
        if self.shape == "levels" and (not self.table or self.end - self.begin < len(self.table)):
            raise ValueRangeError(
                message(
                    f"{len(self.table)} levels over {self.end - self.begin:g} positions",
                    "one level or more, each of one position or more",
                )
            )

    @classmethod
    def constant(cls, sparsity: float, at: float = 0) -> Schedule:
        """Return the schedule with one event: `sparsity` at once."""
        return cls("constant", sparsity, sparsity, at, at)

    @classmethod
    def linear(cls, final: float, *, initial: float = 0.0, begin: float = 0, end: float, every: float = 1) -> Schedule:
        """Return the straight ramp from `initial` to `final`."""
        return cls("linear", final, initial, begin, end, every)

    @classmethod
    def cubic(cls, final: float, *, initial: float = 0.0, begin: float = 0, end: float, every: float = 1) -> Schedule:
        """Return the ramp that prunes much early and little late: gradual magnitude pruning's."""
        return cls("cubic", final, initial, begin, end, every)

    @classmethod
    def cosine(cls, final: float, *, initial: float = 0.0, begin: float = 0, end: float, every: float = 1) -> Schedule:
        """Return half a cosine wave from `initial` to `final`."""
        return cls("cosine", final, initial, begin, end, every)

    @classmethod
    def levels(cls, table: tuple[float, ...] | list[float], total: int, begin: int = 0) -> Schedule:
        """Return a staircase: the sparsities of `table`, each for an equal part of `total` positions.

        >>> stairs = Schedule.levels([0.3, 0.6], total=10)
        >>> stairs.at(4), stairs.at(5), [p for p in range(10) if stairs.is_event(p)]
        (0.3, 0.6, [0, 5])
        """
        steps = tuple(float(level) for level in table)
        if not steps:
            raise ValueRangeError(message("a table without levels", "one sparsity or more"))
        return cls("levels", steps[-1], steps[0], begin, begin + total, 1, steps)

    def in_steps(self, steps_per_epoch: int) -> Schedule:
        """Return the same schedule counted in steps, when this one counts epochs (fractions of one are fine)."""
        return replace(
            self,
            begin=self.begin * steps_per_epoch,
            end=self.end * steps_per_epoch,
            every=max(1, self.every * steps_per_epoch),
        )

    def at(self, position: float) -> float:
        """Return the sparsity at `position`: 0 before `begin`, `final` from `end` on."""
        if position < self.begin:
            return 0.0
        if self.shape == "levels":
            return self.table[self._level(position)]
        if position >= self.end:
            return self.final
        progress = (position - self.begin) / (self.end - self.begin)
        return self.initial + (self.final - self.initial) * float(_SHAPES[self.shape](progress))

    def is_event(self, position: int) -> bool:
        """Return whether masks change at `position`: the first at or after each multiple of `every`, and at the end."""
        if position < self.begin or position - 1 >= self.end:
            return False
        if self.shape == "levels":
            starts = (self.begin + start for start in level_starts(int(self.end - self.begin), len(self.table)))
            return any(position - 1 < start <= position for start in starts)
        if position - 1 < self.begin or position >= self.end:
            return True
        # counted exactly: floats would miss or repeat an event where `every` is a fraction
        passed = Fraction(position) - Fraction(self.begin)
        return passed // Fraction(self.every) > (passed - 1) // Fraction(self.every)

    def _level(self, position: float) -> int:
        starts = level_starts(int(self.end - self.begin), len(self.table))
        return sum(start <= position - self.begin for start in starts) - 1

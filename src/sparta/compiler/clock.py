"""How whole models are timed: in rounds in which each takes its turn, so that ratios are paired in time.

A busy machine slows all calls of a round alike, or hits one of them by chance; so two are compared round by round, and
what counts is the median of these ratios with its interval. Medians of one and the other, divided, can be off by any
factor. The clock itself is a function that a test can replace.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparta.measure.timing import compare_own_time
from sparta.specialize.tuning.significance import LEAST_GAIN, Pairs

__all__ = ["Call", "Measure", "Ratio", "Rounds", "interleaved", "machine_load", "ratio_of"]

Call = Callable[[], Any]
Measure = Callable[[Mapping[Any, Call], float], Mapping[Any, Sequence[float]]]
"""Times calls within so many seconds: milliseconds of each, one per round, in the order of the rounds."""

_MOST_ROUNDS = 100
_FEWEST_ROUNDS = 3  # below which nothing is known of the spread


def interleaved(calls: Mapping[Any, Call], seconds: float) -> dict[Any, tuple[float, ...]]:
    """Time calls, one of each per round, without the time in which other processes had the processor.

    With 0 seconds each is called once, and that call counts: for calls that take long and have been made before.

    >>> sorted(interleaved({"a": dict, "b": list}, 0.01))
    ['a', 'b']
    """
    places = {str(number): key for number, key in enumerate(calls)}
    by_place = {place: calls[key] for place, key in places.items()}
    once = not seconds
    how = {"warmup": 0 if once else 2, "iters": 1 if once else _MOST_ROUNDS, "max_seconds": seconds or 1.0}
    found = compare_own_time(by_place, **how, device="cpu")  # type: ignore[arg-type]
    return {key: found[place].samples for place, key in places.items()}


@dataclass(frozen=True)
class Ratio:
    """How many times faster one is than another: the median over rounds and its 95 % interval."""

    value: float
    low: float
    high: float
    rounds: int

    def within(self, factor: float) -> bool:
        """Whether the interval stays within a factor of the median; False where there are too few rounds to tell.

        >>> Ratio(2.0, 1.9, 2.1, 9).within(1.1), Ratio(2.0, 1.0, 40.0, 9).within(1.1), Ratio(2.0, 2.0, 2.0, 1).within(9)
        (True, False, False)
        """
        narrow = self.low * factor >= self.value and self.high <= self.value * factor
        return self.rounds >= _FEWEST_ROUNDS and narrow

    @property
    def sure(self) -> bool:
        """Whether it is faster beyond doubt: by 3 %, and at the lower end of the interval as well."""
        return self.value >= LEAST_GAIN and self.low > 1.0


@dataclass(frozen=True)
class Rounds:
    """Milliseconds of several calls, one of each per round.

    >>> busy = Rounds({"slow": [2.0, 80.0, 2.0], "fast": [1.0, 40.0, 1.0]})
    >>> busy.ratio("slow", "fast").value, busy.median("fast")
    (2.0, 1.0)
    """

    samples: Mapping[Any, Sequence[float]]

    def median(self, key: Hashable) -> float:
        """Return the median of one call."""
        return statistics.median(self.samples[key])

    def ratio(self, slow: Hashable, fast: Hashable) -> Ratio:
        """Return how many times faster `fast` is than `slow`, round by round."""
        return ratio_of(self.samples[slow], self.samples[fast])

    def joined(self, other: Rounds) -> Rounds:
        """Return the rounds of two runs together, of the calls that both timed."""
        return Rounds({key: (*self.samples[key], *more) for key, more in other.samples.items() if key in self.samples})


def ratio_of(slow: Sequence[float], fast: Sequence[float]) -> Ratio:
    """Return the paired ratio of two series of the same rounds."""
    pairs = Pairs(tuple(zip(slow, fast, strict=True)))
    return Ratio(pairs.gain, *pairs.interval, len(slow))


def machine_load() -> str:
    """Return how busy the machine is, in words: ``load 17 on 2 cores``."""
    cores = os.cpu_count() or 1
    try:
        load = os.getloadavg()[0]
    except OSError:
        return f"{cores} cores"
    return f"load {load:.3g} on {cores} cores"

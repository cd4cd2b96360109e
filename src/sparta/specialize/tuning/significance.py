"""Is a candidate really faster than dense? Pairs of calls in turns, until the answer no longer hangs on luck.

The tuner asks this last, of the winners of a search, because whoever wins among many measured in haste was lucky too:
the best few are put in order once more (:func:`ranked`), and then the first must beat dense (:func:`confirm`). A busy
machine slows both calls of a pair alike, so the ratio is taken pair by pair and the median of the ratios is what
counts; where it is near the threshold, more pairs are taken.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

from torch import Tensor

from sparta.measure.timing import Comparison, compare

__all__ = ["LEAST_GAIN", "LOWEST_GAIN", "Pairs", "confirm", "pairs_of", "ranked"]

LEAST_GAIN = 1.03
"""What the median of the paired ratios must reach before anything but dense runs."""
LOWEST_GAIN = 0.97
"""What the gain must not fall below at the lower end of its 95 % interval."""

_BATCH_SECONDS, _BATCH_PAIRS = 0.05, 50
_FEWEST_PAIRS, _MOST_BATCHES = 7, 8
# Calls so long that a batch is one pair of them average the noise themselves: three that all say so are enough.
_FEWEST_LONG_PAIRS, _FAR_ABOVE, _FAR_BELOW = 3, 1.5, 0.9
_RANKING_SECONDS, _RANKING_ROUNDS = 0.15, 50
_DENSE, _CANDIDATE = "dense", "candidate"


@dataclass(frozen=True)
class Pairs:
    """Milliseconds of dense and of a candidate, measured in turns.

    Examples
    --------
    >>> pairs = Pairs(((2.0, 1.0), (20.0, 10.0), (3.0, 1.0)))  # the second pair met a busy machine
    >>> pairs.gain, pairs.dense_milliseconds
    (2.0, 3.0)
    """

    milliseconds: tuple[tuple[float, float], ...]

    @property
    def gain(self) -> float:
        """How many times faster than dense the candidate is: the median of the ratios of the pairs."""
        return statistics.median(self._ratios)

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of that median, from the ranks of the ratios alone; all of them when they are few."""
        ratios, count = sorted(self._ratios), len(self.milliseconds)
        rank = max(0, math.floor(count / 2 - 0.98 * math.sqrt(count)))
        return ratios[rank], ratios[count - 1 - rank]

    @property
    def dense_milliseconds(self) -> float:
        """The median of dense."""
        return statistics.median(dense for dense, _ in self.milliseconds)

    @property
    def won(self) -> bool:
        """Whether the candidate may run instead of dense; one or two pairs must be far above."""
        enough = len(self.milliseconds) >= _FEWEST_LONG_PAIRS or self.gain >= _FAR_ABOVE
        return enough and self.gain >= LEAST_GAIN and self.interval[0] >= LOWEST_GAIN

    @property
    def decided(self) -> bool:
        """Whether there are enough pairs to tell: the interval lies on one side of the threshold."""
        low, high = self.interval
        if _FEWEST_LONG_PAIRS <= len(self.milliseconds) < _FEWEST_PAIRS:
            return low >= _FAR_ABOVE or high < _FAR_BELOW
        return len(self.milliseconds) >= _FEWEST_PAIRS and (low >= LEAST_GAIN or high < LEAST_GAIN)

    @property
    def _ratios(self) -> list[float]:
        # A clock that is too coarse for a call says 0: nothing is known of such a pair.
        return [dense / other if dense > 0 and other > 0 else 1.0 for dense, other in self.milliseconds]


def pairs_of(times: Comparison) -> Pairs:
    """Return the pairs of a comparison of two functions, dense first.

    >>> from sparta.measure.timing import Timing
    >>> pairs_of(Comparison({"dense": Timing((4.0,), "cpu"), "other": Timing((2.0,), "cpu")})).gain
    2.0
    """
    dense, other = (timing.samples for timing in times.timings.values())
    return Pairs(tuple(zip(dense, other, strict=True)))


def confirm(dense: Callable[[], Tensor], candidate: Callable[[], Tensor], max_seconds: float = math.inf) -> Pairs:
    """Time a candidate and dense in turns until it is clear which is faster, or the time is up.

    It takes 50 ms where the answer is clear and 0.4 s where it is not, longer for calls that are longer than that; the
    rest is up to :attr:`Pairs.won`. After `max_seconds` no new batch of pairs begins.

    Examples
    --------
    >>> import torch
    >>> x = torch.rand(64, 64)
    >>> confirm(lambda: x @ x @ x @ x @ x, lambda: x).won
    True
    """
    found, deadline = Pairs(()), perf_counter() + max_seconds
    hurry = max_seconds < _MOST_BATCHES * _BATCH_SECONDS
    for batch in range(_MOST_BATCHES):
        times = compare(
            {_DENSE: dense, _CANDIDATE: candidate},
            warmup=1 if batch or hurry else 5,
            iters=_BATCH_PAIRS,
            max_seconds=_BATCH_SECONDS,
        )
        found = Pairs(found.milliseconds + pairs_of(times).milliseconds)
        if found.decided or perf_counter() >= deadline:
            break
    return found


def ranked(dense: Callable[[], Tensor], candidates: Sequence[Callable[[], Tensor]], max_seconds: float) -> list[int]:
    """Time a few candidates in turns; return their numbers, the fastest first.

    Dense takes its turn as well, so that all find the caches as a model leaves them. It takes 0.15 s, longer for calls
    that are longer than that; with no time left the order stays.

    Examples
    --------
    >>> import torch
    >>> x = torch.rand(64, 64)
    >>> ranked(lambda: x @ x, [lambda: x @ x @ x @ x @ x, lambda: x], 1.0)
    [1, 0]
    """
    order = range(len(candidates))
    if len(order) < 2 or max_seconds <= 0:
        return list(order)
    functions = {_DENSE: dense} | {str(number): candidates[number] for number in order}
    seconds = min(_RANKING_SECONDS, max_seconds)
    times = compare(functions, warmup=1, iters=_RANKING_ROUNDS, max_seconds=seconds)
    return sorted(order, key=lambda number: times[str(number)].median)

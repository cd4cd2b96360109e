"""Is a candidate really faster than dense? Interleaved pairs of calls, until the answer cannot be due to chance.

The tuner asks this last, of the winners of a search, because the best of many that were measured briefly was lucky too:
the best few are put in order once more (:func:`ranked`), and then the first must beat dense (:func:`confirm`). A busy
machine slows both calls of a pair alike, so the ratio is taken pair by pair and the median of the ratios is what
counts; where it is near the threshold, more pairs are taken. Time in which other processes had the processor does not
count (:func:`timed`). A gain that is spread too wide, or larger than the saved work allows, is measured again, and the
quickest calls must bear it out (:func:`settled`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

from torch import Tensor

from sparta.measure.timing import Comparison, compare_own_time

__all__ = ["LEAST_GAIN", "LOWEST_GAIN", "Pairs", "Verdict", "confirm", "pairs_of", "ranked", "settled", "timed"]

LEAST_GAIN = 1.03
"""What the median of the paired ratios must reach before anything but dense runs."""
LOWEST_GAIN = 0.97
"""What the gain must not fall below at the lower end of its 95 % interval."""

_PATIENCE = 4.0  # how many times longer a measurement may take on a busy machine, so that it gets the calls it needs
_BATCH_SECONDS, _BATCH_PAIRS = 0.05, 50
_FEWEST_PAIRS, _MOST_BATCHES = 7, 8
# Calls so long that a batch is one pair of them average the noise themselves: three that all say so are enough.
_FEWEST_LONG_PAIRS, _FAR_ABOVE, _FAR_BELOW = 3, 1.5, 0.9
_WIDEST = 1.5  # how far the ends of an interval may lie apart
_MORE_LOOKS = 2
_ALIKE, _CLEARLY_FASTER = 1.25, 1.1  # of gains by the quickest calls
_RANKING_SECONDS, _RANKING_ROUNDS = 0.15, 50
_DENSE, _CANDIDATE = "dense", "candidate"


@dataclass(frozen=True)
class Pairs:
    """Milliseconds of dense and of a candidate, measured interleaved.

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
    def stable(self) -> bool:
        """Whether the ratios agree so well that the gain may be called a fact."""
        low, high = self.interval
        return high <= _WIDEST * low

    @property
    def quiet(self) -> tuple[float, float]:
        """Milliseconds of dense and of the candidate when the machine did little else: of the quickest calls of 20.

        Medians of a busy machine tell how it shares its processors; its quickest calls are those it left alone.
        """
        dense, other = (sorted(times)[len(self.milliseconds) // 20] for times in zip(*self.milliseconds, strict=True))
        return dense, other

    @property
    def quiet_gain(self) -> float:
        """The gain by those times."""
        dense, other = self.quiet
        return dense / other if dense > 0 and other > 0 else 1.0

    @property
    def likely_gain(self) -> float:
        """The gain by the paired ratios where they agree, else by the quickest calls; it puts candidates in order."""
        return self.gain if self.stable else self.quiet_gain

    @property
    def _ratios(self) -> list[float]:
        # A clock that is too coarse for a call says 0: nothing is known of such a pair.
        return [dense / other if dense > 0 and other > 0 else 1.0 for dense, other in self.milliseconds]


def timed(functions: Mapping[str, Callable[[], Tensor]], *, warmup: int, iters: int, seconds: float) -> Comparison:
    """Time functions interleaved, by the time that is their own, until they have had so many seconds of it.

    Examples
    --------
    >>> times = timed({"one": lambda: Tensor([1.0])}, warmup=1, iters=3, seconds=1.0)
    >>> len(times["one"].samples)
    3
    """
    return compare_own_time(functions, warmup=warmup, iters=iters, max_seconds=seconds, patience=_PATIENCE)


def pairs_of(times: Comparison) -> Pairs:
    """Return the pairs of a comparison of two functions, dense first.

    >>> from sparta.measure.timing import Timing
    >>> pairs_of(Comparison({"dense": Timing((4.0,), "cpu"), "other": Timing((2.0,), "cpu")})).gain
    2.0
    """
    dense, other = (timing.samples for timing in times.timings.values())
    return Pairs(tuple(zip(dense, other, strict=True)))


def confirm(
    dense: Callable[[], Tensor],
    candidate: Callable[[], Tensor],
    max_seconds: float = math.inf,
    *,
    thorough: bool = False,
) -> Pairs:
    """Time a candidate and dense interleaved until it is clear which is faster, or the time is up.

    It takes 50 ms where the answer is clear and 0.4 s where it is not, longer for calls that are longer than that; the
    rest is up to :attr:`Pairs.won`. After `max_seconds` no new batch of pairs begins. A thorough look takes as many
    pairs as where the answer is not clear.

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
        both, warmup = {_DENSE: dense, _CANDIDATE: candidate}, 1 if batch or hurry else 5
        times = timed(both, warmup=warmup, iters=_BATCH_PAIRS, seconds=_BATCH_SECONDS)
        found = Pairs(found.milliseconds + pairs_of(times).milliseconds)
        if (found.decided and not thorough) or perf_counter() >= deadline:
            break
    return found


@dataclass(frozen=True)
class Verdict:
    """What is known of a candidate in the end.

    Attributes
    ----------
    gain, dense_milliseconds
        How many times faster than dense it is, and how long dense takes.
    won
        Whether it may run instead of dense.
    decided
        Whether there was enough to tell.
    stable
        Whether measuring again would say the same: only then is the gain a fact.
    """

    gain: float
    dense_milliseconds: float
    won: bool
    decided: bool
    stable: bool

    @staticmethod
    def of(pairs: Pairs, *, stable: bool) -> Verdict:
        """Return what paired ratios say."""
        return Verdict(pairs.gain, pairs.dense_milliseconds, pairs.won, pairs.decided, stable)


def settled(
    dense: Callable[[], Tensor], candidate: Callable[[], Tensor], max_seconds: float = math.inf, roof: float = math.inf
) -> Verdict:
    """Time a candidate and dense as :func:`confirm` does, and once more where the outcome is hard to believe.

    That is where the ratios are spread wide, and where the gain is above `roof`. If the second look is no better, there
    is a third, and the quickest calls of both decide: whatever disturbs a call only makes it longer. The gain is
    claimed if either half of the pairs says the same and leaves no doubt which is faster.

    Examples
    --------
    >>> import torch
    >>> x = torch.rand(64, 64)
    >>> settled(lambda: x @ x @ x @ x @ x, lambda: x @ x).won
    True
    """
    deadline = perf_counter() + max_seconds
    found = confirm(dense, candidate, max_seconds)
    if found.stable and (found.gain <= roof or not found.won):
        return Verdict.of(found, stable=True)
    pool: tuple[tuple[float, float], ...] = ()
    for _ in range(_MORE_LOOKS):
        if perf_counter() >= deadline:
            break
        found = confirm(dense, candidate, deadline - perf_counter(), thorough=True)
        if found.stable and found.gain <= roof:
            return Verdict.of(found, stable=True)
        pool += found.milliseconds
    if len(pool) < _FEWEST_PAIRS:
        return Verdict.of(found, stable=False)
    return _by_quickest(Pairs(pool))


def _by_quickest(pairs: Pairs) -> Verdict:
    """Return what the quickest calls say, of pairs that do not agree; every other pair is a half of them."""
    gain, halves = pairs.quiet_gain, [Pairs(pairs.milliseconds[half::2]).quiet_gain for half in range(2)]
    alike = max(halves) <= _ALIKE * min(halves)
    if alike and min(halves) >= _CLEARLY_FASTER:
        return Verdict(gain, pairs.quiet[0], won=True, decided=True, stable=True)
    if alike and max(halves) <= LOWEST_GAIN:
        return Verdict(gain, pairs.quiet[0], won=False, decided=True, stable=True)
    won = gain >= LEAST_GAIN and min(halves) >= LOWEST_GAIN
    return Verdict(gain, pairs.quiet[0], won, decided=False, stable=False)


def ranked(dense: Callable[[], Tensor], candidates: Sequence[Callable[[], Tensor]], max_seconds: float) -> list[int]:
    """Time a few candidates interleaved; return their numbers, the fastest first.

    Dense takes its turn as well: each is compared with the dense call beside it, and all find the caches as a model
    leaves them. It takes 0.15 s, longer for calls
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
    times = timed(functions, warmup=1, iters=_RANKING_ROUNDS, seconds=seconds)
    gains = [Pairs(tuple(zip(times[_DENSE].samples, times[str(n)].samples, strict=True))).likely_gain for n in order]
    return sorted(order, key=lambda number: -gains[number])

"""The solver: one option per group, the least cost for every amount of time.

Groups are added one after the other, and of all sums of times and costs only those stay that no other beats in both:
the Pareto front. So one run answers every question about speed, and each answer is the exact optimum of the table. When
a front has more than :data:`MOST` points, the cheapest of each of so many equal steps of time stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["MOST", "Front", "front_of"]

MOST = 20_000
_Floats = NDArray[np.float64]
_Indices = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Front:
    """All best answers, the fastest first.

    Parameters
    ----------
    times, costs
        Of each point; times grow and costs fall.
    """

    times: _Floats
    costs: _Floats
    _steps: tuple[tuple[_Indices, _Indices], ...]

    def within(self, time: float) -> int | None:
        """Return the point of least cost that takes no more than `time`; None where none does."""
        place = int(np.searchsorted(self.times, time * (1 + 1e-12), side="right")) - 1
        return place if place >= 0 else None

    def costing(self, cost: float) -> int | None:
        """Return the fastest point that costs no more than `cost`; None where none does."""
        found = np.nonzero(self.costs <= cost * (1 + 1e-12))[0]
        return int(found[0]) if len(found) else None

    def chosen(self, point: int) -> list[int]:
        """Return the option of each group at a point."""
        picks: list[int] = []
        for parents, options in reversed(self._steps):
            picks.append(int(options[point]))
            point = int(parents[point])
        return picks[::-1]

    def __len__(self) -> int:
        return len(self.times)


def front_of(groups: Sequence[Sequence[tuple[float, float]]], most: int = MOST) -> Front:
    """Return the front of groups, each a list of (time, cost) of which one is chosen.

    >>> front = front_of([[(4.0, 0.0), (1.0, 2.0)], [(3.0, 0.0), (2.0, 5.0)]])
    >>> front.times.tolist(), front.costs.tolist()
    ([3.0, 4.0, 7.0], [7.0, 2.0, 0.0])
    """
    times, costs = np.zeros(1), np.zeros(1)
    steps: list[tuple[_Indices, _Indices]] = []
    for options in groups:
        table = np.asarray(options, dtype=np.float64).reshape(-1, 2)
        parents = np.repeat(np.arange(len(times)), len(table))
        picks = np.tile(np.arange(len(table)), len(times))
        all_times, all_costs = times[parents] + table[picks, 0], costs[parents] + table[picks, 1]
        kept = _best(all_times, all_costs, most)
        times, costs = all_times[kept], all_costs[kept]
        steps.append((parents[kept], picks[kept]))
    return Front(times, costs, tuple(steps))


def _best(times: _Floats, costs: _Floats, most: int) -> _Indices:
    """Return the places of what nothing beats in both, in the order of time."""
    order = np.lexsort((costs, times))
    lowest = np.minimum.accumulate(costs[order])
    first = np.r_[True, lowest[1:] < lowest[:-1]]
    kept: _Indices = order[first]
    if len(kept) <= most:
        return kept
    start, end = times[kept[0]], times[kept[-1]]
    step = np.minimum(((times[kept] - start) * (most / (end - start))).astype(np.int64), most - 1)
    last = np.r_[step[1:] != step[:-1], True]  # the cheapest of a step is its last
    last[0] = True  # and the fastest of all stays
    return kept[last]

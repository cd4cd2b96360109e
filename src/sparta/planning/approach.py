"""The approach: which combination is measured next, so that what was asked is met closely and no accuracy given away.

The compiled model with nothing changed comes first, then what the table says. From there on measured wholes decide: of
those that are faster than asked and those that are slower, two enclose the answer, and the next one lies between them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sparta.planning.bench import Whole
from sparta.planning.options import DENSE, Option
from sparta.planning.result import Goal
from sparta.planning.solve import Front
from sparta.planning.table import Assignment, Table, picked

__all__ = ["Point", "following", "solved"]

Point = tuple[Assignment, Whole, float]
"""What layers became, what that measured, and its estimated loss."""

_AIM = 1.005  # times what was asked: a little more, so that chance does not miss it
_NEAREST = 200  # points of the front that are looked at
_APART = 0.003  # of the time: what lies nearer to another cannot be told from it


def solved(table: Table, goal: Goal) -> Assignment:
    """Return the best assignment by the table; the fastest, or smallest, where the goal is out of its reach."""
    front, bundles = table.front(memory=goal.memory_mb is not None)
    if goal.memory_mb is not None:
        place = front.within(goal.memory_mb - table.rest_mb)
    elif goal.max_loss is not None:
        place = front.costing(goal.max_loss**2)
    else:
        asked = goal.asked_ms(table.given_ms)
        place = None if asked is None else front.within(asked - table.rest_ms)
    return picked(bundles, front.chosen(0 if place is None else place))


def following(table: Table, goal: Goal, points: Sequence[Point]) -> Assignment | None:
    """Return what to measure next; None where nothing is left that could be nearer to the goal."""
    if not points and goal.asked_ms(table.given_ms) is not None:
        return {}  # compiling alone makes it faster: all else is to be seen from there
    found = solved(table, goal)
    known = [assignment for assignment, _, _ in points]
    if not points or goal.max_loss is not None:
        return None if found in known else found
    if not any(goal.met(whole) for _, whole, _ in points):
        front, bundles = table.front(memory=goal.memory_mb is not None)
        attempts = [found, picked(bundles, front.chosen(0)), *_extremes(table)]
        return next((attempt for attempt in attempts if attempt not in known), None)
    return _between(table, goal, points)


def _extremes(table: Table) -> list[Assignment]:
    """Return every layer rounded alone, and in its fastest option, by precision: the table's sums may be wrong."""
    options = {option for times in table.times.values() for option in times if option != DENSE}
    kinds = {(option.precision, prunes) for option in options for prunes in (option.prunes, True)}
    found: list[Assignment] = []
    for precision, prunes in sorted(kinds, key=lambda kind: (kind[1], kind[0] is None, str(kind[0]))):
        assignment: dict[str, Option] = {}
        for group in table.groups:
            for unit in group.units:
                option = table.fastest(unit, precision, prunes=prunes)
                assignment |= {} if option is None else dict.fromkeys(unit, option)
        found.append(assignment)
    return found


def _between(table: Table, goal: Goal, points: Sequence[Point]) -> Assignment | None:
    """Return an assignment between the one of least loss that meets a goal and those of less loss that do not.

    Losses do not change with what is measured, so they put assignments in order whatever the table says of times.
    """
    met = [goal.met(whole) for _, whole, _ in points]
    fast = min((point for point, good in zip(points, met, strict=True) if good), key=lambda point: point[2])
    slow = [point for point, good in zip(points, met, strict=True) if not good and point[2] < fast[2]]
    nearest = max(slow, key=lambda point: point[2], default=None)
    front, bundles = table.front(memory=goal.memory_mb is not None)
    least = 0.0 if nearest is None else nearest[2]
    losses = np.sqrt(front.costs)
    places = np.nonzero((losses < fast[2]) & (losses >= least if nearest is None else losses > least))[0]
    if not len(places):
        return None
    times = front.times[places]
    begin, end = float(times[0]), float(times[-1])
    ours = 1 / (goal.reached(fast[1]) or 1.0)
    theirs = _undone(table, goal) if nearest is None else 1 / (goal.reached(nearest[1]) or 1.0)
    if len(met) > 2 and met[-1] == met[-2]:
        share = 0.5  # the straight line between the two does not lead there quickly
    else:
        share = (1 / _AIM - ours) / (theirs - ours) if theirs > ours else 0.5
    aim = begin + (end - begin) * min(max(share, 0.0), 1.0)
    known = [assignment for assignment, _, _ in points]
    ends = [_axis(front, losses, point) for point in (fast, nearest) if point is not None]
    for place in sorted(places.tolist(), key=lambda place: abs(float(front.times[place]) - aim))[:_NEAREST]:
        time = float(front.times[place])
        found = picked(bundles, front.chosen(place))
        if found not in known and all(abs(time - other) > _APART * other for other in ends):
            return found
    return None


def _axis(front: Front, losses: NDArray[np.float64], point: Point) -> float:
    """Return the time of the front at the loss of a point."""
    return float(front.times[int(np.argmin(np.abs(losses - point[2])))])


def _undone(table: Table, goal: Goal) -> float:
    """Return the time, or memory, of the model as given over what was asked."""
    if goal.memory_mb is not None:
        return table.given_mb / goal.memory_mb
    return table.given_ms / (goal.asked_ms(table.given_ms) or table.given_ms)

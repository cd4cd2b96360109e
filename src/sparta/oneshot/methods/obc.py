"""OBC: the exact greedy. One unit at a time, always the one whose removal costs least after the best update.

Rows (bands of rows for blocks) are independent of each other, so the whole trace of each is computed and the counts
per band follow from the costs. The time grows with rows times columns cubed: it is for small layers.
"""

from __future__ import annotations

import heapq

import torch
from torch import Tensor

from sparta.errors import PatternError, message
from sparta.oneshot.methods.base import method
from sparta.oneshot.methods.least_squares import exact_fit
from sparta.oneshot.problem import Problem, Solution, Units

__all__ = ["obc"]


@method("obc")
def obc(problem: Problem) -> Solution:
    """Remove units one at a time, then fit the values of those that stay."""
    units = problem.units
    if units is None:
        raise PatternError(
            message(
                f"method 'obc' with the pattern {problem.pattern} on the shape {problem.layout.shape}",
                "unstructured, N:M and blocks over outputs and inputs",
                "use method 'alps' or 'sparsegpt'",
            )
        )
    bands, traces = [], []
    for group, hessian in enumerate(problem.hessian):
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
        for first in range(0, problem.weight.shape[1], units.height):
            rows = problem.weight[group, first : first + units.height].double()
            bands.append((group, slice(first, first + units.height)))
            traces.append(_trace(rows, inverse.clone(), units))
    removed = _shares([[cost for _, cost in trace] for trace in traces], problem.count)
    mask = torch.ones_like(problem.weight, dtype=torch.bool)
    for (group, band), trace, count in zip(bands, traces, removed, strict=True):
        gone = torch.zeros(units.count, dtype=torch.bool, device=mask.device)
        gone[[unit for unit, _ in trace[:count]]] = True
        mask[group, band] = ~gone[units.column_unit]
    return Solution(mask, exact_fit(problem, mask))


def _trace(rows: Tensor, inverse: Tensor, units: Units) -> list[tuple[int, float]]:
    """Return the units of one band in the order of their removal, each with what its removal cost."""
    rows = rows.clone()
    columns = [(units.column_unit == unit).nonzero().flatten() for unit in range(units.count)]
    left = set(range(units.count))
    group_of = _groups(units, columns)
    room = [group_of.count(group) - units.quota for group in range(max(group_of) + 1)] if group_of else []
    trace: list[tuple[int, float]] = []
    while left:
        free = [unit for unit in sorted(left) if not group_of or room[group_of[unit]] > 0]
        if not free:
            break
        costs = _costs(rows, inverse, [columns[unit] for unit in free])
        best = int(costs.argmin())
        unit, where = free[best], columns[free[best]]
        solved = torch.linalg.solve(inverse[where][:, where], inverse[where])
        rows -= rows[:, where] @ solved
        inverse -= inverse[:, where] @ solved
        rows[:, where] = 0
        trace.append((unit, float(costs[best])))
        left.remove(unit)
        if group_of:
            room[group_of[unit]] -= 1
    return trace


def _costs(rows: Tensor, inverse: Tensor, columns: list[Tensor]) -> Tensor:
    """Return what the removal of each set of columns costs, summed over the rows."""
    if all(len(where) == 1 for where in columns):
        where = torch.cat(columns)
        return rows[:, where].square().sum(0) / inverse[where, where]
    return torch.stack(
        [(rows[:, where] * torch.linalg.solve(inverse[where][:, where], rows[:, where].T).T).sum() for where in columns]
    )


def _groups(units: Units, columns: list[Tensor]) -> list[int]:
    if units.column_group is None:
        return []
    return [int(units.column_group[where[0]]) for where in columns]


def _shares(costs: list[list[float]], count: int | None) -> list[int]:
    """Return how many units each band gives: the cheapest next removal first, or all of each trace."""
    if count is None:
        return [len(trace) for trace in costs]
    removed = [0] * len(costs)
    waiting = [(trace[0], band) for band, trace in enumerate(costs) if trace]
    heapq.heapify(waiting)
    for _ in range(count):
        _, band = heapq.heappop(waiting)
        removed[band] += 1
        if removed[band] < len(costs[band]):
            heapq.heappush(waiting, (costs[band][removed[band]], band))
    return removed

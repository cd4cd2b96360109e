"""OBC: the exact greedy. One unit at a time, always the one whose removal costs least after the best update.

Rows (bands of rows for blocks) are independent of each other, so the whole trace of each is computed and the counts
per band follow from the costs; every other density follows from the same traces. The time grows with rows times columns
cubed: it is for small layers.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparta.errors import PatternError, ValueRangeError, message
from sparta.oneshot.methods.base import method
from sparta.oneshot.methods.least_squares import exact_fit
from sparta.oneshot.problem import Problem, Solution, Units

__all__ = ["obc", "obc_path"]

Trace = list[tuple[int, float]]
_BUDGET = 2**24  # elements of the inverses that are held at once


@method("obc")
def obc(problem: Problem) -> Solution:
    """Remove units one at a time, then fit the values of those that stay."""
    (found,) = obc_path(problem, [problem.count])
    return found


def obc_path(problem: Problem, counts: Sequence[int | None]) -> list[Solution]:
    """Return a solution for each number of units to prune, all from one pass.

    Parameters
    ----------
    problem
        The layer. Its own number of units to prune counts for nothing here.
    counts
        How many units to prune; None prunes as many as the pattern lets go (those of N:M).

    Examples
    --------
    >>> from sparta.tesa.patterns import Unstructured
    >>> problem = Problem.of(torch.eye(4), torch.eye(4), Unstructured(), 0.5)
    >>> [int(found.mask.sum()) for found in obc_path(problem, [0, 4, 12])]
    [16, 12, 4]
    """
    units = problem.units
    if units is None:
        raise PatternError(
            message(
                f"method 'obc' with the pattern {problem.pattern} on the shape {problem.layout.shape}",
                "unstructured, N:M and blocks over outputs and inputs",
                "use method 'alps' or 'sparsegpt'",
            )
        )
    most = _bands_of(problem.weight, units) * int(_room(units)[1].sum())
    for count in counts:
        if count is not None and not 0 <= count <= most:
            raise ValueRangeError(message(f"{count} units of {most}", "as many as there are, or fewer"))
    bands: list[tuple[int, slice]] = []
    traces: list[Trace] = []
    for group, hessian in enumerate(problem.hessian):
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
        rows = problem.weight[group].double()
        bands += [(group, slice(first, first + units.height)) for first in range(0, len(rows), units.height)]
        traces += _traces(rows, inverse, units)
    costs = [[cost for _, cost in trace] for trace in traces]
    masks = [_mask(problem, units, bands, traces, _shares(costs, count)) for count in counts]
    return [Solution(mask, exact_fit(problem, mask)) for mask in masks]


def _mask(
    problem: Problem, units: Units, bands: Sequence[tuple[int, slice]], traces: Sequence[Trace], removed: Sequence[int]
) -> Tensor:
    """Return the mask in which so many units of each band are gone, the first of its trace."""
    mask = torch.ones_like(problem.weight, dtype=torch.bool)
    for (group, band), trace, count in zip(bands, traces, removed, strict=True):
        gone = torch.zeros(units.count, dtype=torch.bool, device=mask.device)
        gone[[unit for unit, _ in trace[:count]]] = True
        mask[group, band] = ~gone[units.column_unit]
    return mask


def _bands_of(weight: Tensor, units: Units) -> int:
    groups, rows, _ = weight.shape
    return groups * -(-rows // units.height)


def _room(units: Units) -> tuple[Tensor, Tensor]:
    """Return the group of each unit of a band, and how many units each group may lose."""
    groups = units.column_group if units.column_group is not None else torch.zeros_like(units.column_unit)
    if units.count < len(groups):  # units of several columns are of one group, and there is no quota
        groups = groups.new_zeros(units.count)
    return groups, (torch.bincount(groups) - units.quota).clamp(min=0)


def _traces(rows: Tensor, inverse: Tensor, units: Units) -> list[Trace]:
    """Return for each band its units in the order of their removal, each with what its removal cost."""
    if units.count < rows.shape[1]:
        return [_trace(band.clone(), inverse.clone(), units) for band in torch.split(rows, units.height)]
    bands = pad(rows, (0, 0, 0, -len(rows) % units.height)).view(-1, units.height, rows.shape[1])
    at_once = max(1, _BUDGET // inverse.numel())
    return [trace for some in torch.split(bands, at_once) for trace in _column_traces(some.clone(), inverse, units)]


def _column_traces(rows: Tensor, inverse: Tensor, units: Units) -> list[Trace]:
    """Return the traces of several bands, ``(bands, height, columns)``, whose units are single columns."""
    count, _, columns = rows.shape
    inverses = inverse.expand(count, columns, columns).clone()
    band = torch.arange(count, device=rows.device)
    closed = torch.zeros(count, columns, dtype=torch.bool, device=rows.device)
    groups, room = _room(units)
    steps, room = int(room.sum()), room.repeat(count, 1)
    order, costs = [], []
    for _ in range(steps):
        cost = rows.square().sum(1) / inverses.diagonal(dim1=1, dim2=2)
        least, unit = cost.masked_fill(closed | (room[:, groups] == 0), torch.inf).min(1)
        column = inverses[band, :, unit]
        pivot = column[band, unit]
        rows -= (rows[band, :, unit] / pivot.unsqueeze(1)).unsqueeze(2) * column.unsqueeze(1)
        inverses -= column.unsqueeze(2) * (column / pivot.unsqueeze(1)).unsqueeze(1)
        rows[band, :, unit] = 0
        closed[band, unit] = True
        room[band, groups[unit]] -= 1
        order.append(unit)
        costs.append(least)
    if not order:
        return [[] for _ in range(count)]
    removed, paid = torch.stack(order, 1).tolist(), torch.stack(costs, 1).tolist()
    return [list(zip(units_of, costs_of, strict=True)) for units_of, costs_of in zip(removed, paid, strict=True)]


def _trace(rows: Tensor, inverse: Tensor, units: Units) -> Trace:
    """Return the trace of one band whose units are several columns wide."""
    columns = {unit: (units.column_unit == unit).nonzero().flatten() for unit in range(units.count)}
    trace: Trace = []
    while columns:
        costs = {unit: _cost(rows, inverse, where) for unit, where in columns.items()}
        unit = min(costs, key=lambda each: costs[each])
        where = columns.pop(unit)
        solved = torch.linalg.solve(inverse[where][:, where], inverse[where])
        rows -= rows[:, where] @ solved
        inverse -= inverse[:, where] @ solved
        rows[:, where] = 0
        trace.append((unit, costs[unit]))
    return trace


def _cost(rows: Tensor, inverse: Tensor, where: Tensor) -> float:
    """Return what the removal of some columns costs, summed over the rows."""
    return float((rows[:, where] * torch.linalg.solve(inverse[where][:, where], rows[:, where].T).T).sum())


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

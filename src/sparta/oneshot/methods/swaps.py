"""Swaps: a mask is improved by exchanging a pruned unit for a kept one as long as that lowers the layer's error.

The error of a mask is a quadratic form on its pruned units, so the gain of every exchange is known exactly. Each one
taken lowers the error, so the result is never worse than the start.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparta.errors import PatternError, message
from sparta.oneshot.methods.base import method
from sparta.oneshot.methods.least_squares import no_worse, refit
from sparta.oneshot.methods.wanda import wanda
from sparta.oneshot.problem import Problem, Solution, Units

__all__ = ["improve", "swaps"]

_MOST = 100  # exchanges per band
_BUDGET = 2**24  # elements of the quadratic forms that are held at once


@method("swaps")
def swaps(problem: Problem) -> Solution:
    """Start from Wanda's mask, exchange, and fit the values."""
    mask = improve(problem, wanda(problem).mask)
    return no_worse(problem, Solution(mask, refit(problem, mask, problem.weight * mask)))


def improve(problem: Problem, mask: Tensor) -> Tensor:
    """Return a mask of the same counts per row and group whose error, without an update of weights, is no higher."""
    units = problem.units
    if units is None:
        raise PatternError(
            message(
                f"method 'swaps' with the pattern {problem.pattern} on the shape {problem.layout.shape}",
                "unstructured, N:M and blocks over outputs and inputs",
                "use method 'alps' or 'sparsegpt'",
            )
        )
    result = mask.clone()
    bands = max(1, _BUDGET // (units.height * units.column_unit.numel() ** 2))
    for group, hessian in enumerate(problem.hessian):
        for first in range(0, mask.shape[1], bands * units.height):
            rows = slice(first, first + bands * units.height)
            result[group, rows] = _improve_rows(problem.weight[group, rows].double(), hessian, mask[group, rows], units)
    return result


def _improve_rows(weight: Tensor, hessian: Tensor, mask: Tensor, units: Units) -> Tensor:
    forms = _forms(weight, hessian, units)
    first_rows = torch.arange(0, len(weight), units.height, device=weight.device)
    first_columns = torch.stack([(units.column_unit == unit).nonzero()[0, 0] for unit in range(units.count)])
    pruned = ~mask[first_rows][:, first_columns]
    allowed = None
    if units.column_group is not None:
        group = units.column_group[first_columns]
        allowed = group[:, None] == group[None, :]
    own = forms.diagonal(dim1=1, dim2=2)
    tolerance = 1e-12 * own.sum(1)
    for _ in range(_MOST):
        pull = (forms @ pruned.double().unsqueeze(2)).squeeze(2)
        back = (own - 2 * pull).masked_fill(~pruned, torch.inf)
        drop = (own + 2 * pull).masked_fill(pruned, torch.inf)
        change = back.unsqueeze(2) + drop.unsqueeze(1) - 2 * forms
        if allowed is not None:
            change.masked_fill_(~allowed, torch.inf)
        lowest, where = change.flatten(1).min(1)
        better = (lowest < -tolerance).nonzero().flatten()
        if not len(better):
            break
        pruned[better, where[better] // units.count] = False
        pruned[better, where[better] % units.count] = True
    rows = torch.arange(len(weight), device=weight.device) // units.height
    return ~pruned[rows][:, units.column_unit]


def _forms(weight: Tensor, hessian: Tensor, units: Units) -> Tensor:
    """Return the quadratic form of each band on its units: entry (p, k) is what p and k cost together."""
    short = -len(weight) % units.height
    bands = torch.nn.functional.pad(weight, (0, 0, 0, short)).view(-1, units.height, weight.shape[1])
    forms = (bands.transpose(1, 2) @ bands) * hessian
    if units.count == weight.shape[1]:
        return forms
    member = torch.nn.functional.one_hot(units.column_unit, units.count).double()
    return member.T @ forms @ member

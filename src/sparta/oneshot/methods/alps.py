"""ALPS: the support is found by ADMM with the pattern's exact projection, the values by conjugate gradients.

The Gram matrix, scaled to a unit diagonal, is decomposed once; after that an iteration is two matrix products and one
projection, and only the projection knows the pattern. The penalty grows until the support stands still. The support
that it started from, the largest scaled weights, is fitted too, and the better of the two is taken.
"""

from __future__ import annotations

import torch

from sparta.oneshot.methods.base import method
from sparta.oneshot.methods.least_squares import no_worse, refit
from sparta.oneshot.problem import Problem, Solution

__all__ = ["alps"]

_START, _EVERY, _MOST = 0.1, 3, 300  # penalty, iterations between its changes, iterations at most
_GROWTH = ((0.1, 1.3), (0.005, 1.2), (0.0, 1.1))  # by the share of kept weights that changed


@method("alps")
def alps(problem: Problem) -> Solution:
    """Alternate between least squares and projection, then fit the values on the support."""
    dtype = problem.weight.dtype
    scale = problem.hessian.diagonal(dim1=1, dim2=2).sqrt().unsqueeze(1)
    values, vectors = problem.once("eigen", lambda: torch.linalg.eigh(problem.hessian / scale / scale.transpose(1, 2)))
    values, vectors = values.to(dtype).unsqueeze(1), vectors.to(dtype)
    scaled = problem.weight * scale.to(dtype)
    aim = ((scaled @ vectors) * values) @ vectors.transpose(1, 2)
    mask = first = problem.select(scaled.square())
    projected, dual, penalty, last = scaled * mask, torch.zeros_like(scaled), _START, mask
    kept = max(1, int(mask.sum()))
    for iteration in range(1, _MOST + 1):
        solved = ((aim - dual + penalty * projected) @ vectors / (values + penalty)) @ vectors.transpose(1, 2)
        shifted = solved + dual / penalty
        mask = problem.select(shifted.square())
        projected = shifted * mask
        dual += penalty * (solved - projected)
        if iteration % _EVERY:
            continue
        changed = int((mask & ~last).sum())
        last = mask
        if not changed:
            break
        penalty *= next(factor for share, factor in _GROWTH if changed >= share * kept)
    found = Solution(mask, refit(problem, mask, projected / scale.to(dtype)))
    start = Solution(first, refit(problem, first, problem.weight))
    return no_worse(problem, min((found, start), key=lambda solution: _cost(problem, solution)))


def _cost(problem: Problem, solution: Solution) -> float:
    change = (solution.weight - problem.weight).double()
    return float(((change @ problem.hessian) * change).sum())

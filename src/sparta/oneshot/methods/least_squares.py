"""Least squares on a fixed support: the best values of the weights that stay.

Conjugate gradients do it for all rows at once, each row with its own support; :func:`exact_fit` solves every row
directly and is for small layers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparta.oneshot.methods.magnitude import magnitude
from sparta.oneshot.problem import Problem, Solution

__all__ = ["exact_fit", "no_worse", "refit"]


def refit(problem: Problem, mask: Tensor, start: Tensor, steps: int = 20) -> Tensor:
    """Return weights on `mask` that reproduce the layer's output better, by conjugate gradients from `start`.

    The columns are scaled to a Gram matrix of unit diagonal first, which is what makes few steps enough.
    """
    dtype = problem.weight.dtype
    scale = problem.hessian.diagonal(dim1=1, dim2=2).sqrt().unsqueeze(1)
    hessian = (problem.hessian / scale / scale.transpose(1, 2)).to(dtype)
    scale = scale.to(dtype)
    target, support = problem.weight * scale, mask.to(dtype)
    x = start * support * scale
    residual = ((target - x) @ hessian) * support
    direction = residual.clone()
    size = residual.square().sum(2, keepdim=True)
    tiny = torch.finfo(dtype).tiny
    for _ in range(steps):
        image = (direction @ hessian) * support
        step = size / (direction * image).sum(2, keepdim=True).clamp(min=tiny)
        x += step * direction
        residual -= step * image
        following = residual.square().sum(2, keepdim=True)
        direction = residual + following / size.clamp(min=tiny) * direction
        size = following
    return x * support / scale


def exact_fit(problem: Problem, mask: Tensor) -> Tensor:
    """Return the least-squares weights on `mask`, row by row in float64."""
    result = torch.zeros_like(problem.weight)
    for group, hessian in enumerate(problem.hessian):
        target = problem.weight[group].double() @ hessian
        for row, support in enumerate(mask[group]):
            kept = support.nonzero().flatten()
            if len(kept):
                factor = torch.linalg.cholesky(hessian[kept][:, kept])
                solved = torch.cholesky_solve(target[row, kept].unsqueeze(1), factor)
                result[group, row, kept] = solved.squeeze(1).to(result.dtype)
    return result


def no_worse(problem: Problem, found: Solution) -> Solution:
    """Return a solution whose error is never above that of pruning by magnitude: almost always `found` itself."""
    plain = magnitude(problem)
    most = problem.loss(plain.weight)
    if problem.loss(found.weight) <= most:
        return found
    fitted = Solution(plain.mask, refit(problem, plain.mask, plain.weight))
    return fitted if problem.loss(fitted.weight) <= most else plain

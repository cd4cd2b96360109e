"""SparseGPT: columns are pruned from left to right, and what is still to come makes up for what was removed.

The inverse of the damped Gram matrix is factored once in float64; its Cholesky rows are the optimal updates of the
columns that remain. Which weights go is decided block by block of columns, with the weights as updated so far.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from sparta.oneshot.methods.base import method
from sparta.oneshot.problem import Problem, Solution
from sparta.tesa.patterns import Block, Pattern

__all__ = ["sparsegpt"]


@method("sparsegpt")
def sparsegpt(problem: Problem) -> Solution:
    """Sweep over the columns with optimal updates of those that follow."""
    inverse = problem.once("inverse", lambda: torch.cholesky_inverse(torch.linalg.cholesky(problem.hessian)))
    factor = problem.once("factor", lambda: torch.linalg.cholesky(inverse, upper=True)).to(problem.weight.dtype)
    blocks = problem.steps()
    weight = problem.weight.clone()
    mask = torch.ones_like(weight, dtype=torch.bool)
    if blocks is None:  # slices and other axes: chosen at once, by the loss of each weight alone
        cost = problem.weight.square() / inverse.diagonal(dim1=1, dim2=2).unsqueeze(1).to(weight.dtype)
        mask = problem.select(cost)
        blocks = [[(first, min(first + 128, weight.shape[2]))] for first in range(0, weight.shape[2], 128)]
        chooser = None
    else:
        chooser = _Chooser(problem)
    for steps in blocks:
        start, stop = steps[0][0], steps[-1][1]
        errors = torch.zeros_like(weight[:, :, start:stop])
        for first, last in steps:
            if chooser is not None:
                diagonal = factor[:, first:last, first:last].diagonal(dim1=1, dim2=2).unsqueeze(1)
                mask[:, :, first:last] = chooser(weight[:, :, first:last].square() / diagonal.square())
            for column in range(first, last):
                kept = weight[:, :, column] * mask[:, :, column]
                error = (weight[:, :, column] - kept) / factor[:, column, column].unsqueeze(1)
                weight[:, :, column:stop] -= error.unsqueeze(2) * factor[:, column : column + 1, column:stop]
                errors[:, :, column - start] = error
        weight[:, :, stop:] -= errors @ factor[:, start:stop, stop:]
    return Solution(mask, weight * mask)


class _Chooser:
    """Chooses the mask of the next columns; over all of them exactly as many units are pruned as asked for."""

    def __init__(self, problem: Problem) -> None:
        self.pattern: Pattern = problem.pattern
        self.count = problem.count
        self.units = problem.pattern.unit_count(problem.layout.shape)
        self.seen = self.pruned = 0

    def __call__(self, score: Tensor) -> Tensor:
        """Return the mask of these columns, ``(groups, rows, some columns)``."""
        flat = score.flatten(0, 1)
        if self.count is None:
            return self.pattern.project(flat).view(score.shape)
        pattern = self.pattern
        if isinstance(pattern, Block):  # the last columns of a kernel position may be fewer than a block is wide
            pattern = dataclasses.replace(pattern, w=min(pattern.w, flat.shape[1]))
        units = pattern.unit_count(flat.shape)
        self.seen += units
        wanted = self.count * self.seen // self.units - self.pruned
        self.pruned += wanted
        return pattern.project(flat, wanted / units if units else 0.0).view(score.shape)

"""Magnitude: the smallest weights are pruned, no data is needed and no other weight changes."""

from __future__ import annotations

from sparta.oneshot.methods.base import method
from sparta.oneshot.problem import Problem, Solution

__all__ = ["magnitude"]


@method("magnitude", needs_data=False)
def magnitude(problem: Problem) -> Solution:
    """Keep the largest weights of the layer."""
    mask = problem.select(problem.weight.abs())
    return Solution(mask, problem.weight * mask)

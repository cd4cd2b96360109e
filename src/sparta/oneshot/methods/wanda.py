"""Wanda: weights times the norm of their input, compared within each row; no other weight changes.

For N:M the comparison is within each group, for blocks within each row of blocks.
"""

from __future__ import annotations

from sparta.oneshot.methods.base import method
from sparta.oneshot.problem import Problem, Solution

__all__ = ["wanda"]


@method("wanda")
def wanda(problem: Problem) -> Solution:
    """Keep the highest ``|W_ij| ‖X_j‖`` of each row."""
    mask = problem.select_per_row(problem.weight.abs() * problem.norms)
    return Solution(mask, problem.weight * mask)

"""RIA: relative importance times activations. A weight matters by its share of its row and of its column.

No row or column is emptied only because all its weights are small. No other weight changes.
"""

from __future__ import annotations

import torch

from sparta.oneshot.methods.base import method
from sparta.oneshot.problem import Problem, Solution

__all__ = ["ria"]

POWER = 0.5  # of the input's norm


@method("ria")
def ria(problem: Problem) -> Solution:
    """Keep the highest ``(|W_ij| / Σ_i |W_ij| + |W_ij| / Σ_j |W_ij|) ‖X_j‖^½`` of the layer."""
    size = problem.weight.abs()
    tiny = torch.finfo(size.dtype).tiny
    share = size / size.sum(1, keepdim=True).clamp(min=tiny) + size / size.sum(2, keepdim=True).clamp(min=tiny)
    mask = problem.select(share * problem.norms.pow(POWER))
    return Solution(mask, problem.weight * mask)

"""Gradient scalers: what `initialize` takes and gives back for mixed precision, and how to know of a skipped step.

A scaler needs no wrapper: it calls the optimizer's `step`, where the recipe listens, and does not call it when a
gradient overflowed. *fused* optimizers are the exception; they are always called and told to skip, so that the recipe
asks them.
"""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from sparta.errors import ValueRangeError, message

__all__ = ["check_scaler", "step_is_skipped"]


def check_scaler(scaler: Any) -> None:
    """Raise :class:`ValueRangeError` unless `scaler` steps optimizers.

    >>> import torch
    >>> check_scaler(torch.amp.GradScaler("cpu", enabled=False))
    """
    if not callable(getattr(scaler, "step", None)):
        raise ValueRangeError(
            message(
                f"scaler is a {type(scaler).__name__} without `step`",
                "a torch.amp.GradScaler, or an object whose step(optimizer) calls optimizer.step()",
            )
        )


def step_is_skipped(optimizer: Optimizer) -> bool:
    """Return whether a scaler tells this (fused) optimizer to skip the step it is being called for.

    >>> import torch
    >>> step_is_skipped(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]))
    False
    """
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found > 0)

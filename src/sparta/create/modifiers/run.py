"""The run: all of the outside world that a modifier may see and touch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["Run"]


def _log_nothing(_: dict[str, float]) -> None:
    """Throw a record away."""


@dataclass
class Run:
    """What a modifier may see and touch of a training run.

    Parameters
    ----------
    model, optimizer
        The user's own, as they were handed over; the model may be wrapped (DDP, FSDP2, `torch.compile`).
    steps_per_epoch
        Optimizer steps of an epoch.
    epoch, step
        The time: ``step`` optimizer steps were taken, which is ``epoch`` epochs.
    log
        Takes a record: numbers by name.
    teacher
        For distillation: a module, ``"self"``, or None when there is none.
    loss_closure
        Called without arguments, it returns the loss of one fresh batch; for second-order pruning.
    data
        Batches, each ``(inputs, targets)``, for modifiers that need data outside the training loop.
    generator
        Seeded; the only source of chance.
    include, ignore
        Names, globs or ``re:`` patterns that limit what ``__ALL_PRUNABLE__`` means.
    scaler, accumulation_steps
        What the script's loss is multiplied by before ``backward``: the scale of a gradient scaler, and one over the
        number of batches whose gradients are summed.

    Examples
    --------
    >>> model = nn.Linear(2, 2)
    >>> run = Run(model, torch.optim.SGD(model.parameters(), lr=0.1), steps_per_epoch=4)
    >>> run.epoch, run.step
    (0.0, 0)
    """

    model: nn.Module
    optimizer: Optimizer
    steps_per_epoch: int = 1
    epoch: float = 0.0
    step: int = 0
    log: Callable[[dict[str, float]], None] = _log_nothing
    teacher: nn.Module | Literal["self"] | None = None
    loss_closure: Callable[[], Tensor] | None = None
    data: Iterable[Any] | None = None
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))
    include: Sequence[str] | str | None = None
    ignore: Sequence[str] | str | None = None
    scaler: Any = None
    accumulation_steps: int = 1

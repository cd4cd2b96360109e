"""Restarting a learning-rate schedule: back to where it stood when it was handed over.

Level schedulers start the schedule over at each level. The scheduler's own ``state_dict`` and the optimizer's learning
rates are remembered and put back, which works alike for every scheduler of PyTorch, chained, sequential and plateau
ones included, and for any other with the same two methods.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from sparta.errors import ValueRangeError, message

__all__ = ["LRRestart"]

_SCHEDULED = ("lr", "momentum", "betas")  # what the schedulers of PyTorch change in a parameter group


class LRRestart:
    """Remembers the start of a learning-rate schedule.

    Parameters
    ----------
    lr_scheduler
        As new: it has an ``optimizer``, ``state_dict`` and ``load_state_dict``.
    init_lr
        Learning rate at each restart, one for all parameter groups or one for each, instead of the present ones.

    Examples
    --------
    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    >>> schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    >>> restart = LRRestart(schedule)
    >>> optimizer.step(); schedule.step(); schedule.get_last_lr()
    [0.5]
    >>> restart(); schedule.get_last_lr(), schedule.last_epoch
    ([1.0], 0)
    """

    def __init__(self, lr_scheduler: Any, init_lr: float | Sequence[float] | None = None) -> None:
        for needed in ("optimizer", "state_dict", "load_state_dict"):
            if not hasattr(lr_scheduler, needed):
                raise ValueRangeError(
                    message(
                        f"the lr_scheduler is a {type(lr_scheduler).__name__} without `{needed}`",
                        "a scheduler of torch.optim.lr_scheduler, or one with its methods",
                    )
                )
        self._scheduler = lr_scheduler
        groups = lr_scheduler.optimizer.param_groups
        self._state: dict[str, Any] = copy.deepcopy(dict(lr_scheduler.state_dict()))
        self._groups = [{key: copy.deepcopy(group[key]) for key in _SCHEDULED if key in group} for group in groups]
        if init_lr is not None:
            rates = list(init_lr) if isinstance(init_lr, Sequence) else [init_lr] * len(groups)
            if len(rates) != len(groups):
                raise ValueRangeError(message(f"{len(rates)} values of init_lr", f"one, or {len(groups)}: one a group"))
            for held, rate in zip(self._groups, rates, strict=True):
                held["lr"] = float(rate)

    def __call__(self) -> None:
        """Put the schedule and the optimizer's rates back to the start."""
        self._scheduler.load_state_dict(copy.deepcopy(self._state))
        for group, held in zip(self._scheduler.optimizer.param_groups, self._groups, strict=False):
            for key, value in held.items():
                if isinstance(group[key], Tensor):
                    group[key].fill_(float(value))
                else:
                    group[key] = copy.deepcopy(value)

    def state_dict(self) -> dict[str, Any]:
        """Return the remembered start."""
        return {"scheduler": copy.deepcopy(self._state), "groups": copy.deepcopy(self._groups)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back a remembered start: that of the run's beginning, not of the moment it was resumed."""
        self._state = copy.deepcopy(dict(state["scheduler"]))
        self._groups = copy.deepcopy(list(state["groups"]))

"""Copies that follow: an average of the weights (EMA, SWA) has the zeros of the model that it averages.

An average forgets what a pruned weight was only slowly, so it would stay nearly dense. The present masks are put on it
whenever it is used or saved, by hooks of the copy itself, and for the last time when the run ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sparta.errors import ValueRangeError, message
from sparta.modules import unwrapped
from sparta.sparsify.shards import local
from sparta.tesa import names

__all__ = ["Follower"]


class Follower:
    """Puts masks on a copy of a model each time that it computes or is saved, until :meth:`stop`.

    Parameters
    ----------
    copy
        A :class:`torch.optim.swa_utils.AveragedModel`, or any other copy of the model.
    masks
        Returns the present masks by the names of the parameters (True: kept).
    shapes
        The shapes that the parameters must have.

    Examples
    --------
    >>> copy = nn.Linear(3, 1, bias=False)
    >>> follower = Follower(copy, lambda: {"weight": torch.tensor([[True, False, True]])}, {"weight": (1, 3)})
    >>> int((copy.state_dict()["weight"] == 0).sum())
    1
    """

    def __init__(
        self, copy: nn.Module, masks: Callable[[], Mapping[str, Tensor]], shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        inner = unwrapped(copy)
        self._parameters = {names.canonical(name): parameter for name, parameter in inner.named_parameters()}
        self._masks = masks
        for name, shape in shapes.items():
            found = self._parameters.get(name)
            if found is None or tuple(found.shape) != shape:
                raise ValueRangeError(
                    message(f"a {type(inner).__name__} without {name} of shape {shape}", "a copy of the trained model")
                )
        untyped: Any = copy
        self._handles: list[Any] = [
            untyped.register_forward_pre_hook(lambda *_: self.apply()),
            untyped.register_state_dict_pre_hook(lambda *_: self.apply()),
        ]

    @torch.no_grad()
    def apply(self) -> None:
        """Zero what is pruned, now."""
        for name, kept in self._masks().items():
            local(self._parameters[name]).masked_fill_(~kept.to(self._parameters[name].device), 0)

    def stop(self) -> None:
        """Zero what is pruned for the last time, and take the hooks away."""
        self.apply()
        for handle in self._handles:
            handle.remove()
        self._handles = []

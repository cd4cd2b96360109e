"""The teacher: a frozen model that runs beside the student, or a frozen copy of the student itself.

It is never trained, always in eval mode, and follows the student to its device when it is first asked. A student that
teaches itself is copied when distillation begins, so that it imitates what it was before it was pruned further or
quantised.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from sparta.create.quantize.prepare import restore
from sparta.errors import NameNotFoundError, ValueRangeError, did_you_mean, message
from sparta.modules import unwrapped

__all__ = ["Teacher", "check_teacher", "frozen_copy"]


def check_teacher(teacher: Any) -> None:
    """Raise :class:`ValueRangeError` unless `teacher` is a module or ``"self"``.

    >>> check_teacher("self")
    """
    if isinstance(teacher, nn.Module) or teacher == "self":
        return
    allowed = "a torch.nn.Module, or None or 'self' for a copy of the model itself"
    if isinstance(teacher, str):
        raise ValueRangeError(
            message(
                f"the distillation teacher is the text {teacher!r}",
                allowed,
                "build the model, load its weights with load_state_dict, and pass it",
            )
        )
    raise ValueRangeError(message(f"the distillation teacher is a {type(teacher).__name__}", allowed))


def frozen_copy(model: nn.Module) -> nn.Module:
    """Return a copy of a model that shares nothing with it: plain layers, eval mode, no gradients, no hooks of ours.

    >>> copy = frozen_copy(nn.Linear(2, 2))
    >>> copy.training, copy.weight.requires_grad
    (False, False)
    """
    try:
        copy = deepcopy(unwrapped(model))
    except Exception as error:
        raise ValueRangeError(
            message(
                f"the model cannot be copied to be its own teacher ({type(error).__name__}: {error})",
                "models that copy.deepcopy takes",
                "pass a teacher; a sharded model has to be copied before it is sharded",
            )
        ) from error
    restore(copy)
    return copy.eval().requires_grad_(requires_grad=False)


class Teacher:
    """Runs a teacher on the student's inputs.

    Parameters
    ----------
    module
        The teacher, put into eval mode; its parameters stop asking for gradients.
    input_keys
        The keyword arguments (or entries of a single mapping) that the teacher takes; None: all.

    Examples
    --------
    >>> teacher = Teacher(nn.Linear(2, 3))
    >>> teacher((torch.zeros(4, 2),), {}, torch.device("cpu")).shape
    torch.Size([4, 3])
    """

    def __init__(self, module: nn.Module, input_keys: Sequence[str] | None = None) -> None:
        self.module = module.eval().requires_grad_(requires_grad=False)
        self.input_keys = input_keys
        self._device: torch.device | None = None

    @torch.no_grad()
    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> Any:
        """Return the teacher's output for copies of the student's arguments."""
        if self._device != device:
            if any(p.device != device for p in self.module.parameters()):
                self.module.to(device)
            self._device = device
        self.module.eval()  # other code that holds the teacher may have called train()
        args, kwargs = self._chosen(args, kwargs)
        # Copies: neither model may see what the other does to its inputs in place.
        args, kwargs = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, (args, kwargs))
        return self.module(*args, **kwargs)

    def _chosen(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.input_keys is None:
            return args, kwargs
        source = args[0] if len(args) == 1 and isinstance(args[0], dict) else kwargs
        for key in self.input_keys:
            if key not in source:
                raise NameNotFoundError(did_you_mean(key, map(str, source), "input of the student"))
        chosen = {key: source[key] for key in self.input_keys}
        return ((chosen,), kwargs) if source is not kwargs else (args, chosen)

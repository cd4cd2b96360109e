"""Distillation inside a run: which teacher it has, what the loss is multiplied by, why nothing happened.

Shared by the modifiers that distil outputs and features. The automatic way never sees the script's loss, so whatever
the script multiplies it by (a loss scale, the share of an accumulation) has to come from the run.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from sparta.create.distill.capture import Capture
from sparta.create.distill.teacher import Teacher, check_teacher, frozen_copy
from sparta.create.modifiers.base import Run
from sparta.errors import ValueRangeError, message

__all__ = [
    "copied_teacher_state",
    "copied_teacher_with",
    "loss_factor",
    "reason_of_idleness",
    "student_device",
    "teacher_for",
]


def teacher_for(run: Run, input_keys: list[str] | None) -> Teacher | None:
    """Return the run's teacher, or None where it is a copy of the student that is still to be made."""
    given = "self" if run.teacher is None else run.teacher
    check_teacher(given)
    if given is run.model:
        raise ValueRangeError(
            message(
                "the teacher is the model that is being trained",
                "another module, or 'self' for a frozen copy of the model",
                "pass distillation_teacher='self'",
            )
        )
    return None if isinstance(given, str) else Teacher(given, input_keys)


def loss_factor(run: Run) -> float | Tensor:
    """Return what the script multiplies its loss by before ``backward``.

    That is the scale of the gradient scaler the run knows, times each pass's share of an accumulation.

    >>> model = torch.nn.Linear(2, 2)
    >>> loss_factor(Run(model, torch.optim.SGD(model.parameters(), lr=0.1)))
    1.0
    """
    scaler, share = run.scaler, 1.0 / run.accumulation_steps
    if scaler is None or not getattr(scaler, "is_enabled", lambda: True)():
        return share
    scale = getattr(scaler, "_scale", None)  # a tensor on the device: `get_scale` would wait for it
    return share * (scale if isinstance(scale, Tensor) else float(scaler.get_scale()))


def student_device(run: Run) -> torch.device:
    """Return where the student's parameters are."""
    return next((p.device for p in run.model.parameters()), torch.device("cpu"))


def reason_of_idleness(capture: Capture, name: str) -> str:
    """Return why a capture has had no effect, or not on all of its tensors; empty if all is well."""
    by_hand = "or call manager.loss_update on the loss"
    if capture.seen == 0 and capture.used == 0:
        return message(
            f"{name} never touched the loss: no forward pass of the model was seen in training mode",
            fix=f"call the model that was given to initialize, as model(...) after model.train(); {by_hand}",
        )
    if capture.used == 0:
        return message(
            f"{name} never touched the loss: no gradient came back to the outputs of the model",
            fix=f"compute the loss from the model's outputs without detaching them; {by_hand}",
        )
    if capture.unreached:
        return message(
            f"{name} does not reach {sorted(capture.unreached)}: the loss does not depend on them",
            fix=f"leave them out of what is distilled; {by_hand}",
        )
    return ""


def copied_teacher_state(run: Run | None, teacher: Teacher | None) -> dict[str, Tensor] | None:
    """Return the weights of a teacher that is a copy of the student, if there is one."""
    if run is None or teacher is None or (run.teacher is not None and not isinstance(run.teacher, str)):
        return None
    return {name: tensor.detach().cpu().clone() for name, tensor in teacher.module.state_dict().items()}


def copied_teacher_with(run: Run, state: Mapping[str, Tensor], input_keys: list[str] | None) -> Teacher:
    """Return a copy of the student with saved weights, as its teacher."""
    copy = frozen_copy(run.model)
    copy.load_state_dict(dict(state))
    return Teacher(copy, input_keys)

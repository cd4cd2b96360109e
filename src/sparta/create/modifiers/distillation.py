"""The modifier that lets a teacher's outputs share in the loss.

``loss = (1 - hardness) · task + hardness · KD``, where KD is the divergence of the student's softened outputs from the
teacher's, or, for embeddings and single numbers, their angle or their squared difference. The script stays as it is,
because the blend happens in the gradient (:mod:`sparta.create.distill.capture`); ``manager.loss_update`` returns the
blended loss to callers that want to see it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, PrivateAttr
from torch import Tensor

from sparta.create.distill.capture import Capture, Target
from sparta.create.distill.in_run import (
    copied_teacher_state,
    copied_teacher_with,
    loss_factor,
    reason_of_idleness,
    student_device,
    teacher_for,
)
from sparta.create.distill.losses import OutputLoss, heads_of, kind_of_output, output_gradient, output_loss
from sparta.create.distill.teacher import Teacher, frozen_copy
from sparta.create.modifiers.base import Modifier, Run, modifier
from sparta.errors import ValueRangeError, message

__all__ = ["DistillationModifier"]


@modifier
class DistillationModifier(Modifier):
    """Learn from a teacher's outputs, or from what the model itself was when distillation began.

    Examples
    --------
    >>> from torch import nn
    >>> model, teacher = nn.Linear(4, 3), nn.Linear(4, 3)
    >>> run = Run(model, torch.optim.SGD(model.parameters(), lr=0.1), teacher=teacher)
    >>> entry = DistillationModifier(hardness=0.5, temperature=2.0)
    >>> entry.call_initialize(run)
    >>> loss = model(torch.randn(8, 4)).square().mean()
    >>> bool(entry.loss(run, loss, None, None) != loss)
    True
    """

    kind: ClassVar[str] = "distillation"

    hardness: float = Field(default=0.5, ge=0, le=1, description="The teacher's share of the loss, 0 to 1.")
    temperature: float = Field(default=2.0, gt=0, description="What logits are divided by before the softmax.")
    distill_loss: Literal["auto", "kl", "mse", "cosine"] = Field(
        default="auto",
        description="What outputs are compared by; auto: unit vectors by cosine, single numbers by mse, others by kl.",
    )
    distill_output_keys: list[str | int] | None = Field(
        default=None, description="Which outputs to distil; null: the logits, or every tensor that is not a scalar."
    )
    teacher_input_keys: list[str] | None = Field(
        default=None, description="Which keyword arguments the teacher takes; null: all."
    )

    _run: Run | None = PrivateAttr(default=None)
    _teacher: Teacher | None = PrivateAttr(default=None)
    _capture: Capture | None = PrivateAttr(default=None)
    _last_value: Tensor | None = PrivateAttr(default=None)
    _kinds: dict[str, OutputLoss] = PrivateAttr(default_factory=dict)  # by output, seen once: looking waits for a GPU

    def initialize(self, run: Run) -> None:
        """Check the teacher and begin to watch the model's forward passes."""
        self._run = run
        self._teacher = teacher_for(run, self.teacher_input_keys)
        if self._capture is not None:
            self._capture.remove()
        self._capture = Capture(
            run.model,
            self._ask_teacher,
            self._compare,
            task_weight=1 - self.hardness,
            factor=lambda: loss_factor(run),
        )

    def loss(self, run: Run, loss: Tensor, inputs: Any, outputs: Any) -> Tensor:
        """Return the blended loss of the captured passes, or of `inputs` and `outputs` if they were not captured."""
        del run
        capture = self._watching()
        tensors = None if outputs is None else list(heads_of(outputs, self.distill_output_keys).values())
        blended = capture.blended(loss, tensors)
        if blended is not None:
            return blended
        if outputs is None or inputs is None:
            raise ValueRangeError(
                message(
                    "no forward pass of the model was captured in this step",
                    "a call of the model in training mode, with gradients, before loss_update",
                    "or pass inputs= and outputs= to loss_update",
                )
            )
        args, kwargs = _as_call(inputs)
        student = heads_of(outputs, self.distill_output_keys)
        teacher = heads_of(self._asked(args, kwargs), self.distill_output_keys)
        losses = [
            output_loss(self._loss_for(name, teacher[name]), head, teacher[name], self.temperature)
            for name, head in student.items()
        ]
        capture.used += 1
        return (1 - self.hardness) * loss + self.hardness * torch.stack(losses).mean()

    def after_step(self, run: Run) -> None:
        """Forget the passes of the step; log the divergence once an epoch."""
        self._watching().clear()
        if self._last_value is not None and (run.step + 1) % run.steps_per_epoch == 0:
            run.log({"distillation_loss": float(self._last_value)})

    def finalize(self, run: Run) -> None:
        """Stop watching and let the teacher go."""
        del run
        if self._capture is not None:
            self._capture.remove()
        self._teacher, self._last_value = None, None

    def idle(self) -> str:
        """Return why the loss was never touched, if it was not."""
        return "" if self._capture is None else reason_of_idleness(self._capture, self.name)

    def state_dict(self) -> dict[str, Any]:
        """Return the weights of a teacher that is a copy of the student; another teacher is the user's to keep."""
        return {"teacher": copied_teacher_state(self._run, self._teacher)}

    def load_state_dict(self, run: Run, state: Mapping[str, Any]) -> None:
        """Take the copy of the student back."""
        if state["teacher"] is not None:
            self._teacher = copied_teacher_with(run, state["teacher"], self.teacher_input_keys)

    def _loss_for(self, name: str, teacher: Tensor) -> OutputLoss:
        if self.distill_loss != "auto":
            return self.distill_loss
        if name not in self._kinds:
            self._kinds[name] = kind_of_output(teacher)
        return self._kinds[name]

    def _watching(self) -> Capture:
        if self._capture is None:
            raise ValueRangeError(message(f"{self.name} is used before it was initialized", fix="attach it to a run"))
        return self._capture

    def _asked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run = self._run
        if run is None:
            raise ValueRangeError(message(f"{self.name} is used before it was initialized", fix="attach it to a run"))
        if self._teacher is None:
            self._teacher = Teacher(frozen_copy(run.model), self.teacher_input_keys)
        return self._teacher(args, kwargs, student_device(run))

    def _ask_teacher(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._run is None or not self.active(self._run.epoch):
            return None
        return heads_of(self._asked(args, kwargs), self.distill_output_keys)

    def _compare(self, teacher: dict[str, Tensor] | None, output: Any) -> tuple[dict[str, Target], Tensor] | None:
        if teacher is None:
            return None
        student = heads_of(output, self.distill_output_keys)
        if student.keys() != teacher.keys():
            raise ValueRangeError(
                message(
                    f"the student returns {list(student)} and the teacher {list(teacher)}",
                    "the same outputs",
                    "name those to distil in distill_output_keys",
                )
            )
        share = self.hardness / len(student)
        targets: dict[str, Target] = {}
        values = []
        with torch.no_grad():
            for name, head in student.items():
                compared = self._loss_for(name, teacher[name]), head, teacher[name], self.temperature
                targets[name] = Target(head, output_gradient(*compared) * share)
                values.append(output_loss(*compared))
            value = torch.stack(values).mean()
        self._last_value = value
        return targets, value * self.hardness


def _as_call(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return inputs as arguments: a mapping by keyword, a tuple or list by position, anything else as the first."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs), {}) if isinstance(inputs, tuple | list) else ((inputs,), {})

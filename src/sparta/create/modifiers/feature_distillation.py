"""The modifier that draws a student's features, layer by layer, to its teacher's.

``loss = task + gain · Σ MSE(student's feature, teacher's feature)``. As with the distillation of outputs the script
stays as it is; each layer's share enters the gradient at that layer's output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from pydantic import Field, PrivateAttr
from torch import Tensor, nn

from sparta.create.distill.capture import Capture, OwnHook, Target
from sparta.create.distill.in_run import (
    copied_teacher_state,
    copied_teacher_with,
    loss_factor,
    reason_of_idleness,
    student_device,
    teacher_for,
)
from sparta.create.distill.losses import feature_loss
from sparta.create.distill.teacher import Teacher, frozen_copy
from sparta.create.modifiers.base import Modifier, Run, modifier
from sparta.create.quantize.prepare import named_modules
from sparta.errors import NameNotFoundError, ShapeError, ValueRangeError, did_you_mean, message

__all__ = ["PerLayerDistillationModifier"]

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_PROJECTIONS = {3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}  # by the dims of their weight


@modifier
class PerLayerDistillationModifier(Modifier):
    """Learn from a teacher's features.

    Examples
    --------
    >>> model, teacher = nn.Linear(4, 3), nn.Linear(4, 3)
    >>> run = Run(model, torch.optim.SGD(model.parameters(), lr=0.1), teacher=teacher)
    >>> entry = PerLayerDistillationModifier(gain=1.0)
    >>> entry.call_initialize(run)
    >>> loss = model(torch.randn(8, 4)).square().mean()
    >>> bool(entry.loss(run, loss, None, None) > loss)
    True
    """

    kind: ClassVar[str] = "distillation"

    gain: float = Field(default=1.5, ge=0, description="What the features' loss is multiplied by.")
    normalize: bool = Field(default=True, description="Divide by the mean square of the teacher's feature.")
    student_layer_names: list[str] | None = Field(
        default=None, description="Layers of the student; null: all linear and convolution layers."
    )
    teacher_layer_names: list[str] | None = Field(
        default=None, description="Layers of the teacher in the same order; null: those of the same names."
    )
    project_features: bool = Field(
        default=True, description="Learn a linear map where a student's feature has another number of channels."
    )
    epsilon: float = Field(default=1e-6, ge=0, description="Added to the divisor of `normalize`.")

    _run: Run | None = PrivateAttr(default=None)
    _teacher: Teacher | None = PrivateAttr(default=None)
    _capture: Capture | None = PrivateAttr(default=None)
    _handles: list[Any] = PrivateAttr(default_factory=list)
    _teacher_handles: list[Any] = PrivateAttr(default_factory=list)
    _student_features: dict[str, Tensor] = PrivateAttr(default_factory=dict)
    _teacher_features: dict[str, Tensor] = PrivateAttr(default_factory=dict)
    _channels_first: set[str] = PrivateAttr(default_factory=set)
    _recording: bool = PrivateAttr(default=False)
    _projections: dict[str, nn.Module] = PrivateAttr(default_factory=dict)
    _last_value: Tensor | None = PrivateAttr(default=None)

    def initialize(self, run: Run) -> None:
        """Check the teacher and the names of layers, and begin to watch them."""
        self._run = run
        self._teacher = teacher_for(run, None)
        student_names, _ = self._layer_names(run.model)
        modules = _layers_named(run.model, student_names, "layer of the student")
        self._channels_first = {n for n, m in zip(student_names, modules, strict=True) if isinstance(m, nn.Conv1d)}
        if self._teacher is not None:
            self._watch_teacher()
        for handle in self._handles:
            handle.remove()
        self._handles = [
            module.register_forward_hook(OwnHook(module, self._recorder(name, self._student_features)))
            for name, module in zip(student_names, modules, strict=True)
        ]
        if self._capture is not None:
            self._capture.remove()
        self._capture = Capture(run.model, self._ask_teacher, self._compare, factor=lambda: loss_factor(run))

    def loss(self, run: Run, loss: Tensor, inputs: Any, outputs: Any) -> Tensor:
        """Return the loss with the features' share of the passes captured in this step."""
        del run, inputs, outputs
        blended = None if self._capture is None else self._capture.blended(loss)
        if blended is None:
            raise ValueRangeError(
                message(
                    "no forward pass of the model was captured in this step",
                    "a call of the model in training mode, with gradients, before loss_update",
                )
            )
        return blended

    def before_step(self, run: Run) -> None:
        """Average the gradients of the projections over the processes of a distributed run: DDP does not know them."""
        del run
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            for projection in self._projections.values():
                for parameter in projection.parameters():
                    if parameter.grad is not None:
                        torch.distributed.all_reduce(parameter.grad)
                        parameter.grad /= torch.distributed.get_world_size()

    def after_step(self, run: Run) -> None:
        """Forget the passes of the step; log the loss of the features once an epoch."""
        if self._capture is not None:
            self._capture.clear()
        if self._last_value is not None and (run.step + 1) % run.steps_per_epoch == 0:
            run.log({"feature_distillation_loss": float(self._last_value)})

    def finalize(self, run: Run) -> None:
        """Stop watching; the projections stay in the optimizer, without gradients."""
        del run
        if self._capture is not None:
            self._capture.remove()
        for handle in [*self._handles, *self._teacher_handles]:
            handle.remove()
        for projection in self._projections.values():
            projection.zero_grad(set_to_none=True)
        self._handles, self._teacher_handles, self._teacher, self._last_value = [], [], None, None
        self._student_features.clear()
        self._teacher_features.clear()

    def idle(self) -> str:
        """Return why the loss was never touched, if it was not."""
        return "" if self._capture is None else reason_of_idleness(self._capture, self.name)

    def state_dict(self) -> dict[str, Any]:
        """Return the projections, and the teacher if it is a copy of the student."""
        weights = {name: _weight_of(p).detach().cpu().clone() for name, p in self._projections.items()}
        return {"teacher": copied_teacher_state(self._run, self._teacher), "projections": weights}

    def load_state_dict(self, run: Run, state: Mapping[str, Any]) -> None:
        """Take back the copy of the student and the projections, which join the optimizer again."""
        if state["teacher"] is not None:
            self._teacher = copied_teacher_with(run, state["teacher"], None)
            self._watch_teacher()
        for name, weight in state["projections"].items():
            projection = self._projections.get(name)
            if projection is None:
                projection = self._add_projection(name, weight.shape[1], weight.shape[0], weight.dim())
            with torch.no_grad():
                _weight_of(projection).copy_(weight)

    # ------------------------------------------------------------------ parts

    def _layer_names(self, model: nn.Module) -> tuple[list[str], list[str]]:
        student = self.student_layer_names
        if student is None:
            student = [name for name, module in named_modules(model).items() if isinstance(module, _LAYERS)]
        teacher = student if self.teacher_layer_names is None else self.teacher_layer_names
        if not student or len(student) != len(teacher):
            raise ValueRangeError(
                message(f"{len(student)} layers of the student and {len(teacher)} of the teacher", "one for one")
            )
        return student, teacher

    def _watch_teacher(self) -> None:
        if self._teacher is None or self._run is None:
            return
        for handle in self._teacher_handles:
            handle.remove()
        student_names, teacher_names = self._layer_names(self._run.model)
        modules = _layers_named(self._teacher.module, teacher_names, "layer of the teacher")
        self._teacher_handles = [
            module.register_forward_hook(OwnHook(module, self._recorder(name, self._teacher_features)))
            for name, module in zip(student_names, modules, strict=True)
        ]

    def _recorder(self, name: str, features: dict[str, Tensor]) -> Callable[..., None]:
        def record(_: Any, output: Any) -> None:
            tensor = next((t for t in output if isinstance(t, Tensor)), None) if isinstance(output, tuple) else output
            if self._recording and isinstance(tensor, Tensor):
                calls = sum(key == name or key.startswith(f"{name}@") for key in features)
                features[f"{name}@{calls}" if calls else name] = tensor

        return record

    def _ask_teacher(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run = self._run
        self._student_features.clear()
        self._teacher_features.clear()
        if run is None or not self.active(run.epoch):
            self._recording = False
            return None
        if self._teacher is None:
            self._teacher = Teacher(frozen_copy(run.model))
            self._watch_teacher()
        self._recording = True
        self._teacher(args, kwargs, student_device(run))
        return True

    def _compare(self, asked: bool | None, output: Any) -> tuple[dict[str, Target], Tensor] | None:  # noqa: FBT001
        del output
        self._recording = False
        if asked is None:
            return None
        targets: dict[str, Target] = {}
        total = torch.zeros((), device=student_device(self._run) if self._run else None)
        for name, feature in self._student_features.items():
            if name not in self._teacher_features:
                raise ValueRangeError(
                    message(f"the student's layer {name!r} ran and the teacher's did not", fix="name layers that match")
                )
            targets[name], value = self._target(name, feature, self._teacher_features[name])
            total = total + value
        self._student_features.clear()
        self._teacher_features.clear()
        self._last_value = total
        return (targets, total * self.gain) if targets else None

    @torch.enable_grad()
    def _target(self, name: str, feature: Tensor, teacher: Tensor) -> tuple[Target, Tensor]:
        student = feature.detach().float().requires_grad_()
        projection = self._projection(name.partition("@")[0], student, teacher)
        with torch.autocast(feature.device.type, enabled=False):
            projected = student if projection is None else projection(student)
            value = feature_loss(projected, teacher, normalize=self.normalize, epsilon=self.epsilon)
            weights = [] if projection is None else list(projection.parameters())
            gradient, *others = torch.autograd.grad(value * self.gain, [student, *weights])

        def arrive(factor: float | Tensor) -> None:
            for weight, extra in zip(weights, others, strict=True):
                weight.grad = extra * factor if weight.grad is None else weight.grad + extra * factor

        return Target(feature, gradient, arrive if weights else None), value.detach()

    def _projection(self, name: str, student: Tensor, teacher: Tensor) -> nn.Module | None:
        if student.shape == teacher.shape or not self.project_features:
            return None
        channels_first = student.dim() >= 4 or name in self._channels_first
        channel = 1 if channels_first else -1
        ours, theirs = list(student.shape), list(teacher.shape)
        if len(ours) == len(theirs) and ours[:channel] + ours[channel:][1:] == theirs[:channel] + theirs[channel:][1:]:
            if name not in self._projections:
                dims = student.dim() if channels_first else 2
                self._add_projection(name, ours[channel], theirs[channel], dims)
            return self._projections[name]
        raise ShapeError(
            message(
                f"the layer {name!r} has a feature of shape {tuple(ours)}, its teacher's {tuple(theirs)}",
                "shapes that differ in the number of channels alone",
                "choose other layers",
            )
        )

    def _add_projection(self, name: str, inputs: int, outputs: int, weight_dims: int) -> nn.Module:
        """Make a linear map of channels, seeded by the run, and let the optimizer train it."""
        run = self._run
        if run is None:
            raise ValueRangeError(message(f"{self.name} is used before it was initialized", fix="attach it to a run"))
        made: nn.Module
        if weight_dims == 2:
            made = nn.Linear(inputs, outputs, bias=False)
        else:
            made = _PROJECTIONS[weight_dims](inputs, outputs, 1, bias=False)
        with torch.no_grad():
            weight = _weight_of(made)
            weight.copy_(torch.randn(weight.shape, generator=run.generator) / inputs**0.5)
        made.to(student_device(run))
        self._projections[name] = made
        run.optimizer.add_param_group({"params": list(made.parameters())})
        return made


def _weight_of(projection: nn.Module) -> Tensor:
    return next(projection.parameters())


def _layers_named(model: nn.Module, wanted: list[str], what: str) -> list[nn.Module]:
    modules = named_modules(model)
    for name in wanted:
        if name not in modules:
            raise NameNotFoundError(did_you_mean(name, [known for known in modules if known], what))
    return [modules[name] for name in wanted]

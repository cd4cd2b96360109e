"""Learning rates: closed forms of the epoch, written to the optimizer's parameter groups before every step.

A schedule is a pure function of time, so that resuming, accumulation and skipped steps need nothing special. Two
writers of one learning rate cannot both be right, so a rate that someone else has changed since the last step is warned
of.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field, PrivateAttr, model_validator
from torch import Tensor

from sparta.create.modifiers.base import Modifier, Run, modifier
from sparta.errors import ValueRangeError, did_you_mean, message

__all__ = ["LearningRateFunctionModifier", "LearningRateModifier", "SetLearningRateModifier", "write_to_groups"]

_CONFLICT = message(
    "a learning-rate scheduler of the script and the recipe both set the learning rate",
    fix="disable the scheduler of the script, or pass lr=None to initialize to leave the rate to it",
)


def write_to_groups(run: Run, key: str, value: float, places: Sequence[int] | None) -> None:
    """Write a value to the optimizer's parameter groups at `places`, or to all; a tensor is filled in place."""
    for place in range(len(run.optimizer.param_groups)) if places is None else places:
        group = run.optimizer.param_groups[place]
        if isinstance(group.get(key), Tensor):
            group[key].fill_(value)
        else:
            group[key] = value


def check_places(run: Run, name: str, places: Sequence[int] | None) -> None:
    """Raise :class:`ValueRangeError` for a parameter group that the optimizer does not have."""
    groups = len(run.optimizer.param_groups)
    for place in places or ():
        if not 0 <= place < groups:
            raise ValueRangeError(
                message(f"param_groups of {name} has {place}", f"0 to {groups - 1}: the optimizer has {groups}")
            )


class _Rate(Modifier):
    """What all learning-rate modifiers share: writing, logging, noticing a second writer."""

    kind: ClassVar[str] = "learning_rate"

    param_groups: list[int] | None = None

    _written: list[float] | None = PrivateAttr(default=None)
    _warned: bool = PrivateAttr(default=False)

    def rate_at(self, epoch: float) -> float:
        """Return the learning rate at `epoch`."""
        raise NotImplementedError

    def initialize(self, run: Run) -> None:
        """Check the groups, and warn of a scheduler that is attached already."""
        check_places(run, self.name, self.param_groups)
        if any("initial_lr" in group for group in run.optimizer.param_groups):  # every scheduler leaves this behind
            self._warn()

    def update(self, run: Run) -> None:
        """Write the rate of this epoch."""
        places = range(len(run.optimizer.param_groups)) if self.param_groups is None else self.param_groups
        found = [float(run.optimizer.param_groups[place]["lr"]) for place in places]
        if self._written is not None and any(
            not math.isclose(now, before, rel_tol=1e-6, abs_tol=1e-12)
            for now, before in zip(found, self._written, strict=False)
        ):
            self._warn()
        rate = self.rate_at(run.epoch)
        write_to_groups(run, "lr", rate, self.param_groups)
        self._written = [float(run.optimizer.param_groups[place]["lr"]) for place in places]
        if self.end_pending(run.epoch):
            self._written = None  # another modifier may take over
        run.log({"learning_rate": rate})

    def planned(self, epoch: float) -> dict[str, float]:
        """Return the learning rate, inside the window."""
        inside = epoch >= self.start_epoch and (self.end_epoch < 0 or epoch <= self.end_epoch)
        return {"learning_rate": self.rate_at(epoch)} if inside else {}

    def state_dict(self) -> dict[str, Any]:
        """Return the rates last written."""
        return {"written": self._written}

    def load_state_dict(self, run: Run, state: Mapping[str, Any]) -> None:  # noqa: ARG002
        """Take back the rates last written."""
        self._written = state["written"]

    def _warn(self) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(_CONFLICT, stacklevel=2)


@modifier
class SetLearningRateModifier(_Rate):
    """Sets the learning rate once, when it starts.

    >>> SetLearningRateModifier(learning_rate=0.1, start_epoch=2).rate_at(2)
    0.1
    """

    learning_rate: float = Field(ge=0)
    constant_logging: bool = False
    """Whether the rate is logged at every step and not only when it is set."""

    def rate_at(self, epoch: float) -> float:  # noqa: ARG002
        """Return the one rate."""
        return self.learning_rate

    def update_ready(self, epoch: float) -> bool:
        """Return whether it starts now; logging alone may follow."""
        return self.start_pending(epoch)

    def before_step(self, run: Run) -> None:
        """Log, if asked."""
        if self.constant_logging and self._started:
            run.log({"learning_rate": float(run.optimizer.param_groups[0]["lr"])})


def _linear(progress: float, init: float, final: float) -> float:
    return init + (final - init) * progress


def _cosine(progress: float, init: float, final: float) -> float:
    return final + (init - final) * (0.5 + 0.5 * math.cos(math.pi * progress))


def _exponential(progress: float, init: float, final: float) -> float:
    return float(init * (final / init) ** progress)


def _constant(progress: float, init: float, final: float) -> float:  # noqa: ARG001
    return init


_FUNCTIONS: dict[str, Callable[[float, float, float], float]] = {
    "linear": _linear,
    "cosine": _cosine,
    "exponential": _exponential,
    "constant": _constant,
    "cyclic_linear": _linear,
    "stepped": _linear,
}


@modifier
class LearningRateFunctionModifier(_Rate):
    """Moves the learning rate from `init_lr` at its start to `final_lr` at its end.

    Parameters
    ----------
    lr_func
        ``linear``; ``cosine`` (half a wave); ``cyclic_linear`` (the line again every `cycle_epochs`); ``exponential``
        (the same factor every epoch); ``stepped`` (`plateaus` levels of equal length, a constant factor apart, or a
        constant difference where a rate is 0); ``constant``.

    Examples
    --------
    >>> rate = LearningRateFunctionModifier(lr_func="linear", init_lr=0.1, final_lr=0.0, start_epoch=0, end_epoch=10)
    >>> rate.rate_at(0), rate.rate_at(5), rate.rate_at(10)
    (0.1, 0.05, 0.0)
    """

    lr_func: Literal["linear", "cosine", "cyclic_linear", "constant", "stepped", "exponential"]
    init_lr: float = Field(ge=0)
    final_lr: float = Field(ge=0)
    start_epoch: float = 0.0
    end_epoch: float
    cycle_epochs: float = Field(default=1.0, gt=0)
    _step: float = PrivateAttr(default=0.0)  # epochs of one step
    plateaus: int = Field(default=4, ge=2)

    @model_validator(mode="after")
    def _check_rates(self) -> LearningRateFunctionModifier:
        if self.lr_func == "exponential" and min(self.init_lr, self.final_lr) <= 0:
            raise ValueError(
                message("an exponential learning rate from or to 0", "rates above 0", "use linear or cosine")
            )
        if self.end_epoch < 0:
            raise ValueError(message(f"end_epoch is {self.end_epoch}", "the epoch at which final_lr is reached"))
        return self

    def initialize(self, run: Run) -> None:
        """Learn how long a step is."""
        super().initialize(run)
        self._step = 1 / run.steps_per_epoch

    def rate_at(self, epoch: float) -> float:
        """Return the rate at `epoch`, held before the start and after the end."""
        start = max(0.0, self.start_epoch)
        length = self.end_epoch - start
        if self.lr_func == "cyclic_linear" and start < epoch < self.end_epoch:
            progress = self._progress_in_cycle(epoch - start)
        else:
            progress = min(1.0, max(0.0, (epoch - start) / length)) if length > 0 else float(epoch >= start)
        if self.lr_func == "stepped":
            level = min(self.plateaus - 1, math.floor(progress * self.plateaus + 1e-9))
            kind = "linear" if min(self.init_lr, self.final_lr) <= 0 else "exponential"
            return _FUNCTIONS[kind](level / (self.plateaus - 1), self.init_lr, self.final_lr)
        return _FUNCTIONS[self.lr_func](progress, self.init_lr, self.final_lr)

    def _progress_in_cycle(self, elapsed: float) -> float:
        """Return how far a cycle has come; 1, where `final_lr` is, at its last step, once the steps are known."""
        inside = elapsed - self.cycle_epochs * math.floor(elapsed / self.cycle_epochs + 1e-9)
        last = self.cycle_epochs - self._step
        return min(1.0, max(0.0, inside) / last) if last > 1e-9 else 0.0


_CLASSES: dict[str, tuple[str, ...]] = {
    "StepLR": ("step_size", "gamma"),
    "MultiStepLR": ("milestones", "gamma"),
    "ExponentialLR": ("gamma",),
    "CosineAnnealingWarmRestarts": ("T_0", "T_mult", "eta_min"),
}


@modifier
class LearningRateModifier(_Rate):
    """The schedules of PyTorch by their names, counted in epochs from the start of the window.

    Parameters
    ----------
    lr_class
        ``StepLR``, ``MultiStepLR``, ``ExponentialLR`` or ``CosineAnnealingWarmRestarts``.
    lr_kwargs
        Their keyword arguments, in epochs.

    Examples
    --------
    >>> rate = LearningRateModifier(lr_class="StepLR", lr_kwargs={"step_size": 2, "gamma": 0.5}, init_lr=1.0)
    >>> [rate.rate_at(epoch) for epoch in (0, 1.75, 2, 4)]
    [1.0, 1.0, 0.5, 0.25]
    """

    lr_class: Literal["StepLR", "MultiStepLR", "ExponentialLR", "CosineAnnealingWarmRestarts"]
    lr_kwargs: dict[str, Any] = Field(default_factory=dict)
    init_lr: float = Field(gt=0)
    start_epoch: float = 0.0

    @model_validator(mode="after")
    def _check_kwargs(self) -> LearningRateModifier:
        known = _CLASSES[self.lr_class]
        for name in self.lr_kwargs:
            if name not in known:
                raise ValueError(did_you_mean(name, known, f"keyword argument of {self.lr_class}"))
        if known[0] != "gamma" and known[0] not in self.lr_kwargs:
            raise ValueError(message(f"{self.lr_class} without {known[0]}", fix=f"give it in lr_kwargs: {known}"))
        return self

    def rate_at(self, epoch: float) -> float:
        """Return the rate at `epoch`."""
        passed = max(0.0, epoch - max(0.0, self.start_epoch)) + 1e-9
        if self.end_epoch >= 0:
            passed = min(passed, self.end_epoch - max(0.0, self.start_epoch) + 1e-9)
        gamma = float(self.lr_kwargs.get("gamma", 0.1))
        if self.lr_class == "CosineAnnealingWarmRestarts":
            return self._warm_restart(passed - 1e-9)
        if self.lr_class == "StepLR":
            drops = math.floor(passed / float(self.lr_kwargs["step_size"]))
        elif self.lr_class == "MultiStepLR":
            drops = sum(passed >= float(milestone) for milestone in self.lr_kwargs["milestones"])
        else:
            drops = math.floor(passed)
        return float(self.init_lr * gamma**drops)

    def _warm_restart(self, passed: float) -> float:
        period, factor = float(self.lr_kwargs["T_0"]), float(self.lr_kwargs.get("T_mult", 1))
        while passed >= period - 1e-9:
            passed -= period
            period *= factor
        return _cosine(max(0.0, passed) / period, self.init_lr, float(self.lr_kwargs.get("eta_min", 0.0)))

"""The modifier that switches quantization-aware training on, and later holds ranges and batch norms still.

Everything it does is in :mod:`sparta.create.quantize`; this file says when. It needs nothing from the training script,
and mixed precision may stay on (the rounding is done in float32), though a script that wants to switch it off finds the
moment in ``start_epoch``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, PrivateAttr, field_validator, model_validator
from torch import nn

from sparta.create.modifiers.base import Modifier, Run, modifier
from sparta.create.quantize.compensate import as_inputs, compensate
from sparta.create.quantize.export import integer_weights
from sparta.create.quantize.fold import freeze_statistics
from sparta.create.quantize.prepare import (
    calibrate,
    freeze_observers,
    is_quantized,
    load_quantization_state,
    plan,
    prepare,
    quantization_state,
    restore,
    synchronize,
)
from sparta.create.quantize.scheme import Scheme
from sparta.errors import SpartaError, ValueRangeError, message
from sparta.tesa.spec import Spec

__all__ = ["QuantizationModifier"]

_SLACK = 1e-6  # of an epoch


@modifier
class QuantizationModifier(Modifier):
    """Quantization-aware training from `start_epoch` on; it stays on.

    Examples
    --------
    >>> entry = QuantizationModifier(start_epoch=15, freeze_bn_stats_epoch=17.5)
    >>> entry.epochs(), entry.shifted(10).freeze_bn_stats_epoch
    ((15.0, 17.5), 27.5)
    """

    kind: ClassVar[str] = "quantization"
    epoch_fields: ClassVar[tuple[str, ...]] = (
        "start_epoch",
        "end_epoch",
        "disable_quantization_observer_epoch",
        "freeze_bn_stats_epoch",
    )

    scheme: str | dict[str, Any] = Field(
        default="default", description="A preset's name, or args for weights, input_activations, output_activations."
    )
    scheme_overrides: dict[str, str | dict[str, Any] | None] = Field(
        default_factory=dict, description="Schemes by module or class name; null leaves it in floating point."
    )
    ignore: list[str] = Field(default_factory=list, description="Modules or classes to leave in floating point.")
    submodules: list[str] | None = Field(default=None, description="Modules to quantise; null: all.")
    disable_quantization_observer_epoch: float | None = Field(
        default=None, description="From when on ranges stay as they are; null: never."
    )
    freeze_bn_stats_epoch: float | None = Field(
        default=None, description="From when on batch norms use and keep their running statistics; null: never."
    )
    num_calibration_steps: int | None = Field(
        default=None, ge=1, description="Batches of `data` that set the first ranges; null: all, if there is data."
    )
    fold_batch_norms: bool = Field(
        default=True, description="Round weights of one scale as they will be with their batch norm folded in."
    )
    strict: bool = Field(default=True, description="Whether a name that matches nothing is an error.")
    rounding: Literal["nearest", "compensated"] = Field(
        default="nearest",
        description="How weights are rounded first; compensated: by `data`, later columns make up for earlier ones.",
    )

    _observers_frozen: bool = PrivateAttr(default=False)
    _norms_frozen: bool = PrivateAttr(default=False)
    _model: nn.Module | None = PrivateAttr(default=None)

    @field_validator("end_epoch")
    @classmethod
    def _never_ends(cls, value: float) -> float:
        if value != -1:
            raise ValueError(message(f"end_epoch is {value}", "-1: quantization stays on", "leave it out"))
        return value

    @field_validator("scheme")
    @classmethod
    def _scheme_exists(cls, value: str | dict[str, Any]) -> str | dict[str, Any]:
        _check_scheme(value)
        return value

    @field_validator("scheme_overrides")
    @classmethod
    def _overrides_exist(cls, value: dict[str, Any]) -> dict[str, Any]:
        for given in value.values():
            if given is not None:
                _check_scheme(given)
        return value

    @model_validator(mode="after")
    def _freezes_after_start(self) -> Self:
        for name in ("disable_quantization_observer_epoch", "freeze_bn_stats_epoch"):
            value = getattr(self, name)
            if value is not None and value < max(self.start_epoch, 0):
                raise ValueError(
                    message(f"{name} is {value} and start_epoch {self.start_epoch}", "a freeze after the start")
                )
        return self

    def initialize(self, run: Run) -> None:
        """Check the scheme and all names against the model."""
        self._model = run.model
        if self.rounding == "compensated" and run.data is None:
            given = f"{self.name} with rounding 'compensated' and without data"
            raise ValueRangeError(message(given, "batches as the model takes them", "pass data= where the run begins"))
        if not is_quantized(run.model):
            plan(run.model, self.scheme, **self._choice())

    def update(self, run: Run) -> None:
        """Switch on at the start (and calibrate, where there is data), freeze when it is time."""
        if self.start_pending(run.epoch) and not is_quantized(run.model):
            self._switch_on(run)
            self._calibrate(run)
        if not self._observers_frozen and _reached(self.disable_quantization_observer_epoch, run.epoch):
            freeze_observers(run.model)
            self._observers_frozen = True
        if not self._norms_frozen and _reached(self.freeze_bn_stats_epoch, run.epoch):
            freeze_statistics(run.model)
            self._norms_frozen = True

    def after_step(self, run: Run) -> None:
        """Keep the ranges of all processes of a distributed run alike."""
        if self._started and not self._observers_frozen:
            synchronize(run.model)

    def spec(self, run: Run) -> Spec | None:
        """Return the bits and grids of the quantised weights; which of them are zero is for pruning to say."""
        if not is_quantized(run.model):
            return None
        return Spec({name: weight.tesa(zeros=False) for name, weight in integer_weights(run.model).items()})

    def epochs(self) -> tuple[float, float]:
        """Return the start and the last freeze."""
        freezes = (self.disable_quantization_observer_epoch, self.freeze_bn_stats_epoch)
        return self.start_epoch, max((epoch for epoch in freezes if epoch is not None), default=-1.0)

    def planned(self, epoch: float) -> dict[str, float]:
        """Return whether quantization is on."""
        return {"quantized": float(epoch >= self.start_epoch)}

    def state_dict(self) -> dict[str, Any]:
        """Return all ranges, and what is frozen."""
        on = self._model is not None and is_quantized(self._model)
        return {
            "observers_frozen": self._observers_frozen,
            "norms_frozen": self._norms_frozen,
            "quantization": quantization_state(self._model) if on and self._model is not None else None,
        }

    def load_state_dict(self, run: Run, state: Mapping[str, Any]) -> None:
        """Bring the model to the saved stage: switched on, ranges, freezes; or back to plain."""
        if is_quantized(run.model):
            restore(run.model)
        self._observers_frozen, self._norms_frozen = bool(state["observers_frozen"]), bool(state["norms_frozen"])
        if state["quantization"] is not None:
            self._switch_on(run)
            load_quantization_state(run.model, state["quantization"])
        if self._norms_frozen:
            freeze_statistics(run.model)

    def _switch_on(self, run: Run) -> None:
        prepare(run.model, self.scheme, fold_batch_norms=self.fold_batch_norms, **self._choice())

    def _calibrate(self, run: Run) -> None:
        if run.data is not None:
            data = run.data
            if self.rounding == "compensated":
                data = as_inputs(run.data, self.num_calibration_steps)  # read once, used twice
                compensate(run.model, data, self.num_calibration_steps)
            calibrate(run.model, data, self.num_calibration_steps)
        elif self.num_calibration_steps is not None:
            raise ValueRangeError(
                message(
                    f"num_calibration_steps is {self.num_calibration_steps}, but there is no data",
                    fix="pass `data` where the run begins, or leave it out",
                )
            )

    def _choice(self) -> dict[str, Any]:
        return {
            "include": self.submodules,
            "ignore": self.ignore,
            "overrides": self.scheme_overrides,
            "strict": self.strict,
        }


def _reached(moment: float | None, epoch: float) -> bool:
    return moment is not None and epoch >= moment - _SLACK


def _check_scheme(given: str | dict[str, Any]) -> None:
    try:
        Scheme.of(given)
    except SpartaError as error:
        raise ValueError(str(error).rstrip(".")) from error

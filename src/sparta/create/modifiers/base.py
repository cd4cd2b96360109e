"""What every modifier is: some fields of a recipe, a window of epochs, and a life cycle inside a training run.

A recipe is a list of modifiers; the manager calls each at its moments of every optimizer step. A modifier's *fields*
say what it does and never change, everything it learns lives in private attributes and is in its state, and a
:class:`Run` is all of the outside world it may see and touch. Subclasses write what happens (`initialize`, `update`,
`state_dict`, `load_state_dict`); the manager calls the methods around it that keep track of the window
(`call_initialize`, `update_if_due`, `full_state`, `load_full_state`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

from pydantic import ConfigDict, PrivateAttr, ValidationError
from torch import Tensor

from sparta.create.modifiers.run import Run
from sparta.create.modifiers.window import Window
from sparta.errors import NameNotFoundError, SpartaError, ValueRangeError, did_you_mean, message
from sparta.tesa.spec import Spec

__all__ = ["KINDS", "Modifier", "Run", "modifier", "modifier_named", "modifier_names"]

KINDS = ("epoch", "learning_rate", "pruning", "quantization", "distillation", "structured", "training")

_REGISTRY: dict[str, type[Modifier]] = {}
_M = TypeVar("_M", bound="type[Modifier]")


class Modifier(Window):
    """One entry of a recipe.

    A new modifier is one subclass with fields, a `kind`, the methods of the life cycle that it needs, and the
    :func:`modifier` decorator. The manager calls, in this order: :meth:`initialize` once, before the first step; then
    at each optimizer step :meth:`update` where the window has an event, :meth:`before_step` (gradients are there),
    the optimizer's step, :meth:`after_step`; :meth:`finalize` at the end.

    Parameters
    ----------
    start_epoch
        When it begins; -1: at once.
    end_epoch
        When it ends; -1: never.
    update_frequency
        Epochs between two updates; -1: every step. Counted from the start, so that rounding to steps never adds up.

    Examples
    --------
    >>> from sparta.create.modifiers import modifier_named
    >>> entry = modifier_named("EpochRange")(start_epoch=0, end_epoch=10)
    >>> entry.name, entry.epochs(), entry.shifted(5).epochs()
    ('EpochRange', (0.0, 10.0), (5.0, 15.0))
    """

    model_config = ConfigDict(
        extra="forbid", validate_assignment=True, validate_default=True, protected_namespaces=(), allow_inf_nan=False
    )

    kind: ClassVar[str] = "training"
    _initialized: bool = PrivateAttr(default=False)

    def __init__(self, **fields: Any) -> None:
        for name in fields:
            if name not in type(self).model_fields:
                raise NameNotFoundError(did_you_mean(name, type(self).model_fields, f"field of {type(self).label()}"))
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise ValueRangeError(_first_problem(error, type(self).label())) from error
        self._check_window()

    def __setattr__(self, name: str, value: Any) -> None:
        try:
            super().__setattr__(name, value)
        except ValidationError as error:
            raise ValueRangeError(_first_problem(error, type(self).label())) from error

    # ------------------------------------------------------------------ identity

    def fields(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults, as plain values: what a recipe would say."""
        return self.model_dump(mode="json", exclude_defaults=True)

    def __eq__(self, other: object) -> bool:
        """Whether the other says the same; what either has learnt in a run does not count."""
        return isinstance(other, Modifier) and type(self) is type(other) and self.model_dump() == other.model_dump()

    __hash__ = None  # type: ignore[assignment]  # fields can be assigned

    # ------------------------------------------------------------------ the life cycle: what subclasses write

    def initialize(self, run: Run) -> None:
        """Match parameters and check everything that can be checked before the first step."""

    def update(self, run: Run) -> None:
        """Do the scheduled work; :meth:`start_pending` and :meth:`end_pending` tell what kind of moment it is."""

    def before_step(self, run: Run) -> None:
        """See the gradients of a step, unscaled, just before the optimizer takes it."""

    def after_step(self, run: Run) -> None:
        """See the model just after the optimizer's step."""

    def loss(self, run: Run, loss: Tensor, inputs: Any, outputs: Any) -> Tensor:  # noqa: ARG002
        """Return the loss to train with."""
        return loss

    def finalize(self, run: Run) -> None:
        """Let go of everything that is hooked to the model or the optimizer."""

    def idle(self) -> str:
        """Return why it has had no effect so far although it was to have one, or nothing; the manager warns of it.

        Asked after the first epoch of its window and when the run is finalized.
        """
        return ""

    def spec(self, run: Run) -> Spec | None:  # noqa: ARG002
        """Return what it has done to the weights, if anything: zeros, bits."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return what it has learnt, as tensors and plain values; the window's own state is kept beside it."""
        return {}

    def load_state_dict(self, run: Run, state: Mapping[str, Any]) -> None:  # noqa: ARG002
        """Take back what :meth:`state_dict` returned."""
        if state:
            raise ValueRangeError(message(f"a state for {self.name}, which has none", "an empty state"))

    # ------------------------------------------------------------------ what it says beforehand

    def planned(self, epoch: float) -> dict[str, float]:  # noqa: ARG002
        """Return the scheduled values at `epoch`, such as ``learning_rate`` or ``sparsity``; for plots and dry runs."""
        return {}

    def preview(self, run: Run) -> dict[str, float]:  # noqa: ARG002
        """Return the sparsity each parameter would end with, judged by the weights as they are; changes nothing."""
        return {}

    # ------------------------------------------------------------------ what the manager calls

    def call_initialize(self, run: Run) -> None:
        """Call :meth:`initialize`, and note that it was."""
        self.initialize(run)
        self._initialized = True

    def update_if_due(self, run: Run) -> bool:
        """Call :meth:`update` if the window has an event now, and update its bookkeeping; returns whether it had.

        Where a window begins and ends at one moment, both events happen, in this order.
        """
        if not self._initialized:
            raise ValueRangeError(
                message(f"{self.name} is updated before it was initialized", fix="let a Manager initialize it first")
            )
        fired = False
        while self.update_ready(run.epoch) and not (fired and not self.end_pending(run.epoch)):
            starting, ending = self.start_pending(run.epoch), self.end_pending(run.epoch)
            self.update(run)
            self._started = self._started or starting
            self._ended = self._ended or ending
            self._last_update = run.epoch if math.isfinite(run.epoch) else max(self.end_epoch, 0.0)
            fired = True
        return fired

    def full_state(self) -> dict[str, Any]:
        """Return the window's bookkeeping and :meth:`state_dict`."""
        window = {"started": self._started, "ended": self._ended, "last_update": self._last_update}
        return {"window": window, "own": self.state_dict()}

    def load_full_state(self, run: Run, state: Mapping[str, Any]) -> None:
        """Take back what :meth:`full_state` returned, after :meth:`call_initialize`."""
        missing = {"window", "own"} - state.keys()
        if missing:
            raise ValueRangeError(message(f"a state of {self.name} without {sorted(missing)}", "what it saved"))
        window = state["window"]
        self._started, self._ended = bool(window["started"]), bool(window["ended"])
        self._last_update = float(window["last_update"])
        if not -1 <= self._last_update < 2**53:
            raise ValueRangeError(message(f"the last update of {self.name} was at {self._last_update}", "an epoch"))
        try:
            self.load_state_dict(run, state["own"])
        except KeyError as error:
            if isinstance(error, SpartaError):
                raise
            raise ValueRangeError(
                message(f"a state of {self.name} without {error}", "what the same modifier saved")
            ) from error


def modifier(cls: _M) -> _M:
    """Class decorator: make a modifier known to recipes under its :meth:`Modifier.label`."""
    if cls.kind not in KINDS:
        raise NameNotFoundError(did_you_mean(cls.kind, KINDS, "kind of modifier"))
    _REGISTRY[cls.label()] = cls
    return cls


def modifier_named(name: str) -> type[Modifier]:
    """Return the modifier that a recipe calls `name`; the old spelling with ``Modifier`` at the end is understood too.

    >>> from sparta.create.modifiers import modifier_named
    >>> modifier_named("EpochRangeModifier") is modifier_named("EpochRange")
    True
    """
    found = _REGISTRY.get(name) or _REGISTRY.get(name.removesuffix("Modifier"))
    if found is None:
        raise NameNotFoundError(did_you_mean(name, _REGISTRY, "modifier"))
    return found


def modifier_names() -> list[str]:
    """Return the names of all modifiers, sorted."""
    return sorted(_REGISTRY)


def _first_problem(error: ValidationError, name: str) -> str:
    """Return pydantic's first complaint as one sentence of ours."""
    first = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in first["loc"]) or "a field"
    text = str(first["msg"]).removeprefix("Value error, ").rstrip(".")
    if first["type"] in {"value_error", "missing"}:
        return f"{name}: {text if first['type'] == 'value_error' else f'{place} is missing'}."
    return message(f"{place} of {name} is {first['input']!r}: {text[0].lower()}{text[1:]}")

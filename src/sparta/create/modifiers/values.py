"""Plain values written while training: weight decay, which parameters learn, and parameters themselves.

Small things that recipes have always had. What is taken away for a window is given back at its end as it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, PrivateAttr, model_validator
from torch import nn

from sparta.create.modifiers.base import Modifier, Run, modifier
from sparta.create.modifiers.learning_rate import check_places, write_to_groups
from sparta.create.modifiers.parameters import parameters_for
from sparta.errors import NameNotFoundError, ValueRangeError, message
from sparta.sparsify import Schedule
from sparta.sparsify.shards import local

__all__ = ["GradualParamModifier", "SetParamModifier", "SetWeightDecayModifier", "TrainableParamsModifier"]


@modifier
class SetWeightDecayModifier(Modifier):
    """Sets the weight decay once, when it starts.

    >>> SetWeightDecayModifier(weight_decay=1e-4, start_epoch=3).epochs()
    (3.0, -1.0)
    """

    weight_decay: float = Field(ge=0)
    param_groups: list[int] | None = None

    def initialize(self, run: Run) -> None:
        """Check that the optimizer has such groups and knows of weight decay."""
        check_places(run, self.name, self.param_groups)
        for group in run.optimizer.param_groups:
            if "weight_decay" not in group:
                raise ValueRangeError(
                    message(f"{type(run.optimizer).__name__} has no weight decay", "an optimizer that has one")
                )

    def update_ready(self, epoch: float) -> bool:
        """Return whether it starts now."""
        return self.start_pending(epoch)

    def update(self, run: Run) -> None:
        """Write the weight decay."""
        write_to_groups(run, "weight_decay", self.weight_decay, self.param_groups)


class _OfParameters(Modifier):
    """What modifiers of named parameters share."""

    params: list[str] | str = "__ALL__"
    params_strict: bool = True
    """Whether a name that matches nothing is an error; otherwise it is left out."""

    _parameters: dict[str, nn.Parameter] = PrivateAttr(default_factory=dict)

    def initialize(self, run: Run) -> None:
        """Match the parameters."""
        entries = [self.params] if isinstance(self.params, str) else self.params
        for entry in entries:
            try:
                self._parameters |= parameters_for(run, entry)
            except NameNotFoundError:
                if self.params_strict:
                    raise


@modifier
class TrainableParamsModifier(_OfParameters):
    """Switches learning off (or on) for some parameters, and back at the end of the window.

    >>> TrainableParamsModifier(params="re:.*norm.*", trainable=False, start_epoch=0, end_epoch=2).trainable
    False
    """

    trainable: bool

    _before: dict[str, bool] = PrivateAttr(default_factory=dict)

    def update_ready(self, epoch: float) -> bool:
        """Return whether it starts or ends now."""
        return self.start_pending(epoch) or self.end_pending(epoch)

    def update(self, run: Run) -> None:  # noqa: ARG002
        """Switch, and forget the gradient, which the optimizer would otherwise still use."""
        if not self._started:
            self._before = {name: parameter.requires_grad for name, parameter in self._parameters.items()}
            self._switch(dict.fromkeys(self._parameters, self.trainable))
        else:
            self._switch(self._before)

    def _switch(self, wanted: Mapping[str, bool]) -> None:
        for name, parameter in self._parameters.items():
            parameter.requires_grad_(wanted[name])
            if not wanted[name]:
                parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Return how it was before."""
        return {"before": dict(self._before)}

    def load_state_dict(self, run: Run, state: Mapping[str, Any]) -> None:  # noqa: ARG002
        """Take back how it was before, and switch as it stood."""
        self._before = dict(state["before"])
        if self._started and not self._ended:
            self._switch(dict.fromkeys(self._parameters, self.trainable))


@modifier
class SetParamModifier(_OfParameters):
    """Sets all elements of some parameters to one value once, when it starts.

    >>> SetParamModifier(params="fc.bias", val=0.0).val
    0.0
    """

    val: float

    def update_ready(self, epoch: float) -> bool:
        """Return whether it starts now."""
        return self.start_pending(epoch)

    @torch.no_grad()
    def update(self, run: Run) -> None:  # noqa: ARG002
        """Write the value."""
        for parameter in self._parameters.values():
            local(parameter).fill_(self.val)


@modifier
class GradualParamModifier(_OfParameters):
    """Moves all elements of some parameters from one value to another over its window.

    >>> ramp = GradualParamModifier(params="beta", init_val=0, final_val=4, start_epoch=0, end_epoch=2)
    >>> ramp.value_at(1)
    2.0
    """

    kind: ClassVar[str] = "training"

    init_val: float
    final_val: float
    end_epoch: float
    inter_func: Literal["linear", "cubic", "inverse_cubic", "cosine"] = "linear"

    @model_validator(mode="after")
    def _check_end(self) -> GradualParamModifier:
        if self.end_epoch < 0:
            raise ValueError(message(f"end_epoch is {self.end_epoch}", "the epoch at which final_val is reached"))
        return self

    def value_at(self, epoch: float) -> float:
        """Return the value at `epoch`."""
        start = max(0.0, self.start_epoch)
        progress = Schedule(self.inter_func, 1.0, 0.0, start, self.end_epoch).at(max(start, epoch))
        return self.init_val + (self.final_val - self.init_val) * progress

    @torch.no_grad()
    def update(self, run: Run) -> None:
        """Write the value of this epoch."""
        for parameter in self._parameters.values():
            local(parameter).fill_(self.value_at(run.epoch))

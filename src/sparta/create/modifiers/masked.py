"""What all pruning modifiers share: layers, a pattern, and masks that hold.

The masks are :class:`sparta.sparsify.Masks`, the holder of every other way to prune in this package. Masks are attached
to the optimizer at the start of the run, hold nothing until one is set, and change only at an event of the modifier's
window.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import PrivateAttr, field_validator
from torch import Tensor
from torch.optim import Optimizer

from sparta.create.modifiers.base import Modifier, Run
from sparta.create.modifiers.parameters import ALL_PRUNABLE, layers_for
from sparta.errors import ValueRangeError, message
from sparta.sparsify import Layer, Masks
from sparta.sparsify.masks import Gradients, OptimizerState, Pruned, zero_moments
from sparta.tesa.patterns import Block, Channel, Pattern, parse_pattern
from sparta.tesa.spec import Spec

__all__ = ["MaskedModifier", "mask_text", "pattern_of", "reset_state"]


def mask_text(mask_type: object) -> object:
    """Return a pattern as its text, which recipes can hold; anything else as it is."""
    return str(mask_type) if isinstance(mask_type, Pattern) else mask_type


def pattern_of(mask_type: str | list[int]) -> Pattern:
    """Return the pattern that a recipe's `mask_type` names.

    Parameters
    ----------
    mask_type
        ``"unstructured"``, ``"block4"`` (four input channels), ``"2:4"`` or any other N:M (N kept of M),
        ``"tensorrt"`` (2:4), ``"filter"``, ``"channel"``, a text form such as ``"block:16x16"``, or two sizes.

    Examples
    --------
    >>> pattern_of("block4") == pattern_of([1, 4]), str(pattern_of("tensorrt"))
    (True, '2:4')
    """
    if isinstance(mask_type, str):
        return Channel(1) if mask_type == "channel" else parse_pattern(mask_type)  # beside "filter", it means inputs
    if len(mask_type) != 2:
        raise ValueRangeError(message(f"mask_type is {mask_type}", "a name, or the two sizes of a block, as [1, 4]"))
    return Block(mask_type[0], mask_type[1])


def reset_state(optimizer: Optimizer, parameter: Tensor) -> None:
    """Make the optimizer forget a parameter: moments to zero, and the count of steps that corrects their bias."""
    zero_moments(optimizer, parameter)
    state = optimizer.state.get(parameter, {})
    if isinstance(step := state.get("step"), Tensor):
        step.zero_()
    elif step is not None:
        state["step"] = 0


class MaskedModifier(Modifier):
    """A modifier that holds masks on some layers.

    Parameters
    ----------
    params
        Names, globs, ``re:`` patterns, ``__ALL__`` or ``__ALL_PRUNABLE__``.
    leave_enabled
        Whether the masks hold after the end of the window. If not, pruned weights may grow again from then on.
    mask_type
        Where zeros may be; see :func:`pattern_of`.
    """

    kind: ClassVar[str] = "pruning"
    _gradients: ClassVar[Gradients] = "masked"
    _pruned: ClassVar[Pruned] = "forget"
    _moments: ClassVar[OptimizerState] = "zero"

    params: list[str] | str = ALL_PRUNABLE
    leave_enabled: bool = True
    mask_type: str | list[int] = "unstructured"

    _layers: list[Layer] = PrivateAttr(default_factory=list)
    _masks: Masks | None = PrivateAttr(default=None)

    _as_text = field_validator("mask_type", mode="before")(mask_text)

    @field_validator("mask_type")
    @classmethod
    def _known_pattern(cls, value: str | list[int]) -> str | list[int]:
        pattern_of(value)
        return value

    @property
    def pattern(self) -> Pattern:
        """Where zeros may be."""
        return pattern_of(self.mask_type)

    @property
    def masks(self) -> Masks:
        """The masks; there are none before the run begins."""
        if self._masks is None:
            raise ValueRangeError(message(f"{self.name} has no masks yet", fix="let a Manager initialize it first"))
        return self._masks

    def chosen_layers(self, run: Run) -> list[Layer]:
        """Return the layers to prune."""
        return layers_for(run, self.params, self.pattern)

    def initialize(self, run: Run) -> None:
        """Find the layers, check the pattern on each, and hang the masks on the optimizer."""
        self._layers = self.chosen_layers(run)
        self._masks = Masks(
            self._layers,
            gradients=self._gradients,
            pruned=self._pruned,
            optimizer_state=self._moments,
            before_step=lambda _: self.see_gradients(run),
        ).attach(run.optimizer)

    def see_gradients(self, run: Run) -> None:
        """Look at the gradients of a step, with the real values of pruned weights in place."""

    def set_masks(self, run: Run, made: Mapping[str, Tensor]) -> None:
        """Hold new masks, and say so."""
        self.masks.set(made)
        run.log({"sparsity": self.masks.sparsity})

    def release(self) -> None:
        """Let go of the optimizer at the end of the window, if asked."""
        if not self.leave_enabled:
            self.masks.detach()

    def finalize(self, run: Run) -> None:  # noqa: ARG002
        """Zero what is pruned for the last time and let go of the optimizer."""
        if not self._ended or self.leave_enabled:
            self.masks.apply()
        self.masks.detach()

    @property
    def _holds(self) -> bool:
        return self._started and (self.leave_enabled or not self._ended)

    def held_masks(self) -> dict[str, Tensor]:
        """Return the masks that hold now, by name (True: kept); none before it has begun or after it let go."""
        return self.masks.to_dict() if self._holds else {}

    def spec(self, run: Run) -> Spec | None:  # noqa: ARG002
        """Return the masks, once it has begun; not of masks that were let go."""
        return self.masks.spec() if self._holds else None

    def state_dict(self) -> dict[str, Any]:
        """Return the masks, packed."""
        return {"masks": self.masks.state_dict()}

    def load_state_dict(self, run: Run, state: Mapping[str, Any]) -> None:  # noqa: ARG002
        """Take back the masks."""
        self.masks.load_state_dict(state["masks"])
        if self._ended:
            self.release()

"""How a sparsity is spread over layers: what all kinds of pruning with a budget share.

An allocation is chosen by its name. Without one, a kind spreads as it always did: by a single threshold, evenly, or by
the sizes of layers. Measured sensitivities are taken once, before the first masks, and are part of the state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import PrivateAttr, model_validator
from torch import Tensor

from sparta.create.modifiers.base import Run
from sparta.create.modifiers.masked import MaskedModifier
from sparta.create.modifiers.parameters import mean_fresh_loss
from sparta.errors import ValueRangeError, message
from sparta.sparsify import ERK, Allocation, Global, Layer, Score, Sensitivity, Uniform, make_masks, measure_sensitivity
from sparta.sparsify.allocation import lamp

__all__ = ["ALLOCATIONS", "AllocationName", "SpreadModifier"]

AllocationName = Literal["uniform", "global", "erk", "lamp", "sensitivity"]
ALLOCATIONS: dict[str, str] = {
    "uniform": "the same sparsity in each layer",
    "global": "one threshold for all layers",
    "erk": "by the sizes of layers: small ones stay denser (Erdős-Rényi-Kernel)",
    "lamp": "one threshold for scores that are relative to their layer (LAMP)",
    "sensitivity": "each layer until it costs the same loss, measured before the first masks; needs a loss or data",
}
"""What `allocation` may be."""

_LEAST = 0.1  # of the density of all layers, which each of them keeps in any case
_LEAST_OF_THRESHOLD = 0.5  # the same under a single threshold, which would starve layers whose weights are small
_BATCHES = 4  # fresh batches for one measured loss


class SpreadModifier(MaskedModifier):
    """A modifier that spreads one sparsity over its layers.

    Parameters
    ----------
    allocation
        One of :data:`ALLOCATIONS`; left out, the kind's own. A pattern with a sparsity of its own (N:M) has it in each
        layer.
    """

    _refused: ClassVar[Mapping[str, str]] = {}  # allocations that this kind cannot take, with the reason

    allocation: AllocationName | None = None

    _curves: dict[str, list[tuple[float, float]]] = PrivateAttr(default_factory=dict)

    @model_validator(mode="after")
    def _check_allocation(self) -> SpreadModifier:
        if self.allocation is not None and self.allocation in self._refused:
            given = f"allocation {self.allocation!r} for {self.name}: {self._refused[self.allocation]}"
            raise ValueError(message(given, ", ".join(name for name in ALLOCATIONS if name not in self._refused)))
        if self.allocation not in {None, "uniform"} and self.pattern.own_sparsity() is not None:
            given = f"allocation {self.allocation!r} with {self.pattern}, which says how sparse each layer is"
            raise ValueError(message(given, "uniform", "leave allocation out"))
        asked = getattr(self, "global_sparsity", None) if "global_sparsity" in self.model_fields_set else None
        if None not in {asked, self.allocation} and asked != (self.allocation == "global"):
            given = f"global_sparsity {asked} with allocation {self.allocation!r}"
            raise ValueError(message(given, "one of them", "leave global_sparsity out"))
        return self

    @property
    def spread_by(self) -> AllocationName:
        """The allocation that is used."""
        if self.pattern.own_sparsity() is not None:
            return "uniform"
        return self.allocation or self._own_allocation()

    def _own_allocation(self) -> AllocationName:
        return "global" if getattr(self, "global_sparsity", False) else "uniform"

    def initialize(self, run: Run) -> None:
        """Refuse to begin without a loss where sensitivities are to be measured."""
        super().initialize(run)
        if self.spread_by == "sensitivity" and run.loss_closure is None and run.data is None:
            fix = "pass loss_closure=, a function that returns the loss of one fresh batch, or data= to initialize"
            raise ValueRangeError(message("allocation 'sensitivity' without a source of losses", fix=fix))

    def measure(self, run: Run) -> None:
        """Measure how sensitive the layers are, once, where the allocation asks for it."""
        if self.spread_by == "sensitivity" and not self._curves:
            self._curves = measure_sensitivity(
                self._layers, lambda: mean_fresh_loss(run, _BATCHES), pattern=self.pattern
            )

    def least(self, sparsity: float) -> float:
        """Return the density that each layer keeps at least when all together have `sparsity`."""
        return (1 - sparsity) * (_LEAST_OF_THRESHOLD if self.spread_by == "global" else _LEAST)

    def spread(
        self, layers: list[Layer], score: Score | Mapping[str, Tensor], sparsity: float | None, floor: float = 0.0
    ) -> dict[str, Tensor]:
        """Return masks of `sparsity` over all layers together, each with at least the density `floor`."""
        return make_masks(layers, score, self.pattern, sparsity, self._allocation(1 - floor))

    def _allocation(self, most: float) -> Allocation:
        match self.spread_by:
            case "global":
                return Global(max_sparsity=most)
            case "erk":
                return ERK(max_sparsity=most)
            case "lamp":
                return lamp(most)
            case "sensitivity":
                return Sensitivity(most, self._curves)
            case _:
                return Uniform()

    def state_dict(self) -> dict[str, Any]:
        """Return the masks and the measured sensitivities."""
        return super().state_dict() | ({"curves": dict(self._curves)} if self._curves else {})

    def load_state_dict(self, run: Run, state: Mapping[str, Any]) -> None:
        """Take back what :meth:`state_dict` returned."""
        super().load_state_dict(run, state)
        curves = state.get("curves", {})
        self._curves = {name: [(float(at), float(loss)) for at, loss in points] for name, points in curves.items()}

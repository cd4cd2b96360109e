"""Logging what is pruned: one number per layer, at regular epochs.

It measures the zeros that are in the weights, not what a mask claims.
"""

from __future__ import annotations

from pydantic import PrivateAttr

from sparta.create.modifiers.base import Modifier, Run, modifier
from sparta.create.modifiers.parameters import ALL_PRUNABLE, layers_for
from sparta.create.modifiers.pruning import measured_sparsities
from sparta.sparsify import Layer

__all__ = ["SparsificationLoggingModifier"]


@modifier
class SparsificationLoggingModifier(Modifier):
    """Logs the measured sparsity of each layer and of all.

    >>> SparsificationLoggingModifier().update_frequency
    1.0
    """

    start_epoch: float = 0.0
    update_frequency: float = 1.0
    params: list[str] | str = ALL_PRUNABLE

    _layers: list[Layer] = PrivateAttr(default_factory=list)

    def initialize(self, run: Run) -> None:
        """Find the layers."""
        self._layers = layers_for(run, self.params, with_frozen=True)

    def update(self, run: Run) -> None:
        """Measure and log."""
        record = {
            f"sparsity/{name}": value for name, value in measured_sparsities(self._layers, together=False).items()
        }
        together = measured_sparsities(self._layers, together=True)
        run.log(record | {"sparsity/all": next(iter(together.values()))})

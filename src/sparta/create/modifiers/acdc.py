"""AC/DC: alternating compressed and dense phases, so that a network finds its mask while it learns.

Phases of `update_frequency` epochs take turns, dense first; the last one is compressed. Weights come back at zero when
a dense phase begins, and the optimizer forgets what it knew of them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from pydantic import Field, model_validator

from sparta.create.modifiers.base import Run, modifier
from sparta.create.modifiers.masked import reset_state
from sparta.create.modifiers.spread import SpreadModifier
from sparta.errors import message
from sparta.sparsify import Layer, Magnitude
from sparta.sparsify.shards import local

__all__ = ["ACDCPruningModifier"]


@modifier
class ACDCPruningModifier(SpreadModifier):
    """Alternates dense and compressed phases over its window, and ends compressed.

    Parameters
    ----------
    compression_sparsity
        Sparsity of the compressed phases; left out, it is the pattern's own (N:M).
    update_frequency
        Length of a phase in epochs; fractions are fine.
    momentum_buffer_reset
        Whether the optimizer forgets its moments when a dense phase begins.
    long_last_dense_phase
        Whether the last dense phase is twice as long as the others, as in the paper (Peste et al., 2021).
    layer_floor
        Least density of a layer unless all get the same; by default half of that of all under one threshold,
        else a tenth.
    allocation
        How the sparsity is spread over layers, if not by `global_sparsity`: ``uniform``, ``global``, ``erk``,
        ``lamp`` or ``sensitivity``.

    Examples
    --------
    >>> phases = ACDCPruningModifier(compression_sparsity=0.9, start_epoch=0, end_epoch=7, update_frequency=2)
    >>> [phases.is_compressed(epoch) for epoch in (0, 2, 4, 6, 7)]
    [False, True, False, True, True]
    """

    compression_sparsity: float | None = Field(default=None, ge=0, lt=1)
    start_epoch: float = 0.0
    end_epoch: float
    update_frequency: float
    global_sparsity: bool = True
    momentum_buffer_reset: bool = True
    long_last_dense_phase: bool = False
    layer_floor: float | None = Field(default=None, ge=0, lt=1)

    @model_validator(mode="after")
    def _check_phases(self) -> ACDCPruningModifier:
        if self.compression_sparsity is None and self.pattern.own_sparsity() is None:
            raise ValueError(message("compression_sparsity is missing", "a number in [0, 1)"))
        if self.update_frequency < 0 or self.end_epoch < 0:
            raise ValueError(message("AC/DC without end_epoch or update_frequency", "an end and the length of a phase"))
        return self

    def is_compressed(self, epoch: float) -> bool:
        """Return whether the phase at `epoch` is a compressed one."""
        start = max(0.0, self.start_epoch)
        if epoch < start - 1e-6:
            return False
        phases = math.ceil((self.end_epoch - start) / self.update_frequency - 1e-6)
        phase = math.floor((min(epoch, self.end_epoch) - start) / self.update_frequency + 1e-6)
        if self.long_last_dense_phase and phases >= 3:
            last = phases - 1 - (phases % 2 == 0)  # where the last compressed phase begins, after a dense one
            return phase >= last or (phase % 2 == 1 and phase < last - 2)
        return phase % 2 == 1 or phase >= phases - 1

    def update(self, run: Run) -> None:
        """Change the phase, if it is another one."""
        compressed = self.is_compressed(run.epoch)
        if compressed and self._is_dense:
            self.measure(run)
            self.set_masks(run, self._make(self._layers))
        elif not compressed and not self._is_dense:
            ones = {layer.name: torch.ones_like(local(layer.parameter), dtype=torch.bool) for layer in self._layers}
            self.set_masks(run, ones)
            if self.momentum_buffer_reset:
                for layer in self._layers:
                    reset_state(run.optimizer, layer.parameter)
        if self.end_pending(run.epoch):
            self.release()

    @property
    def _is_dense(self) -> bool:
        return not any(self.masks.pruned_counts().values())

    def _make(self, layers: list[Layer]) -> dict[str, Any]:
        floor = 0.0
        if self.compression_sparsity is not None:
            floor = self.least(self.compression_sparsity) if self.layer_floor is None else self.layer_floor
        return self.spread(layers, Magnitude(), self.compression_sparsity, floor)

    def planned(self, epoch: float) -> dict[str, float]:
        """Return the sparsity of the phase."""
        if epoch < self.start_epoch:
            return {}
        return {"sparsity": (self.compression_sparsity or 0.0) if self.is_compressed(epoch) else 0.0}

    def preview(self, run: Run) -> dict[str, float]:
        """Return the sparsity each layer would end with, by its weights now."""
        if self.spread_by == "sensitivity" and not self._curves:
            return {}  # not known before it is measured
        made = self._make(self.chosen_layers(run))
        return {name: 1 - float(mask.float().mean()) for name, mask in made.items()}

"""Dynamic sparse training: sparse from the first step, with masks that move while the network learns.

RigL drops small weights and grows those with large gradients; Top-KAST computes with few weights and trains some more.
The sparsity is constant, only the places change.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, PrivateAttr, model_validator
from torch import Tensor

from sparta.create.modifiers.base import Run, modifier
from sparta.create.modifiers.parameters import fresh_gradients, gradient_of
from sparta.create.modifiers.spread import AllocationName, SpreadModifier
from sparta.errors import ValueRangeError, message
from sparta.sparsify import ERK, Layer, Magnitude, make_masks
from sparta.sparsify.masks import OptimizerState, Pruned, zero_moments
from sparta.sparsify.ranking import lowest_of
from sparta.sparsify.shards import gradient_part, local, packed, shards_of, summed, unpacked

__all__ = ["RigLPruningModifier", "TopKASTPruningModifier"]


@modifier
class RigLPruningModifier(SpreadModifier):
    """Drops the smallest weights and grows as many where the gradient is largest, at every update.

    Parameters
    ----------
    final_sparsity
        Sparsity from the start on.
    sparsity_strategy
        How it is spread: ``erdos_renyi_kernel``, ``erdos_renyi`` (without the kernel's dims) or ``uniform``.
    allocation
        The same by the names that all kinds share, and goes before it: ``uniform``, ``global``, ``erk``, ``lamp`` or
        ``sensitivity``, by the weights at the start.
    init_update_fraction
        Share of a layer's weights that the first update moves; it falls to zero over the window as half a cosine.
    num_grads
        Gradients that growing looks at: 1 is the training's own of that step, more are sampled afresh.

    Examples
    --------
    >>> rigl = RigLPruningModifier(final_sparsity=0.9, end_epoch=10, update_frequency=0.5)
    >>> rigl.fraction_at(0), rigl.fraction_at(5), rigl.fraction_at(10)
    (0.3, 0.15, 0.0)
    """

    final_sparsity: float = Field(ge=0, lt=1)
    start_epoch: float = 0.0
    end_epoch: float
    update_frequency: float = 0.1
    sparsity_strategy: Literal["erdos_renyi_kernel", "erdos_renyi", "uniform"] = "erdos_renyi_kernel"
    init_update_fraction: float = Field(default=0.3, ge=0, le=1)
    num_grads: int = Field(default=1, ge=1)
    mask_type: Literal["unstructured"] = "unstructured"

    @model_validator(mode="after")
    def _check_end(self) -> RigLPruningModifier:
        if self.end_epoch < 0:
            raise ValueError(message(f"end_epoch is {self.end_epoch}", "the epoch of the last update"))
        return self

    def initialize(self, run: Run) -> None:
        """Check that there is a source of gradients where more than the training's own are asked for."""
        if self.num_grads > 1 and run.loss_closure is None and run.data is None:
            raise ValueRangeError(
                message(
                    f"RigL with num_grads {self.num_grads} and no source of fresh gradients",
                    "1 without a source",
                    "pass loss_closure= or data= to initialize, or set num_grads: 1",
                )
            )
        super().initialize(run)

    def fraction_at(self, epoch: float) -> float:
        """Return the share of weights that an update at `epoch` moves."""
        start = max(0.0, self.start_epoch)
        progress = min(1.0, (epoch - start) / (self.end_epoch - start)) if self.end_epoch > start else 1.0
        return self.init_update_fraction * (0.5 + 0.5 * math.cos(math.pi * progress))

    def update(self, run: Run) -> None:
        """Make the first masks, or move them."""
        if self.start_pending(run.epoch):
            self.measure(run)
            self.set_masks(run, self._first_masks(self._layers))
        elif not self.end_pending(run.epoch):
            self.set_masks(run, self._moved(run))
        if self.end_pending(run.epoch):
            self.release()

    def _first_masks(self, layers: list[Layer]) -> dict[str, Tensor]:
        if self.allocation is None and self.sparsity_strategy == "erdos_renyi":
            allocation = ERK(include_kernel=False)
            return make_masks(layers, Magnitude(), self.pattern, self.final_sparsity, allocation)
        return self.spread(layers, Magnitude(), self.final_sparsity, self._floor(self.final_sparsity))

    def _own_allocation(self) -> AllocationName:
        return "uniform" if self.sparsity_strategy == "uniform" else "erk"

    def _floor(self, sparsity: float) -> float:
        return 0.0 if self.allocation is None else self.least(sparsity)

    def _moved(self, run: Run) -> dict[str, Tensor]:
        gradients = self._gradients_of(run)
        fraction = self.fraction_at(run.epoch)
        made = {}
        for layer in self._layers:
            kept, weight = self.masks[layer.name], local(layer.parameter)
            shards = shards_of(layer.parameter)
            live = int(summed(torch.count_nonzero(kept), shards))
            count = min(round(fraction * live), layer.parameter.numel() - live)
            stay = kept & ~lowest_of([weight.abs()], count, shards, [kept])[0]
            grown = lowest_of([-gradients[layer.name].abs()], count, shards, [~stay])[0]
            made[layer.name] = stay | grown
        return made

    def _gradients_of(self, run: Run) -> dict[str, Tensor]:
        if self.num_grads == 1:
            found = {layer.name: gradient_of(layer.parameter, run.optimizer) for layer in self._layers}
            return {
                layer.name: torch.zeros_like(local(layer.parameter)) if gradient is None else gradient
                for layer, gradient in zip(self._layers, found.values(), strict=True)
            }
        sums = {layer.name: torch.zeros_like(local(layer.parameter)) for layer in self._layers}
        for gradients in fresh_gradients(run, self._layers, self.num_grads):
            for layer, gradient in zip(self._layers, gradients, strict=True):
                sums[layer.name] += gradient
        return sums

    def planned(self, epoch: float) -> dict[str, float]:
        """Return the constant sparsity."""
        return {"sparsity": self.final_sparsity} if epoch >= self.start_epoch else {}

    def preview(self, run: Run) -> dict[str, float]:
        """Return how the sparsity is spread."""
        if self.spread_by == "sensitivity" and not self._curves:
            return {}  # not known before it is measured
        made = self._first_masks(self.chosen_layers(run))
        return {name: 1 - float(mask.float().mean()) for name, mask in made.items()}


@modifier
class TopKASTPruningModifier(SpreadModifier):
    """Computes with the largest weights and trains some more, so that these can take their places.

    Weights outside the forward mask are zero for the model but go on learning inside the backward mask; decay pulls
    on all that learn, harder on those outside (their share of the forward density more).

    Parameters
    ----------
    forward_sparsity
        Of the weights that the model computes with.
    backward_sparsity
        Of the weights that learn; not above `forward_sparsity`.
    active_weight_decay
        Strength of the decay.
    allocation
        How both are spread over layers: ``uniform`` (the default), ``global``, ``erk``, ``lamp`` or ``sensitivity``.

    Examples
    --------
    >>> TopKASTPruningModifier(forward_sparsity=0.9, backward_sparsity=0.5).planned(3)
    {'sparsity': 0.9}
    """

    _pruned: ClassVar[Pruned] = "train"
    _moments: ClassVar[OptimizerState] = "keep"

    forward_sparsity: float = Field(ge=0, lt=1)
    backward_sparsity: float = Field(ge=0, lt=1)
    start_epoch: float = 0.0
    update_frequency: float = 0.1
    active_weight_decay: float = Field(default=1e-4, ge=0)

    _learning: dict[str, Tensor] = PrivateAttr(default_factory=dict)

    @model_validator(mode="after")
    def _check_order(self) -> TopKASTPruningModifier:
        if self.backward_sparsity > self.forward_sparsity:
            raise ValueError(
                message(
                    f"backward_sparsity {self.backward_sparsity} is above forward_sparsity {self.forward_sparsity}",
                    "more weights that learn than weights that compute",
                )
            )
        return self

    def update(self, run: Run) -> None:
        """Choose both masks again by magnitude; at the end, what is outside the forward mask stops learning."""
        self.measure(run)
        floor = self.least(self.forward_sparsity)
        with self.masks.exposed():
            made = self.spread(self._layers, Magnitude(), self.forward_sparsity, floor)
            self._learning = self.spread(self._layers, Magnitude(), self.backward_sparsity, floor)
        self._learning = {name: mask | made[name] for name, mask in self._learning.items()}
        if self.end_pending(run.epoch):
            self._learning = made
        for layer in self._layers:
            zero_moments(run.optimizer, layer.parameter, ~self._learning[layer.name])
        self.set_masks(run, made)
        if self.end_pending(run.epoch):
            self.release()

    @torch.no_grad()
    def see_gradients(self, run: Run) -> None:
        """Decay what learns, and stop the rest."""
        scale = getattr(run.optimizer, "grad_scale", None)
        decay = self.active_weight_decay if scale is None else self.active_weight_decay * scale
        for layer in self._layers:
            weight, gradient = local(layer.parameter), gradient_part(layer.parameter)
            if gradient is None or layer.name not in self._learning:
                continue
            outside = ~self.masks[layer.name]
            strength = torch.where(outside, 1 / (1 - self.forward_sparsity), 1.0)
            gradient.add_(weight * strength * decay)
            gradient.masked_fill_(~self._learning[layer.name], 0)

    def planned(self, epoch: float) -> dict[str, float]:
        """Return the sparsity of what the model computes with."""
        return {"sparsity": self.forward_sparsity} if epoch >= self.start_epoch else {}

    def state_dict(self) -> dict[str, Any]:
        """Return the masks, and which weights learn."""
        weights = {layer.name: layer.parameter for layer in self._layers}
        learning = {name: packed(mask, weights[name]) for name, mask in self._learning.items()}
        return super().state_dict() | {"learning": learning}

    def load_state_dict(self, run: Run, state: Mapping[str, Any]) -> None:
        """Take back what :meth:`state_dict` returned."""
        super().load_state_dict(run, state)
        weights = {layer.name: layer.parameter for layer in self._layers}
        self._learning = {name: unpacked(bits, weights[name]) for name, bits in state["learning"].items()}

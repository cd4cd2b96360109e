"""Second-order pruning: what to prune, and how the rest makes up for it, from the curvature of the loss.

OBS holds blocks of the empirical Fisher matrix and samples fresh gradients for them; M-FAC works from a few gradients
alone, sampled or taken from the training itself. After such an event the surviving weights have moved, by the step that
the estimate of the curvature says repairs the damage.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from pydantic import Field, PrivateAttr, field_validator
from torch import Tensor

from sparta.create.loop.scaler import step_is_skipped
from sparta.create.modifiers.base import Run, modifier
from sparta.create.modifiers.fisher import BlockFisher, Curvature, GradientFisher
from sparta.create.modifiers.parameters import fresh_gradients, gradient_of
from sparta.create.modifiers.pruning import GradualPruning
from sparta.errors import ValueRangeError, message
from sparta.sparsify import Layer
from sparta.sparsify.shards import local, own_part, shards_of, taken, whole

__all__ = ["MFACPruningModifier", "OBSPruningModifier"]

_SOURCE = (
    "pass loss_closure=, a function without arguments that returns the loss of one fresh batch, or data=, a loader of "
    "(inputs, targets), to initialize"
)


class _SecondOrder(GradualPruning):
    """What both share: scores and compensation from a curvature for each layer."""

    global_sparsity: bool = True
    damp: float = Field(default=1e-7, gt=0)
    fisher_block_size: int = Field(default=50, ge=1)

    _curvatures: dict[str, Curvature] = PrivateAttr(default_factory=dict)

    def estimate(self, run: Run) -> dict[str, Curvature]:
        """Return the curvature of each layer among the weights that are there.

        Gradients of pruned weights count as zero: a weight that is held at zero cannot make up for another. Of sharded
        weights it is that of the whole, which every process makes from gathered gradients.
        """
        raise NotImplementedError

    def scores(self, run: Run) -> Mapping[str, Tensor]:
        """Return the rise of the loss that each weight stands for."""
        self._curvatures = self.estimate(run)
        found = {layer.name: self._curvatures[layer.name].saliency(_whole(layer)) for layer in self._layers}
        return {layer.name: own_part(found[layer.name], layer.parameter) for layer in self._layers}

    @torch.no_grad()
    def adjust(self, made: Mapping[str, Tensor]) -> None:
        """Move the survivors."""
        for layer in self._layers:
            kept = whole(made[layer.name], layer.parameter)
            moved = self._curvatures[layer.name].compensated(_whole(layer), kept)
            local(layer.parameter).copy_(own_part(moved, layer.parameter))
        self._curvatures = {}


def _whole(layer: Layer) -> Tensor:
    """Return all of a layer's weight, also where this process holds a part of it."""
    return whole(local(layer.parameter), layer.parameter)


@modifier
class OBSPruningModifier(_SecondOrder):
    """Optimal brain surgeon: blocks of the empirical Fisher matrix, from fresh gradients at every update.

    Needs a ``loss_closure`` or ``data``. Memory goes with the weights times `fisher_block_size`.

    Parameters
    ----------
    num_grads
        Fresh batches sampled at an update.
    damp
        Added to the diagonal of the matrix.
    num_recomputations
        In how many parts an update is done, each with a new estimate.

    Examples
    --------
    >>> OBSPruningModifier(final_sparsity=0.9, end_epoch=4).fisher_block_size
    50
    """

    num_grads: int = Field(default=256, ge=1)
    num_recomputations: int = Field(default=1, ge=1)

    def initialize(self, run: Run) -> None:
        """Refuse to begin without a source of fresh gradients."""
        if run.loss_closure is None and run.data is None:
            raise ValueRangeError(
                message("OBS pruning without a source of fresh gradients", "a loss_closure or data", _SOURCE)
            )
        super().initialize(run)

    def estimate(self, run: Run) -> dict[str, Curvature]:
        """Return the blocks of each layer, from fresh gradients."""
        found = {layer.name: BlockFisher(_whole(layer), self.damp, self.fisher_block_size) for layer in self._layers}
        for gradients in fresh_gradients(run, self._layers, self.num_grads):
            for layer, gradient in zip(self._layers, gradients, strict=True):
                found[layer.name].add(whole(gradient * self.masks[layer.name], layer.parameter))
        return dict(found)

    def update(self, run: Run) -> None:
        """Prune, in as many parts as asked."""
        now = run.epoch
        last = now if self._last_update < 0 else self._last_update
        parts = self.num_recomputations if last < now < float("inf") else 1
        for part in range(1, parts):
            run.epoch = last + (now - last) * part / parts
            with self.masks.exposed():
                made = self._make(self._layers, self.scores(run), run.epoch)
                self.adjust(made)
            self.masks.set(made)
        run.epoch = now
        super().update(run)


@modifier
class MFACPruningModifier(_SecondOrder):
    """M-FAC: the curvature from a few gradients alone, without a matrix.

    With a ``loss_closure`` or ``data`` fresh gradients are sampled; without, those of the last `num_grads` training
    steps are kept (that many copies of the weights, saved with the state). Before that many steps have been taken, an
    update works with those there are; with one gradient it prunes nearly as magnitude pruning does.

    Parameters
    ----------
    num_grads
        How many gradients; ``{sparsity: count}`` takes more when sparsity is higher.
    grads_device
        Where kept gradients lie, such as ``"cpu"``; by default where the weights do.
    use_gradient_buffering
        Whether to keep the training's gradients even where fresh ones could be had.

    Examples
    --------
    >>> MFACPruningModifier(final_sparsity=0.9, end_epoch=4, num_grads={0.0: 32, 0.8: 64}).gradients_at(0.85)
    64
    """

    damp: float = Field(default=1e-5, gt=0)
    fisher_block_size: int = Field(default=2000, ge=1)
    num_grads: int | dict[float, int] = 64
    grads_device: str | None = None
    use_gradient_buffering: bool = False

    _kept: deque[Tensor] = PrivateAttr(default_factory=deque)
    _seen_step: int = PrivateAttr(default=-1)

    @field_validator("num_grads")
    @classmethod
    def _check_counts(cls, value: int | dict[float, int]) -> int | dict[float, int]:
        counts = value.values() if isinstance(value, dict) else [value]
        if not counts or min(counts) < 1:
            raise ValueError(message(f"num_grads is {value}", "1 or more, or {sparsity: count}"))
        return value

    def gradients_at(self, sparsity: float) -> int:
        """Return how many gradients are used at a sparsity."""
        if isinstance(self.num_grads, int):
            return self.num_grads
        steps = sorted(self.num_grads)
        return self.num_grads[max([step for step in steps if step <= sparsity] or steps[:1])]

    def before_step(self, run: Run) -> None:
        """Keep the gradients of this step, if they are to come from the training."""
        if not self._ended and not self._samples(run):
            self._keep(run)

    def _samples(self, run: Run) -> bool:
        has_source = run.loss_closure is not None or run.data is not None
        return has_source and not self.use_gradient_buffering

    @torch.no_grad()
    def _keep(self, run: Run) -> None:
        if self._seen_step == run.step or step_is_skipped(run.optimizer):
            return
        found = [gradient_of(layer.parameter, run.optimizer) for layer in self._layers]
        if all(gradient is None for gradient in found):
            return
        flat = [
            (torch.zeros_like(local(layer.parameter)) if gradient is None else gradient).reshape(-1).float()
            for gradient, layer in zip(found, self._layers, strict=True)
        ]
        self._seen_step = run.step
        device = self.grads_device or flat[0].device
        self._kept.append(torch.cat([part.to(device) for part in flat]))
        while len(self._kept) > self._most:
            self._kept.popleft()

    @property
    def _most(self) -> int:
        return self.num_grads if isinstance(self.num_grads, int) else max(self.num_grads.values())

    def estimate(self, run: Run) -> dict[str, Curvature]:
        """Return the curvature of each layer, from fresh or from kept gradients."""
        count = self.gradients_at(self.masks.sparsity)
        if self._samples(run):
            rows = [
                torch.cat([gradient.reshape(-1).float() for gradient in gradients])
                for gradients in fresh_gradients(run, self._layers, count)
            ]
        else:
            self._keep(run)
            rows = list(self._kept)[-count:]
        if not rows:
            raise ValueRangeError(message("M-FAC pruning has seen no gradient", "one step or more", _SOURCE))
        sizes = [local(layer.parameter).numel() for layer in self._layers]
        parts = torch.split(torch.stack(rows), sizes, dim=1)
        return {
            layer.name: GradientFisher(self._gathered(layer, part), self.damp, self.fisher_block_size)
            for layer, part in zip(self._layers, parts, strict=True)
        }

    def _gathered(self, layer: Layer, rows: Tensor) -> Tensor:
        """Return gradients of the weights that are there, one in each row, of the whole weight."""
        rows = rows * self.masks[layer.name].flatten().to(rows.device)
        if shards_of(layer.parameter).is_whole:
            return rows
        weight = local(layer.parameter)
        return torch.stack([whole(row.view_as(weight).to(weight.device), layer.parameter).flatten() for row in rows])

    def state_dict(self) -> dict[str, Any]:
        """Return the masks and the kept gradients."""
        kept = {"kept": torch.stack([self._gathered_row(row) for row in self._kept])} if self._kept else {}
        return super().state_dict() | kept | {"seen_step": self._seen_step}

    def _gathered_row(self, row: Tensor) -> Tensor:
        """Return a kept gradient of whole weights; `row` is this process's part."""
        weights = [layer.parameter for layer in self._layers]
        parts = torch.split(row, [local(weight).numel() for weight in weights])
        made = [whole(p.view_as(local(w)).to(local(w).device), w) for p, w in zip(parts, weights, strict=True)]
        return torch.cat([part.reshape(-1).to(row.device) for part in made])

    def _own_row(self, row: Tensor) -> Tensor:
        """Return this process's part of a gradient of whole weights."""
        weights = [layer.parameter for layer in self._layers]
        if row.numel() == sum(local(weight).numel() for weight in weights):
            return row
        parts = torch.split(row, [weight.numel() for weight in weights])
        made = [taken(part.view(weight.shape), weight) for part, weight in zip(parts, weights, strict=True)]
        return torch.cat([part.reshape(-1).to(row.device) for part in made])

    def load_state_dict(self, run: Run, state: Mapping[str, Any]) -> None:
        """Take back what :meth:`state_dict` returned."""
        super().load_state_dict(run, state)
        device = self.grads_device or local(self._layers[0].parameter).device
        rows = state["kept"].to(device).clone().unbind() if "kept" in state else ()
        self._kept = deque(self._own_row(row) for row in rows)
        self._seen_step = int(state["seen_step"])

"""Gradual pruning: from one sparsity to another over a window, by magnitude or movement, of layers or the network.

The family of GMP. The sparsity at an update is the closed form of the epoch, exact to the last element at both ends,
and a floor keeps a global threshold from emptying a layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, PrivateAttr, field_validator, model_validator
from torch import Tensor

from sparta.create.loop.scaler import step_is_skipped
from sparta.create.modifiers.base import Run, modifier
from sparta.create.modifiers.parameters import fresh_gradients, gradient_of, layers_for
from sparta.create.modifiers.spread import SpreadModifier
from sparta.errors import ValueRangeError, message
from sparta.sparsify import Layer, Magnitude, Movement, Schedule, Score, Uniform, along_inputs, make_masks
from sparta.sparsify.masks import OptimizerState, Pruned
from sparta.sparsify.shards import local, shards_of, summed, taken, whole

__all__ = [
    "FROM_PARAM",
    "GMPruningModifier",
    "GlobalMagnitudePruningModifier",
    "GradualPruning",
    "MagnitudePruningModifier",
    "MovementPruningModifier",
]

FROM_PARAM = "__FROM_PARAM__"
_WARM_UP = 8  # fresh batches for a score that has seen none, when a recipe is applied at once


class GradualPruning(SpreadModifier):
    """Prunes from `init_sparsity` at the start of the window to `final_sparsity` at its end, and holds it.

    Parameters
    ----------
    init_sparsity
        At the start; ``__FROM_PARAM__``: what the weights have then.
    final_sparsity
        At the end: one number, or ``{sparsity: [names]}`` with ``params: []``. Left out, it is the pattern's own (N:M).
    inter_func
        The curve between: ``cubic`` (much early), ``linear``, ``inverse_cubic`` (much late), ``cosine``.
    global_sparsity
        Whether one threshold ranks all layers together. N:M fixes every layer's sparsity, so there it makes none.
    allocation
        How the sparsity is spread over layers, if not by `global_sparsity`: ``uniform``, ``global``, ``erk``,
        ``lamp`` or ``sensitivity``.
    layer_floor
        Least density of a layer unless all get the same; by default half of the final density under
        one threshold, else a tenth. 0: one weight.
    """

    init_sparsity: float | Literal["__FROM_PARAM__"] = 0.05
    final_sparsity: float | dict[float, list[str]] | None = None
    start_epoch: float = 0.0
    end_epoch: float
    inter_func: Literal["linear", "cubic", "inverse_cubic", "cosine"] = "cubic"
    global_sparsity: bool = False
    layer_floor: float | None = Field(default=None, ge=0, lt=1)

    _targets: dict[str, float | None] = PrivateAttr(default_factory=dict)
    _measured: dict[str, float] = PrivateAttr(default_factory=dict)
    _score: Score = PrivateAttr(default_factory=Magnitude)

    @field_validator("final_sparsity")
    @classmethod
    def _check_final(cls, value: float | dict[float, list[str]] | None) -> float | dict[float, list[str]] | None:
        for sparsity in value if isinstance(value, dict) else [value]:
            if sparsity is not None and not 0 <= sparsity < 1:
                raise ValueError(message(f"final_sparsity is {sparsity}", "a number in [0, 1)"))
        return value

    @model_validator(mode="after")
    def _check_together(self) -> GradualPruning:
        final, pattern = self.final_sparsity, self.pattern
        own = pattern.own_sparsity()
        if self.end_epoch < 0:
            raise ValueError(message(f"end_epoch is {self.end_epoch}", "the epoch at which final_sparsity is reached"))
        if isinstance(self.init_sparsity, float) and not 0 <= self.init_sparsity < 1:
            raise ValueError(message(f"init_sparsity is {self.init_sparsity}", "a number in [0, 1), or __FROM_PARAM__"))
        if final is None and own is None:
            raise ValueError(message("final_sparsity is missing", "a number in [0, 1)", "only N:M has one of its own"))
        if isinstance(final, dict):
            if self.params != []:
                raise ValueError(message("final_sparsity names parameters, and so does params", "params: []"))
            if self.spread_by != "uniform":
                given = f"the allocation {self.spread_by!r} with several final sparsities"
                raise ValueError(message(given, "uniform", "set global_sparsity: false"))
        elif final is not None:
            if isinstance(self.init_sparsity, float) and self.init_sparsity > final:
                raise ValueError(message(f"init_sparsity {self.init_sparsity} is above final_sparsity {final}"))
            if own is not None and final < own - 1e-9:
                raise ValueError(
                    message(f"final_sparsity {final} with {pattern}", f"{own:g} or more", "leave final_sparsity out")
                )
        return self

    def initialize(self, run: Run) -> None:
        """Find the layers, and the final sparsity of each."""
        super().initialize(run)
        self._targets = self._find_targets(run, self._layers)

    def chosen_layers(self, run: Run) -> list[Layer]:
        """Return the layers to prune: those of `params`, or those that `final_sparsity` names."""
        if isinstance(self.final_sparsity, dict):
            return layers_for(run, [name for entries in self.final_sparsity.values() for name in entries], self.pattern)
        return layers_for(run, self.params, self.pattern)

    def _find_targets(self, run: Run, layers: list[Layer]) -> dict[str, float | None]:
        if not isinstance(self.final_sparsity, dict):
            return dict.fromkeys([layer.name for layer in layers], self.final_sparsity)
        targets: dict[str, float | None] = {}
        for sparsity, entries in self.final_sparsity.items():
            for layer in layers_for(run, entries):
                if layer.name in targets:
                    raise ValueRangeError(message(f"final_sparsity names {layer.name!r} twice", "once"))
                targets[layer.name] = sparsity
        return targets

    # ------------------------------------------------------------------ when and how much

    def sparsity_at(self, epoch: float, layer: Layer | None = None) -> float | None:
        """Return the scheduled sparsity at `epoch`, of one layer where they differ; None: the full N:M pattern."""
        final = self._final_of(layer)
        initial = 0.0 if isinstance(self.init_sparsity, str) else self.init_sparsity
        if layer is not None and self.init_sparsity == FROM_PARAM:
            initial = self._measured.get(layer.name, 0.0)
        start = max(0.0, self.start_epoch)
        if epoch >= self.end_epoch - 1e-9 and self._wants_full_pattern(layer):
            return None
        if epoch >= self.end_epoch - 1e-9:
            return final
        return Schedule(self.inter_func, final, min(initial, final), start, self.end_epoch).at(max(start, epoch))

    def _final_of(self, layer: Layer | None) -> float:
        final = self._targets.get(layer.name) if layer is not None else self.final_sparsity
        if isinstance(final, dict):
            final = max(final)
        if final is None:
            pattern = self.pattern if layer is None else along_inputs(self.pattern, layer)
            return pattern.own_sparsity(None if layer is None else layer.shape) or 0.0
        return final

    def _wants_full_pattern(self, layer: Layer | None) -> bool:
        final = self._targets.get(layer.name) if layer is not None else self.final_sparsity
        own = self.pattern.own_sparsity()
        return own is not None and (final is None or (not isinstance(final, dict) and abs(final - own) < 1e-9))

    def planned(self, epoch: float) -> dict[str, float]:
        """Return the scheduled sparsity, from the start on."""
        sparsity = self.sparsity_at(epoch)
        return {"sparsity": self._final_of(None) if sparsity is None else sparsity} if epoch >= self.start_epoch else {}

    def preview(self, run: Run) -> dict[str, float]:
        """Return the sparsity each layer would end with, by the magnitudes of its weights now."""
        layers = self.chosen_layers(run)
        twin = type(self)(**{name: getattr(self, name) for name in self.model_fields_set})
        twin._targets = twin._find_targets(run, layers)
        twin._curves = self._curves
        if twin.spread_by == "sensitivity" and not twin._curves:
            return {}  # not known before it is measured
        made = twin._make(layers, Magnitude(), self.end_epoch)
        return {name: 1 - float(mask.float().mean()) for name, mask in made.items()}

    # ------------------------------------------------------------------ the work

    def update(self, run: Run) -> None:
        """Make the masks of this epoch."""
        if self.start_pending(run.epoch) and self.init_sparsity == FROM_PARAM:
            self._measured = measured_sparsities(self._layers, together=self._ranks_together)
        self.measure(run)
        with self.masks.exposed():
            self.see_gradients(run)
            made = self._make(self._layers, self.scores(run), run.epoch)
            self.adjust(made)
        self.set_masks(run, made)
        if self.end_pending(run.epoch):
            self.release()

    def scores(self, run: Run) -> Score | Mapping[str, Tensor]:  # noqa: ARG002
        """Return what to prune first: a score, or the scores by layer."""
        return self._score

    def adjust(self, made: Mapping[str, Tensor]) -> None:
        """Change the weights that stay, just before others are pruned; plain pruning changes nothing."""

    @property
    def _ranks_together(self) -> bool:
        return self.spread_by != "uniform"

    def _make(self, layers: list[Layer], score: Score | Mapping[str, Tensor], epoch: float) -> dict[str, Tensor]:
        if self._ranks_together:
            sparsity = self.sparsity_at(epoch, layers[0])
            floor = self.least(self._final_of(layers[0])) if self.layer_floor is None else self.layer_floor
            return self.spread(layers, score, sparsity, floor)
        made: dict[str, Tensor] = {}
        for layer in layers:
            sparsity = self.sparsity_at(epoch, layer)
            made |= make_masks([layer], score, self.pattern, sparsity, Uniform())
        return made

    def state_dict(self) -> dict[str, Any]:
        """Return the masks, what the score has learnt, and the measured start."""
        weights = {layer.name: layer.parameter for layer in self._layers}
        score = {name: whole(value, weights[name]) for name, value in self._score.state_dict().items()}
        return super().state_dict() | {"score": score, "measured": dict(self._measured)}

    def load_state_dict(self, run: Run, state: Mapping[str, Any]) -> None:
        """Take back what :meth:`state_dict` returned."""
        super().load_state_dict(run, state)
        weights = {layer.name: layer.parameter for layer in self._layers}
        self._score.load_state_dict({name: taken(value, weights[name]) for name, value in state["score"].items()})
        self._measured = dict(state["measured"])


def measured_sparsities(layers: list[Layer], *, together: bool) -> dict[str, float]:
    """Return the fraction of zeros of each layer, or of all of them for each."""
    zeros = {
        layer.name: int(summed(torch.count_nonzero(local(layer.parameter) == 0), shards_of(layer.parameter)))
        for layer in layers
    }
    if together:
        share = sum(zeros.values()) / max(1, sum(layer.parameter.numel() for layer in layers))
        return dict.fromkeys(zeros, share)
    return {layer.name: zeros[layer.name] / max(1, layer.parameter.numel()) for layer in layers}


@modifier
class MagnitudePruningModifier(GradualPruning):
    """Prunes the smallest weights of each layer, gradually.

    >>> ramp = MagnitudePruningModifier(final_sparsity=0.8, start_epoch=0, end_epoch=10, update_frequency=1)
    >>> [round(ramp.sparsity_at(epoch), 4) for epoch in (0, 1, 2, 5, 9, 10)]
    [0.05, 0.2532, 0.416, 0.7063, 0.7993, 0.8]
    """


@modifier
class GlobalMagnitudePruningModifier(GradualPruning):
    """Prunes the smallest weights of the whole network, gradually.

    >>> GlobalMagnitudePruningModifier(final_sparsity=0.9, end_epoch=4).global_sparsity
    True
    """

    global_sparsity: bool = True


@modifier
class MovementPruningModifier(GradualPruning):
    """Prunes the weights that move towards zero: ``-W · G`` summed over all steps, gradually.

    Pruned weights are remembered as they were and go on being scored, so that they can come back.

    >>> MovementPruningModifier(final_sparsity=0.9, end_epoch=4).global_sparsity
    False
    """

    # Pruned weights that went on learning would move with nothing to hold them, and score themselves up.
    _pruned: ClassVar[Pruned] = "keep"
    _moments: ClassVar[OptimizerState] = "keep"
    _refused: ClassVar[Mapping[str, str]] = {"lamp": "movement can be negative, and LAMP cannot rank that"}

    _score: Score = PrivateAttr(default_factory=Movement)
    _seen_step: int = PrivateAttr(default=-1)

    def see_gradients(self, run: Run) -> None:
        """Add this step's movement, once a step."""
        if self._seen_step == run.step or step_is_skipped(run.optimizer):
            return
        if all(gradient_of(layer.parameter, run.optimizer) is None for layer in self._layers):
            if self._seen_step < 0:
                self._see_fresh(run)
            return
        self._seen_step = run.step
        with self.masks.exposed():
            self._score.observe(self._layers, run.optimizer)

    def _see_fresh(self, run: Run) -> None:
        """Learn from fresh batches, where a recipe is applied without training."""
        for gradients in fresh_gradients(run, self._layers, _WARM_UP):
            for layer, gradient in zip(self._layers, gradients, strict=True):
                layer.parameter.grad = gradient
            self._score.observe(self._layers, run.optimizer)
            for layer in self._layers:
                layer.parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Return the masks, the movement so far, and the step it was last seen at."""
        return super().state_dict() | {"seen_step": self._seen_step}

    def load_state_dict(self, run: Run, state: Mapping[str, Any]) -> None:
        """Take back what :meth:`state_dict` returned."""
        super().load_state_dict(run, {key: value for key, value in state.items() if key != "seen_step"})
        self._seen_step = int(state["seen_step"])


@modifier
class GMPruningModifier(GradualPruning):
    """The old name of gradual magnitude pruning, of each layer or of the network.

    >>> GMPruningModifier(final_sparsity=0.8, end_epoch=4).name
    'GMPruning'
    """

    score_type: Literal["magnitude"] = "magnitude"
    phased: Literal[False] = False

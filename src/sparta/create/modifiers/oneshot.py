"""One-shot pruning inside a recipe: the engine of `sparta.prune`, at one moment of a run or without any training.

Weights are chosen, and the remaining ones corrected, by the data of the run when the window begins; from then on the
masks hold like those of any other pruning. ``Manager.apply`` does it at once, so a recipe alone can prune a model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Self

from pydantic import Field, model_validator
from torch import nn

from sparta.create.modifiers.base import Run, modifier
from sparta.create.modifiers.masked import MaskedModifier
from sparta.create.modifiers.parameters import ALL, ALL_PRUNABLE, layers_for, refuse_shards
from sparta.create.quantize.compensate import as_inputs
from sparta.create.quantize.prepare import named_modules
from sparta.errors import NameNotFoundError, ValueRangeError, did_you_mean, message
from sparta.oneshot import prune
from sparta.oneshot.methods import method_names
from sparta.oneshot.targets import find_targets
from sparta.sparsify import Layer

__all__ = ["OneShotPruningModifier"]

_CLASS = re.compile(r"[A-Z]\w*")


@modifier
class OneShotPruningModifier(MaskedModifier):
    """Prunes at the start of its window, by data, and holds the zeros.

    Examples
    --------
    >>> import torch
    >>> from sparta.create import Manager
    >>> model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    >>> manager = Manager([OneShotPruningModifier(method="sparsegpt", mask_type="2:4")])
    >>> manager.apply(model, data=[torch.randn(32, 16)])
    >>> manager.spec().density
    0.5
    """

    params: list[str] | str = Field(
        default=ALL_PRUNABLE, description="Names, globs, re: patterns, or classes of modules whose weights are pruned."
    )
    ignore: list[str] = Field(default_factory=list, description="The same, for what is left out; it may match nothing.")
    method: str = Field(default="auto", description="How: auto, or a method of `sparta.prune`.")
    sparsity: float | None = Field(
        default=None, ge=0, lt=1, description="How much of each layer; null: what the mask has of its own."
    )
    allocation: str = Field(default="uniform", description="How the sparsity is spread over the layers.")

    @model_validator(mode="after")
    def _known(self) -> Self:
        names = ["auto", *method_names()]
        if self.method not in names:
            raise ValueError(did_you_mean(self.method, names, "method"))
        own = self.pattern.own_sparsity()
        if self.sparsity is None and own is None:
            raise ValueError(message(f"no sparsity for mask_type {self.mask_type!r}", "a number from 0 to 1"))
        if self.sparsity is not None and own is not None and abs(self.sparsity - own) > 1e-6:
            given = f"sparsity {self.sparsity} with mask_type {self.mask_type!r}, which prunes {own:.4g}"
            raise ValueError(message(given, f"{own:.4g}", "leave sparsity out"))
        return self

    def update_ready(self, epoch: float) -> bool:
        """Return whether it starts or ends now."""
        return self.start_pending(epoch) or self.end_pending(epoch)

    def chosen_layers(self, run: Run) -> list[Layer]:
        """Return the layers to prune: those that are named or within a class, and that the engine can solve."""
        solvable = {target.name for target in find_targets(run.model, include="*")}
        entries = [self.params] if isinstance(self.params, str) else self.params
        chosen: dict[str, Layer] = {}
        for entry in entries:
            chosen |= {layer.name: layer for layer in self._named(run, entry) if layer.name in solvable}
        for entry in self.ignore:
            within = _within(run.model, entry)
            chosen = {name: layer for name, layer in chosen.items() if not _is_in(name, within)}
        if not chosen:
            given = f"params {entries} without {self.ignore} leave nothing to prune"
            raise ValueRangeError(message(given, "one linear layer or convolution, or more"))
        return layers_for(run, list(chosen), self.pattern)

    def _named(self, run: Run, entry: str) -> list[Layer]:
        if entry in {ALL, ALL_PRUNABLE} or not _CLASS.fullmatch(entry) or entry in named_modules(run.model):
            return layers_for(run, ALL_PRUNABLE if entry == ALL else entry, self.pattern, with_frozen=True)
        within = _within(run.model, entry)
        if not within:
            kinds = sorted({type(module).__name__ for module in run.model.modules()})
            raise NameNotFoundError(did_you_mean(entry, kinds, "class of modules"))
        every = layers_for(run, ALL_PRUNABLE, self.pattern, with_frozen=True)
        return [layer for layer in every if _is_in(layer.name, within)]

    def initialize(self, run: Run) -> None:
        """Find the layers, and check that there is data for a method that needs it."""
        super().initialize(run)
        refuse_shards(self._layers, self.name)
        if run.data is None and self.method not in {"auto", "magnitude"}:
            given = f"{self.name} by {self.method!r} without data"
            raise ValueRangeError(message(given, "batches as the model takes them", "pass data= where the run begins"))

    def update(self, run: Run) -> None:
        """Prune at the start; let go at the end."""
        if self._started:
            self.release()
            return
        inner = named_modules(run.model)[""]
        spec, _ = prune(
            inner,
            None if run.data is None else as_inputs(run.data),
            self.pattern,
            None if self.pattern.own_sparsity() is not None else self.sparsity,
            method=self.method,
            include=[layer.name for layer in self._layers],
            allocation=self.allocation,
        )
        kept = spec.resolve(inner)
        self.set_masks(run, {layer.name: kept[layer.name].mask(layer.parameter.device) for layer in self._layers})

    def preview(self, run: Run) -> dict[str, float]:
        """Return what was asked for, layer by layer."""
        own = self.pattern.own_sparsity()
        return {layer.name: self.sparsity if own is None else own for layer in self.chosen_layers(run)}  # type: ignore[misc]


def _within(model: nn.Module, entry: str) -> set[str]:
    """Return the names of the modules that an entry names: by class, by name or by pattern."""
    modules: Mapping[str, nn.Module] = named_modules(model)
    if entry.startswith("re:"):
        pattern = re.compile(entry.removeprefix("re:"))
        return {name for name in modules if name and pattern.match(name)}
    return {name for name, module in modules.items() if name == entry or type(module).__name__ == entry}


def _is_in(parameter: str, modules: set[str]) -> bool:
    parts = parameter.split(".")[:-1]
    return any(".".join(parts[:length]) in modules for length in range(len(parts) + 1))

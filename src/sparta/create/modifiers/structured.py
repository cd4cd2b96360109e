"""Structured pruning: whole filters or input channels, by their norms, and whole layers.

What it prunes can be cut out of the model afterwards (`sparta.compact`), so that the model is smaller with ordinary
dense layers. Layers that must lose the same channels are named as one group, scored by the sum of their norms and given
one and the same choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import PrivateAttr
from torch import Tensor, nn

from sparta.create.modifiers.base import Modifier, Run, modifier
from sparta.create.modifiers.parameters import layers_for
from sparta.create.modifiers.pruning import GradualPruning
from sparta.errors import ShapeError, ValueRangeError, did_you_mean, message
from sparta.sparsify import Layer
from sparta.sparsify.shards import local, shards_of, summed
from sparta.tesa import names
from sparta.tesa.patterns import Channel

__all__ = ["LayerPruningModifier", "StructuredPruningModifier"]


@modifier
class StructuredPruningModifier(GradualPruning):
    """Prunes the filters (or input channels) with the smallest L2 norms, gradually.

    Parameters
    ----------
    mask_type
        ``"filter"``: output channels; ``"channel"``: input channels.
    param_groups
        Lists of names: the layers of a list lose the same channels, as residual connections need.
    params
        As of all pruning; with ``__ALL_PRUNABLE__``, depthwise convolutions are left out.

    Examples
    --------
    >>> StructuredPruningModifier(final_sparsity=0.5, end_epoch=2).pattern
    Channel(axis=0)
    """

    kind: ClassVar[str] = "structured"

    mask_type: Literal["filter", "channel"] = "filter"
    param_groups: list[list[str]] | None = None
    global_sparsity: Literal[False] = False

    _groups: list[list[Layer]] = PrivateAttr(default_factory=list)

    def chosen_layers(self, run: Run) -> list[Layer]:
        """Return the layers without depthwise convolutions, whose channels are not theirs alone to prune."""
        found = super().chosen_layers(run)
        kept = [layer for layer in found if not _is_depthwise(layer.module)]
        if not kept:
            raise ValueRangeError(message(f"{self.name} finds depthwise convolutions only", "other layers"))
        return kept

    def initialize(self, run: Run) -> None:
        """Find the layers and the groups among them."""
        super().initialize(run)
        if self.param_groups and self.spread_by != "uniform":
            given = f"param_groups with allocation {self.spread_by!r}"
            raise ValueRangeError(message(given, "uniform", "the layers of a group lose the same channels"))
        by_name = {layer.name: layer for layer in self._layers}
        axis = self.pattern.axis if isinstance(self.pattern, Channel) else 0
        for entries in self.param_groups or []:
            group = [by_name[layer.name] for layer in layers_for(run, entries) if layer.name in by_name]
            sizes = {layer.shape[axis] for layer in group}
            if len(sizes) != 1:
                raise ShapeError(
                    message(
                        f"the group {entries} has layers with {sorted(sizes)} channels", "the same number, one or more"
                    )
                )
            self._groups.append(group)

    def scores(self, run: Run) -> Mapping[str, Tensor]:  # noqa: ARG002
        """Return for every element the squared norm of its channel, summed over the group."""
        axis = self.pattern.axis if isinstance(self.pattern, Channel) else 0
        grouped = {layer.name for group in self._groups for layer in group}
        found: dict[str, Tensor] = {}
        for group in [*self._groups, *([layer] for layer in self._layers if layer.name not in grouped)]:
            total = sum((_squared_norms(layer, axis) for layer in group), torch.zeros(()))
            for layer in group:
                weight, shards = local(layer.parameter), shards_of(layer.parameter)
                shape = [-1 if dim == axis else 1 for dim in range(len(layer.shape))]
                here = total if shards.is_whole else total[shards.slices()[axis]]
                found[layer.name] = here.to(weight.device).view(shape).expand(weight.shape)
        return found


def _squared_norms(layer: Layer, axis: int) -> Tensor:
    """Return the squared norm of every channel of the whole weight."""
    weight, shards = local(layer.parameter).float(), shards_of(layer.parameter)
    here = weight.square().sum([dim for dim in range(weight.dim()) if dim != axis])
    if shards.is_whole:
        return here
    norms = here.new_zeros(shards.shape[axis])
    norms[shards.slices()[axis]] = here
    return summed(norms, shards)


def _is_depthwise(module: nn.Module) -> bool:
    groups: int = getattr(module, "groups", 1)
    return groups > 1 and groups == getattr(module, "in_channels", 0)


@modifier
class LayerPruningModifier(Modifier):
    """Replaces whole layers by the identity while its window lasts, and puts them back at its end.

    Without an end they stay out. The parameters of a layer that is out get no gradient, so the optimizer leaves them.

    Parameters
    ----------
    layers
        Names of submodules whose output has the shape of their input.

    Examples
    --------
    >>> LayerPruningModifier(layers=["blocks.3"], start_epoch=2).layers
    ['blocks.3']
    """

    kind: ClassVar[str] = "structured"

    layers: list[str]

    _removed: dict[str, nn.Module] = PrivateAttr(default_factory=dict)
    _paths: list[str] = PrivateAttr(default_factory=list)

    def initialize(self, run: Run) -> None:
        """Find the layers."""
        known = {names.canonical(path): path for path, _ in run.model.named_modules() if path}
        for name in self.layers:
            if names.canonical(name) not in known:
                raise ValueRangeError(did_you_mean(name, known, "submodule"))
            self._paths.append(known[names.canonical(name)])

    def update_ready(self, epoch: float) -> bool:
        """Return whether it starts or ends now."""
        return self.start_pending(epoch) or self.end_pending(epoch)

    def update(self, run: Run) -> None:
        """Take the layers out, or put them back."""
        if self._started:
            for path, module in self._removed.items():
                run.model.set_submodule(path, module)
            self._removed = {}
        else:
            self._take_out(run)

    def _take_out(self, run: Run) -> None:
        for path in self._paths:
            module = run.model.get_submodule(path)
            self._removed[path] = module
            for parameter in module.parameters():
                parameter.grad = None
            run.model.set_submodule(path, nn.Identity())

    def state_dict(self) -> dict[str, Any]:
        """Return the weights of the layers that are out, which the model's own state lacks."""
        return {"removed": {path: dict(module.state_dict()) for path, module in self._removed.items()}}

    def load_state_dict(self, run: Run, state: Mapping[str, Any]) -> None:
        """Take the layers out again, with the weights they had."""
        if state["removed"]:
            self._take_out(run)
        for path, weights in state["removed"].items():
            self._removed[path].load_state_dict(weights)

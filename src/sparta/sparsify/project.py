"""From scores and a budget to masks: the one place where score, pattern and allocation meet.

:func:`make_masks` is what every sparsifier, scheduler and recipe calls at an event. A mask is made from the whole
weight, also when it is spread over processes, and is exact in either case. Scores stay where they are, but for
patterns whose units lie across processes: then those of one layer at a time are gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from sparta.errors import ValueRangeError, message
from sparta.sparsify.allocation import Allocation, Candidate, Uniform
from sparta.sparsify.layers import Layer, along_inputs
from sparta.sparsify.ranking import lowest_of
from sparta.sparsify.shards import WHOLE, Shards, gathered, shards_of
from sparta.tesa.patterns import Pattern, as_pattern

__all__ = ["make_masks"]


@torch.no_grad()
def make_masks(
    layers: Sequence[Layer],
    score: Callable[[Layer], Tensor] | Mapping[str, Tensor],
    pattern: Pattern | str,
    sparsity: float | None = None,
    allocation: Allocation | None = None,
) -> dict[str, Tensor]:
    """Return the mask of each layer: the highest scores under `pattern`, as many as the budget leaves.

    Parameters
    ----------
    layers
        What to prune, as :func:`~sparta.sparsify.layers.find_layers` returns it.
    score
        A score, or the scores by layer name, each of the shape of the weight (of what of it is here).
    pattern
        A pattern, or its text form, such as ``"4x1"`` or ``"2:4"``.
    sparsity
        Fraction of all elements of all layers together. None is a pattern's own, as of N:M.
    allocation
        How the budget is spread; uniform by default.

    Returns
    -------
    dict of str to Tensor
        Bool masks, True for kept, of the shape of what this process holds of each weight.

    Examples
    --------
    >>> from sparta.sparsify import Global, Magnitude, find_layers
    >>> from sparta.tesa.patterns import Unstructured
    >>> layers = find_layers(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)))
    >>> masks = make_masks(layers, Magnitude(), Unstructured(), 0.75, Global())
    >>> sum(int(mask.sum()) for mask in masks.values())
    24
    """
    pattern = as_pattern(pattern)
    scores = {layer.name: score[layer.name] if isinstance(score, Mapping) else score(layer) for layer in layers}
    patterns = {layer.name: along_inputs(pattern, layer) for layer in layers}
    parts = {layer.name: _Part(patterns[layer.name], shards_of(layer.parameter), layer.shape) for layer in layers}
    if sparsity is None:
        if pattern.own_sparsity() is None:
            raise ValueRangeError(message(f"no sparsity for {pattern}", "a number in [0, 1]", "N:M has one of its own"))
        return {name: parts[name].full_mask(scores[name]) for name in scores}
    allocation = allocation or Uniform()
    limits = {} if isinstance(allocation, Uniform) else _limits(layers, patterns, sparsity)
    candidates = [
        Candidate(
            layer.name,
            layer.shape,
            patterns[layer.name].unit_count(layer.shape),
            parts[layer.name].unit_scores(scores[layer.name]),
            parts[layer.name].units or WHOLE,
            limits.get(layer.name, 1.0),
        )
        for layer in layers
    ]
    counts = allocation.counts(candidates, sparsity)
    return {c.name: parts[c.name].mask(scores[c.name], count) for c, count in zip(candidates, counts, strict=True)}


class _Part:
    """What this process holds of one weight, and how the units of its pattern lie in it.

    Parameters
    ----------
    shards
        How the weight of `shape` is spread; `units` is how its units are, None where one lies across processes.
    """

    def __init__(self, pattern: Pattern, shards: Shards, shape: Sequence[int]) -> None:
        self.pattern, self.shards, self.shape = pattern, shards, tuple(shape)
        self.units = shards.of_units(pattern)

    def unit_scores(self, score: Tensor) -> Tensor:
        """Return the scores of the units that are here; of all of them where they lie across processes."""
        return self.pattern.unit_scores(score if self.units is not None else gathered(score, self.shards))

    def full_mask(self, score: Tensor) -> Tensor:
        """Return the mask of the pattern's own sparsity."""
        if self.units is not None:
            return self.pattern.project(score)
        return self._here(self.pattern.project(gathered(score, self.shards)))

    def mask(self, score: Tensor, count: int) -> Tensor:
        """Return the mask with `count` units pruned, over all processes that hold a part of the weight."""
        total = self.pattern.unit_count(self.shape)
        share = count / total if total else 0.0
        if self.units is None:
            return self._here(self.pattern.project(gathered(score, self.shards), share))
        if self.units.is_whole:
            return self.pattern.project(score, share)
        if self.pattern.own_sparsity() is not None:
            full = self.pattern.project(score)
            pruned_by_full = total - round(self.pattern.capacity(self.shape) * total)
            if count >= pruned_by_full:
                return full & ~lowest_of([score], count - pruned_by_full, self.units, [full])[0]
            return ~lowest_of([score], count, self.units, [~full])[0]
        pruned = lowest_of([self.pattern.unit_scores(score)], count, self.units)[0]
        return self.pattern.spread(~pruned, score.shape)

    def _here(self, mask: Tensor) -> Tensor:
        return mask[self.shards.slices()].contiguous()


def _limits(layers: Sequence[Layer], patterns: Mapping[str, Pattern], sparsity: float) -> dict[str, float]:
    """Return how far N:M prunes each layer by itself, unless the network is to be sparser than that.

    Without this an uneven budget would take from one layer what another lacks to reach its pattern.
    """
    found = {layer.name: patterns[layer.name].own_sparsity(layer.shape) for layer in layers}
    own = {name: sparsity for name, sparsity in found.items() if sparsity is not None}
    total = sum(layer.parameter.numel() for layer in layers)
    reach = sum(own.get(layer.name, 1.0) * layer.parameter.numel() for layer in layers)
    return own if sparsity * total <= reach + 0.5 else {}

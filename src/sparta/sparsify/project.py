"""From scores and a budget to masks: the one place where score, pattern and allocation meet.

:func:`make_masks` is what every sparsifier, scheduler and recipe calls at an event. A mask is made from the whole
weight, also when its rows are spread over processes, and is exact in either case.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from sparta.errors import ValueRangeError, message
from sparta.sparsify.allocation import Allocation, Candidate, Uniform
from sparta.sparsify.layers import Layer, along_inputs
from sparta.sparsify.shards import Shards, check_sharding, lowest_of, shards_of
from sparta.tesa.patterns import Pattern, as_pattern

__all__ = ["make_masks", "project"]


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
        A score, or the scores by layer name, each of the shape of the weight (of its rows that are here).
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
    spread = {layer.name: shards_of(layer.parameter) for layer in layers}
    for layer in layers:
        check_sharding(patterns[layer.name], layer.shape, len(scores[layer.name]), spread[layer.name])
    if sparsity is None:
        if pattern.own_sparsity() is None:
            raise ValueRangeError(message(f"no sparsity for {pattern}", "a number in [0, 1]", "N:M has one of its own"))
        return {name: patterns[name].project(scores[name]) for name in scores}
    allocation = allocation or Uniform()
    limits = {} if isinstance(allocation, Uniform) else _limits(layers, patterns, sparsity)
    candidates = [
        Candidate(
            layer.name,
            layer.shape,
            patterns[layer.name].unit_count(layer.shape),
            patterns[layer.name].unit_scores(scores[layer.name]),
            spread[layer.name],
            limits.get(layer.name, 1.0),
        )
        for layer in layers
    ]
    counts = allocation.counts(candidates, sparsity)
    return {
        c.name: project(patterns[c.name], scores[c.name], count, c.shape, c.shards)
        for c, count in zip(candidates, counts, strict=True)
    }


def _limits(layers: Sequence[Layer], patterns: Mapping[str, Pattern], sparsity: float) -> dict[str, float]:
    """Return how far N:M prunes each layer by itself, unless the network is to be sparser than that.

    Without this an uneven budget would take from one layer what another lacks to reach its pattern.
    """
    found = {layer.name: patterns[layer.name].own_sparsity(layer.shape) for layer in layers}
    own = {name: sparsity for name, sparsity in found.items() if sparsity is not None}
    total = sum(layer.parameter.numel() for layer in layers)
    reach = sum(own.get(layer.name, 1.0) * layer.parameter.numel() for layer in layers)
    return own if sparsity * total <= reach + 0.5 else {}


def project(pattern: Pattern, score: Tensor, count: int, shape: Sequence[int], shards: Shards) -> Tensor:
    """Return the mask of one weight with `count` units pruned, over all processes that hold a part of it.

    Parameters
    ----------
    score
        The scores of what is here; `shape` is that of the whole weight.
    """
    units = pattern.unit_count(shape)
    if shards.is_whole:
        return pattern.project(score, count / units if units else 0.0)
    if pattern.own_sparsity() is not None:
        full = pattern.project(score)
        pruned_by_full = units - round(pattern.capacity(shape) * units)
        if count >= pruned_by_full:
            return full & ~lowest_of([score], count - pruned_by_full, shards, [full])[0]
        return ~lowest_of([score], count, shards, [~full])[0]
    return pattern.spread(~lowest_of([pattern.unit_scores(score)], count, shards)[0], score.shape)

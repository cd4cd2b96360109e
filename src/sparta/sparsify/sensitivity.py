"""Sensitivity: what pruning one layer alone costs, measured.

The curves feed the allocation :class:`~sparta.sparsify.allocation.Sensitivity`, and make a table worth reading by
itself. Each layer is pruned alone, from the same weights, and put back bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from sparta.sparsify.layers import Layer
from sparta.sparsify.project import make_masks
from sparta.sparsify.scores import Magnitude, Score
from sparta.sparsify.shards import local
from sparta.tesa.patterns import Pattern

__all__ = ["measure_sensitivity"]


@torch.no_grad()
def measure_sensitivity(
    layers: Sequence[Layer],
    evaluate: Callable[[], float],
    levels: Sequence[float] = (0.3, 0.5, 0.7, 0.9),
    *,
    score: Score | None = None,
    pattern: Pattern | str = "unstructured",
) -> dict[str, list[tuple[float, float]]]:
    """Return for each layer pairs of sparsity and loss, the dense loss first.

    Parameters
    ----------
    evaluate
        Returns a loss of the model as it is now, on data of your choice; lower is better.
    levels
        Sparsities to try.

    Examples
    --------
    >>> from sparta.sparsify import find_layers
    >>> model = torch.nn.Linear(4, 1, bias=False)
    >>> before = model.weight.detach().clone()
    >>> curves = measure_sensitivity(find_layers(model), lambda: float((model.weight - before).square().sum()), [0.5])
    >>> curves["weight"][0], curves["weight"][1][1] > 0, torch.equal(model.weight, before)
    ((0.0, 0.0), True, True)
    """
    dense = float(evaluate())
    curves = {}
    for layer in layers:
        weight = local(layer.parameter)
        saved = weight.clone()
        points = [(0.0, dense)]
        try:
            for level in sorted(levels):
                mask = make_masks([layer], score or Magnitude(), pattern, level)[layer.name]
                weight.masked_fill_(~mask, 0)
                points.append((float(level), float(evaluate())))
                weight.copy_(saved)
        finally:
            weight.copy_(saved)
        curves[layer.name] = points
    return curves

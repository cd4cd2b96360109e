"""Losses: what rounding costs the whole model on calibration data, and which layers stay as they are to keep it small.

The loss is the norm of the change of the outputs over their norm, or what a metric of the user's falls by. Layers are
given up by what they cost alone, those first that cost most for what they compute, until the rest is within bounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sparta.errors import ValueRangeError, message
from sparta.precision.data import call, float_leaves
from sparta.precision.layers import Layer, Simulated
from sparta.precision.watch import Weights, quietly

__all__ = ["Judge", "Metric", "kept_within"]

Metric = Callable[[Callable[..., Any]], float]
"""Takes a model and returns a number; higher is better."""
_JUDGED = 8  # batches
_OF_A_METRIC = 0.01
_BYTES = 1 << 28  # of outputs that are kept


@dataclass
class Judge:
    """Measures losses against the model as it was.

    Parameters
    ----------
    batches
        Those that are compared.
    references
        The model's outputs for them.
    metric, baseline
        The user's metric and what the model as it was reaches; None without one.
    """

    batches: Sequence[Any]
    references: list[list[Tensor]]
    metric: Metric | None = None
    baseline: float | None = None

    @classmethod
    def of(cls, model: nn.Module, batches: Sequence[Any], metric: Metric | None) -> Judge:
        """Run the model as it is."""
        references: list[list[Tensor]] = []
        size = 0
        with quietly(model):
            for index, batch in enumerate(batches[:_JUDGED]):
                found = [leaf.clone() for leaf in float_leaves(call(model, batch, index))]
                references.append(found)
                size += sum(leaf.numel() * leaf.element_size() for leaf in found)
                if size > _BYTES:
                    break
            if not any(references):
                raise ValueRangeError(
                    message("a model whose outputs hold no real numbers", "outputs that a loss can be measured on")
                )
            baseline = None if metric is None else _measured(metric, model)
        return cls(batches[: len(references)], references, metric, baseline)

    def allowed(self, max_loss: float | None) -> float:
        """Return the loss that is allowed where `max_loss` may be None: a hundredth of a metric, else any."""
        if max_loss is not None:
            return max_loss
        return float("inf") if self.baseline is None else _OF_A_METRIC * abs(self.baseline)

    def change(self, model: Callable[..., Any], batches: int | None = None) -> float:
        """Return the norm of the change of the outputs over their norm, of the output that changes most."""
        count = len(self.batches) if batches is None else min(batches, len(self.batches))
        gaps: list[float] = []
        sizes: list[float] = []
        with torch.no_grad():
            for index in range(count):
                outputs = float_leaves(call(model, self.batches[index], index))  # type: ignore[arg-type]
                gaps, sizes = _added(gaps, sizes, self.references[index], outputs)
        return max(((gap / max(size, 1e-30)) ** 0.5 for gap, size in zip(gaps, sizes, strict=True)), default=0.0)

    def loss(self, model: Callable[..., Any]) -> tuple[float, float | None]:
        """Return the loss, and the metric where there is one."""
        if self.metric is None or self.baseline is None:
            return self.change(model), None
        reached = _measured(self.metric, model)
        return self.baseline - reached, reached


def _added(
    gaps: list[float], sizes: list[float], expected: list[Tensor], found: list[Tensor]
) -> tuple[list[float], list[float]]:
    pairs = [(one.double(), two.double()) for one, two in zip(expected, found, strict=False) if one.shape == two.shape]
    if len(pairs) != len(expected):
        raise ValueRangeError(message(f"{len(found)} outputs of other shapes", f"{len(expected)} as the model gives"))
    more = [float((two - one).square().sum()) for one, two in pairs], [float(one.square().sum()) for one, _ in pairs]
    if not gaps:
        return more
    return tuple([a + b for a, b in zip(old, new, strict=True)] for old, new in zip((gaps, sizes), more, strict=True))  # type: ignore[return-value]


def _measured(metric: Metric, model: Callable[..., Any]) -> float:
    value = metric(model)
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise ValueRangeError(message(f"the metric returned {value!r}", "a number, higher is better")) from error
    if not math.isfinite(number):
        raise ValueRangeError(message(f"the metric returned {number}", "a finite number"))
    return number


def kept_within(
    judge: Judge, model: nn.Module, weights: Weights, layers: Mapping[str, Layer], max_loss: float
) -> tuple[set[str], dict[str, str], tuple[float, float | None]]:
    """Return which layers are rounded, why the others are not, and the loss that remains with the metric reached.

    Layers are given up in the order of their own change of the outputs over what they compute; how many must be is
    found by bisection, with the whole simulated each time.
    """
    active = set(layers)
    found = judge.loss(Simulated(model, weights, layers))
    if found[0] <= max_loss:
        return active, {}, found
    harm = {name: judge.change(Simulated(model, weights, layers, {name}), batches=2) for name in layers}
    total = sum(layer.cost for layer in layers.values()) or 1
    order = sorted(layers, key=lambda name: -(harm[name] ** 2) / max(layers[name].cost / total, 1e-6))

    def without(count: int) -> tuple[float, float | None]:
        return judge.loss(Simulated(model, weights, layers, active - set(order[:count])))

    few, many, best = 0, len(order), (0.0, judge.baseline)
    while many - few > 1:
        middle = (few + many) // 2
        now = without(middle)
        if now[0] <= max_loss:
            many, best = middle, now
        else:
            few = middle
    left = {
        name: f"rounding it alone changes the outputs by {harm[name]:.2g}; with all layers the loss is {found[0]:.2g}, "
        f"above max_loss={max_loss:g}"
        for name in order[:many]
    }
    return active - set(left), left, best

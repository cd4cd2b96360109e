"""Observers: what the inputs of each layer look like on calibration data, and the grids that follow from it.

One pass keeps, for each weight, the range of its inputs and a small sample of them. Every grid is then judged by what
it does to the layer's output on that sample, so that observers compete by the error that counts and not by their names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from sparta.errors import ValueRangeError, message
from sparta.precision.data import call
from sparta.precision.watch import Kind, Product, Products, Weights, quietly
from sparta.specialize.int8_linear.quantization import Quantization

__all__ = ["OBSERVERS", "Seen", "observe"]

_ROWS = 256  # of the inputs of a layer that are kept
_ELEMENTS = 1 << 19  # of the images of a convolution that are kept
_PERCENTILE = 0.9995
_SHRINKS = tuple(1.0 - 0.05 * step for step in range(15))


@dataclass
class Seen:
    """What calibration showed of one weight.

    Parameters
    ----------
    name
        The parameter.
    kinds, axes
        How it was used, and where its output channels are.
    low, high
        The range of its inputs.
    peaks
        (K,), the largest magnitude of each input channel.
    samples
        Inputs as they came: rows (m, K) of a linear layer, images of a convolution.
    replay
        Runs the layer again on a sample with a weight in the parameter's layout.
    positions
        Multiplications that one weight takes part in, over all batches.
    """

    name: str
    kinds: set[Kind] = field(default_factory=set)
    axes: set[int | None] = field(default_factory=set)
    low: float = 0.0
    high: float = 0.0
    peaks: Tensor | None = None
    samples: list[Tensor] = field(default_factory=list)
    replay: Callable[[Tensor, Tensor], Tensor] | None = None
    positions: int = 0

    @property
    def axis(self) -> int | None:
        """The axis of the output channels; None where uses differ, or take parts of the weight."""
        return next(iter(self.axes)) if len(self.axes) == 1 else None

    @property
    def multiplies(self) -> bool:
        """Whether it has inputs in real numbers, not only choices of rows."""
        return bool(self.kinds - {"embedding"})

    @property
    def input_axis(self) -> int:
        """The axis of the weight that meets the input."""
        return 1 - (self.axis or 0)

    def error(self, weight: Tensor, rounded: Tensor, rounding: Callable[[Tensor], Tensor] | None) -> float:
        """Return the relative error of the layer's output on the sample, with a rounded weight and rounded inputs."""
        if self.replay is None or not self.samples:
            return 0.0
        gap = size = 0.0
        for x in self.samples:
            exact = self.replay(x, weight).double()
            found = self.replay(x if rounding is None else rounding(x), rounded).double()
            gap += float((found - exact).square().sum())
            size += float(exact.square().sum())
        return math.sqrt(gap / max(size, 1e-30))


def observe(model: nn.Module, batches: Sequence[object], weights: Weights) -> dict[str, Seen]:
    """Run calibration batches through a model and return what was seen of each weight that a product used.

    Examples
    --------
    >>> model = nn.Linear(2, 3)
    >>> seen = observe(model, [torch.tensor([[-1.0, 4.0]])], Weights(model))["weight"]
    >>> seen.low, seen.high, seen.axis
    (-1.0, 4.0, 0)
    """
    found: dict[str, Seen] = {}
    share = max(1, _ROWS // len(batches))

    def visit(product: Product) -> None:
        seen = found.setdefault(product.name, Seen(product.name))
        seen.kinds.add(product.kind)
        seen.axes.add(product.axis)
        if product.x is not None and product.x.numel():
            _add(seen, product, product.x, share)

    with quietly(model), Products(weights, visit):
        for index, batch in enumerate(batches):
            call(model, batch, index)
    for seen in found.values():
        if not abs(seen.low) + abs(seen.high) < float("inf"):
            raise ValueRangeError(
                message(
                    f"the inputs of {seen.name!r} hold NaN or infinity on the calibration data",
                    "finite activations",
                    "look at the data, or run the model in float32",
                )
            )
    return found


def _add(seen: Seen, product: Product, x: Tensor, share: int) -> None:
    low, high = torch.aminmax(x)
    first = seen.positions == 0
    seen.low = float(low) if first else _least(seen.low, float(low))
    seen.high = float(high) if first else -_least(-seen.high, -float(high))
    if product.kind == "conv":
        if sum(sample.numel() for sample in seen.samples) < _ELEMENTS:
            images = max(1, min(share, _ELEMENTS // max(1, x[0].numel())))
            seen.samples.append(x[:images].detach().clone())
        seen.positions += x.numel() // max(1, x.shape[1])
        peaks = x.abs().amax([dim for dim in range(x.dim()) if dim != 1])
    else:
        rows = x.reshape(-1, x.shape[-1])
        seen.samples.append(rows[_drawn(len(rows), share).to(rows.device)].detach().clone())
        seen.positions += len(rows)
        peaks = rows.abs().amax(0)
    seen.peaks = peaks if seen.peaks is None else torch.maximum(seen.peaks, peaks)
    if seen.replay is None:
        seen.replay = _replay(product)


def _drawn(rows: int, share: int) -> Tensor:
    """Return which rows are kept, drawn from a fixed seed: steps of one size could meet one position of all texts."""
    return torch.randperm(rows, generator=torch.Generator().manual_seed(rows))[:share]


def _least(one: float, two: float) -> float:
    """Return the smaller number; one that is not finite stays, so that it is found."""
    if abs(one) < float("inf"):
        return min(one, two) if abs(two) < float("inf") else two
    return one


def _replay(product: Product) -> Callable[[Tensor, Tensor], Tensor]:
    """Return what runs the layer on another input, with a weight in the parameter's layout."""
    if product.kind == "conv":
        return product.call
    if product.axis == 1:
        return lambda x, weight: x @ weight
    return lambda x, weight: x @ weight.t()


# ---------------------------------------------------------------------- grids


def _minmax(seen: Seen) -> Quantization:
    return Quantization.covering(seen.low, seen.high)


def _percentile(seen: Seen) -> Quantization:
    values = _values(seen)
    low, high = (_quantile(values, q) for q in (1 - _PERCENTILE, _PERCENTILE))
    return Quantization.covering(low, high)


def _mse(seen: Seen) -> Quantization:
    values = _values(seen)
    grids = [Quantization.covering(seen.low * shrink, seen.high * shrink) for shrink in _SHRINKS]
    return min(grids, key=lambda grid: float((grid.rounded(values) - values).square().sum()))


OBSERVERS: Mapping[str, Callable[[Seen], Quantization]] = {"minmax": _minmax, "percentile": _percentile, "mse": _mse}
"""How a static grid follows from what was seen: the whole range; all but the outermost values; the least squares."""


def _values(seen: Seen) -> Tensor:
    return torch.cat([sample.reshape(-1) for sample in seen.samples]).float()


def _quantile(values: Tensor, share: float) -> float:
    """Return a quantile; `torch.quantile` takes no large tensors."""
    place = round(share * (values.numel() - 1)) + 1
    return float(values.kthvalue(place).values)

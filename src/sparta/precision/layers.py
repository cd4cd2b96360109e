"""Layers: how each weight is rounded, on which grid its inputs are, and the model that computes with all of it.

A grid is chosen by the error of the layer's own output on the sample that calibration kept. The simulation runs the
user's model as it is, with rounded operands in the products of chosen layers: it is what compiled kernels must agree
with, and what losses are measured on.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from sparta.precision.formats import Float8, RoundedWeight, round_weight
from sparta.precision.observe import OBSERVERS, Seen
from sparta.precision.watch import Kind, Product, Products, Weights, quietly
from sparta.specialize.int8_linear.quantization import Quantization

__all__ = ["Layer", "Simulated", "chosen_layer", "unusable"]

_STATIC_ENOUGH = 1.2  # times the error of a grid per token: a static one is faster, and neighbours hand over integers
_FINE = 0.004  # an error that no one asks about


@dataclass(frozen=True, eq=False)
class Layer:
    """How one weight is computed with.

    Parameters
    ----------
    name, kind
        The parameter, and what it is multiplied by.
    axis
        Of its output channels.
    format
        Its bits, as TeSA names them.
    input
        The grid of its inputs; None leaves them as they are.
    observer
        How that grid was found.
    error
        The relative error of the layer's output on the sample.
    weight
        The rounded weight.
    cost
        Multiplications in all calibration batches.
    """

    name: str
    kind: Kind
    axis: int
    format: str
    input: Quantization | Float8 | None
    observer: str
    error: float
    weight: RoundedWeight
    cost: int = 0

    def rounded_input(self, x: Tensor) -> Tensor:
        """Return an input as the layer sees it."""
        return x if self.input is None else self.input.rounded(x)


def unusable(seen: Seen, tensor: Tensor) -> str:
    """Return why a weight cannot be rounded, or nothing."""
    if seen.axis is None:
        return "its uses differ, or take parts of it"
    if seen.multiplies and seen.low == seen.high:
        return f"its inputs are all {seen.low:g} on the calibration data, a range of zero width"
    return "" if bool(tensor.isfinite().all()) else "it holds NaN or infinity"


def chosen_layer(seen: Seen, tensor: Tensor, format: str, observer: str, dynamic: bool | None) -> Layer:  # noqa: FBT001 - three answers
    """Return the layer with the grid that changes its output least.

    Parameters
    ----------
    observer
        A key of :data:`OBSERVERS`, or ``"auto"`` for the best of them.
    dynamic
        Whether every token has a scale of its own; None: where static ones are clearly worse.
    """
    axis = seen.axis or 0
    weight = round_weight(tensor, axis, format)
    kind: Kind = "linear" if "linear" in seen.kinds else "conv" if "conv" in seen.kinds else "embedding"
    cost = seen.positions * tensor.numel()
    if not seen.multiplies:
        error = float((weight.values - tensor).norm() / tensor.norm().clamp_min(1e-30))
        return Layer(seen.name, kind, axis, format, None, "", error, weight, cost)
    options = _options(seen, format, observer, dynamic if kind == "linear" else False)
    errors = {how: seen.error(tensor, weight.values, grid.rounded) for how, grid in options.items()}
    best = min((how for how in errors if how != "per token"), key=errors.__getitem__, default="per token")
    if "per token" in errors and errors[best] > max(_STATIC_ENOUGH * errors["per token"], _FINE):
        best = "per token"
    return Layer(seen.name, kind, axis, format, options[best], best, errors[best], weight, cost)


def _options(seen: Seen, format: str, observer: str, dynamic: bool | None) -> dict[str, Quantization | Float8]:  # noqa: FBT001
    """Return the grids that compete, by how they were found."""
    names = list(OBSERVERS) if observer == "auto" else [observer]
    found: dict[str, Quantization | Float8] = {}
    if not dynamic:
        for name in names:
            grid = OBSERVERS[name](seen)
            found[name] = grid if format == "int8" else _float8(grid)
    if dynamic or dynamic is None:
        found["per token"] = Quantization.per_token() if format == "int8" else Float8()
    return found


def _float8(grid: Quantization) -> Float8:
    """Return the e4m3 numbers that cover what a grid of integers covers."""
    least, most = -grid.zero_point * grid.scale, (255 - grid.zero_point) * grid.scale
    return Float8(max(-least, most) / 448.0)


class Simulated:
    """A model whose chosen layers compute with rounded operands; called as the model is, which stays as it was.

    Parameters
    ----------
    model, weights
        The model, and its tensors.
    layers
        How weights are rounded, by name.
    active
        Which of them; None for all.
    """

    def __init__(
        self, model: nn.Module, weights: Weights, layers: Mapping[str, Layer], active: Collection[str] | None = None
    ) -> None:
        self._model, self._weights = model, weights
        self._layers = {name: layer for name, layer in layers.items() if active is None or name in active}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the rounded model returns."""
        with quietly(self._model), Products(self._weights, self._visit):
            return self._model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)  # a metric may want the model's configuration

    def _visit(self, product: Product) -> Tensor | None:
        layer = self._layers.get(product.name)
        if layer is None:
            return None
        x = None if product.x is None else layer.rounded_input(product.x)
        return product.call(x, self._weights.in_place_of(product.name, product.weight, layer.weight.values))

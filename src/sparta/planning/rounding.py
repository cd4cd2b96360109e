"""Layers of a plan that are rounded: what that changes in each, and the model in which those that were chosen are.

Rounding is that of :mod:`sparta.precision`, for some layers only: all others, embeddings among them, stay as they are.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Literal, cast

from torch import nn

from sparta.errors import SpartaError
from sparta.precision.api import FORMATS, Quantized, quantize
from sparta.precision.layers import chosen_layer, unusable
from sparta.precision.observe import observe
from sparta.precision.watch import Weights
from sparta.tesa.spec import Spec

__all__ = ["rounded", "rounding_errors"]


def rounding_errors(
    model: nn.Module, names: Collection[str], batches: Sequence[Any], precision: str
) -> dict[str, float]:
    """Return the relative error that rounding weights and inputs makes in the output of each layer that can be."""
    weights = Weights(model)
    try:
        seen = observe(model, batches, weights)
    except SpartaError:
        return {}  # inputs that are not finite: no layer is rounded
    dynamic = None if precision == "int8" else True
    return {
        name: chosen_layer(one, weights.tensors[name], FORMATS[precision], "auto", dynamic).error
        for name, one in seen.items()
        if name in names and not unusable(one, weights.tensors[name])
    }


def rounded(
    model: nn.Module, batches: Sequence[Any], spec: Spec, names: Collection[str], precision: str, *, quick: bool = False
) -> Quantized:
    """Return a copy of a model in which these layers are rounded, with its spec and the grids of their inputs.

    Parameters
    ----------
    quick
        Take the first grids that will do: times do not depend on them.
    """
    others = [name for name in Weights(model).tensors if name not in names]
    return quantize(
        model,
        batches,
        cast("Literal['int8', 'fp8']", precision),
        spec=spec,
        observer="minmax" if quick else "auto",
        migrate=not quick,
        dynamic=None if precision == "int8" else True,
        ignore=others,
    )

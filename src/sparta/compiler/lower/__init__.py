"""Lowerings, one file an operation: from calls of a graph to kernel specs and back."""

from __future__ import annotations

from sparta.compiler.lower.base import Anchor, Lowering
from sparta.compiler.lower.conv import ConvLowering
from sparta.compiler.lower.linear import LinearLowering
from sparta.compiler.lower.quantized_conv import QuantizedConvLowering
from sparta.compiler.lower.quantized_linear import QuantizedLinearLowering
from sparta.compiler.lower.scaled_linear import ScaledLinearLowering
from sparta.errors import NameNotFoundError, did_you_mean

__all__ = ["LOWERINGS", "Anchor", "Lowering", "lowering_of", "register_lowering"]

LOWERINGS: list[Lowering] = [
    LinearLowering(),
    ConvLowering("conv2d"),
    ConvLowering("conv1d"),
    QuantizedLinearLowering(),
    QuantizedConvLowering("conv2d"),
    QuantizedConvLowering("conv1d"),
    ScaledLinearLowering(),
]
"""What is recognised in a graph, in this order."""


def register_lowering(lowering: Lowering) -> Lowering:
    """Add a lowering; of several for one operation, the last says how its kernels are called."""
    LOWERINGS.append(lowering)
    return lowering


def lowering_of(op: str) -> Lowering:
    """Return the lowering of an operation.

    >>> lowering_of("linear").op
    'linear'
    """
    found = {lowering.op: lowering for lowering in LOWERINGS}
    if op not in found:
        raise NameNotFoundError(did_you_mean(op, found, "lowered operation"))
    return found[op]

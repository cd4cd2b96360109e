"""Quantise, dequantise and fake-quantise: element-wise, with parameters for the tensor or for each channel.

What comes out holds at most as many values as the integer range, so these ops are where bit formats are born, and
everything in front of them that only moves elements needs no more bits either.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from sparta.propagation.axes import Axes
from sparta.propagation.constants import Known, unbroadcast
from sparta.propagation.op import Op, dtype_of, shape_of
from sparta.propagation.registry import rule
from sparta.propagation.rules.elementwise import elementwise, elementwise_axes, elementwise_observed
from sparta.tesa.bits import FORMATS, BitFormat
from sparta.tesa.grid import Grid

__all__: list[str] = []

_aten = torch.ops.aten
_Seen = list[tuple[fx.Node, Grid]]
_PLAIN = (
    _aten.fake_quantize_per_tensor_affine.default,
    "quantized_decomposed.quantize_per_tensor.default",
    "quantized_decomposed.dequantize_per_tensor.default",
)
_LEARNT = (
    _aten.fake_quantize_per_tensor_affine.tensor_qparams,
    "quantized_decomposed.quantize_per_tensor.tensor",
    "quantized_decomposed.dequantize_per_tensor.tensor",
)
_CHANNELS = (
    _aten.fake_quantize_per_channel_affine.default,
    "quantized_decomposed.quantize_per_channel.default",
    "quantized_decomposed.dequantize_per_channel.default",
)

rule("constants", *_PLAIN)(elementwise)
rule("observed", *_PLAIN)(elementwise_observed)
rule("axes", *_PLAIN)(elementwise_axes)


def _kind(op: Op) -> str:
    name = str(op.node.target)
    if "fake_quantize" in name:
        return "both"
    return "back" if ".dequantize" in name else "to"


def _parameters(op: Op) -> tuple[fx.Node, fx.Node, fx.Node | None, int | None]:
    """Return input, scale, zero point, and the dim they go along (None: one for the tensor)."""
    source, scale, zero = op.node.args[:3]
    return source, scale, zero, op.dim(op["axis"]) if "axis" in op.arguments else None  # type: ignore[return-value]


def _wide(grid: Grid, shape: tuple[int, ...], dim: int | None) -> Grid:
    if dim is None:
        return grid.reshape((1,) * len(shape)).broadcast_to(shape)
    return grid.reshape(_line(shape, dim)).broadcast_to(shape)


def _line(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return tuple(s if d == dim else 1 for d, s in enumerate(shape))


@rule("constants", *_LEARNT, *_CHANNELS)
def quantized(op: Op) -> Known | None:
    """Evaluate the op where input, scale and zero point are constants."""
    source, scale, zero, dim = _parameters(op)
    knowns = [op.known(source)]
    for node in (scale, zero):
        known = op.known(node) if node is not None else Known.of(torch.zeros(shape_of(scale)))
        knowns.append(known.map(lambda g: _wide(g, op.shape, dim)))
    const = Grid.combine(lambda a, b, c: a & b & c, *(k.const for k in knowns))
    low, high, kind = op["quant_min"], op["quant_max"], _kind(op)
    if any(isinstance(bound, fx.Node) for bound in (low, high)):
        return None

    def run(known: Tensor, value: Tensor, step: Tensor, shift: Tensor) -> Tensor:
        step = torch.where(known, step, 1.0).to(torch.float32)
        code = value.to(torch.float32)
        if kind != "back":
            code = torch.clamp(torch.round(code * (1.0 / step) + shift.to(torch.float32)), low, high)
        if kind != "to":
            code = (code - shift.to(torch.float32)) * step
        return code.to(dtype_of(op.node)).to(torch.float64)

    value = Grid.combine(run, const, *(k.value for k in knowns))
    return Known(const, value).only(const)


@rule("observed", *_LEARNT, *_CHANNELS)
def quantized_observed(op: Op, seen: Grid) -> _Seen:
    """Observe of the input what is observed of the output, and the parameters of observed channels."""
    source, scale, zero, dim = _parameters(op)
    if dim is None:
        return [(source, seen)]
    line = unbroadcast(seen, _line(op.shape, dim))
    return [(source, seen), *((n, line.reshape(shape_of(n))) for n in (scale, zero) if n is not None)]


@rule("axes", *_LEARNT, *_CHANNELS)
def quantized_axes(op: Op, axes: Axes) -> None:
    """Cut input and output alike, channels with their parameters."""
    source, scale, zero, dim = _parameters(op)
    axes.broadcast(source, op.node)
    for node in (scale, zero):
        if node is None:
            continue
        if dim is None:
            axes.keep_all(node, "the parameters of a quantised tensor")
        else:
            axes.equal(axes.of(node, 0), axes.of(op.node, dim))


# ---------------------------------------------------------------------- bit formats


def _format(op: Op) -> BitFormat | None:
    """Return the smallest format that holds the op's range of integers."""
    low, high = op["quant_min"], op["quant_max"]
    if isinstance(low, fx.Node) or isinstance(high, fx.Node):
        return None
    for form in FORMATS:
        lowest = -(2 ** (form.bits - 1)) if form.kind == "int" else 0
        highest = 2 ** (form.bits - (form.kind == "int")) - 1
        if form.kind in {"int", "uint"} and lowest <= low and high <= highest:
            return form
    return None


@rule("bits", *_PLAIN, *_LEARNT, *_CHANNELS)
def born(op: Op) -> BitFormat | None:
    """Return the format of the integers that the output stands for."""
    return _format(op)


@rule("needs", *_PLAIN, *_LEARNT, *_CHANNELS)
def enough(op: Op, node: fx.Node) -> BitFormat | None:
    """Need no more of the input than is left of it."""
    return _format(op) if node is op.node.args[0] else None

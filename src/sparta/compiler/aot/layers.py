"""Layers of a package: sub-graphs as calls of our C++ operators, or of PyTorch's own.

Each layer takes what its kernel module takes and holds all that the kernel reads as buffers. Numbers go to an operator
as one list, in the order that ``native/ops.cpp`` reads them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from sparta.specialize.conv.cpu_packed import PackedConv
from sparta.specialize.conv.int8_packed import PackedInt8Conv
from sparta.specialize.cpu.library import STREAM_FORMS, activation_code, fused_activation
from sparta.specialize.int8_linear.cpu_packed import PackedInt8Linear, no_least_weight
from sparta.specialize.int8_linear.quantization import Quantization
from sparta.specialize.int8_linear.quantized import INT8_IMPLEMENTS, row_scales
from sparta.specialize.int8_linear.spec import requantization
from sparta.specialize.linear.cpu_packed import PackedLinear
from sparta.specialize.linear.spec import apply_epilogue

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sparta.compiler.run.kernel_module import KernelModule
    from sparta.specialize.kernel_spec import Epilogue

__all__ = ["ConvLayer", "DenseLayer", "Int8Layer", "PackedLayer"]

_PANEL_ARRAYS = ("starts", "offsets", "rows", "costs", "chunk_columns")
_STREAM_ARRAYS = ("starts", "indices", "step_starts", "step_lanes", "step_advances", "costs")
_CONV_ARRAYS = ("starts", "offsets", "rows", "costs", "slot_rows", "slot_columns", "used")
_CONV_NUMBERS = (
    *("channels", "inputs", "groups", "bn", "mv", "interleave", "prefetch", "in_channels", "in_rows", "in_columns"),
    *("out_rows", "out_columns", "stride_rows", "stride_columns", "slots", "row_width", "band_tokens", "reach"),
    *("plane", "direct", "chunks"),
)
_PANEL_FORM = -1
_OUTPUTS = {torch.float32: 0, torch.int8: 1, torch.uint8: 2}


class _Packed(nn.Module):
    """A layer whose index arrays are buffers."""

    bias: Tensor | None

    def _hold(self, names: Sequence[str], arrays: Mapping[str, Tensor]) -> None:
        self._names = tuple(names)
        for name in self._names:
            array = arrays.get(name, torch.empty(0, dtype=torch.int64))
            # Inductor knows no unsigned words; bytes mean the same to code that reads an address.
            self.register_buffer(name, array.contiguous().view(torch.uint8) if array.numel() else array)

    def _arrays(self) -> list[Tensor]:
        return [cast("Tensor", getattr(self, name)) for name in self._names]


class PackedLayer(_Packed):
    """A linear sub-graph as a call of ``sparta_aot::linear``; its buffers are all that the kernel reads."""

    def __init__(self, packed: PackedLinear, values: Tensor, bias: Tensor | None, activation: str | None) -> None:
        super().__init__()
        tile, layout = packed.tile, packed.layout
        panel = tile.form == "panel"
        self._hold(_PANEL_ARRAYS if panel else _STREAM_ARRAYS, layout.arrays)
        self.register_buffer("values", values)
        self.register_buffer("bias", bias)
        indices = layout.arrays.get("indices")
        self._numbers = [
            _PANEL_FORM if panel else STREAM_FORMS[tile.form], packed.shape[0], packed.shape[1], layout.groups,
            len(layout.arrays["chunk_columns"]) - 1 if panel else 0, tile.block, tile.mv if panel else 0,
            tile.interleave if panel else 0, tile.prefetch, 0 if indices is None else indices.element_size(),
            activation_code(activation),
        ]  # fmt: skip

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return ``activation(x W^T + bias) + residual`` for x (..., K)."""
        outputs, inputs = self._numbers[1:3]
        added = None if residual is None else residual.reshape(-1, outputs)
        rows, arrays = x.reshape(-1, inputs), self._arrays()
        y = torch.ops.sparta_aot.linear(rows, self.values, arrays, self._numbers, self.bias, added)
        return cast("Tensor", y).reshape(*x.shape[:-1], outputs)


class ConvLayer(_Packed):
    """A convolution as a call of ``sparta_aot::conv2d``, for images of one size and any number of them.

    Parameters
    ----------
    packed, values
        The packed weight.
    size
        (H, W), or (L,) of a conv1d.
    """

    def __init__(
        self, packed: PackedConv, values: Tensor, bias: Tensor | None, activation: str | None, size: Sequence[int]
    ) -> None:
        super().__init__()
        plan = packed.fixed(size, torch.get_num_threads())
        self._hold(_CONV_ARRAYS, plan.arrays)
        self.register_buffer("values", values)
        self.register_buffer("bias", bias)
        self._numbers = [*(plan.numbers[name] for name in _CONV_NUMBERS), activation_code(activation)]
        self._image = [plan.numbers[name] for name in ("in_channels", "in_rows", "in_columns")]
        kernel = packed.shape[2:]
        self._size, self._result = tuple(size), (packed.shape[0], *packed.geometry.output_size(size, kernel))
        self._planes = [packed.shape[0], plan.numbers["out_rows"], plan.numbers["out_columns"]]

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return ``activation(conv(x) + bias) + residual`` for x (B, C, ...)."""
        for given, wanted in zip(x.shape[2:], self._size, strict=True):
            torch._check(given == wanted, lambda: f"packaged for images of {self._size}")  # type: ignore[no-untyped-call]
        images = x.reshape(-1, *self._image)
        added = None if residual is None else residual.reshape(-1, *self._planes)
        y = torch.ops.sparta_aot.conv2d(images, self.values, self._arrays(), self._numbers, self.bias, added)
        return cast("Tensor", y).reshape(-1, *self._result)


class Int8Layer(_Packed):
    """A quantised linear layer as a call of ``sparta_aot::int8_linear`` between roundings of its own."""

    def __init__(self, packed: PackedInt8Linear, operands: Sequence[Tensor], kernel: KernelModule) -> None:
        super().__init__()
        fused, layout = kernel.fused, packed.layout
        self._grid, self._epilogue = Quantization.from_dict(fused.attributes), fused.epilogue
        output = Quantization.of_output(fused.attributes)
        self._hold(("starts", "offsets", "rows", "costs"), layout.arrays)
        self._output = output if self._grid.dynamic else None  # rounded to after all else
        output = None if self._grid.dynamic else output
        scale = 1.0 if output is None else output.scale
        multiplier, offset = requantization(
            row_scales(fused.weight), self._grid.scale, bias=kernel.bias, output_scale=scale
        )
        for name, tensor in (("values", operands[0]), ("row_sums", operands[1]), ("multiplier", multiplier)):
            self.register_buffer(name, tensor)
        self.register_buffer("bias", offset)
        self._inside = _relu_inside(fused.epilogue) and not self._grid.dynamic
        dtype = torch.float32 if output is None else output.dtype
        self._numbers = [
            packed.shape[0], packed.shape[1], layout.shape[1], layout.groups, packed.tile.block, packed.tile.mv,
            int(self._inside), self._grid.zero_point, _OUTPUTS[dtype], 0 if output is None else output.zero_point,
            int(no_least_weight(operands[0])),
        ]  # fmt: skip

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the fused layer for x (..., K) in real numbers or on the grid."""
        outputs, inputs = self._numbers[:2]
        rows = x.reshape(-1, inputs)
        scales: Tensor | None = None
        if self._grid.dynamic:
            integers, scales = self._grid.token_integers(rows)
        else:
            integers = self._grid.integers(rows) if rows.is_floating_point() else rows
        operands = [cast("Tensor", getattr(self, name)) for name in ("values", "row_sums", "multiplier")]
        offset = None if scales is not None else self.bias
        y = torch.ops.sparta_aot.int8_linear(integers, operands, self._arrays(), self._numbers, offset)
        if scales is not None:  # the scale of a token stands before the bias, and so before what follows it
            y = y * scales if self.bias is None else y * scales + self.bias
        y = cast("Tensor", y).reshape(*x.shape[:-1], outputs)
        if self._inside:
            return y if residual is None else y + residual
        y = apply_epilogue(y, self._epilogue, residual)
        return y if self._output is None else self._output.integers(y)


class DenseLayer(nn.Module):
    """A sub-graph by PyTorch's own operators, its input rounded where the kernel rounds it."""

    bias: Tensor | None

    def __init__(self, kernel: KernelModule) -> None:
        super().__init__()
        self._fused = kernel.fused
        self._rounds = any(choice.implement in INT8_IMPLEMENTS for _, choice in kernel.choices.values())
        self.register_buffer("weight", kernel.weight())
        self.register_buffer("bias", None if kernel.bias is None else kernel.bias.clone())

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return ``activation(layer(x) + bias) + residual``."""
        fused = self._fused
        given = fused.lowering.on_grid(x, fused.attributes) if self._rounds else x
        residual = fused.lowering.residual_on_grid(residual, fused.attributes) if self._rounds else residual
        y = fused.lowering.dense(cast("Tensor", self.weight), given, self.bias, fused.attributes)
        return apply_epilogue(y, fused.epilogue, residual)


def layer_for(kernel: KernelModule) -> nn.Module | None:
    """Return the layer that calls a kernel module's C++ kernel; None where there is no operator for it."""
    _, built, packed = kernel._built[0]
    built = getattr(built, "_kernel", built)  # one that rounds holds an int8 kernel
    inner = getattr(built, "_packed", None)
    activation = fused_activation(kernel.fused.epilogue)
    if kernel.live.dtype != torch.float32:
        return None
    if isinstance(inner, PackedInt8Linear):
        return Int8Layer(inner, packed, kernel)
    if isinstance(inner, PackedLinear):
        return PackedLayer(inner, packed[0], kernel.bias, activation)
    sizes: set[tuple[int, ...]] = {tuple(spec["input"].shape[2:]) for spec, _ in kernel.choices.values()}
    if isinstance(inner, PackedInt8Conv):
        return None  # of integers there is no operator
    if isinstance(inner, PackedConv) and len(sizes) == 1:
        return ConvLayer(inner, packed[0], kernel.bias, activation, min(sizes))
    return None


def _relu_inside(epilogue: Epilogue) -> bool:
    return epilogue.activation == "relu" and not epilogue.residual_first

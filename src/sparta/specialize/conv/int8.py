"""The operations ``int8_conv2d`` and ``int8_conv1d``: convolutions whose weight lies on an int8 grid and may be sparse.

They are to convolutions what ``int8_linear`` is to linear layers: the scales of the weight are part of its TeSA, one
per output channel, and the static grid of the input is in the attributes beside the geometry. Kernels take and return
real numbers, so kernels in fp32 compete with those of integers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sparta.common.tuning import TunableItemCfg
from sparta.errors import ValueRangeError, message
from sparta.specialize.conv.cpu import CpuConv1d, CpuConv2d, block_height, conv_images
from sparta.specialize.conv.cpu_whole import CpuDenseConv1d, CpuDenseConv2d
from sparta.specialize.conv.dense import DenseConv1d, DenseConv2d
from sparta.specialize.conv.int8_depthwise import Int8Depthwise, is_depthwise
from sparta.specialize.conv.int8_images import UNIT, Int8Images
from sparta.specialize.conv.int8_packed import PackedInt8Conv
from sparta.specialize.conv.spec import ConvGeometry, ConvKernel, conv_spec, dense_conv
from sparta.specialize.cpu.device import layout_of, library_here
from sparta.specialize.cpu.library import fused_activation, load
from sparta.specialize.cpu.tile import Tile
from sparta.specialize.implement import Cause, Implement, KernelLayout, Params, Support, present
from sparta.specialize.int8_linear.cpu import integers_here
from sparta.specialize.int8_linear.quantization import Quantization
from sparta.specialize.int8_linear.spec import integers_of, requantization, row_scales
from sparta.specialize.kernel_spec import Epilogue, KernelSpec
from sparta.specialize.linear.spec import apply_epilogue
from sparta.tesa.attribute import TeSA

__all__ = [
    "CONV_OPS",
    "CpuInt8Conv1d",
    "CpuInt8Conv2d",
    "DenseQuantizedConv1d",
    "DenseQuantizedConv2d",
    "Int8ConvKernel",
    "RealQuantizedConv1d",
    "RealQuantizedConv2d",
    "WholeQuantizedConv1d",
    "WholeQuantizedConv2d",
    "conv_reference",
    "int8_conv_spec",
    "residual_grid",
]

CONV_OPS = {"conv2d": "int8_conv2d", "conv1d": "int8_conv1d"}
"""The operation with an int8 weight for each convolution."""
_VECTORS = {"avx512": (4, 3, 2), "avx2": (2, 3, 4), "portable": (2, 1)}  # of pixels, for blocks of 4
_RUN_ROWS = 32  # of a group in the form 'runs'
_TILE_ROWS = 16  # of a group in the form 'gathered'
_MOST_UNION = 2.2  # times the live weights: what tile registers may multiply to be the better guess
_DENSE = 0.5  # the share of live weights from which groups are read as if they had no pruned ones


def int8_conv_spec(
    weight: TeSA,
    input_shape: Sequence[int],
    grid: Quantization,
    geometry: ConvGeometry | None = None,
    *,
    epilogue: Epilogue | None = None,
    residual: Quantization | None = None,
) -> KernelSpec:
    """Return the kernel spec of a quantised convolution.

    Parameters
    ----------
    weight
        TeSA of the weight, (N, C / groups, ...), int8 and symmetric, with one scale per output channel or one for all.
    input_shape
        (B, C, H, W) or (B, C, L) that is measured.
    grid
        The static grid of the input. Padding is real 0, whatever its zero point is.
    residual
        The static grid that the residual is rounded to, None where it is added as it is.

    Examples
    --------
    >>> weight = TeSA.dense((16, 8, 3, 3)).with_format("int8", scale=0.1)
    >>> int8_conv_spec(weight, (1, 8, 14, 14), Quantization(0.5), ConvGeometry.make(2, padding=1)).op
    'int8_conv2d'
    """
    if weight.count("live") and str(weight.format) != "int8":
        raise ValueRangeError(message(f"a weight in {weight.format}", "int8", "weight.with_format('int8', scale=...)"))
    if grid.dynamic or (residual is not None and residual.dynamic):
        raise ValueRangeError(message("a dynamic grid of a convolution's input", "a static one"))
    row_scales(weight)
    plain = conv_spec(weight, input_shape, torch.float32, geometry, epilogue=epilogue)
    return replace(
        plain,
        op=CONV_OPS[plain.op],
        operands={"input": plain["input"], "weight": weight},
        attributes={**plain.attributes, **grid.to_dict(), **({} if residual is None else residual.to_dict("residual"))},
    )


def residual_grid(attributes: Mapping[str, Any]) -> Quantization | None:
    """Return the grid that a convolution's residual is rounded to, None where it is added as it is."""
    return Quantization.from_dict(attributes, "residual") if "residual_format" in attributes else None


def conv_reference(
    spec: KernelSpec, integers: Tensor, x: Tensor, bias: Tensor | None, residual: Tensor | None
) -> Tensor:
    """Return what a kernel of integers computes, every step rounded as kernels round it."""
    grid, scales = Quantization.from_dict(spec.attributes), row_scales(spec["weight"])
    live = torch.where(spec["weight"].mask("cpu"), integers.double(), 0.0)
    steps = grid.integers(x.float()).double() - grid.zero_point
    sums = dense_conv(steps, live, None, ConvGeometry.from_dict(spec.attributes))  # whole numbers, exact in float64
    multiplier, offset = requantization(scales, grid.scale, bias=bias)
    shape = (1, -1, *[1] * (x.dim() - 2))
    exact = sums.float().double() * multiplier.double().view(shape)
    y = (exact if offset is None else exact + offset.double().view(shape)).float()
    adding = residual_grid(spec.attributes)
    if adding is None or residual is None:
        return apply_epilogue(y, spec.epilogue, residual)
    scale = torch.tensor(adding.scale, dtype=torch.float32).double()  # as the kernel has it
    added = (adding.integers(residual.float()).double() - adding.zero_point) * scale
    return apply_epilogue(y.double(), spec.epilogue, added).float()


class Int8ConvKernel(ConvKernel):
    """A built kernel of integers: it rounds its input."""


class _CpuInt8ConvKernel(Int8ConvKernel):
    def __init__(self, spec: KernelSpec, packed: Int8Images) -> None:
        self._packed = packed
        self._grid, self._scales = Quantization.from_dict(spec.attributes), row_scales(spec["weight"])
        self._multiplier, _ = requantization(self._scales, self._grid.scale)
        self._activation, self._adding = fused_activation(spec.epilogue), residual_grid(spec.attributes)

    def pack(self, operand: Tensor) -> tuple[Tensor, ...]:
        weight = operand.detach()
        if weight.is_floating_point():
            weight = integers_of(weight.flatten(1), self._scales).view(weight.shape)
        return self._packed.pack_integers(weight)

    def run(self, packed: Sequence[Tensor], *inputs: Tensor | None) -> Tensor:
        (x,), bias, residual = present(inputs[0]), inputs[1], inputs[2]
        scales, activation = (self._multiplier, bias), self._activation
        return self._packed.run(
            x, packed, scales, self._grid, activation=activation, residual=residual, adding=self._adding
        )

    def fast_path(self, packed: Sequence[Tensor], bias: Tensor | None) -> Callable[..., Tensor | None] | None:
        scales = (self._multiplier, bias)
        return self._packed.fast_path_for(packed, scales, self._grid, self._activation, self._adding)

    def product(self, packed: Sequence[Tensor], bias: Tensor | None) -> Any:
        scales = (self._multiplier, bias)
        return self._packed.product_for(packed, scales, self._grid, self._activation, self._adding)

    def layout(self) -> KernelLayout | None:
        packed = self._packed
        return layout_of(packed.layout, packed.tile, packed.library) if isinstance(packed, PackedInt8Conv) else None


class _CpuInt8Conv(Implement):
    """Hand-written C++ kernels on places of four channels, with VNNI where the processor has it."""

    name = "cpu-int8"
    version = 5
    every_epilogue = True
    any_mask = True

    def supports(self, spec: KernelSpec) -> Support:
        """Any mask on the CPU for fp32 models, where groups have whole places or one channel; and with a compiler."""
        weight, groups = spec["weight"], spec.attributes["groups"]
        if groups > 1 and weight.shape[1] % UNIT and not is_depthwise(weight.shape, groups):
            reason = f"four channels are multiplied together, and a group has {weight.shape[1]}"
            return Support.no(reason, Cause.SHAPE)
        answer = integers_here(spec)
        return library_here(spec) if answer else answer

    def space(self, spec: KernelSpec) -> Mapping[str, TunableItemCfg]:
        """Return the tiles and image layouts that are worth timing; depthwise layers have neither."""
        if is_depthwise(spec["weight"].shape, spec.attributes["groups"]):
            return {}
        return {
            "tile": TunableItemCfg("choice", _value=[str(tile) for tile in _tiles(spec)]),
            "image": TunableItemCfg("choice", _value=list(conv_images(spec))),
        }

    def default(self, spec: KernelSpec) -> dict[str, Any]:
        """Return the best guess."""
        if is_depthwise(spec["weight"].shape, spec.attributes["groups"]):
            return {}
        return {"tile": str(_tiles(spec)[0]), "image": conv_images(spec)[0]}

    def build(self, spec: KernelSpec, params: Params) -> ConvKernel:
        """Compile the library if it is not there yet, and pack the mask."""
        mask, geometry = spec["weight"].mask("cpu"), ConvGeometry.from_dict(spec.attributes)
        if is_depthwise(mask.shape, geometry.groups):
            return _CpuInt8ConvKernel(spec, Int8Depthwise(mask, geometry))
        tile = Tile.parse(params["tile"])
        return _CpuInt8ConvKernel(spec, PackedInt8Conv(mask, geometry, image=params["image"], **tile.to_dict()))


def _tiles(spec: KernelSpec) -> list[Tile]:
    """Return the tiles worth timing, the best guess first: blocks of 4 where groups and the mask have them.

    Groups that skip nothing are computed a run of pixels after the other where the processor has registers enough. Tile
    registers compute 16 rows at once, and come first where these skip about the same.
    """
    weight, isa = spec["weight"], load().isa
    each, alone = weight.shape[0] // spec.attributes["groups"], spec.attributes["groups"] == 1
    whole = block_height(spec) % 4 == 0 or weight.density > _DENSE
    heights = [height for height in ((4, 1) if whole else (1, 4)) if height == 1 or alone or each % 4 == 0]
    tiles = [Tile(block=height, mv=mv) for height in heights for mv in (_VECTORS[isa] if height == 4 else (4, 3, 2))]
    runs = weight.density > _DENSE and (alone or each % _RUN_ROWS == 0) and isa == "avx512"
    if runs:
        tiles = [Tile("runs", _RUN_ROWS), *tiles] if each >= _RUN_ROWS else [*tiles, Tile("runs", _RUN_ROWS)]
    if not load().byte_tiles or not (alone or each % _TILE_ROWS == 0):
        return tiles
    # With two vectors, groups that skip the same places go together.
    gathered = [Tile("gathered", _TILE_ROWS, mv) for mv in (4, 2, 3)]
    # A tile multiplies a place for 16 rows where any of them has it.
    union = 1 - (1 - weight.density) ** (_TILE_ROWS / min(_TILE_ROWS, max(block_height(spec), 1)))
    first = each >= _TILE_ROWS and union <= _MOST_UNION * weight.density
    return [*gathered, *tiles] if first else [*tiles[:2], *gathered, *tiles[2:]]


class CpuInt8Conv2d(_CpuInt8Conv):
    """Kernels of integers for conv2d."""

    op = CONV_OPS["conv2d"]


class CpuInt8Conv1d(_CpuInt8Conv):
    """Kernels of integers for conv1d."""

    op = CONV_OPS["conv1d"]


class _RealConvKernel(ConvKernel):
    """A kernel of real numbers that takes a weight as its integers too."""

    def __init__(self, spec: KernelSpec, kernel: ConvKernel) -> None:
        self._kernel, self._scales = kernel, row_scales(spec["weight"])

    def pack(self, operand: Tensor) -> tuple[Tensor, ...]:
        if not operand.is_floating_point():
            operand = operand.float() * self._scales.float().view(-1, *[1] * (operand.dim() - 1))
        return self._kernel.pack(operand)

    def shared(self, packed: Sequence[Tensor], operand: Tensor) -> Sequence[Tensor]:
        return self._kernel.shared(packed, operand) if operand.is_floating_point() else packed

    def run(self, packed: Sequence[Tensor], *inputs: Tensor | None) -> Tensor:
        return self._kernel.run(packed, *inputs)

    def fast_path(self, packed: Sequence[Tensor], bias: Tensor | None) -> Callable[..., Tensor | None] | None:
        return self._kernel.fast_path(packed, bias)

    def product(self, packed: Sequence[Tensor], bias: Tensor | None) -> Any:
        return self._kernel.product(packed, bias)

    def layout(self) -> KernelLayout | None:
        return self._kernel.layout()


def _plain(spec: KernelSpec) -> KernelSpec:
    """Return the convolution in real numbers, as its implements read it."""
    names = {after: before for before, after in CONV_OPS.items()}
    geometry = ConvGeometry.from_dict(spec.attributes).to_dict()
    return replace(spec, op=names[spec.op], attributes=geometry)


class DenseQuantizedConv2d(DenseConv2d):
    """PyTorch's conv2d in real numbers."""

    op = CONV_OPS["conv2d"]

    def build(self, spec: KernelSpec, params: Params) -> ConvKernel:
        """Return the dense kernel."""
        return _RealConvKernel(spec, super().build(_plain(spec), params))


class DenseQuantizedConv1d(DenseConv1d):
    """PyTorch's conv1d in real numbers."""

    op = CONV_OPS["conv1d"]

    def build(self, spec: KernelSpec, params: Params) -> ConvKernel:
        """Return the dense kernel."""
        return _RealConvKernel(spec, super().build(_plain(spec), params))


class RealQuantizedConv2d(CpuConv2d):
    """The C++ kernels of conv2d in real numbers."""

    op = CONV_OPS["conv2d"]

    def build(self, spec: KernelSpec, params: Params) -> ConvKernel:
        """Compile the library if it is not there yet, and pack the mask."""
        return _RealConvKernel(spec, super().build(_plain(spec), params))


class RealQuantizedConv1d(CpuConv1d):
    """The C++ kernels of conv1d in real numbers."""

    op = CONV_OPS["conv1d"]

    def build(self, spec: KernelSpec, params: Params) -> ConvKernel:
        """Compile the library if it is not there yet, and pack the mask."""
        return _RealConvKernel(spec, super().build(_plain(spec), params))


class WholeQuantizedConv2d(CpuDenseConv2d):
    """The C++ kernels of conv2d in real numbers that skip nothing; of depthwise layers, whose groups have no places."""

    op = CONV_OPS["conv2d"]

    def build(self, spec: KernelSpec, params: Params) -> ConvKernel:
        """Compile the library if it is not there yet."""
        return _RealConvKernel(spec, super().build(_plain(spec), params))


class WholeQuantizedConv1d(CpuDenseConv1d):
    """The same for conv1d."""

    op = CONV_OPS["conv1d"]

    def build(self, spec: KernelSpec, params: Params) -> ConvKernel:
        """Compile the library if it is not there yet."""
        return _RealConvKernel(spec, super().build(_plain(spec), params))

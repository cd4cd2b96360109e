"""Convolutions of models in bfloat16: the implement ``cpu-bf16``, sparse, dense and depthwise.

It rounds images to bf16, as the model does, multiplies two live weights at once with sums in fp32, and hands bf16 to
the next layer of a chain, which moves half of the bytes. It competes where the processor has instructions for pairs;
elsewhere the kernels for fp32 run, which compute the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from sparta.common.tuning import TunableItemCfg
from sparta.measure.machine import probe_cpu
from sparta.specialize.conv.bf16_depthwise import Bf16Depthwise
from sparta.specialize.conv.bf16_images import Bf16Images
from sparta.specialize.conv.bf16_packed import LAYOUTS, PackedBf16Conv
from sparta.specialize.conv.cpu import block_height
from sparta.specialize.conv.int8_depthwise import is_depthwise
from sparta.specialize.conv.spec import ConvGeometry, ConvKernel
from sparta.specialize.cpu.device import library_here
from sparta.specialize.cpu.library import fused_activation
from sparta.specialize.cpu.tile import Tile
from sparta.specialize.implement import Cause, Implement, Params, Support, present
from sparta.specialize.kernel_spec import KernelSpec

__all__ = ["CpuBf16Conv1d", "CpuBf16Conv2d"]

_FLAG = "avx512_bf16"
_DENSE = 0.5  # the share of live weights from which groups are read as if they had no pruned ones
_ROWS = 4
_FEW_PIXELS = 64  # that two vectors hold


class _Bf16ConvKernel(ConvKernel):
    def __init__(self, spec: KernelSpec, images: Bf16Images) -> None:
        self._images, self._activation = images, fused_activation(spec.epilogue)

    def pack(self, operand: Tensor) -> tuple[Tensor, ...]:
        return (self._images.pack_short(operand),)

    def run(self, packed: Sequence[Tensor], *inputs: Tensor | None) -> Tensor:
        (x,), bias, residual = present(inputs[0]), inputs[1], inputs[2]
        y = self._images.run(x, packed[0], bias, activation=self._activation, residual=residual)
        return y.to(x.dtype)

    def fast_path(self, packed: Sequence[Tensor], bias: Tensor | None) -> Callable[..., Tensor | None] | None:
        return self._images.fast_path_for(packed[0], bias, self._activation)

    def product(self, packed: Sequence[Tensor], bias: Tensor | None) -> Any:
        return self._images.product_for(packed[0], bias, self._activation)


class _CpuBf16Conv(Implement):
    """Products of two live weights at once, with sums in fp32 (AVX-512 BF16)."""

    name = "cpu-bf16"
    every_epilogue = True
    any_mask = True

    def supports(self, spec: KernelSpec) -> Support:
        """Take bf16 models on processors that multiply pairs of bf16."""
        if str(spec["input"].format) != "bf16":
            return Support.no(f"it computes in bf16, and the model is {spec['input'].format}", Cause.DTYPE)
        if 0 in spec["weight"].shape:
            return Support.no("its weight is empty", Cause.SHAPE)
        if spec.device == "cpu" and _FLAG not in probe_cpu().vector_isa:
            return Support.no("the processor has no instructions for pairs of bf16 (AVX-512 BF16)", Cause.CAPABILITY)
        return library_here(spec)

    def space(self, spec: KernelSpec) -> Mapping[str, TunableItemCfg]:
        """Return the tiles and image layouts that are worth timing; depthwise layers have neither."""
        if _is_planes(spec):
            return {}
        return {
            "tile": TunableItemCfg("choice", _value=[str(tile) for tile in _tiles(spec)]),
            "image": TunableItemCfg("choice", _value=list(_layouts(spec))),
        }

    def default(self, spec: KernelSpec) -> dict[str, Any]:
        """Return the best guess."""
        if _is_planes(spec):
            return {}
        return {"tile": str(_tiles(spec)[0]), "image": _layouts(spec)[0]}

    def build(self, spec: KernelSpec, params: Params) -> ConvKernel:
        """Compile the library if it is not there yet, and pack the mask."""
        mask, geometry = spec["weight"].mask("cpu"), ConvGeometry.from_dict(spec.attributes)
        if _is_planes(spec):
            return _Bf16ConvKernel(spec, Bf16Depthwise(mask, geometry))
        tile = Tile.parse(params["tile"])
        return _Bf16ConvKernel(spec, PackedBf16Conv(mask, geometry, image=params["image"], **tile.to_dict()))


class CpuBf16Conv2d(_CpuBf16Conv):
    """Kernels in bf16 for conv2d."""

    op = "conv2d"


class CpuBf16Conv1d(_CpuBf16Conv):
    """Kernels in bf16 for conv1d."""

    op = "conv1d"


def _is_planes(spec: KernelSpec) -> bool:
    return is_depthwise(spec["weight"].shape, spec.attributes["groups"])


def _layouts(spec: KernelSpec) -> tuple[str, ...]:
    """Return the layouts of images that are worth timing; of one tap there is nothing to choose."""
    return LAYOUTS if math.prod(spec["weight"].shape[2:]) > 1 else LAYOUTS[:1]


def _tiles(spec: KernelSpec) -> list[Tile]:
    """Return the tiles worth timing, the best guess first: the tallest blocks that the mask and its groups have."""
    weight, groups = spec["weight"], int(spec.attributes["groups"])
    each, height = weight.shape[0] // groups, block_height(spec)
    tall = (height % _ROWS == 0 or weight.density > _DENSE) and (groups == 1 or each % _ROWS == 0)
    eight = [Tile(block=8, mv=1)] if height % 8 == 0 and (groups == 1 or each % 8 == 0) else []
    size = ConvGeometry.from_dict(spec.attributes).output_size(spec["input"].shape[2:], weight.shape[2:])
    vectors = (3, 2) if math.prod(size) > _FEW_PIXELS else (2, 3)
    return [*(Tile(block=4, mv=mv) for mv in vectors), *eight] if tall else [Tile(mv=4), Tile(mv=3), Tile(mv=2)]

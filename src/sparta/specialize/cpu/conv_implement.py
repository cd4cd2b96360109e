"""The C++ kernels as implements of convolutions: ``cpu`` for any sparse conv2d and conv1d on the CPU.

What is tuned is the tile, as for a linear layer over the pixels, and the layout of the image's copy. The one idea to
know: an implement only offers both; which pays depends on the image and the mask, and measurement tells.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from sparta.common.tuning import TunableItemCfg
from sparta.specialize.conv import ConvGeometry, ConvKernel
from sparta.specialize.cpu.candidates import candidates
from sparta.specialize.cpu.conv import PackedConv
from sparta.specialize.cpu.conv_image import IMAGES
from sparta.specialize.cpu.implement import layout_of, runs_here
from sparta.specialize.cpu.library import fused_activation
from sparta.specialize.cpu.tile import Tile
from sparta.specialize.implement import Implement, KernelLayout, Params, Support, register
from sparta.specialize.kernel_spec import KernelSpec

__all__ = ["CpuConv1d", "CpuConv2d"]

_VECTOR_BYTES = 64
_NEAR_BYTES = 32 * 1024  # of the first level of caches, for the input


class _CpuConvKernel(ConvKernel):
    def __init__(self, spec: KernelSpec, tile: Tile, image: str) -> None:
        geometry = ConvGeometry.from_dict(spec.attributes)
        self._packed = PackedConv(None, spec["weight"].mask("cpu"), geometry, image=image, **tile.to_dict())
        self._activation = fused_activation(spec.epilogue)

    def pack(self, operand: Tensor) -> tuple[Tensor, ...]:
        return (self._packed.pack(operand.detach()),)

    def layout(self) -> KernelLayout:
        return layout_of(self._packed.layout, self._packed.tile, self._packed.library)

    def run(self, packed: Sequence[Tensor], *inputs: Tensor | None) -> Tensor:
        x, bias, residual = inputs
        assert x is not None  # noqa: S101 - the operation's convention
        return self._packed(x, bias, self._activation, residual, values=packed[0])


class _CpuConv(Implement):
    """Hand-written C++ kernels, compiled for this machine at their first use."""

    name = "cpu"
    every_epilogue = True

    def supports(self, spec: KernelSpec) -> Support:
        """Any mask and geometry on the CPU in fp32, bf16 and fp16, where there is a compiler."""
        return runs_here(spec)

    def space(self, spec: KernelSpec) -> Mapping[str, TunableItemCfg]:
        """Return the tiles and image layouts that are worth timing."""
        return {
            "tile": TunableItemCfg("choice", _value=[str(tile) for tile in conv_tiles(spec)]),
            "image": TunableItemCfg("choice", _value=list(_images(spec))),
        }

    def default(self, spec: KernelSpec) -> dict[str, Any]:
        """Return the best guess."""
        return {"tile": str(conv_tiles(spec)[0]), "image": _images(spec)[0]}

    def build(self, spec: KernelSpec, params: Params) -> ConvKernel:
        """Compile the library if it is not there yet, and pack the mask."""
        return _CpuConvKernel(spec, Tile.parse(params["tile"]), params["image"])


@register
class CpuConv2d(_CpuConv):
    """Hand-written C++ kernels for conv2d."""

    op = "conv2d"


@register
class CpuConv1d(_CpuConv):
    """Hand-written C++ kernels for conv1d."""

    op = "conv1d"


def conv_tiles(spec: KernelSpec) -> list[Tile]:
    """Return the tiles worth timing, the best guess first: those of a linear layer over the output's pixels."""
    weight = spec["weight"]
    geometry = ConvGeometry.from_dict(spec.attributes)
    pixels = math.prod(geometry.output_size(spec["input"].shape[2:], weight.shape[2:]))
    outputs, reduction = weight.shape[0], math.prod(weight.shape[1:])
    height = math.gcd(weight.state.block[0], outputs // geometry.groups)
    found = candidates(max(pixels, 2), outputs, reduction, weight.density, (max(height, 1), 1))
    tiles = [tile for tile in (Tile(**fields) for fields in found) if tile.form == "panel" and not tile.k_chunk]
    return [*tiles, *_in_chunks(tiles, weight.shape)]


def _in_chunks(tiles: Sequence[Tile], shape: Sequence[int]) -> list[Tile]:
    """Return wide unstructured tiles again, in chunks of channels of which all rows read from the nearest cache."""
    channels, taps = shape[1], math.prod(shape[2:])
    found = []
    for tile in tiles:
        window = math.prod(shape[2:-1]) * (tile.mv + 2) * _VECTOR_BYTES  # a run for each row of taps, not aligned
        together = max(1, _NEAR_BYTES // window)
        if tile.block == tile.interleave == 1 and tile.mv > 1 and together < channels:
            even = -(-channels // -(-channels // together))
            found.append(replace(tile, k_chunk=even * taps))
    return found


def _images(spec: KernelSpec) -> tuple[str, ...]:
    """Return the layouts worth timing; with one tap, rows need no other alignment than pixels."""
    return ("flat", "taps") if math.prod(spec["weight"].shape[2:]) == 1 else IMAGES

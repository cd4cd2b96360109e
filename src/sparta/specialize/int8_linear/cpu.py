"""The C++ kernels of 8-bit integers as an implement: ``cpu-int8`` for any mask on the CPU, dense ones included."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sparta.errors import SpartaError
from sparta.specialize.cpu.chain import Product
from sparta.specialize.cpu.device import layout_of, library_here
from sparta.specialize.cpu.library import fused_activation, load
from sparta.specialize.cpu.tile import Tile
from sparta.specialize.implement import Cause, KernelLayout, Params, Support, TiledImplement, present
from sparta.specialize.int8_linear.cpu_packed import SCALES, Int8Options, Int8Panel, PackedInt8Linear
from sparta.specialize.int8_linear.cpu_product import int8_product
from sparta.specialize.int8_linear.quantization import Quantization
from sparta.specialize.int8_linear.spec import (
    MOST_INPUTS,
    OP,
    Int8Kernel,
    folds,
    integers_of,
    requantization,
    row_scales,
)
from sparta.specialize.kernel_spec import KernelSpec

__all__ = ["CpuInt8Linear", "Int8Options", "Int8Panel", "PackedInt8Linear", "integers_here"]

# Vectors of tokens for blocks of 4, the best guess first: sixteen registers hold the sums of two.
_VECTORS = {"avx512": (4, 3, 2, 1), "avx2": (2, 3, 4, 1), "portable": (2, 1)}
_GATHERED = (4, 2, 1)  # vectors of tokens for tile registers
_MOST_UNION = 2.2  # times the live weights: what tile registers may multiply to be the better guess


class _CpuInt8Kernel(Int8Kernel):
    def __init__(self, spec: KernelSpec, tile: Tile) -> None:
        self._packed = PackedInt8Linear(spec["weight"].mask("cpu"), **tile.to_dict())
        self._scales, grid = row_scales(spec["weight"]), Quantization.from_dict(spec.attributes)
        output = Quantization.of_output(spec.attributes)
        inside = output is not None and folds(spec.epilogue)
        self._divisor = output.scale if output is not None and inside else 1.0
        self._multiplier, _ = requantization(self._scales, grid.scale, output_scale=self._divisor)
        self._offset: tuple[Tensor, int, Tensor] | None = None  # of the last bias
        self._options = Int8Options(
            zero_point=grid.zero_point,
            activation=fused_activation(spec.epilogue),
            output=(torch.float32, 0) if output is None else (output.dtype, output.zero_point),
            output_scale=1.0 if output is None or inside else output.scale,
            rounded_to=None if grid.dynamic else (grid.dtype, grid.scale),
            dynamic=grid.dynamic,
        )

    def pack(self, operand: Tensor) -> tuple[Tensor, ...]:
        weight = operand.detach()
        return self._packed.pack(integers_of(weight, self._scales) if weight.is_floating_point() else weight)

    def layout(self) -> KernelLayout:
        return layout_of(self._packed.layout, self._packed.tile, self._packed.library)

    def run(self, packed: Sequence[Tensor], *inputs: Tensor | None) -> Tensor:
        (x,), bias, residual = present(inputs[0]), inputs[1], inputs[2]
        rows = x.float() if x.is_floating_point() else x
        return self._packed.run(
            rows, packed, (self._multiplier, self._offset_of(bias)), self._options, residual=residual
        )

    def fast_path(self, packed: Sequence[Tensor], bias: Tensor | None) -> Callable[..., Tensor | None] | None:
        return self._packed.fast_path(packed, (self._multiplier, self._offset_of(bias)), self._options)

    def product(self, packed: Sequence[Tensor], bias: Tensor | None) -> Product:
        return int8_product(self._packed, packed, (self._multiplier, self._offset_of(bias)), self._options)

    def _offset_of(self, bias: Tensor | None) -> Tensor | None:
        """Return the bias in units of the output, computed once for each bias."""
        if bias is None or (self._divisor == 1.0 and bias.dtype == torch.float32):
            return bias
        known = self._offset
        if bias.is_inference():
            return (bias.double() / self._divisor).float()
        if known is None or known[0] is not bias or known[1] != bias._version:
            known = self._offset = (bias, bias._version, (bias.detach().double() / self._divisor).float())
        return known[2]


class CpuInt8Linear(TiledImplement):
    """Hand-written C++ kernels on units of 1x4, with VNNI or the tiles of AMX where the processor has them."""

    name = "cpu-int8"
    version = 5
    op = OP
    every_epilogue = True
    any_mask = True

    def supports(self, spec: KernelSpec) -> Support:
        """Any mask on the CPU for fp32 models, where there is a compiler."""
        answer = integers_here(spec)
        return library_here(spec) if answer else answer

    def tiles(self, spec: KernelSpec) -> Sequence[object]:
        """Return the tiles that are worth timing, the best guess first: blocks of 4 where the mask has them."""
        library, weight = load(), spec["weight"]
        vectors = max(1, -(-spec["input"].shape[0] // library.lanes))
        whole = weight.state.block[0] % 4 == 0 or weight.density > 0.5
        orders = {4: _VECTORS[library.isa], 1: (4, 3, 2, 1)}
        heights = (4, 1) if whole else (1, 4)
        panels = {height: [Tile(block=height, mv=mv) for mv in orders[height] if mv <= vectors] for height in heights}
        if not library.byte_tiles:
            return [*panels[heights[0]], *panels[heights[1]]]
        gathered = [Tile("gathered", 16, mv) for mv in _GATHERED if mv <= vectors]
        # A tile multiplies a place for 16 rows where any of them has it.
        union = 1 - (1 - weight.density) ** (16 / min(16, weight.state.block[0]))
        if union <= _MOST_UNION * weight.density:
            return [*gathered[:2], *panels[heights[0]][:2]]
        return [*panels[heights[0]][:2], *gathered[:1], *panels[heights[1]][:1], *panels[heights[0]][2:]]

    def build(self, spec: KernelSpec, params: Params) -> Int8Kernel:
        """Compile the library if it is not there yet, and pack the mask."""
        return _CpuInt8Kernel(spec, Tile.parse(params["tile"]))


def integers_here(spec: KernelSpec) -> Support:
    """Say whether a kernel of integers on the CPU can take a spec: fp32 models, symmetric weights, usable scales."""
    weight, grids = spec["weight"], (Quantization.from_dict(spec.attributes), Quantization.of_output(spec.attributes))
    no: tuple[str, Cause] | None = None
    if spec.device != "cpu":
        no = f"it runs on the CPU, not on {spec.device}", Cause.DEVICE
    elif str(spec["input"].format) not in ("fp32", "any"):
        no = f"int8 kernels run for fp32 models, not {spec['input'].format}", Cause.DTYPE
    elif weight.count("live") and str(weight.format) != "int8":
        no = f"the weight is {weight.format}, not int8", Cause.DTYPE
    elif math.prod(weight.shape[1:]) > MOST_INPUTS:
        no = f"32 bits hold sums with K up to {MOST_INPUTS}, not {math.prod(weight.shape[1:])}", Cause.SHAPE
    elif any(grid is not None and not SCALES[0] <= grid.scale <= SCALES[1] for grid in grids):
        no = f"a scale outside {SCALES[0]} to {SCALES[1]}", Cause.OTHER
    else:
        try:
            row_scales(weight)
        except SpartaError as error:
            no = str(error), Cause.PATTERN
    if no is None:
        return Support.yes()
    reason, cause = no
    return Support.no(reason, cause)

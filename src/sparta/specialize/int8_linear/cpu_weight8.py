"""Weights in int8, activations in fp32: the implement ``cpu-weight8`` for one token or a few.

With so few tokens a layer's time is that of reading its weight, so a byte per live weight and an index of a bit or a
byte beat anything that is computed faster. Nothing but the weight is rounded to 8 bits; activations keep 16 at least.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sparta.specialize.cpu.chain import Product
from sparta.specialize.cpu.device import library_here
from sparta.specialize.cpu.library import fused_activation
from sparta.specialize.cpu.short import PackedShort, ShortTile, short_layout, short_tiles
from sparta.specialize.implement import Cause, KernelLayout, Params, Support, TiledImplement, present
from sparta.specialize.int8_linear.cpu import integers_here
from sparta.specialize.int8_linear.quantization import Quantization
from sparta.specialize.int8_linear.quantized import RealKernel
from sparta.specialize.int8_linear.spec import OP, integers_of, row_scales
from sparta.specialize.kernel_spec import KernelSpec
from sparta.specialize.linear.spec import LinearKernel

__all__ = ["CpuWeight8"]

MOST_TOKENS = 8
"""Beyond these, vectors of tokens are filled, and kernels for many tokens are faster."""


class _Weight8Kernel(LinearKernel):
    def __init__(self, spec: KernelSpec, tile: ShortTile) -> None:
        grid = Quantization.from_dict(spec.attributes)
        self._short = PackedShort(spec["weight"].mask("cpu"), tile, step=0.0 if grid.dynamic else grid.scale)
        self._rows, self._activation = row_scales(spec["weight"]), fused_activation(spec.epilogue)
        self._scales = self._rows.float()

    def pack(self, operand: Tensor) -> tuple[Tensor, ...]:
        weight = operand.detach()
        return (self._short.pack(integers_of(weight, self._rows) if weight.is_floating_point() else weight),)

    def run(self, packed: Sequence[Tensor], *inputs: Tensor | None) -> Tensor:
        (x,), bias, residual = present(inputs[0]), inputs[1], inputs[2]
        return self._short(x, packed[0], self._scales, bias, self._activation, residual)

    def product(self, packed: Sequence[Tensor], bias: Tensor | None) -> Product | None:
        return self._short.product(packed[0], self._scales, bias, self._activation)

    def layout(self) -> KernelLayout:
        return short_layout(self._short, 1)


class _RealWeight8(RealKernel):
    """Takes the weight's integers as they are."""

    def pack(self, operand: Tensor) -> tuple[Tensor, ...]:
        return self._kernel.pack(operand)


class CpuWeight8(TiledImplement):
    """Weights of 8 bits as one stream, with activations in fp32."""

    name = "cpu-weight8"
    op = OP
    every_epilogue = True

    def supports(self, spec: KernelSpec) -> Support:
        """Take a few tokens on the CPU, where there is a compiler."""
        answer = integers_here(spec)
        if not answer:
            return answer
        if spec["input"].shape[0] > MOST_TOKENS:
            return Support.no(f"it is for up to {MOST_TOKENS} tokens, not {spec['input'].shape[0]}", Cause.SHAPE)
        return library_here(spec)

    def tiles(self, spec: KernelSpec) -> Sequence[object]:
        """Return the forms that are worth timing, the best guess first."""
        return short_tiles(spec)

    def build(self, spec: KernelSpec, params: Params) -> LinearKernel:
        """Compile the library if it is not there yet, and pack the mask."""
        return _RealWeight8(spec, _Weight8Kernel(spec, ShortTile.parse(params["tile"])))

"""Weights stored as bfloat16: the implement ``cpu-bf16`` for one token or a few of models in bf16.

It reads half the bytes of fp32 and sums in fp32, so results are those of the other C++ kernels within the order of
their sums.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparta.specialize.cpu.chain import Product
from sparta.specialize.cpu.device import library_here
from sparta.specialize.cpu.library import fused_activation
from sparta.specialize.cpu.short import PackedShort, ShortTile, short_layout, short_tiles
from sparta.specialize.implement import Cause, KernelLayout, Params, Support, TiledImplement, present
from sparta.specialize.kernel_spec import KernelSpec
from sparta.specialize.linear.spec import LinearKernel

__all__ = ["CpuBf16"]

_MOST_TOKENS = 8


class _Bf16Kernel(LinearKernel):
    def __init__(self, spec: KernelSpec, tile: ShortTile) -> None:
        self._short = PackedShort(spec["weight"].mask("cpu"), tile)
        self._activation = fused_activation(spec.epilogue)

    def pack(self, operand: Tensor) -> tuple[Tensor, ...]:
        return (self._short.pack(operand.detach().to(torch.bfloat16)),)

    def run(self, packed: Sequence[Tensor], *inputs: Tensor | None) -> Tensor:
        (x,), bias, residual = present(inputs[0]), inputs[1], inputs[2]
        return self._short(x, packed[0], None, bias, self._activation, residual).to(x.dtype)

    def product(self, packed: Sequence[Tensor], bias: Tensor | None) -> Product | None:
        return self._short.product(packed[0], None, bias, self._activation)

    def layout(self) -> KernelLayout:
        return short_layout(self._short, 2)


class CpuBf16(TiledImplement):
    """Weights of 16 bits as one stream."""

    name = "cpu-bf16"
    op = "linear"
    every_epilogue = True

    def supports(self, spec: KernelSpec) -> Support:
        """Take a few tokens of a bf16 model on the CPU, where there is a compiler."""
        if str(spec["input"].format) != "bf16":
            return Support.no(f"it keeps weights in bf16, and the model is {spec['input'].format}", Cause.DTYPE)
        if spec["input"].shape[0] > _MOST_TOKENS:
            return Support.no(f"it is for up to {_MOST_TOKENS} tokens, not {spec['input'].shape[0]}", Cause.SHAPE)
        return library_here(spec)

    def tiles(self, spec: KernelSpec) -> Sequence[object]:
        """Return the forms that are worth timing, the best guess first."""
        return short_tiles(spec)

    def build(self, spec: KernelSpec, params: Params) -> LinearKernel:
        """Compile the library if it is not there yet, and pack the mask."""
        return _Bf16Kernel(spec, ShortTile.parse(params["tile"]))

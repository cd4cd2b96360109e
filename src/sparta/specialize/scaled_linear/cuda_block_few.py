"""``cuda-block-few`` in 8 bits: weights pruned in blocks, in fp8 or int8, for few tokens.

The kernel is that of :mod:`sparta.specialize.linear.cuda_block_few`; values are widened in registers and multiplied in
bf16 or fp16, so x is not rounded and no pass over it is needed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparta.specialize.cuda.device import HALF_FORMATS
from sparta.specialize.implement import Params, Support, TiledImplement
from sparta.specialize.kernel_spec import KernelSpec
from sparta.specialize.linear.cuda_block_few import (
    FewBlocksKernel,
    FewBlocksTile,
    few_blocks_fit,
    few_blocks_tiles,
)
from sparta.specialize.linear.spec import LinearKernel
from sparta.specialize.linear.streamed import streamed_call
from sparta.specialize.scaled_linear.packed import FORMAT_NUMBERS, packed_codes, takes_scaled
from sparta.specialize.scaled_linear.spec import FP8, OP

__all__ = ["ScaledBlockFew"]

_ORDER = [2, 0, 3, 1]  # of four values: the first two are widened where they stand, the others a byte further up


class _ScaledKernel(FewBlocksKernel):
    call = streamed_call(4)

    def __init__(self, spec: KernelSpec, tile: FewBlocksTile) -> None:
        self._weight, self._half = spec["weight"], HALF_FORMATS[str(spec["input"].format)]
        super().__init__(spec, tile, 1, {"FORMAT": FORMAT_NUMBERS[str(self._weight.format)]})

    def pack(self, operand: Tensor) -> tuple[Tensor, ...]:
        """Return the kept blocks of a real weight (N, K) as codes, their columns, the schedule, scales of outputs."""
        codes, scales = packed_codes(operand, self._weight, self._half)
        values, *index = self._layout.pack(codes)
        ordered = torch.unflatten(values, -1, (-1, 4))[..., _ORDER].flatten(-2).contiguous()
        return ordered, *index, scales[:, 0].contiguous()


class ScaledBlockFew(TiledImplement):
    """CUDA C++ on kept blocks of 16 to 64 outputs in 8 bits, for up to 32 tokens on Hopper; x stays as it is."""

    name = "cuda-block-few"
    op = OP
    first_run_compiles = True

    def supports(self, spec: KernelSpec) -> Support:
        """Bf16 and fp16 on Hopper, few tokens, where kept blocks leave enough out."""
        return takes_scaled(spec, (FP8, "int8")) and few_blocks_fit(spec, 1)

    def tiles(self, spec: KernelSpec) -> Sequence[object]:
        """Return the tiles that are worth timing, the best guess first."""
        return few_blocks_tiles(spec, 1)

    def build(self, spec: KernelSpec, params: Params) -> LinearKernel:
        """Lay out the kept blocks; the kernel is compiled at its first run."""
        return _ScaledKernel(spec, FewBlocksTile.parse(params["tile"]))

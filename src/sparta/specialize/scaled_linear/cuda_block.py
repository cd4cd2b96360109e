"""``cuda-block-fp8``: weights pruned in blocks, in fp8, for many tokens on Hopper.

The kernel is that of :mod:`sparta.specialize.linear.cuda_block`; here x is rounded to fp8 as well, and the scales of
tokens and outputs are applied where the result is written.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparta.specialize.implement import Cause, Params, Support, TiledImplement
from sparta.specialize.kernel_spec import KernelSpec
from sparta.specialize.linear.cuda_block import (
    BlockMatrixLauncher,
    BlockMatrixTile,
    block_matrix_fits,
    block_matrix_tiles,
)
from sparta.specialize.linear.spec import LinearKernel
from sparta.specialize.scaled_linear.inputs import InputRounding, RoundsInputs
from sparta.specialize.scaled_linear.packed import takes_scaled
from sparta.specialize.scaled_linear.spec import FP8, OP, codes_of, rounds_inputs

__all__ = ["Fp8CudaBlock"]


class _Fp8Kernel(RoundsInputs):
    def __init__(self, spec: KernelSpec, tile: BlockMatrixTile) -> None:
        self._launch = BlockMatrixLauncher(spec, tile, torch.float8_e4m3fn)
        self._weight, self._round = spec["weight"], InputRounding(spec.attributes["input_scale"])

    def pack(self, operand: Tensor) -> tuple[Tensor, ...]:
        """Return the kept blocks of a real weight (N, K) as codes, their columns, the schedule, scales of outputs."""
        layout, (codes, scales) = self._launch.layout, codes_of(operand, self._weight)
        index = layout.index(operand.device)
        values = layout.values(codes.view(torch.uint8)).view(codes.dtype)
        return values, index.columns, index.schedule, scales[:, 0].contiguous()

    def run_rounded(
        self, packed: Sequence[Tensor], x: tuple[Tensor, Tensor], bias: Tensor | None, residual: Tensor | None
    ) -> Tensor:
        """Return (M, N) for an x that is rounded already: codes (M, K) and scales (M,)."""
        codes, x_scales = x
        return self._launch(packed, codes, bias, residual, x_scales)


class Fp8CudaBlock(TiledImplement):
    """CUDA C++ on kept blocks of 64 outputs in fp8, for many tokens on Hopper; x is rounded to fp8."""

    name = "cuda-block-fp8"
    op = OP
    first_run_compiles = True

    def supports(self, spec: KernelSpec) -> Support:
        """Bf16 and fp16 on Hopper where x may be rounded, many tokens, where kept blocks leave enough out."""
        if not rounds_inputs(spec):
            return Support.no("activations must not be rounded to fp8", Cause.DTYPE)
        return takes_scaled(spec, (FP8,)) and block_matrix_fits(spec, 1)

    def tiles(self, spec: KernelSpec) -> Sequence[object]:
        """Return the tiles that are worth timing, the best guess first."""
        return block_matrix_tiles(spec, 1)

    def build(self, spec: KernelSpec, params: Params) -> LinearKernel:
        """Lay out the kept blocks; the kernel is compiled at its first run."""
        return _Fp8Kernel(spec, BlockMatrixTile.parse(params["tile"]))

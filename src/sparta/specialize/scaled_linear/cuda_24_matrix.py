"""``cuda-24-matrix-fp8``: 2:4 weights in fp8 for many tokens, by the sparse instructions of Hopper's warpgroups.

The kernel is that of :mod:`sparta.specialize.linear.cuda_24_matrix`; here x is rounded to fp8 as well, and the scales
of tokens and outputs are applied where the result is written.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparta.specialize.implement import Cause, Params, Support, TiledImplement
from sparta.specialize.kernel_spec import KernelSpec
from sparta.specialize.linear.cuda_24_matrix import MatrixKernel, matrix_fits
from sparta.specialize.linear.cuda_24_matrix_tile import MatrixTile, matrix_tiles
from sparta.specialize.linear.spec import LinearKernel
from sparta.specialize.scaled_linear.inputs import InputRounding, RoundsInputs
from sparta.specialize.scaled_linear.packed import takes_scaled
from sparta.specialize.scaled_linear.spec import FP8, OP, codes_of, rounds_inputs

__all__ = ["Fp8Matrix"]


class _Fp8MatrixKernel(RoundsInputs, MatrixKernel):
    def __init__(self, spec: KernelSpec, tile: MatrixTile) -> None:
        super().__init__(spec, tile, torch.float8_e4m3fn)
        self._weight, self._round = spec["weight"], InputRounding(spec.attributes["input_scale"])

    def pack(self, operand: Tensor) -> tuple[Tensor, ...]:
        """Return the packed codes of a real weight (N, K) and the scales of its outputs."""
        codes, scales = codes_of(operand, self._weight)
        return *super().pack(codes), scales[:, 0].contiguous()

    def run_rounded(
        self, packed: Sequence[Tensor], x: tuple[Tensor, Tensor], bias: Tensor | None, residual: Tensor | None
    ) -> Tensor:
        """Return (M, N) for an x that is rounded already: codes (M, K) and scales (M,)."""
        codes, x_scales = x
        return self.multiply(packed[0], codes, bias, residual, (x_scales, packed[1]))


class Fp8Matrix(TiledImplement):
    """CUDA C++ on 2:4 weights in fp8, for many tokens on Hopper; x is rounded to fp8."""

    name = "cuda-24-matrix-fp8"
    op = OP
    first_run_compiles = True

    def supports(self, spec: KernelSpec) -> Support:
        """Bf16 and fp16 on Hopper where x may be rounded, weights of at most 2 live elements in every 4."""
        if not rounds_inputs(spec):
            return Support.no("activations must not be rounded to fp8", Cause.DTYPE)
        return takes_scaled(spec, (FP8,)) and matrix_fits(spec, 1)

    def tiles(self, spec: KernelSpec) -> Sequence[object]:
        """Return the tiles that are worth timing, the best guess first."""
        return matrix_tiles(spec["weight"].shape, spec["input"].shape[0], 1)

    def build(self, spec: KernelSpec, params: Params) -> LinearKernel:
        """Lay out the weight; the kernel is compiled at its first run."""
        return _Fp8MatrixKernel(spec, MatrixTile.parse(params["tile"]))

"""``triton-block`` in 8 bits: weights pruned in blocks, in fp8 or int8.

The kernel and its layout are those of :mod:`sparta.specialize.linear.triton_block`. With x in bf16 or fp16, only the
weight is read in 8 bits (``triton-block``, for few tokens); with x rounded to fp8, the matrix unit multiplies at twice
the rate (``triton-block-fp8``, for any number of tokens).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparta.specialize.cuda.device import HALF_FORMATS, HOPPER, bulk_copies, cuda_here, need_triton, triton_here
from sparta.specialize.implement import Cause, Params, Support, TiledImplement
from sparta.specialize.kernel_spec import KernelSpec
from sparta.specialize.linear.spec import LinearKernel
from sparta.specialize.linear.triton_block.candidates import candidates, coverage
from sparta.specialize.linear.triton_block.layout import BlockLayout
from sparta.specialize.linear.triton_block.tile import BlockTile
from sparta.specialize.scaled_linear.inputs import InputRounding, RoundsInputs
from sparta.specialize.scaled_linear.packed import takes_scaled
from sparta.specialize.scaled_linear.spec import FP8, OP, codes_of, rounds_inputs

__all__ = ["Fp8Block", "ScaledBlock"]

_MOST_COVERED = 0.7
_FEW_TOKENS = 128


class _ScaledBlockKernel(LinearKernel):
    """Sums in float32 over the kept blocks of a row in one fixed order: equal inputs give equal bits."""

    def __init__(self, spec: KernelSpec, tile: BlockTile) -> None:
        need_triton()
        from sparta.specialize.linear.triton_block.launch import BlockLinearLauncher

        self._weight, self._layout = spec["weight"], BlockLayout(spec["weight"], tile)
        self._launch = BlockLinearLauncher(
            (self._weight.shape[0], self._weight.shape[1]),
            tile,
            spec.epilogue.activation,
            whole=self._layout.whole,
            result=HALF_FORMATS[str(spec["input"].format)],
        )

    def pack(self, operand: Tensor) -> tuple[Tensor, ...]:
        codes, scales = codes_of(operand, self._weight)
        index = self._layout.index(operand.device)
        values = self._layout.values(codes.view(torch.uint8)).view(codes.dtype)
        return values, index.columns, index.schedule, scales[:, 0].contiguous()

    def run(self, packed: Sequence[Tensor], *inputs: Tensor | None) -> Tensor:
        x, bias, residual = inputs
        assert x is not None  # noqa: S101 - the operation's convention
        return self._launch(packed, x, bias, residual)


class _Fp8BlockKernel(RoundsInputs, _ScaledBlockKernel):
    """The same on an x that is rounded to fp8."""

    def __init__(self, spec: KernelSpec, tile: BlockTile) -> None:
        super().__init__(spec, tile)
        self._round = InputRounding(spec.attributes["input_scale"])

    def run_rounded(
        self, packed: Sequence[Tensor], x: tuple[Tensor, Tensor], bias: Tensor | None, residual: Tensor | None
    ) -> Tensor:
        """Return (M, N) for an x that is rounded already: codes (M, K) and scales (M,)."""
        codes, scales = x
        return self._launch(packed, codes, bias, residual, scales)


class _Block(TiledImplement):
    """What both have in common."""

    op = OP
    first_run_compiles = True
    kernel: type[_ScaledBlockKernel]

    def build(self, spec: KernelSpec, params: Params) -> LinearKernel:
        """Lay out the kept blocks; the kernel is compiled at its first run."""
        return self.kernel(spec, BlockTile.parse(params["tile"]))


class ScaledBlock(_Block):
    """Triton kernels on kept blocks in 8 bits; x stays as it is."""

    name = "triton-block"
    kernel = _ScaledBlockKernel

    def supports(self, spec: KernelSpec) -> Support:
        """Bf16 and fp16 on CUDA, few tokens, where kept blocks leave enough out."""
        answer = takes_scaled(spec, (FP8, "int8")) and _leaves_enough_out(spec)
        if answer and spec["input"].shape[0] > _FEW_TOKENS:
            given = f"{spec['input'].shape[0]} tokens"
            return Support.no(f"{given}; above {_FEW_TOKENS}, widening the weight takes too long", Cause.SHAPE)
        return answer and _hopper() and Support.yes("Triton kernels on kept blocks in 8 bits")

    def tiles(self, spec: KernelSpec) -> Sequence[object]:
        """Return the tiles that are worth timing, the best guess first."""
        # The left operand of Hopper's matrix unit may come from registers, where the weight is widened.
        return candidates(spec["weight"], spec["input"].shape[0], 2, tma=_copies(spec, 2))


class Fp8Block(_Block):
    """Triton kernels on kept blocks in fp8; x is rounded to fp8."""

    name = "triton-block-fp8"
    kernel = _Fp8BlockKernel

    def supports(self, spec: KernelSpec) -> Support:
        """Bf16 and fp16 on Hopper where x may be rounded, and where kept blocks leave enough out."""
        if not rounds_inputs(spec):
            return Support.no("activations must not be rounded to fp8", Cause.DTYPE)
        answer = takes_scaled(spec, (FP8,)) and _leaves_enough_out(spec)
        return answer and _hopper() and Support.yes("Triton kernels on kept blocks in fp8")

    def tiles(self, spec: KernelSpec) -> Sequence[object]:
        """Return the tiles that are worth timing, the best guess first."""
        return candidates(spec["weight"], spec["input"].shape[0], 1, tma=_copies(spec, 1))


def _copies(spec: KernelSpec, itemsize: int) -> bool:
    """Whether the copy engine can read x with elements of this size."""
    return bulk_copies() and spec["weight"].shape[1] * itemsize % 16 == 0


def _hopper() -> Support:
    return triton_here() and cuda_here(HOPPER)


def _leaves_enough_out(spec: KernelSpec) -> Support:
    covered = coverage(spec["weight"], [(16, 16)])[16, 16]
    if covered > _MOST_COVERED:
        given = f"blocks of 16×16 with a live weight cover {covered:.2f} of the matrix"
        return Support.no(f"{given}; at most {_MOST_COVERED} pays", Cause.PATTERN)
    return Support.yes()

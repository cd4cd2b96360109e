"""``cuda-banks`` in 8 bits: unstructured weights in fp8 or int8 for very few tokens; x is not rounded.

The kernel is that of :mod:`sparta.specialize.linear.cuda_banks`; a live value takes a byte and a half, or two where
little is live.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sparta.specialize.cuda.few_tokens import nvrtc_here
from sparta.specialize.implement import Params, Support, TiledImplement
from sparta.specialize.kernel_spec import KernelSpec
from sparta.specialize.linear.cuda_banks import BanksKernel, BanksTile, banks_fits, banks_tiles
from sparta.specialize.linear.spec import LinearKernel
from sparta.specialize.linear.streamed import streamed_call
from sparta.specialize.scaled_linear.packed import FORMAT_NUMBERS, takes_scaled
from sparta.specialize.scaled_linear.spec import FP8, OP, codes_of

__all__ = ["ScaledBanks"]

_FORMATS = (FP8, "int8")
_ADA = (8, 9)  # from here on there is an instruction that widens fp8


class _ScaledBanksKernel(BanksKernel):
    call = streamed_call(4)

    def __init__(self, spec: KernelSpec, tile: BanksTile) -> None:
        self._weight = spec["weight"]
        super().__init__(spec, tile, {"FORMAT": FORMAT_NUMBERS[str(self._weight.format)]})

    def pack(self, operand: Tensor) -> tuple[Tensor, ...]:
        """Return pieces, places, owners and scales of a real weight (N, K)."""
        codes, scales = codes_of(operand, self._weight)
        return *self._layout.pack(codes), scales[:, 0].contiguous()


class ScaledBanks(TiledImplement):
    """CUDA C++ on any mask, weights in 8 bits, for up to 4 tokens."""

    name = "cuda-banks"
    op = OP
    version = 4
    first_run_compiles = True

    def supports(self, spec: KernelSpec) -> Support:
        """Bf16 and fp16 on CUDA, very few tokens, weights of which not much more than half is live."""
        return takes_scaled(spec, _FORMATS) and banks_fits(spec) and nvrtc_here(_ADA)

    def tiles(self, spec: KernelSpec) -> Sequence[object]:
        """Return the tiles that are worth timing, the best guess first."""
        return banks_tiles(spec)

    def build(self, spec: KernelSpec, params: Params) -> LinearKernel:
        """Lay out the weight; the kernel is compiled at its first run."""
        return _ScaledBanksKernel(spec, BanksTile.parse(params["tile"]))

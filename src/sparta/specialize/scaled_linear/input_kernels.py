"""The Triton kernel that rounds tokens to fp8. This module imports Triton; import it only to run a kernel."""

# ruff: noqa: ANN001, ANN201, N803, PLR0913, PLR0917 - Triton's own conventions
# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparta.specialize.cuda.device import HOPPER, capability
from sparta.specialize.cuda.launcher import Launcher

__all__ = [
    "INTERPRETED",
    "TINY",
    "WIDEST",
    "bits_of",
    "codes_in",
    "round_on_gpu",
    "round_rows",
    "scale_of",
    "warps_for",
]

WIDEST = 16384  # elements of a token that a program holds at once


@triton.jit
def bits_of(part):
    """Return absolute values as integers, which have the same order; NaN is the largest of all."""
    return part.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_of(bits, tiny):
    """Return the scale of a row whose largest element has these bits; where one is NaN, so is the scale."""
    largest = bits.to(tl.float32, bitcast=True)
    return tl.where(largest < tiny, 1.0, largest / 448.0)


@triton.jit
def codes_in(part, scale, STATIC: tl.constexpr):
    """Return the nearest codes; what is not finite becomes NaN.

    With one scale for all, what is too large saturates; with the scale of its row, nothing is too large.
    """
    if STATIC:
        exact = part / scale
        code = tl.where(exact > 448.0, 448.0, tl.where(exact < -448.0, -448.0, exact))  # keeps NaN
        code = tl.where(tl.abs(part) == float("inf"), float("nan"), code)
    else:
        code = part * (1.0 / scale)
    return code.to(tl.float8e4nv)


@triton.jit
def round_rows(
    x,
    codes,
    scales,
    K,
    x_stride,
    given,
    tiny,
    BLOCK: tl.constexpr,
    STATIC: tl.constexpr,
    WHOLE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Round one row; what is not finite becomes NaN."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    part = tl.load(x + row * x_stride + column, mask=column < K, other=0.0).to(tl.float32)
    if STATIC:
        scale = given * 1.0
    else:
        most = bits_of(part)
        if not WHOLE:
            for first in range(BLOCK, K, BLOCK):
                more = tl.load(x + row * x_stride + first + column, mask=first + column < K, other=0.0)
                most = tl.maximum(most, bits_of(more.to(tl.float32)))
        scale = scale_of(tl.max(most, 0), tiny)
    tl.store(scales + row, scale)
    tl.store(codes + row * K + column, codes_in(part, scale, STATIC), mask=column < K)
    if not WHOLE:
        for first in range(BLOCK, K, BLOCK):
            place = first + column
            more = tl.load(x + row * x_stride + place, mask=place < K, other=0.0).to(tl.float32)
            tl.store(codes + row * K + place, codes_in(more, scale, STATIC), mask=place < K)


INTERPRETED = not isinstance(round_rows, triton.runtime.JITFunction)
_round = Launcher(round_rows, interpreted=INTERPRETED)
TINY = float(torch.finfo(torch.float32).tiny) * 448.0


def warps_for(block: int) -> int:
    """Return the warps that hold so many elements of a token: few, so that several programs share a multiprocessor.

    >>> warps_for(1024), warps_for(8192), warps_for(16384)
    (4, 8, 16)
    """
    return min(16, max(4, block // 1024))


def round_on_gpu(x: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    """Return codes (M, K), float8_e4m3fn, and scales (M,), float32, of x (M, K)."""
    rows, inputs = x.shape
    if x.stride(1) != 1 and inputs > 1:
        x = x.contiguous()
    codes = torch.empty((rows, inputs), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    if not codes.numel():
        return codes, scales.fill_(1.0)
    block = min(WIDEST, triton.next_power_of_2(inputs))
    early = not INTERPRETED and capability(x.device) >= HOPPER  # set up while the kernel before ends
    given = 1.0 if scale is None else scale
    arguments = (x, codes, scales, inputs, x.stride(0), given, TINY, block, scale is not None, block >= inputs, early)
    _round(rows, arguments, x.device, {"num_warps": warps_for(block), "launch_pdl": early})
    return codes, scales

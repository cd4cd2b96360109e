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

__all__ = ["INTERPRETED", "TINY", "codes_in", "round_on_gpu", "round_rows", "sizes_of"]

_WIDEST = 8192  # elements of a token that a program holds at once
_WARPS = {1024: 4, 4096: 8}
_MOST_WARPS = 16


@triton.jit
def sizes_of(part):
    """Return absolute values; NaN counts as infinite."""
    size = tl.abs(part)
    return tl.where(size >= 0.0, size, float("inf"))


@triton.jit
def codes_in(part, scale):
    """Return the nearest codes; what is too large saturates, what is not finite becomes NaN."""
    exact = part / scale
    code = tl.where(exact > 448.0, 448.0, tl.where(exact < -448.0, -448.0, exact))  # keeps NaN
    return tl.where(tl.abs(part) == float("inf"), float("nan"), code).to(tl.float8e4nv)


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
        most = sizes_of(part)
        if not WHOLE:
            for first in range(BLOCK, K, BLOCK):
                more = tl.load(x + row * x_stride + first + column, mask=first + column < K, other=0.0)
                most = tl.maximum(most, sizes_of(more.to(tl.float32)))
        largest = tl.max(most, 0)
        scale = tl.where(largest < tiny, 1.0, largest / 448.0)
    tl.store(scales + row, scale)
    tl.store(codes + row * K + column, codes_in(part, scale), mask=column < K)
    if not WHOLE:
        for first in range(BLOCK, K, BLOCK):
            place = first + column
            more = tl.load(x + row * x_stride + place, mask=place < K, other=0.0).to(tl.float32)
            tl.store(codes + row * K + place, codes_in(more, scale), mask=place < K)


INTERPRETED = not isinstance(round_rows, triton.runtime.JITFunction)
_round = Launcher(round_rows, interpreted=INTERPRETED)
TINY = float(torch.finfo(torch.float32).tiny) * 448.0


def round_on_gpu(x: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    """Return codes (M, K), float8_e4m3fn, and scales (M,), float32, of x (M, K)."""
    rows, inputs = x.shape
    if x.stride(1) != 1 and inputs > 1:
        x = x.contiguous()
    codes = torch.empty((rows, inputs), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    if not codes.numel():
        return codes, scales.fill_(1.0)
    block = min(_WIDEST, triton.next_power_of_2(inputs))
    warps = next((count for size, count in _WARPS.items() if block <= size), _MOST_WARPS)
    early = not INTERPRETED and capability(x.device) >= HOPPER  # set up while the kernel before ends
    given = 1.0 if scale is None else scale
    arguments = (x, codes, scales, inputs, x.stride(0), given, TINY, block, scale is not None, block >= inputs, early)
    _round(rows, arguments, x.device, {"num_warps": warps, "launch_pdl": early})
    return codes, scales

"""The Triton kernel that rounds tokens to fp8. This module imports Triton; import it only to run a kernel."""

# ruff: noqa: ANN001, ANN201, N803, PLR0913, PLR0917 - Triton's own conventions
# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparta.specialize.cuda.launcher import Launcher

__all__ = ["INTERPRETED", "round_on_gpu", "round_rows"]

_WIDEST = 8192  # elements of a token that a program holds at once
_WARPS = {1024: 4, 4096: 8}
_MOST_WARPS = 16


@triton.jit
def round_rows(x, codes, scales, K, x_stride, given, tiny, BLOCK: tl.constexpr, STATIC: tl.constexpr):
    """Round one row; what is not finite becomes NaN."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    if STATIC:
        scale = given * 1.0
    else:
        most = tl.zeros((BLOCK,), tl.float32)
        for first in range(0, K, BLOCK):
            part = tl.load(x + row * x_stride + first + column, mask=first + column < K, other=0.0).to(tl.float32)
            size = tl.abs(part)
            most = tl.where(size <= most, most, tl.where(size > most, size, float("inf")))  # NaN counts as infinite
        largest = tl.max(most, 0)
        scale = tl.where(largest < tiny, 1.0, largest / 448.0)
    tl.store(scales + row, scale)
    for first in range(0, K, BLOCK):
        place = first + column
        part = tl.load(x + row * x_stride + place, mask=place < K, other=0.0).to(tl.float32)
        exact = part / scale
        code = tl.where(exact > 448.0, 448.0, tl.where(exact < -448.0, -448.0, exact))  # keeps NaN
        code = tl.where(tl.abs(part) == float("inf"), float("nan"), code)
        tl.store(codes + row * K + place, code.to(tl.float8e4nv), mask=place < K)


INTERPRETED = not isinstance(round_rows, triton.runtime.JITFunction)
_round = Launcher(round_rows, interpreted=INTERPRETED)
_TINY = float(torch.finfo(torch.float32).tiny) * 448.0


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
    given = 1.0 if scale is None else scale
    arguments = (x, codes, scales, inputs, x.stride(0), given, _TINY, block, scale is not None)
    _round(rows, arguments, x.device, {"num_warps": warps})
    return codes, scales

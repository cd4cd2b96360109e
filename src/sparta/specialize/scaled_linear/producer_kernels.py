"""Triton kernels that make tokens and round them to fp8 at once. This module imports Triton; import it only to run."""

# ruff: noqa: ANN001, ANN202, N803, PLR0913, PLR0917 - Triton's own conventions
# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparta.specialize.cuda.device import HOPPER, capability
from sparta.specialize.cuda.launcher import Launcher
from sparta.specialize.scaled_linear.input_kernels import INTERPRETED, TINY, bits_of, codes_in, scale_of, warps_for

__all__ = ["gate_on_gpu", "norm_on_gpu", "plain_norm_on_gpu"]


@triton.jit
def _inverse(x, FAST: tl.constexpr):
    """Return 1 / x; fast, to within one unit in the last place, in one instruction."""
    if FAST:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    return 1.0 / x


@triton.jit
def _store_rounded(y, made, codes, scales, row, column, K, given, tiny, STATIC: tl.constexpr, KEEP: tl.constexpr):
    """Write a token's codes and scale, if there is room for them, and the token itself where others read it.

    y is 0 beyond K.
    """
    if KEEP:
        tl.store(made + row * K + column, y, mask=column < K)
    if codes is not None:
        part = y.to(tl.float32)
        scale = given * 1.0 if STATIC else scale_of(tl.max(bits_of(part), 0), tiny)
        tl.store(scales + row, scale)
        tl.store(codes + row * K + column, codes_in(part, scale, STATIC), mask=column < K)


@triton.jit
def round_norm(
    x,
    weight,
    bias,
    made,
    codes,
    scales,
    K,
    x_stride,
    eps,
    given,
    tiny,
    BLOCK: tl.constexpr,
    RMS: tl.constexpr,
    STATIC: tl.constexpr,
    KEEP: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Make one token of a norm, and round it if codes are asked for."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < K
    if weight is not None:  # which no kernel before this one writes
        factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        shift = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    read = tl.load(x + row * x_stride + column, mask=inside, other=0.0)
    part = read.to(tl.float32)
    if not RMS:
        part = tl.where(inside, part - tl.sum(part, 0) / K, 0.0)
    part = part * tl.rsqrt(tl.sum(part * part, 0) / K + eps)
    if weight is not None:
        part = part * factor
    if bias is not None:
        part = part + shift
    y = part.to(read.dtype)
    _store_rounded(y, made, codes, scales, row, column, K, given, tiny, STATIC, KEEP)


@triton.jit
def round_gate(
    gate,
    up,
    made,
    codes,
    scales,
    K,
    gate_stride,
    up_stride,
    given,
    tiny,
    BLOCK: tl.constexpr,
    STATIC: tl.constexpr,
    KEEP: tl.constexpr,
    ACTIVATE: tl.constexpr,
    FAST: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Make one token of a gated layer, silu(gate) * up, and round it; without ACTIVATE, the gate is activated."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    left = tl.load(gate + row * gate_stride + column, mask=column < K, other=0.0)
    right = tl.load(up + row * up_stride + column, mask=column < K, other=0.0)
    real = left.to(tl.float32)
    if ACTIVATE:
        real = real * _inverse(1.0 + tl.exp(-real), FAST)
    y = (real * right.to(tl.float32)).to(right.dtype)
    _store_rounded(y, made, codes, scales, row, column, K, given, tiny, STATIC, KEEP)


_norm = Launcher(round_norm, interpreted=INTERPRETED)
_gate = Launcher(round_gate, interpreted=INTERPRETED)


def norm_on_gpu(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, scale: float | None, *, rms: bool, keep: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes (M, K), scales (M,) and, if it is kept, the norm (M, K) of x (M, K); else x stands for that."""
    made, codes, scales, block, options = _room(x, keep=keep)
    given, early = 1.0 if scale is None else scale, bool(options["launch_pdl"])
    sizes = (x.shape[1], x.stride(0), eps, given, TINY)
    constants = (block, rms, scale is not None, keep, early)
    _norm(x.shape[0], (x, weight, bias, made, codes, scales, *sizes, *constants), x.device, options)
    return codes, scales, made


def plain_norm_on_gpu(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, *, rms: bool) -> Tensor:
    """Return the norm (M, K) of x (M, K) in its own dtype."""
    made = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block, options = _started(x)
    constants = (block, rms, False, True, bool(options["launch_pdl"]))
    arguments = (x, weight, bias, made, None, None, x.shape[1], x.stride(0), eps, 1.0, TINY, *constants)
    _norm(x.shape[0], arguments, x.device, options)
    return made


def gate_on_gpu(
    gate: Tensor, up: Tensor, scale: float | None, *, activate: bool, keep: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes (M, K), scales (M,) and, if it is kept, silu(gate) * up (M, K); else `up` stands for that."""
    made, codes, scales, block, options = _room(up, keep=keep)
    given, early = 1.0 if scale is None else scale, bool(options["launch_pdl"])
    sizes = (up.shape[1], gate.stride(0), up.stride(0), given, TINY)
    constants = (block, scale is not None, keep, activate, not INTERPRETED, early)
    _gate(up.shape[0], (gate, up, made, codes, scales, *sizes, *constants), up.device, options)
    return codes, scales, made


def _room(x: Tensor, *, keep: bool) -> tuple[Tensor, Tensor, Tensor, int, dict[str, int | bool]]:
    """Return where a kernel writes, the elements that a program holds, and how it is compiled and started."""
    rows, inputs = x.shape
    codes = torch.empty((rows, inputs), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    made = torch.empty((rows, inputs), dtype=x.dtype, device=x.device) if keep else x
    return made, codes, scales, *_started(x)


def _started(x: Tensor) -> tuple[int, dict[str, int | bool]]:
    """Return the elements of a token that a program holds, and how it is compiled and started."""
    block = triton.next_power_of_2(x.shape[1])
    early = not INTERPRETED and capability(x.device) >= HOPPER  # set up while the kernel before ends
    return block, {"num_warps": warps_for(block), "launch_pdl": early}

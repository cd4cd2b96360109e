"""Triton kernels for attention of one query per head over many keys. This module imports Triton; import it only to run.

Keys are shared out, so that all multiprocessors read some; one program attends to its share for all heads that read the
same keys, and a second kernel puts the shares together, in one fixed order.
"""

# ruff: noqa: ANN001, ANN202, N803, PLR0913, PLR0917 - Triton's own conventions
# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparta.specialize.cuda.device import HOPPER, capability
from sparta.specialize.cuda.launcher import Launcher

__all__ = ["MOST_HEADS", "one_query_on_gpu"]

MOST_HEADS = 16  # that read the same keys: rows of the smallest product
_KEYS = 64
_PROGRAMS = 2  # for each multiprocessor
_LOG2_E = 1.4426950408889634


@triton.jit
def _ask_early(x, first, end, stride, KEYS: tl.constexpr, E: tl.constexpr):
    """Have rows come as far as the L2 cache; what is still written to them is seen."""
    row = tl.minimum(first + tl.arange(0, KEYS), end - 1).to(tl.int64)
    place = (x + row[:, None] * stride + tl.arange(0, E // 64)[None, :] * 64).to(tl.int64)  # lines
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1];\nmov.u32 $0, 0;", "=r,l", [place], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def attend_share(
    q, k, v, sums, stats, heads, keys, share, shares, q_batch, q_head, k_batch, k_head, k_key, v_batch, v_head, v_key,
    factor, G: tl.constexpr, E: tl.constexpr, KEYS: tl.constexpr, EARLY: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Attend to one share of the keys of one head of keys, for the G heads that read it."""
    program = tl.program_id(0)
    number, part = program // shares, program % shares
    batch, head = (number // heads).to(tl.int64), (number % heads).to(tl.int64)
    first = part * share
    end = tl.minimum(first + share, keys)
    k += batch * k_batch + head * k_head
    v += batch * v_batch + head * v_head
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        _ask_early(k, first, end, k_key, KEYS, E)
        _ask_early(v, first, end, v_key, KEYS, E)
        tl.extra.cuda.gdc_wait()
    row, lane = tl.arange(0, 16), tl.arange(0, E)
    real = (row < G)[:, None]
    query = tl.load(q + batch * q_batch + (head * G + row)[:, None] * q_head + lane[None, :], mask=real, other=0.0)
    if UPCAST:  # the interpreter multiplies bf16 wrongly
        query = query.to(tl.float32)
    most = tl.full((16,), float("-inf"), tl.float32)
    weight = tl.zeros((16,), tl.float32)
    total = tl.zeros((16, E), tl.float32)
    for begin in range(first, end, KEYS):
        key = begin + tl.arange(0, KEYS)
        there = (key < end)[:, None]
        place = key.to(tl.int64)[:, None]
        a = tl.load(k + place * k_key + lane[None, :], mask=there, other=0.0)
        b = tl.load(v + place * v_key + lane[None, :], mask=there, other=0.0)
        if UPCAST:
            a, b = a.to(tl.float32), b.to(tl.float32)
        scores = tl.where((key < end)[None, :], tl.dot(query, a.T) * factor, float("-inf"))
        higher = tl.maximum(most, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # keys of no weight: -inf less itself is no number
        chance = tl.exp2(scores - base[:, None])
        scale = tl.exp2(most - base)
        weight = weight * scale + tl.sum(chance, 1)
        total = tl.dot(chance.to(b.dtype), b, total * scale[:, None])
        most = higher
    at = (number * shares + part) * G + row
    tl.store(sums + at.to(tl.int64)[:, None] * E + lane[None, :], total, mask=real)
    tl.store(stats + at * 2, most, mask=row < G)
    tl.store(stats + at * 2 + 1, weight, mask=row < G)


@triton.jit
def join_shares(sums, stats, y, shares, G: tl.constexpr, E: tl.constexpr, SHARES: tl.constexpr, EARLY: tl.constexpr):
    """Put the shares of one query together."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    program = tl.program_id(0)
    number, row = program // G, program % G
    part, lane = tl.arange(0, SHARES), tl.arange(0, E)
    at = (number * shares + part) * G + row
    most = tl.load(stats + at * 2, mask=part < shares, other=float("-inf"))
    weight = tl.load(stats + at * 2 + 1, mask=part < shares, other=0.0)
    scale = tl.exp2(most - tl.max(most, 0))
    place = sums + at.to(tl.int64)[:, None] * E + lane[None, :]
    total = tl.load(place, mask=(part < shares)[:, None], other=0.0) * scale[:, None]
    result = tl.sum(total, 0) / tl.sum(weight * scale, 0)
    tl.store(y + program.to(tl.int64) * E + lane, result.to(y.dtype.element_ty))


INTERPRETED = not isinstance(attend_share, triton.runtime.JITFunction)
_attend, _join = (Launcher(kernel, interpreted=INTERPRETED) for kernel in (attend_share, join_shares))


def one_query_on_gpu(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Return (B, H, 1, E) for q (B, H, 1, E), k and v (B, H / G, N, E), elements of rows one after the other."""
    batches, heads, keys, width = k.shape
    group, device = q.shape[1] // heads, q.device
    on_cuda = device.type == "cuda"
    processors = torch.cuda.get_device_properties(device).multi_processor_count if on_cuda else 4
    wanted = max(1, min(-(-keys // _KEYS), _PROGRAMS * processors // (batches * heads)))
    share = -(-keys // (wanted * _KEYS)) * _KEYS
    shares = -(-keys // share)
    rows = batches * heads * shares * group
    memory = torch.empty(rows * (width + 2), dtype=torch.float32, device=device)
    sums, stats = memory[: rows * width], memory[rows * width :]
    y = torch.empty((batches, q.shape[1], 1, width), dtype=q.dtype, device=device)
    early = not INTERPRETED and capability(device) >= HOPPER
    strides = (*q.stride()[:2], *k.stride()[:3], *v.stride()[:3])
    numbers = (heads, keys, share, shares, *strides, scale * _LOG2_E)
    constants = (group, width, _KEYS, early, INTERPRETED)
    options = {"num_warps": 4, "num_stages": 3, "launch_pdl": early}
    _attend(batches * heads * shares, (q, k, v, sums, stats, *numbers, *constants), device, options)
    last = (sums, stats, y, shares, group, width, triton.next_power_of_2(shares), early)
    _join(batches * q.shape[1], last, device, {"num_warps": 4, "launch_pdl": early})
    return y

"""A Triton kernel for attention of all queries to all keys. This module imports Triton; import it only to run.

It is attention as a library has it, but it begins while the kernel before it ends, lets the kernel after it begin
early, and writes the heads of a token side by side, where the layer that follows reads them. Between the layers of an
encoder that is worth more than the last percent of the product.
"""

# ruff: noqa: ANN001, ANN202, FBT003, N803, PLR0913, PLR0917 - Triton's own conventions
# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparta.specialize.cuda.device import HOPPER, capability
from sparta.specialize.cuda.launcher import Launcher

__all__ = ["all_keys_on_gpu"]

_LOG2_E = 1.4426950408889634
_QUERIES, _KEYS, _WARPS, _STAGES = 64, 64, 4, 3


@triton.jit
def _add_keys(
    query, k, v, most, weight, total, begin, keys, k_key, v_key, factor, E: tl.constexpr, KEYS: tl.constexpr,
    WHOLE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Attend to one tile of keys, of which not all may be there."""
    key, lane = begin + tl.arange(0, KEYS), tl.arange(0, E)
    k_place, v_place = k + key[:, None] * k_key + lane[None, :], v + key[:, None] * v_key + lane[None, :]
    if WHOLE:
        a, b = tl.load(k_place), tl.load(v_place)
    else:
        there = (key < keys)[:, None]
        a, b = tl.load(k_place, mask=there, other=0.0), tl.load(v_place, mask=there, other=0.0)
    if UPCAST:  # the interpreter multiplies bf16 wrongly
        a, b = a.to(tl.float32), b.to(tl.float32)
    scores = tl.dot(query, a.T)
    if not WHOLE:
        scores = tl.where((key < keys)[None, :], scores, float("-inf"))
    higher = tl.maximum(most, tl.max(scores, 1) * factor)
    base = tl.where(higher == float("-inf"), 0.0, higher)  # keys of no weight: -inf less itself is no number
    chance = tl.exp2(scores * factor - base[:, None])
    scale = tl.exp2(most - base)
    weight = weight * scale + tl.sum(chance, 1)
    total = tl.dot(chance.to(b.dtype), b, total * scale[:, None])
    return higher, weight, total


@triton.jit
def attend_all(
    q, k, v, y, heads, queries, keys, tiles, q_batch, q_head, q_query, k_batch, k_head, k_key, v_batch, v_head, v_key,
    factor, GROUP: tl.constexpr, E: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, EARLY: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Attend to all keys for one tile of queries of one head; the factor is above 0."""
    program = tl.program_id(0)
    number, first = program // tiles, program % tiles * QUERIES
    batch, head = (number // heads).to(tl.int64), (number % heads).to(tl.int64)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    q += batch * q_batch + head * q_head
    k += batch * k_batch + head // GROUP * k_head
    v += batch * v_batch + head // GROUP * v_head
    row, lane = first + tl.arange(0, QUERIES), tl.arange(0, E)
    real = (row < queries)[:, None]
    query = tl.load(q + row[:, None] * q_query + lane[None, :], mask=real, other=0.0)
    if UPCAST:
        query = query.to(tl.float32)
    most = tl.full((QUERIES,), float("-inf"), tl.float32)
    weight = tl.zeros((QUERIES,), tl.float32)
    total = tl.zeros((QUERIES, E), tl.float32)
    whole = keys // KEYS * KEYS
    for begin in range(0, whole, KEYS):
        most, weight, total = _add_keys(
            query, k, v, most, weight, total, begin, keys, k_key, v_key, factor, E, KEYS, True, UPCAST
        )
    if whole < keys:
        most, weight, total = _add_keys(
            query, k, v, most, weight, total, whole, keys, k_key, v_key, factor, E, KEYS, False, UPCAST
        )
    place = y + ((batch * queries + row.to(tl.int64)) * heads + head)[:, None] * E + lane[None, :]
    tl.store(place, (total / weight[:, None]).to(y.dtype.element_ty), mask=real)


INTERPRETED = not isinstance(attend_all, triton.runtime.JITFunction)
_attend = Launcher(attend_all, interpreted=INTERPRETED)


def all_keys_on_gpu(
    q: Tensor, k: Tensor, v: Tensor, scale: float, tile: tuple[int, int, int, int] = (_QUERIES, _KEYS, _WARPS, _STAGES)
) -> Tensor:
    """Return (B, H, M, E) for q (B, H, M, E), k and v (B, H / G, N, E), elements of rows one after the other.

    Parameters
    ----------
    scale
        Above 0.
    tile
        Queries of a program, keys that it attends to at once, warps, stages.
    """
    batches, heads, queries, width = q.shape
    rows, keys_at_once, warps, stages = tile
    y = torch.empty((batches, queries, heads, width), dtype=q.dtype, device=q.device)
    early = not INTERPRETED and capability(q.device) >= HOPPER
    tiles = -(-queries // rows)
    numbers = (heads, queries, k.shape[2], tiles, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], scale * _LOG2_E)
    constants = (heads // k.shape[1], width, rows, keys_at_once, early, INTERPRETED)
    options = {"num_warps": warps, "num_stages": stages, "launch_pdl": early}
    _attend(batches * heads * tiles, (q, k, v, y, *numbers, *constants), q.device, options)
    return y.transpose(1, 2)

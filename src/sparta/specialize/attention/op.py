"""Run-time ops of fused attention: how PyTorch reaches the kernels, in eager mode, under autograd and when compiled.

``sparta::flash_attention`` takes plain tensors, the lists of a mask (or the lengths of sequences) and the tile as text,
so it holds no state. The forward op also returns the logarithm of each query's sum, from which the backward op gets
every score again without storing any.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparta.specialize.attention.launch import (
    LISTS,
    LOG2E,
    NO_LISTS,
    ROWS_AT_ONCE,
    copyable,
    described,
    on_device,
    parsed,
    precision,
    rows_of,
    sizes_of,
    splits_of,
    start,
)

__all__ = ["flash_attention"]


@torch.library.custom_op("sparta::flash_attention", mutates_args=())
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lists: Sequence[Tensor],
    where: Tensor,
    tile: str,
    unclean: int,
    longest: int,
) -> tuple[Tensor, Tensor]:
    """Return attention (B, H, M, F), and the base 2 logarithm of its sums (B, H, M).

    Parameters
    ----------
    q, k, v
        (B, H, M, E), (B, KV heads, N, E), (B, KV heads, N, F).
    lists
        The tensors of :class:`~sparta.specialize.blocks.attention_lists.AttentionLists`; none for sequences of several
        lengths. Those of the tile for gradients follow, if it has its own.
    where
        int32: the group of each head (B * H,), or without lists the length of each sequence (B,).
    tile
        The text of an :class:`~sparta.specialize.attention.tile.AttentionTile`.
    unclean
        What must be kept away in partly live tiles; as in the lists. Four times that of the lists for gradients is
        added.
    longest
        The length of the longest list; where few queries leave the device idle, programs share lists of that length.
    """
    from sparta.specialize.attention.flash_forward import INTERPRETED, flash_forward, join_splits

    cut, (batches, heads, queries, _), (_, kv_heads, keys, width) = parsed(tile), q.shape, v.shape
    o, lse = q.new_empty(batches, heads, queries, width), q.new_empty(batches, heads, queries, dtype=torch.float32)
    if not o.numel():
        return o, lse
    q, k, v = rows_of(q), rows_of(k), rows_of(v)
    sizes, tma = sizes_of(q, v), bool(cut.tma) and copyable(k) and copyable(v)
    q_tiles = -(-queries // cut.queries)
    splits = splits_of(batches * heads * q_tiles, longest, q.device)
    parts, part_lse = o, lse
    if splits > 1:
        parts, part_lse = o.new_empty(splits, *o.shape, dtype=torch.float32), lse.new_empty(splits, *lse.shape)
    bounds, entries, _, _, patterns = lists[:LISTS] or NO_LISTS
    with on_device(q):
        start(
            flash_forward,
            (batches * heads * q_tiles * splits,),
            cut,
            q, described(k, cut.keys, sizes.padded_e) if tma else k,
            described(v, cut.keys, sizes.padded_f) if tma else v,
            parts, part_lse, bounds, entries, patterns, where, where, LOG2E / math.sqrt(sizes.e), heads, kv_heads,
            queries, keys, q_tiles, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], cut.queries, cut.keys, *sizes,
            splits, bool(lists), unclean & 3, tma, precision(q), INTERPRETED,
        )  # fmt: skip
        if splits > 1:
            lines = lse.numel()
            join_splits[(-(-lines // ROWS_AT_ONCE),)](
                parts, part_lse, o, lse, lines, width, splits, ROWS_AT_ONCE, sizes.padded_f
            )
    return o, lse


@flash_attention.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lists: Sequence[Tensor],
    where: Tensor,
    tile: str,
    unclean: int,
    longest: int,
) -> tuple[Tensor, Tensor]:
    del k, lists, where, tile, unclean, longest
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("sparta::flash_attention_backward", mutates_args=())
def flash_attention_backward(
    grad: Tensor,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    lists: Sequence[Tensor],
    where: Tensor,
    tile: str,
    unclean: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, for that of o; `inputs` are q, k, v and `outputs` o, lse."""
    from sparta.specialize.attention.gradients import Backward

    (q, k, v), (o, lse), grad = (rows_of(x) for x in inputs), outputs, grad.contiguous()
    grad_q, grad_k, grad_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    if not (q.numel() and k.numel()):
        return grad_q.zero_(), grad_k.zero_(), grad_v.zero_()
    with on_device(q):
        Backward(q, k, v, grad, lse, lists, where, parsed(tile), unclean).run(o, grad_q, grad_k, grad_v)
    return grad_q, grad_k, grad_v


@flash_attention_backward.register_fake
def _(
    grad: Tensor,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    lists: Sequence[Tensor],
    where: Tensor,
    tile: str,
    unclean: int,
) -> tuple[Tensor, Tensor, Tensor]:
    del grad, outputs, lists, where, tile, unclean
    q, k, v = (x.new_empty(x.shape) for x in inputs)
    return q, k, v


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, lists, where, ctx.tile, ctx.unclean, _ = inputs
    ctx.lists = len(lists)
    ctx.save_for_backward(q, k, v, *output, where, *lists)


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    q, k, v, o, lse, where, *lists = ctx.saved_tensors
    grads = torch.ops.sparta.flash_attention_backward(grad, [q, k, v], [o, lse], lists, where, ctx.tile, ctx.unclean)
    return (*grads, [None] * ctx.lists, None, None, None, None)


flash_attention.register_autograd(_backward, setup_context=_setup_context)

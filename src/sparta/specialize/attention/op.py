"""Run-time ops of fused attention: how PyTorch reaches the kernels, in eager mode, under autograd and when compiled.

``sparta::flash_attention`` takes plain tensors, the lists of a mask (or the lengths of sequences) and the tile as text,
so it holds no state. The forward op also returns the logarithm of each query's sum, from which the backward op gets
every score again without storing any.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparta.errors import ValueRangeError, message
from sparta.specialize.attention.tile import AttentionTile

__all__ = ["flash_attention"]

_LOG2E = 1.4426950408889634
_JOINED_ROWS = 16
_MOST_SPLITS = 64
_INTERPRETED_PROCESSORS = 4
_NO_LISTS: Sequence[Tensor | None] = [None] * 5


class _Sizes(NamedTuple):
    """What the kernels are compiled for: widths of keys and values, and their padding."""

    e: int
    padded_e: int
    f: int
    padded_f: int


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
        lengths.
    where
        int32: the group of each head (B * H,), or without lists the length of each sequence (B,).
    tile
        The text of an :class:`~sparta.specialize.attention.tile.AttentionTile`.
    unclean
        What must be kept away in partly live tiles; as in the lists.
    longest
        The length of the longest list; where few queries leave the device idle, programs share lists of that length.
    """
    from sparta.specialize.attention.flash_forward import INTERPRETED, flash_forward, join_splits

    cut, (batches, heads, queries, _), (_, kv_heads, keys, width) = _parsed(tile), q.shape, v.shape
    o, lse = q.new_empty(batches, heads, queries, width), q.new_empty(batches, heads, queries, dtype=torch.float32)
    if not o.numel():
        return o, lse
    q, k, v = _rows(q), _rows(k), _rows(v)
    sizes, tma = _sizes(q, v), bool(cut.tma) and _copyable(k) and _copyable(v)
    q_tiles = -(-queries // cut.queries)
    splits = _splits(batches * heads * q_tiles, longest, q.device)
    parts, part_lse = o, lse
    if splits > 1:
        parts, part_lse = o.new_empty(splits, *o.shape, dtype=torch.float32), lse.new_empty(splits, *lse.shape)
    bounds, entries, _, _, patterns = lists or _NO_LISTS
    with _on(q):
        _start(
            flash_forward,
            (batches * heads * q_tiles * splits,),
            cut,
            q, _described(k, cut.keys, sizes.padded_e) if tma else k,
            _described(v, cut.keys, sizes.padded_f) if tma else v,
            parts, part_lse, bounds, entries, patterns, where, where, _LOG2E / math.sqrt(sizes.e), heads, kv_heads,
            queries, keys, q_tiles, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], cut.queries, cut.keys, *sizes,
            splits, bool(lists), unclean, tma, _precision(q), INTERPRETED,
        )  # fmt: skip
        if splits > 1:
            lines = lse.numel()
            join_splits[(-(-lines // _JOINED_ROWS),)](
                parts, part_lse, o, lse, lines, width, splits, _JOINED_ROWS, sizes.padded_f
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
    from sparta.specialize.attention.flash_backward import flash_backward_kv, flash_backward_q, flash_delta
    from sparta.specialize.attention.flash_forward import INTERPRETED

    (q, k, v), (o, lse), grad, cut = (_rows(x) for x in inputs), outputs, grad.contiguous(), _parsed(tile)
    (batches, heads, queries, _), (_, kv_heads, keys, width) = q.shape, v.shape
    grad_q, grad_k, grad_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    if not (q.numel() and k.numel()):
        return grad_q.zero_(), grad_k.zero_(), grad_v.zero_()
    sizes, delta, lines = _sizes(q, v), torch.empty_like(lse), lse.numel()
    piece = _piece(cut, sizes, q.element_size())
    q_tiles, k_tiles = -(-queries // cut.queries), -(-keys // cut.keys)
    query_bounds, query_entries, key_bounds, key_entries, patterns = lists or _NO_LISTS
    shared = (
        patterns, where, where, _LOG2E / math.sqrt(sizes.e), 1.0 / math.sqrt(sizes.e), heads, kv_heads, queries, keys,
    )  # fmt: skip
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], cut.queries, cut.keys)
    rest = (*sizes, bool(lists), unclean, _precision(q), INTERPRETED)
    with _on(q):
        flash_delta[(-(-lines // _JOINED_ROWS),)](o, grad, delta, lines, width, _JOINED_ROWS, sizes.padded_f)
        _start(
            flash_backward_q, (batches * heads * q_tiles * (cut.queries // piece.queries),), piece,
            q, k, v, grad, lse, delta, grad_q, query_bounds, query_entries, *shared, q_tiles, *strides,
            piece.queries, piece.keys, *rest,
        )  # fmt: skip
        _start(
            flash_backward_kv, (batches * kv_heads * k_tiles * (cut.keys // piece.keys),), piece,
            q, k, v, grad, lse, delta, grad_k, grad_v, key_bounds, key_entries, *shared, k_tiles, *strides,
            piece.queries, piece.keys, *rest,
        )  # fmt: skip
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


# ---------------------------------------------------------------------- launching


@functools.lru_cache(maxsize=256)
def _parsed(tile: str) -> AttentionTile:
    return AttentionTile.parse(tile)


def _start(kernel: Any, grid: tuple[int], tile: AttentionTile, *arguments: Any) -> None:
    """Start a kernel; a tile that does not fit is an error of ours."""
    from triton.runtime.errors import OutOfResources

    try:
        kernel[grid](*arguments, num_warps=tile.warps, num_stages=tile.stages)
    except OutOfResources as error:
        raise ValueRangeError(message(f"{tile} needs more than the GPU has: {error}")) from error


def _splits(programs: int, longest: int, device: torch.device) -> int:
    """Return among how many programs a list is split, so that few queries still fill the device."""
    processors = _processors(device)
    if programs >= processors:
        return 1
    return max(1, min(-(-2 * processors // programs), longest // 2, _MOST_SPLITS))


@functools.lru_cache(maxsize=64)
def _processors(device: torch.device) -> int:
    on_cuda = device.type == "cuda"
    return torch.cuda.get_device_properties(device).multi_processor_count if on_cuda else _INTERPRETED_PROCESSORS


def _on(x: Tensor) -> torch.cuda.device:
    """Return a context in which the device of x is current; nothing on the CPU."""
    return torch.cuda.device(x.device if x.is_cuda else -1)


def _rows(x: Tensor) -> Tensor:
    """Return x with its last dim contiguous, as the kernels read it."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _sizes(q: Tensor, v: Tensor) -> _Sizes:
    e, f = q.shape[3], v.shape[3]
    return _Sizes(e, _padded(e), f, _padded(f))


def _padded(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length())


def _piece(tile: AttentionTile, sizes: _Sizes, itemsize: int) -> AttentionTile:
    """Return the piece of a tile whose gradients fit on chip."""
    width = max(sizes.padded_e, sizes.padded_f)
    room, stages = (64, 2) if width <= 128 else (32, 1)
    if itemsize > 2:  # float32 is multiplied without the matrix units, in unrolled code that must stay short
        room, stages = room // 2, 1
    return AttentionTile(min(room, tile.queries), min(room, tile.keys), stages)


def _copyable(x: Tensor) -> bool:
    """Return whether the bulk copy engine can address x (B, H, N, D)."""
    aligned = x.data_ptr() % 16 == 0 and all(stride * x.element_size() % 16 == 0 for stride in x.stride()[:3])
    return aligned and min(x.stride()[:3]) > 0 and x.numel() > 0


def _described(x: Tensor, rows: int, width: int) -> Any:
    """Return a descriptor of (B, H, N, D) that copies (rows, width) of one head; what lies beyond its edges is 0."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, rows, width])


def _precision(x: Tensor) -> str:
    return "tf32" if x.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"

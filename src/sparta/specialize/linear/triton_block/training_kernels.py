"""The Triton kernels that training adds: packing a weight that changes every step, and the gradient of its kept blocks.

Packing copies each kept block once, from any strides, so that a weight and its transpose cost the same. The gradient
multiplies the columns of ``grad`` and ``x`` that meet in a kept block and computes nothing elsewhere; long sums over
tokens are split, and the parts are added in one fixed order, so equal inputs give equal bits. This module imports
Triton; import it only to run a kernel.
"""

# ruff: noqa: ANN001, ANN201, ANN202, N803, PLR0913, PLR0917 - Triton's own conventions
# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["add_parts", "block_gradient", "pack_blocks"]


@triton.jit
def pack_blocks(
    weight, values, tile_row, tile_column, columns, live, N, K, row_stride, column_stride, beyond, live_step, live_row,
    live_column, H: tl.constexpr, W: tl.constexpr, BLOCKS: tl.constexpr, HAS_LIVE: tl.constexpr,
):  # fmt: skip
    """Copy one kept block of the weight to its place in (steps, H, BLOCKS * W); one that only fills up is 0."""
    block = tl.program_id(0).to(tl.int64)
    step, place = block // BLOCKS, block % BLOCKS
    high, wide = tl.arange(0, H), tl.arange(0, W)
    row = tl.load(tile_row + block) * H + high
    column = tl.load(tile_column + block) * W + wide
    rows = tl.where(tl.load(columns + block) < beyond, N, 0)
    kept = (row < rows)[:, None] & (column < K)[None, :]
    if HAS_LIVE:
        at = step * live_step + high[:, None] * live_row + (place * W + wide)[None, :] * live_column
        kept = kept & (tl.load(live + at) != 0)
    tile = tl.load(weight + row[:, None] * row_stride + column[None, :] * column_stride, mask=kept, other=0.0)
    target = values + step * (H * BLOCKS * W) + high[:, None] * (BLOCKS * W) + (place * W + wide)[None, :]
    tl.store(target, tile)


@triton.jit
def _columns_of(chunks, columns, chunk, SIDE: tl.constexpr, W: tl.constexpr):
    """Return the input channels of a chunk, and which of them belong to a block and do not only fill it up."""
    lane = tl.arange(0, SIDE * W)
    first = tl.load(columns + tl.load(chunks + 3 * chunk + 1) + lane // W)
    column = tl.multiple_of(tl.max_contiguous(first + lane % W, W), W)
    return column, lane < tl.load(chunks + 3 * chunk + 2) * W


@triton.jit
def block_gradient(
    grad, x, chunks, columns, mask, parts, result, M, N, K, grad_stride, x_stride, count, tokens_per_split,
    BLOCK_M: tl.constexpr, H: tl.constexpr, W: tl.constexpr, SIDE: tl.constexpr, SPLIT: tl.constexpr,
    WHOLE: tl.constexpr, HAS_MASK: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Compute grad^T x for the kept blocks of one chunk over one share of the tokens."""
    chunk, split = tl.program_id(0) % count, tl.program_id(0) // count
    row = tl.load(chunks + 3 * chunk) * H + tl.arange(0, H)
    column, filled = _columns_of(chunks, columns, chunk, SIDE, W)
    total = tl.zeros((H, SIDE * W), tl.float32)
    begin = split * tokens_per_split
    end = tl.minimum(begin + tokens_per_split, M)
    for first in range(begin, end, BLOCK_M):
        token = first + tl.arange(0, BLOCK_M)
        inside = (token < end)[:, None]
        g_place = grad + token.to(tl.int64)[:, None] * grad_stride + row[None, :]
        x_place = x + token.to(tl.int64)[:, None] * x_stride + column[None, :]
        if WHOLE:  # every block lies wholly inside the weight, so only tokens can end early
            g = tl.load(g_place, mask=inside, other=0.0)
            a = tl.load(x_place, mask=inside, other=0.0)
        else:
            g = tl.load(g_place, mask=inside & (row < N)[None, :], other=0.0)
            a = tl.load(x_place, mask=inside & (column < K)[None, :], other=0.0)
        if UPCAST:  # the interpreter multiplies bf16 wrongly
            g, a = g.to(tl.float32), a.to(tl.float32)
        total = tl.dot(g.T, a, total, input_precision=PRECISION)
    if SPLIT:
        place = tl.program_id(0).to(tl.int64) * (H * SIDE * W)
        tl.store(parts + place + tl.arange(0, H)[:, None] * (SIDE * W) + tl.arange(0, SIDE * W)[None, :], total)
    else:
        _store(total, mask, result, row, column, filled, N, K, HAS_MASK)


@triton.jit
def add_parts(
    parts, chunks, columns, mask, result, N, K, count, splits, H: tl.constexpr, W: tl.constexpr, SIDE: tl.constexpr,
    ROWS: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """Add the shares of one chunk, ROWS of its rows, in order, and store them in the dense gradient."""
    chunk = tl.program_id(0) % count
    high = tl.program_id(0) // count * ROWS + tl.arange(0, ROWS)
    row = tl.load(chunks + 3 * chunk) * H + high
    column, filled = _columns_of(chunks, columns, chunk, SIDE, W)
    total = tl.zeros((ROWS, SIDE * W), tl.float32)
    for split in range(splits):
        place = (split * count + chunk).to(tl.int64) * (H * SIDE * W)
        total += tl.load(parts + place + high[:, None] * (SIDE * W) + tl.arange(0, SIDE * W)[None, :])
    _store(total, mask, result, row, column, filled, N, K, HAS_MASK)


@triton.jit
def _store(total, mask, result, row, column, filled, N, K, HAS_MASK: tl.constexpr):
    place = row.to(tl.int64)[:, None] * K + column[None, :]
    inside = (row < N)[:, None] & (filled & (column < K))[None, :]
    if HAS_MASK:
        inside = inside & (tl.load(mask + place, mask=inside, other=0) != 0)
    tl.store(result + place, total.to(result.dtype.element_ty), mask=inside)

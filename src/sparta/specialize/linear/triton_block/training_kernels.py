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

__all__ = ["add_parts", "block_gradient", "pack_blocks", "pack_both"]


@triton.jit
def _copy_block(
    block, weight, values, tile_row, tile_column, columns, live, N, K, row_stride, column_stride, beyond, live_step,
    live_row, live_column, H: tl.constexpr, W: tl.constexpr, BLOCKS: tl.constexpr, HAS_LIVE: tl.constexpr,
):  # fmt: skip
    """Copy one kept block of the weight to its place in (steps, H, BLOCKS * W); one that only fills up is 0."""
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
def pack_blocks(
    weight, values, tile_row, tile_column, columns, live, N, K, row_stride, column_stride, beyond, live_step, live_row,
    live_column, H: tl.constexpr, W: tl.constexpr, BLOCKS: tl.constexpr, HAS_LIVE: tl.constexpr,
):  # fmt: skip
    """Copy the kept blocks of a weight, one for each program."""
    _copy_block(
        tl.program_id(0).to(tl.int64), weight, values, tile_row, tile_column, columns, live, N, K, row_stride,
        column_stride, beyond, live_step, live_row, live_column, H, W, BLOCKS, HAS_LIVE,
    )  # fmt: skip


@triton.jit
def pack_both(
    weight, first, N, K, row_stride, column_stride, values, tile_row, tile_column, columns, live, beyond, live_step,
    live_row, live_column, other_values, other_row, other_column, other_columns, other_live, other_beyond,
    other_live_step, other_live_row, other_live_column, H: tl.constexpr, W: tl.constexpr, BLOCKS: tl.constexpr,
    HAS_LIVE: tl.constexpr, OTHER_H: tl.constexpr, OTHER_W: tl.constexpr, OTHER_BLOCKS: tl.constexpr,
    OTHER_HAS_LIVE: tl.constexpr,
):  # fmt: skip
    """Copy the kept blocks of a weight by the first programs, and by the others those of its transpose."""
    block = tl.program_id(0).to(tl.int64)
    if block < first:
        _copy_block(
            block, weight, values, tile_row, tile_column, columns, live, N, K, row_stride, column_stride, beyond,
            live_step, live_row, live_column, H, W, BLOCKS, HAS_LIVE,
        )  # fmt: skip
    else:
        _copy_block(
            block - first, weight, other_values, other_row, other_column, other_columns, other_live, K, N,
            column_stride, row_stride, other_beyond, other_live_step, other_live_row, other_live_column, OTHER_H,
            OTHER_W, OTHER_BLOCKS, OTHER_HAS_LIVE,
        )  # fmt: skip


@triton.jit
def _columns_of(chunks, columns, chunk, SIDE: tl.constexpr, W: tl.constexpr):
    """Return the input channels of a chunk, and which of them belong to a block and do not only fill it up."""
    lane = tl.arange(0, SIDE * W)
    first = tl.load(columns + tl.load(chunks + 3 * chunk + 1) + lane // W)
    column = tl.multiple_of(tl.max_contiguous(first + lane % W, W), W)
    return column, lane < tl.load(chunks + 3 * chunk + 2) * W


@triton.jit
def _product(
    program, grad, x, chunks, columns, mask, parts, result, M, N, K, grad_stride, x_stride, count, tokens_per_split,
    BLOCK_M: tl.constexpr, H: tl.constexpr, W: tl.constexpr, SIDE: tl.constexpr, SPLIT: tl.constexpr,
    WHOLE: tl.constexpr, HAS_MASK: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Compute grad^T x for the kept blocks of one chunk over one share of the tokens."""
    chunk, split = program % count, program // count
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
        place = program.to(tl.int64) * (H * SIDE * W)
        tl.store(parts + place + tl.arange(0, H)[:, None] * (SIDE * W) + tl.arange(0, SIDE * W)[None, :], total)
    else:
        _store(total, mask, result, row, column, filled, N, K, HAS_MASK)


@triton.jit
def _sum_tokens(program, grad, sums, M, N, grad_stride, strips, tokens_per_sum, STRIP: tl.constexpr):
    """Sum one strip of the columns of grad over one share of the tokens."""
    column = program % strips * STRIP + tl.arange(0, STRIP)
    share = program // strips
    end = tl.minimum((share + 1) * tokens_per_sum, M)
    total = tl.zeros((32, STRIP), tl.float32)
    for first in range(share * tokens_per_sum, end, 32):
        token = first + tl.arange(0, 32)
        inside = (token < end)[:, None] & (column < N)[None, :]
        place = grad + token.to(tl.int64)[:, None] * grad_stride + column[None, :]
        total += tl.load(place, mask=inside, other=0.0).to(tl.float32)
    tl.store(sums + share * N + column, tl.sum(total, 0), mask=column < N)


@triton.jit
def block_gradient(
    grad, x, chunks, columns, mask, dead, parts, sums, result, M, N, K, grad_stride, x_stride, count, tokens_per_split,
    products, strips, sum_programs, tokens_per_sum, BLOCK_M: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    SIDE: tl.constexpr, SPLIT: tl.constexpr, WHOLE: tl.constexpr, HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr,
    STRIP: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Compute all that a weight's gradient needs: the first programs products, others sums of grad, others zeros."""
    program = tl.program_id(0)
    if program < products:
        _product(
            program, grad, x, chunks, columns, mask, parts, result, M, N, K, grad_stride, x_stride, count,
            tokens_per_split, BLOCK_M, H, W, SIDE, SPLIT, WHOLE, HAS_MASK, PRECISION, UPCAST,
        )  # fmt: skip
    elif program < products + sum_programs:
        if HAS_BIAS:
            _sum_tokens(program - products, grad, sums, M, N, grad_stride, strips, tokens_per_sum, STRIP)
    else:
        block = dead + 2 * (program - products - sum_programs)
        row = tl.load(block) * H + tl.arange(0, H)
        column = tl.load(block + 1) * W + tl.arange(0, W)
        place = result + row.to(tl.int64)[:, None] * K + column[None, :]
        zeros = tl.zeros((H, W), result.dtype.element_ty)
        tl.store(place, zeros, mask=(row < N)[:, None] & (column < K)[None, :])


@triton.jit
def add_parts(
    parts, chunks, columns, mask, sums, result, bias, N, K, count, splits, products, shares, H: tl.constexpr,
    W: tl.constexpr, SIDE: tl.constexpr, ROWS: tl.constexpr, HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr,
    STRIP: tl.constexpr,
):  # fmt: skip
    """Add the shares of one chunk, ROWS of its rows, in order, and store them; or those of a strip of sums of grad."""
    program = tl.program_id(0)
    if program < products:
        chunk = program % count
        high = program // count * ROWS + tl.arange(0, ROWS)
        row = tl.load(chunks + 3 * chunk) * H + high
        column, filled = _columns_of(chunks, columns, chunk, SIDE, W)
        total = tl.zeros((ROWS, SIDE * W), tl.float32)
        for split in range(splits):
            place = (split * count + chunk).to(tl.int64) * (H * SIDE * W)
            total += tl.load(parts + place + high[:, None] * (SIDE * W) + tl.arange(0, SIDE * W)[None, :])
        _store(total, mask, result, row, column, filled, N, K, HAS_MASK)
    elif HAS_BIAS:
        channel = (program - products) * STRIP + tl.arange(0, STRIP)
        added = tl.zeros((STRIP,), tl.float32)
        for share in range(shares):
            added += tl.load(sums + share * N + channel, mask=channel < N, other=0.0)
        tl.store(bias + channel, added.to(bias.dtype.element_ty), mask=channel < N)


@triton.jit
def _store(total, mask, result, row, column, filled, N, K, HAS_MASK: tl.constexpr):
    place = row.to(tl.int64)[:, None] * K + column[None, :]
    inside = (row < N)[:, None] & (filled & (column < K))[None, :]
    if HAS_MASK:
        total = tl.where(tl.load(mask + place, mask=inside, other=0) != 0, total, 0.0)
    tl.store(result + place, total.to(result.dtype.element_ty), mask=inside)

"""The Triton kernels of softmax over kept tiles, forward and backward.

A program takes a few rows, and the tiles on their list side by side as one long row. Where that row fits on chip it is
read once; where it does not, it is walked twice, first for its maximum and sum. This module imports Triton; import it
only to run a kernel.
"""

# ruff: noqa: ANN001, ANN201, ANN202, N803, N806, PLR0913, PLR0917, RET505, SIM108 - Triton's own conventions
# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["INTERPRETED", "softmax_backward", "softmax_forward"]


@triton.jit
def _listed_rows(bounds, groups, own_tiles, ROWS: tl.constexpr, TH: tl.constexpr, GROUPED: tl.constexpr):
    """Return the batch of a program, its rows inside their tile, that tile, and its list."""
    PARTS: tl.constexpr = TH // ROWS
    program = tl.program_id(0)
    rank = (program // PARTS) % own_tiles
    batch = program // (PARTS * own_tiles)
    bound = bounds + rank * 4
    if GROUPED:
        bound += tl.load(groups + batch).to(tl.int64) * own_tiles * 4
    row_in = (program % PARTS) * ROWS + tl.arange(0, ROWS)
    return batch, row_in, tl.load(bound), tl.load(bound + 1), tl.load(bound + 2), tl.load(bound + 3)


@triton.jit
def _span(
    entries, patterns, table, tile, row_in, first, whole, end, M, N, table_columns,
    SPAN: tl.constexpr, TH: tl.constexpr, TW: tl.constexpr, H: tl.constexpr, W: tl.constexpr, ADDRESS: tl.constexpr,
):  # fmt: skip
    """Return where the tiles from `first` on are, side by side, which elements are stored, and which are kept.

    A place has two parts: row and column of a whole matrix, or two numbers whose sum is the place among values.
    """
    lane = tl.arange(0, SPAN)
    entry = first + lane // TW
    listed = entry < end
    column_in = lane % TW
    column = tl.load(entries + 4 * entry, mask=listed, other=0) * TW + column_in
    # Said on the sum, because nothing is known of what was loaded.
    column = tl.multiple_of(tl.max_contiguous(column, TW), TW)
    row = tile * TH + row_in
    partly = (listed & (entry >= whole))[None, :]
    number = tl.load(entries + 4 * entry + 1, mask=listed & (entry >= whole), other=0).to(tl.int64)
    pattern = patterns + (number * (TH * TW) + column_in)[None, :] + (row_in * TW)[:, None]
    kept = listed[None, :] & (tl.load(pattern, mask=partly & (row_in >= 0)[:, None], other=1) != 0)
    if ADDRESS == 0:
        stored = listed[None, :] & ((row < M)[:, None] & (column < N)[None, :])
        return row.to(tl.int64)[:, None], column.to(tl.int64)[None, :], stored, kept
    elif ADDRESS == 1:
        block = tl.load(entries + 4 * entry + 2, mask=listed, other=0).to(tl.int64)
        across = tl.multiple_of(tl.max_contiguous(block * (H * W) + column % W, TW), TW)
        stored = listed[None, :] & (row_in >= 0)[:, None]
        return ((row % H) * W)[:, None].to(tl.int64), across[None, :], stored, kept
    else:
        place = table + (row // H)[:, None] * table_columns + (column // W)[None, :]
        block = tl.load(place, mask=kept, other=0).to(tl.int64)
        return ((row % H) * W)[:, None].to(tl.int64), block * (H * W) + (column % W)[None, :], kept, kept


@triton.jit
def _load(x, row, column, r, c, kept, ADDRESS: tl.constexpr):
    if ADDRESS == 0:
        place = row * r + column * c
    else:
        place = row + column
    return tl.load(x + place, mask=kept, other=0.0).to(tl.float32)


@triton.jit
def _store(x, value, row, column, r, c, stored, ADDRESS: tl.constexpr):
    if ADDRESS == 0:
        place = row * r + column * c
    else:
        place = row + column
    tl.store(x + place, value.to(x.dtype.element_ty), mask=stored)


@triton.jit
def softmax_forward(
    x, y, temperature, bounds, entries, patterns, table, groups, own_tiles, M, N, x_b, x_r, x_c, y_b, y_r, y_c,
    table_columns,
    ROWS: tl.constexpr, SPAN: tl.constexpr, ONCE: tl.constexpr, TH: tl.constexpr, TW: tl.constexpr, H: tl.constexpr,
    W: tl.constexpr, ADDRESS: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    """Compute ROWS rows of ``softmax(x / temperature)``; a row with nothing kept is 0."""
    batch, row_in, tile, begin, whole, end = _listed_rows(bounds, groups, own_tiles, ROWS, TH, GROUPED)
    x += batch.to(tl.int64) * x_b
    y += batch.to(tl.int64) * y_b
    cold = tl.load(temperature).to(tl.float32)
    if ONCE:
        row, column, stored, kept = _span(
            entries, patterns, table, tile, row_in, begin, whole, end, M, N, table_columns, SPAN, TH, TW, H, W, ADDRESS
        )
        score = tl.where(kept, _load(x, row, column, x_r, x_c, kept, ADDRESS) / cold, float("-inf"))
        weight = tl.where(kept, tl.exp(score - tl.max(score, 1)[:, None]), 0.0)
        _store(y, tl.where(kept, weight / tl.sum(weight, 1)[:, None], 0.0), row, column, y_r, y_c, stored, ADDRESS)
    else:
        STEP: tl.constexpr = SPAN // TW
        peak = tl.full((ROWS,), float("-inf"), tl.float32)
        norm = tl.zeros((ROWS,), tl.float32)
        for first in range(begin, end, STEP):
            row, column, stored, kept = _span(
                entries, patterns, table, tile, row_in, first, whole, end, M, N, table_columns, SPAN, TH, TW, H, W,
                ADDRESS,
            )  # fmt: skip
            score = tl.where(kept, _load(x, row, column, x_r, x_c, kept, ADDRESS) / cold, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(score, 1))
            level = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # a row that has seen nothing yet
            norm = norm * tl.exp(peak - level) + tl.sum(tl.where(kept, tl.exp(score - level[:, None]), 0.0), 1)
            peak = new_peak
        for first in range(begin, end, STEP):
            row, column, stored, kept = _span(
                entries, patterns, table, tile, row_in, first, whole, end, M, N, table_columns, SPAN, TH, TW, H, W,
                ADDRESS,
            )  # fmt: skip
            score = _load(x, row, column, x_r, x_c, kept, ADDRESS) / cold
            weight = tl.where(kept, tl.exp(score - peak[:, None]) / norm[:, None], 0.0)
            _store(y, weight, row, column, y_r, y_c, stored, ADDRESS)


@triton.jit
def softmax_backward(
    grad, y, out, temperature, bounds, entries, patterns, table, groups, own_tiles, M, N, g_b, g_r, g_c, y_b, y_r, y_c,
    o_b, o_r, o_c, table_columns,
    ROWS: tl.constexpr, SPAN: tl.constexpr, ONCE: tl.constexpr, TH: tl.constexpr, TW: tl.constexpr, H: tl.constexpr,
    W: tl.constexpr, ADDRESS: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of ROWS rows of x, from the result y and its gradient."""
    batch, row_in, tile, begin, whole, end = _listed_rows(bounds, groups, own_tiles, ROWS, TH, GROUPED)
    grad += batch.to(tl.int64) * g_b
    y += batch.to(tl.int64) * y_b
    out += batch.to(tl.int64) * o_b
    cold = tl.load(temperature).to(tl.float32)
    if ONCE:
        row, column, stored, kept = _span(
            entries, patterns, table, tile, row_in, begin, whole, end, M, N, table_columns, SPAN, TH, TW, H, W, ADDRESS
        )
        slope, weight = (
            _load(grad, row, column, g_r, g_c, kept, ADDRESS),
            _load(y, row, column, y_r, y_c, kept, ADDRESS),
        )
        shared = tl.sum(slope * weight, 1)
        change = tl.where(kept, weight * (slope - shared[:, None]) / cold, 0.0)
        _store(out, change, row, column, o_r, o_c, stored, ADDRESS)
    else:
        STEP: tl.constexpr = SPAN // TW
        shared = tl.zeros((ROWS,), tl.float32)
        for first in range(begin, end, STEP):
            row, column, stored, kept = _span(
                entries, patterns, table, tile, row_in, first, whole, end, M, N, table_columns, SPAN, TH, TW, H, W,
                ADDRESS,
            )  # fmt: skip
            slope = _load(grad, row, column, g_r, g_c, kept, ADDRESS)
            shared += tl.sum(slope * _load(y, row, column, y_r, y_c, kept, ADDRESS), 1)
        for first in range(begin, end, STEP):
            row, column, stored, kept = _span(
                entries, patterns, table, tile, row_in, first, whole, end, M, N, table_columns, SPAN, TH, TW, H, W,
                ADDRESS,
            )  # fmt: skip
            slope = _load(grad, row, column, g_r, g_c, kept, ADDRESS)
            weight = _load(y, row, column, y_r, y_c, kept, ADDRESS)
            change = tl.where(kept, weight * (slope - shared[:, None]) / cold, 0.0)
            _store(out, change, row, column, o_r, o_c, stored, ADDRESS)


INTERPRETED = not isinstance(softmax_forward, triton.runtime.JITFunction)
"""Whether Triton's interpreter runs the kernels, on tensors of the CPU."""

"""The Triton kernels of batched products with one sparse matrix: sparse times dense, and dense times dense into sparse.

These two serve every mode, transposition and gradient: transposes are strides, and a transposed sparse matrix is walked
by its columns. A program owns its part of the result and adds the tiles on its list in one order, wholly live ones
first and without a mask. Tiles are copied by the bulk copy engine where it can address the operands (they are tensor
descriptors then), by ordinary loads elsewhere. This module imports Triton; import it only to run a kernel.
"""

# ruff: noqa: ANN001, ANN201, ANN202, C901, FBT003, N803, N806, PLR0912, PLR0913, PLR0915, PLR0917, RET505, SIM108 - Triton's own conventions
# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from sparta.specialize.attention.flash_forward import pair

__all__ = ["INTERPRETED", "sampled_product", "sparse_product"]


@triton.jit
def _tile_places(
    tile_row, tile_column, row, column, slot, table, kept, row_stride, column_stride, table_columns,
    TH: tl.constexpr, TW: tl.constexpr, H: tl.constexpr, W: tl.constexpr, ADDRESS: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Return where the elements (row, column) of a tile are in the stored matrix, int64; `kept` says which are."""
    if ADDRESS == 0:
        first = (tile_row * TH).to(tl.int64) * row_stride + (tile_column * TW).to(tl.int64) * column_stride
        return first + (row.to(tl.int64) * row_stride + column.to(tl.int64) * column_stride)
    elif ADDRESS == 1:  # the whole tile is in one block
        first = slot.to(tl.int64) * (H * W) + ((tile_row * TH) % H) * W + (tile_column * TW) % W
        # Said, because it is not seen through a remainder, and without it every element is moved alone.
        return tl.multiple_of(first, TW) + (row * W + column)
    else:
        row = tile_row * TH + row
        column = tile_column * TW + column
        place = table + (row // H) * table_columns + column // W
        if MASKED:
            block = tl.load(place, mask=kept, other=0)
        else:
            block = tl.load(place)
        return block.to(tl.int64) * (H * W) + ((row % H) * W + column % W)


@triton.jit
def _copied(
    x, batch, last, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """Return (ROWS, COLUMNS) of a matrix by its descriptor, 0 beyond its edges; turned, x describes its transpose.

    One matrix that serves all batches has only batch 0: `last` is the last one that there is.
    """
    batch = tl.minimum(batch, last)
    if TURNED:
        return x.load([batch, column, row]).reshape(COLUMNS, ROWS).T
    else:
        return x.load([batch, row, column]).reshape(ROWS, COLUMNS)


@triton.jit
def _copied_tile(
    sparse, batch, last, tile_row, tile_column, slot, TH: tl.constexpr, TW: tl.constexpr, H: tl.constexpr,
    W: tl.constexpr, ADDRESS: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """Return a tile of the sparse matrix, turned its transpose; compressed blocks are one tall matrix."""
    row, column = tile_row * TH, tile_column * TW
    if ADDRESS == 1:
        row, column = slot * H + row % H, column % W
    tile = _copied(sparse, batch, last, row, column, TH, TW, False)
    if TURNED:
        return tile.T
    else:
        return tile


@triton.jit
def _added(a, b, total, SWAPPED: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """Return total + a b; swapped, total is its transpose."""
    if SWAPPED:
        return pair(b.T, a.T, total, PRECISION, UPCAST)
    else:
        return pair(a, b, total, PRECISION, UPCAST)


@triton.jit
def sparse_product(
    sparse, dense, bias, out, bounds, entries, patterns, table, groups, own_tiles, free_tiles, OWN, MET, FREE,
    s_last, d_last, s_b, s_r, s_c, d_b, d_q, d_f, o_b, o_p, o_f, table_columns,
    TH: tl.constexpr, TW: tl.constexpr, BF: tl.constexpr, H: tl.constexpr, W: tl.constexpr, ADDRESS: tl.constexpr,
    TURNED: tl.constexpr, GROUPED: tl.constexpr, BIAS: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Compute one tile of ``out (OWN, FREE) = S dense (MET, FREE)`` of one batch; turned, S is transposed.

    TMA is 1 where the copy engine reads both operands, 3 where the descriptor of `dense` is that of its transpose.
    """
    TP: tl.constexpr = TW if TURNED else TH
    TQ: tl.constexpr = TH if TURNED else TW
    # The matrix units of Hopper take 64 rows of the left operand: low tiles are the right one, and the sum is flipped.
    SWAPPED: tl.constexpr = TP < 64 and BF >= 64 and TMA > 0
    program = tl.program_id(0)
    free = program % free_tiles
    rank = (program // free_tiles) % own_tiles
    batch = program // (free_tiles * own_tiles)
    bound = bounds + rank * 4
    if GROUPED:
        bound += tl.load(groups + batch).to(tl.int64) * own_tiles * 4
    tile, begin, whole, end = tl.load(bound), tl.load(bound + 1), tl.load(bound + 2), tl.load(bound + 3)

    own, met_in = tl.arange(0, TP), tl.arange(0, TQ)
    channel = free * BF + tl.arange(0, BF)
    inside = channel < FREE
    if TURNED:
        row, column = met_in[None, :], own[:, None]
    else:
        row, column = own[:, None], met_in[None, :]
    if not TMA:
        sparse += batch.to(tl.int64) * s_b
        dense += batch.to(tl.int64) * d_b
        d_tile = met_in.to(tl.int64)[:, None] * d_q + channel.to(tl.int64)[None, :] * d_f
    if SWAPPED:
        total = tl.zeros((BF, TP), tl.float32)
    else:
        total = tl.zeros((TP, BF), tl.float32)
    met, slot = tl.load(entries + 4 * begin), tl.load(entries + 4 * begin + 2)
    for entry in range(begin, whole):
        # One entry early, so that loads of tiles never wait for an index.
        following, next_slot = tl.load(entries + 4 * (entry + 1)), tl.load(entries + 4 * (entry + 1) + 2)
        if TURNED:
            tile_row, tile_column = met, tile
        else:
            tile_row, tile_column = tile, met
        if TMA:
            a = _copied_tile(sparse, batch, s_last, tile_row, tile_column, slot, TH, TW, H, W, ADDRESS, TURNED)
            b = _copied(dense, batch, d_last, met * TQ, free * BF, TQ, BF, TMA == 3)
        else:
            place = _tile_places(tile_row, tile_column, row, column, slot, table, None, s_r, s_c, table_columns, TH, TW,
                                H, W, ADDRESS, False)  # fmt: skip
            a = tl.load(sparse + place)
            b = tl.load(dense + ((met * TQ).to(tl.int64) * d_q + d_tile), mask=inside[None, :], other=0.0)
        total = _added(a, b, total, SWAPPED, PRECISION, UPCAST)
        met, slot = following, next_slot
    for entry in tl.range(whole, end, num_stages=1):
        met, slot = tl.load(entries + 4 * entry), tl.load(entries + 4 * entry + 2)
        pattern = patterns + tl.load(entries + 4 * entry + 1).to(tl.int64) * (TH * TW)
        kept = tl.load(pattern + (row * TW + column)) != 0
        if TURNED:
            tile_row, tile_column = met, tile
        else:
            tile_row, tile_column = tile, met
        if TMA:
            a = _copied_tile(sparse, batch, s_last, tile_row, tile_column, slot, TH, TW, H, W, ADDRESS, TURNED)
            a = tl.where(kept, a, 0.0)
            b = _copied(dense, batch, d_last, met * TQ, free * BF, TQ, BF, TMA == 3)
        else:
            place = _tile_places(tile_row, tile_column, row, column, slot, table, kept, s_r, s_c, table_columns, TH, TW,
                                H, W, ADDRESS, True)  # fmt: skip
            a = tl.load(sparse + place, mask=kept, other=0.0)
            reached = (met * TQ + met_in < MET)[:, None] & inside[None, :]
            b = tl.load(dense + ((met * TQ).to(tl.int64) * d_q + d_tile), mask=reached, other=0.0)
        total = _added(a, b, total, SWAPPED, PRECISION, UPCAST)

    if SWAPPED:
        total = total.T
    line = tile * TP + own
    if BIAS == 1:
        total += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)[None, :]
    elif BIAS == 2:
        total += tl.load(bias + line, mask=line < OWN, other=0.0).to(tl.float32)[:, None]
    place = line.to(tl.int64)[:, None] * o_p + channel.to(tl.int64)[None, :] * o_f
    tl.store(
        out + batch.to(tl.int64) * o_b + place,
        total.to(out.dtype.element_ty),
        mask=(line < OWN)[:, None] & inside[None, :],
    )


@triton.jit
def sampled_product(
    left, right, bias, out, entries, patterns, ends, table, groups, most, M, N, K, l_last, r_last,
    l_b, l_m, l_k, r_b, r_k, r_n, o_b, o_r, o_c, table_columns,
    TH: tl.constexpr, TW: tl.constexpr, BK: tl.constexpr, H: tl.constexpr, W: tl.constexpr, ADDRESS: tl.constexpr,
    GROUPED: tl.constexpr, BIAS: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Compute one kept tile of ``left (M, K) right (K, N) + bias (N,)`` of one batch.

    TMA is 1 where the copy engine reads both operands; 1 more, left is described by its transpose, 2 more, right is.
    """
    program = tl.program_id(0)
    batch = program // most
    entry = program % most
    if GROUPED:
        bound = ends + tl.load(groups + batch)
        entry += tl.load(bound)
        last = tl.load(bound + 1)
    else:
        last = most
    if entry < last:
        item = entries + 4 * entry.to(tl.int64)
        tile_column, number, slot, tile_row = tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
        row_in, column_in, step = tl.arange(0, TH), tl.arange(0, TW), tl.arange(0, BK)
        row, column = tile_row * TH + row_in, tile_column * TW + column_in
        if not TMA:
            a_lines = left + batch.to(tl.int64) * l_b + row.to(tl.int64)[:, None] * l_m
            b_lines = right + batch.to(tl.int64) * r_b + column.to(tl.int64)[None, :] * r_n
        total = tl.zeros((TH, TW), tl.float32)
        for k in range(0, K, BK):
            if TMA:
                a = _copied(left, batch, l_last, tile_row * TH, k, TH, BK, (TMA - 1) % 2 == 1)
                b = _copied(right, batch, r_last, k, tile_column * TW, BK, TW, TMA > 2)
            else:
                term = k + step
                a_tile, b_tile = a_lines + term.to(tl.int64)[None, :] * l_k, b_lines + term.to(tl.int64)[:, None] * r_k
                a = tl.load(a_tile, mask=(row < M)[:, None] & (term < K)[None, :], other=0.0)
                b = tl.load(b_tile, mask=(term < K)[:, None] & (column < N)[None, :], other=0.0)
            total = pair(a, b, total, PRECISION, UPCAST)
        if BIAS:
            total += tl.load(bias + column, mask=column < N, other=0.0).to(tl.float32)[None, :]
        inside = (row < M)[:, None] & (column < N)[None, :]
        pattern = patterns + tl.maximum(number, 0).to(tl.int64) * (TH * TW)
        kept = inside
        if number >= 0:
            kept = tl.load(pattern + row_in[:, None] * TW + column_in[None, :]) != 0
        total = tl.where(kept, total, 0.0).to(out.dtype.element_ty)
        place = _tile_places(tile_row, tile_column, row_in[:, None], column_in[None, :], slot, table, kept, o_r, o_c,
                            table_columns, TH, TW, H, W, ADDRESS, True)  # fmt: skip
        out += batch.to(tl.int64) * o_b
        if ADDRESS == 0:
            tl.store(out + place, total, mask=inside)
        elif ADDRESS == 1:  # blocks reach beyond the edges, and hold 0 there
            tl.store(out + place, total)
        else:
            tl.store(out + place, total, mask=kept)


INTERPRETED = not isinstance(sparse_product, triton.runtime.JITFunction)
"""Whether Triton's interpreter runs the kernels, on tensors of the CPU."""

"""The Triton kernels of fused attention, forward: one pass over kept tiles, and the sum of what splits found.

A program takes one tile of queries of one head, walks over the tiles of keys on its list with a running softmax, and
never stores a score. Few queries leave most of a GPU idle, so their lists are split among several programs, and a
second kernel joins the parts. This module imports Triton; import it only to run a kernel.
"""

# ruff: noqa: ANN001, ANN201, ANN202, FBT003, N803, PLR0913, PLR0915, PLR0917, RET505, SIM108 - Triton's own conventions
# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "INTERPRETED",
    "clean",
    "copy_tile",
    "flash_forward",
    "join_splits",
    "load_tile",
    "pair",
    "place_of",
    "walk_bounds",
]

_TOGETHER = tl.constexpr(8)  # heads


@triton.jit
def load_tile(
    base, first, last, stride, SIZE: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, INSIDE: tl.constexpr,
):  # fmt: skip
    """Return rows `first` to `first + SIZE` of a matrix (last, D), as (SIZE, BD); 0 beyond its edges."""
    row = first + tl.arange(0, SIZE)
    column = tl.arange(0, BD)
    place = base + row.to(tl.int64)[:, None] * stride + column[None, :]
    if INSIDE and D == BD:
        return tl.load(place)
    elif INSIDE:
        return tl.load(place, mask=(column < D)[None, :], other=0.0)
    else:
        return tl.load(place, mask=(row < last)[:, None] & (column < D)[None, :], other=0.0)


@triton.jit
def pair(a, b, total, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """Return total + a b."""
    if UPCAST:  # the interpreter multiplies bf16 wrongly
        a, b = a.to(tl.float32), b.to(tl.float32)
    if total is None:
        return tl.dot(a, b, input_precision=PRECISION)
    else:
        return tl.dot(a, b, total, input_precision=PRECISION)


@triton.jit
def place_of(program, programs, tiles):
    """Return the rank and the head, of all heads of all batches, that a program takes.

    Lists of several lengths start longest first, and not head by head: the last head alone would leave most of the
    device idle while its longest list is walked. Few heads at a time, so that the L2 cache holds their keys and values.
    """
    heads = programs // tiles
    first = program // (tiles * _TOGETHER) * _TOGETHER
    among = tl.minimum(heads - first, _TOGETHER)
    within = program - first * tiles
    return within // among, first + within % among


@triton.jit
def walk_bounds(bounds, lengths, groups, head, batch, rank, tiles, SIZE: tl.constexpr, LISTED: tl.constexpr):
    """Return the tile of a rank; where its list begins, where its wholly live part ends, where it ends.

    Without lists, a tile within the length of its sequence meets every tile within it, and the last one in part.
    """
    if LISTED:
        row = bounds + (tl.load(groups + head).to(tl.int64) * tiles + rank) * 4
        return tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    else:
        length = tl.load(lengths + batch)
        return rank, 0, length // SIZE, tl.cdiv(length, SIZE)


@triton.jit
def clean(x, kept, AXIS: tl.constexpr):
    """Return x with 0 in the rows that nothing sees: they may hold NaN, and 0 * NaN is NaN."""
    return tl.where((tl.max(kept.to(tl.int32), AXIS) > 0)[:, None], x, 0.0)


@triton.jit
def copy_tile(
    x, batch, head, first, last, stride, SIZE: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, INSIDE: tl.constexpr,
    LISTED: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Return rows `first` to `first + SIZE` of a head; x is a tensor descriptor, or the pointer to that head."""
    if TMA:
        loaded = x.load([batch, head, first, 0]).reshape(SIZE, BD)
        if not (INSIDE or LISTED):  # padding may hold NaN, and 0 * NaN is NaN
            loaded = tl.where((first + tl.arange(0, SIZE) < last)[:, None], loaded, 0.0)
        return loaded
    else:
        return load_tile(x, first, last, stride, SIZE, D, BD, INSIDE)


@triton.jit
def _attend(scores, v, total, peak, norm, kept, scale, MASKED: tl.constexpr, PRECISION: tl.constexpr,
            UPCAST: tl.constexpr):  # fmt: skip
    """Take one tile of scores and values into the running softmax."""
    if MASKED:
        scores = tl.where(kept, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1) * scale)
    if MASKED:  # a row that has seen nothing yet
        level = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    else:
        level = new_peak
    weight = tl.exp2(scores * scale - level[:, None])
    shrink = tl.exp2(peak - level)
    norm = norm * shrink + tl.sum(weight, 1)
    total = pair(weight.to(v.dtype), v, total * shrink[:, None], PRECISION, UPCAST)
    return total, new_peak, norm


@triton.jit(do_not_specialize=["scale"])
def flash_forward(
    q, k, v, o, lse, bounds, entries, patterns, groups, lengths, scale, H, KV_H, M, N, q_tiles,
    q_b, q_h, q_m, k_b, k_h, k_n, v_b, v_h, v_n,
    BM: tl.constexpr, BN: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, F: tl.constexpr, BF: tl.constexpr,
    SPLITS: tl.constexpr, LISTED: tl.constexpr, CLEAN: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Compute one tile of queries, or one split of it: o (splits, B, H, M, F) and lse (splits, B, H, M), base 2."""
    program = tl.program_id(0)
    split = program % SPLITS
    rank, head = place_of(program // SPLITS, tl.num_programs(0) // SPLITS, q_tiles)
    batch = head // H
    kv_head = (head % H) // (H // KV_H)
    tile, begin, whole, end = walk_bounds(bounds, lengths, groups, head, batch, rank, q_tiles, BN, LISTED)
    query_end, key_end = M, N
    if not LISTED:
        query_end = tl.load(lengths + batch)
        key_end = query_end
        end = tl.where(tile * BM < query_end, end, 0)
        whole = tl.minimum(whole, end)
    if SPLITS > 1:
        length = end - begin
        end = begin + (length * (split + 1)) // SPLITS
        begin = begin + (length * split) // SPLITS
        whole = tl.minimum(tl.maximum(whole, begin), end)

    q_base = q + batch.to(tl.int64) * q_b + (head % H).to(tl.int64) * q_h
    q_tile = load_tile(q_base, tile * BM, query_end, q_m, BM, E, BE, False)
    if not TMA:
        k += batch.to(tl.int64) * k_b + kv_head.to(tl.int64) * k_h
        v += batch.to(tl.int64) * v_b + kv_head.to(tl.int64) * v_h
    total = tl.zeros((BM, BF), tl.float32)
    peak = tl.full((BM,), float("-inf"), tl.float32)
    norm = tl.zeros((BM,), tl.float32)
    met = begin
    if LISTED:
        met = tl.load(entries + 2 * begin)
    for entry in range(begin, whole):
        following = entry + 1
        if LISTED:  # one entry early, so that copies never wait for an index
            following = tl.load(entries + 2 * (entry + 1))
        k_tile = copy_tile(k, batch, kv_head, met * BN, key_end, k_n, BN, E, BE, True, LISTED, TMA)
        v_tile = copy_tile(v, batch, kv_head, met * BN, key_end, v_n, BN, F, BF, True, LISTED, TMA)
        scores = pair(q_tile, k_tile.T, None, PRECISION, UPCAST)
        total, peak, norm = _attend(scores, v_tile, total, peak, norm, None, scale, False, PRECISION, UPCAST)
        met = following
    column = tl.arange(0, BN)
    for entry in tl.range(whole, end, num_stages=1):
        met = entry
        if LISTED:
            met = tl.load(entries + 2 * entry)
            pattern = patterns + tl.load(entries + 2 * entry + 1).to(tl.int64) * (BM * BN)
            kept = tl.load(pattern + tl.arange(0, BM)[:, None] * BN + column[None, :]) != 0
        else:
            kept = (met * BN + column < key_end)[None, :]
        k_tile = copy_tile(k, batch, kv_head, met * BN, key_end, k_n, BN, E, BE, False, LISTED, TMA)
        v_tile = copy_tile(v, batch, kv_head, met * BN, key_end, v_n, BN, F, BF, False, LISTED, TMA)
        if CLEAN & 1:
            v_tile = clean(v_tile, kept, 0)
        scores = pair(q_tile, k_tile.T, None, PRECISION, UPCAST)
        total, peak, norm = _attend(scores, v_tile, total, peak, norm, kept, scale, True, PRECISION, UPCAST)

    seen = norm != 0.0  # true for NaN
    total = tl.where(seen[:, None], total / tl.where(seen, norm, 1.0)[:, None], 0.0)
    level = tl.where(seen, peak + tl.log2(tl.where(seen, norm, 1.0)), float("-inf") if SPLITS > 1 else float("inf"))
    row = tile * BM + tl.arange(0, BM)
    inside = row < M
    if not LISTED:  # a query in the padding sees nothing
        total = tl.where((row < query_end)[:, None], total, 0.0)
        level = tl.where(row < query_end, level, float("inf"))
    line = (split * (tl.num_programs(0) // (SPLITS * q_tiles)) + head).to(tl.int64) * M + row
    channel = tl.arange(0, BF)
    tl.store(lse + line, level, mask=inside)
    tl.store(
        o + line[:, None] * F + channel[None, :],
        total.to(o.dtype.element_ty),
        mask=inside[:, None] & (channel < F)[None, :],
    )


@triton.jit
def join_splits(
    parts, part_lse, o, lse, lines, F, SPLITS: tl.constexpr, ROWS: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """Join parts (SPLITS, lines, F) with their lse (SPLITS, lines) into o (lines, F) and lse (lines,)."""
    line = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, BF)
    inside = line < lines
    both = inside[:, None] & (channel < F)[None, :]
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    for split in range(SPLITS):
        peak = tl.maximum(peak, tl.load(part_lse + split * lines + line, mask=inside, other=float("-inf")))
    level = tl.where(peak == float("-inf"), 0.0, peak)
    norm = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((ROWS, BF), tl.float32)
    for split in range(SPLITS):
        at = split * lines + line
        share = tl.exp2(tl.load(part_lse + at, mask=inside, other=float("-inf")) - level)
        norm += share
        place = parts + at.to(tl.int64)[:, None] * F + channel[None, :]
        total += share[:, None] * tl.load(place, mask=both, other=0.0)
    seen = norm != 0.0
    total = tl.where(seen[:, None], total / tl.where(seen, norm, 1.0)[:, None], 0.0)
    tl.store(lse + line, tl.where(seen, level + tl.log2(tl.where(seen, norm, 1.0)), float("inf")), mask=inside)
    tl.store(o + line.to(tl.int64)[:, None] * F + channel[None, :], total.to(o.dtype.element_ty), mask=both)


INTERPRETED = not isinstance(flash_forward, triton.runtime.JITFunction)
"""Whether Triton's interpreter runs the kernels, on tensors of the CPU."""

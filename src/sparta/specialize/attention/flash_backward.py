"""The Triton kernels of fused attention, backward: scores are computed again from what the forward pass kept of them.

One kernel walks the lists of queries for the gradient of q, another those of keys for k and v, so that every sum has
one owner and one order. A program owns a part of a tile and walks the tiles on its list in pieces, since gradients need
more room on chip than results: wholly live ones first and without a mask, then the others in a shorter pipeline. This
module imports Triton; import it only to run a kernel.
"""

# ruff: noqa: ANN001, ANN201, ANN202, FBT003, N803, N806, PLR0913, PLR0915, PLR0917, RET505 - Triton's own conventions
# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from sparta.specialize.attention.flash_forward import clean, copy_tile, load_tile, pair, place_of, walk_bounds

__all__ = ["flash_backward_kv", "flash_backward_q"]


@triton.jit
def _kept(
    entries, entry, patterns, query_in, key_in, query, key, query_end, key_end, BM: tl.constexpr, BN: tl.constexpr,
    LISTED: tl.constexpr,
):  # fmt: skip
    """Return which pairs of a partly live tile are live; places in the tile and in the matrix broadcast."""
    if LISTED:
        pattern = patterns + tl.load(entries + 2 * entry + 1).to(tl.int64) * (BM * BN)
        kept = tl.load(pattern + (query_in * BN + key_in)) != 0
    else:
        kept = (query < query_end) & (key < key_end)
    return kept


@triton.jit
def _facts_of(
    lse, delta, head, first, last, M, ROWS: tl.constexpr, LISTED: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Return the level and the share of ROWS queries; those beyond the last one add nothing to any sum.

    The copy engine reads them too, since the addresses of ordinary loads take registers that the sums need. It gives 0
    beyond the end of a head, where q and the gradient are 0 as well.
    """
    if TMA:
        level, share = lse.load([head, first]).reshape(ROWS), delta.load([head, first]).reshape(ROWS)
        if not LISTED:  # padding may hold NaN
            share = tl.where(first + tl.arange(0, ROWS) < last, share, 0.0)
    else:
        row = first + tl.arange(0, ROWS)
        line = head.to(tl.int64) * M + row
        level = tl.load(lse + line, mask=row < last, other=float("inf"))
        share = tl.load(delta + line, mask=row < last, other=0.0)
    return level, share


@triton.jit
def _walked(begin, whole, end, STEPS: tl.constexpr, MASKED: tl.constexpr):
    """Return the first piece, and the one after the last, of the wholly or of the partly live tiles on a list."""
    if MASKED:
        return whole * STEPS, end * STEPS
    else:
        return begin * STEPS, whole * STEPS


@triton.jit(do_not_specialize=["scale", "natural"])
def flash_backward_q(
    q, k, v, o, grad, lse, delta, grad_q, bounds, entries, patterns, groups, lengths, scale, natural, H, KV_H, M, N,
    q_tiles, q_b, q_h, q_m, k_b, k_h, k_n, v_b, v_h, v_n,
    BM: tl.constexpr, BN: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, E: tl.constexpr, BE: tl.constexpr,
    F: tl.constexpr, BF: tl.constexpr, LISTED: tl.constexpr, CLEAN: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr, MASKED_STAGES: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of ROWS queries of a tile, and `delta`, the sum of ``o * grad`` of each.

    Where TMA is set, k and v are descriptors.
    """
    PARTS: tl.constexpr = BM // ROWS
    STEPS: tl.constexpr = BN // COLS
    program = tl.program_id(0)
    part = program % PARTS
    rank, head = place_of(program // PARTS, tl.num_programs(0) // PARTS, q_tiles)
    batch = head // H
    kv_head = (head % H) // (H // KV_H)
    tile, begin, whole, end = walk_bounds(bounds, lengths, groups, head, batch, rank, q_tiles, BN, LISTED)
    query_end, key_end = M, N
    if not LISTED:
        query_end = tl.load(lengths + batch)
        key_end = query_end
        end = tl.where(tile * BM < query_end, end, 0)
        whole = tl.minimum(whole, end)
    first = tile * BM + part * ROWS
    row = first + tl.arange(0, ROWS)
    line = head.to(tl.int64) * M + row
    q_base = q + batch.to(tl.int64) * q_b + (head % H).to(tl.int64) * q_h
    q_tile = load_tile(q_base, first, query_end, q_m, ROWS, E, BE, False)
    grad_tile = load_tile(grad + head.to(tl.int64) * M * F, first, query_end, F, ROWS, F, BF, False)
    o_tile = load_tile(o + head.to(tl.int64) * M * F, first, query_end, F, ROWS, F, BF, False)
    share = tl.sum(o_tile.to(tl.float32) * grad_tile.to(tl.float32), 1)
    tl.store(delta + line, share, mask=row < M)
    level = tl.load(lse + line, mask=row < query_end, other=float("inf"))
    if not TMA:
        k += batch.to(tl.int64) * k_b + kv_head.to(tl.int64) * k_h
        v += batch.to(tl.int64) * v_b + kv_head.to(tl.int64) * v_h
    total = tl.zeros((ROWS, BE), tl.float32)
    row_in, column = part * ROWS + tl.arange(0, ROWS), tl.arange(0, COLS)
    met = begin
    if LISTED:
        met = tl.load(entries + 2 * begin)
    for MASKED in tl.static_range(2):
        lower, upper = _walked(begin, whole, end, STEPS, MASKED)
        for walked in tl.range(lower, upper, num_stages=MASKED_STAGES if MASKED else None):
            following = (walked + 1) // STEPS
            if LISTED:  # one piece early, so that copies never wait for an index
                following = tl.load(entries + 2 * following)
            step = walked % STEPS
            key = met * BN + step * COLS
            k_tile = copy_tile(k, batch, kv_head, key, key_end, k_n, COLS, E, BE, not MASKED, LISTED, TMA)
            v_tile = copy_tile(v, batch, kv_head, key, key_end, v_n, COLS, F, BF, not MASKED, LISTED, TMA)
            weight = tl.exp2(pair(q_tile, k_tile.T, None, PRECISION, UPCAST) * scale - level[:, None])
            change = pair(grad_tile, v_tile.T, None, PRECISION, UPCAST)
            if MASKED:
                kept = _kept(
                    entries, walked // STEPS, patterns, row_in[:, None], (step * COLS + column)[None, :],
                    row[:, None], (key + column)[None, :], query_end, key_end, BM, BN, LISTED,
                )  # fmt: skip
                weight = tl.where(kept, weight, 0.0)
                if CLEAN:
                    change = tl.where(kept, change, 0.0)
                if CLEAN & 1:
                    k_tile = clean(k_tile, kept, 0)
            change = weight * (change - share[:, None])
            total = pair(change.to(k_tile.dtype), k_tile, total, PRECISION, UPCAST)
            met = following
    channel = tl.arange(0, BE)
    tl.store(
        grad_q + line[:, None] * E + channel[None, :],
        (total * natural).to(grad_q.dtype.element_ty),
        mask=(row < M)[:, None] & (channel < E)[None, :],
    )


@triton.jit(do_not_specialize=["scale", "natural"])
def flash_backward_kv(
    q, k, v, grad, lse, delta, grad_k, grad_v, bounds, entries, patterns, groups, lengths, scale, natural, H, KV_H, M,
    N, k_tiles, q_b, q_h, q_m, k_b, k_h, k_n, v_b, v_h, v_n,
    BM: tl.constexpr, BN: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, E: tl.constexpr, BE: tl.constexpr,
    F: tl.constexpr, BF: tl.constexpr, LISTED: tl.constexpr, CLEAN: tl.constexpr, TMA: tl.constexpr,
    SHARED: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr, MASKED_STAGES: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of COLS keys and values of a tile, summed over the SHARED heads that have them.

    Where TMA is set, q, grad, lse and delta are descriptors.
    """
    PARTS: tl.constexpr = BN // COLS
    STEPS: tl.constexpr = BM // ROWS
    program = tl.program_id(0)
    part = program % PARTS
    tile, kv_head = place_of(program // PARTS, tl.num_programs(0) // PARTS, k_tiles)  # of all kv heads of all batches
    batch = kv_head // KV_H
    query_end, key_end = M, N
    if not LISTED:
        query_end = tl.load(lengths + batch)
        key_end = query_end
    first = tile * BN + part * COLS
    row = first + tl.arange(0, COLS)
    k_base = k + batch.to(tl.int64) * k_b + (kv_head % KV_H).to(tl.int64) * k_h
    v_base = v + batch.to(tl.int64) * v_b + (kv_head % KV_H).to(tl.int64) * v_h
    k_tile = load_tile(k_base, first, key_end, k_n, COLS, E, BE, False)
    v_tile = load_tile(v_base, first, key_end, v_n, COLS, F, BF, False)
    total_k = tl.zeros((COLS, BE), tl.float32)
    total_v = tl.zeros((COLS, BF), tl.float32)
    row_in, column = part * COLS + tl.arange(0, COLS), tl.arange(0, ROWS)
    for shared in range(SHARED):  # known beforehand: a loop that is walked once needs no registers
        head_in = (kv_head % KV_H) * SHARED + shared
        head = batch * H + head_in
        _, begin, whole, end = walk_bounds(bounds, lengths, groups, head, batch, tile, k_tiles, BM, LISTED)
        if not LISTED:
            end = tl.where(tile * BN < key_end, end, 0)
            # The last tile of keys is masked whichever queries it meets.
            whole = tl.where((tile + 1) * BN <= key_end, tl.minimum(whole, end), 0)
        q_from, grad_from = q, grad
        if not TMA:
            q_from = q + batch.to(tl.int64) * q_b + head_in.to(tl.int64) * q_h
            grad_from = grad + head.to(tl.int64) * M * F
        met = begin
        if LISTED:
            met = tl.load(entries + 2 * begin)
        for MASKED in tl.static_range(2):
            lower, upper = _walked(begin, whole, end, STEPS, MASKED)
            for walked in tl.range(lower, upper, num_stages=MASKED_STAGES if MASKED else None):
                following = (walked + 1) // STEPS
                if LISTED:  # one piece early, so that copies never wait for an index
                    following = tl.load(entries + 2 * following)
                step = walked % STEPS
                query = met * BM + step * ROWS
                # Of a wholly live tile on a list, queries may lie beyond the last one: their weights are 0.
                INSIDE: tl.constexpr = not (LISTED or MASKED)
                q_tile = copy_tile(q_from, batch, head_in, query, query_end, q_m, ROWS, E, BE, INSIDE, LISTED, TMA)
                grad_tile = copy_tile(grad_from, batch, head_in, query, query_end, F, ROWS, F, BF, INSIDE, LISTED, TMA)
                level, share = _facts_of(lse, delta, head, query, query_end, M, ROWS, LISTED, TMA)
                weight = tl.exp2(pair(k_tile, q_tile.T, None, PRECISION, UPCAST) * scale - level[None, :])
                change = pair(v_tile, grad_tile.T, None, PRECISION, UPCAST)
                if MASKED:
                    kept = _kept(
                        entries, walked // STEPS, patterns, (step * ROWS + column)[None, :], row_in[:, None],
                        (query + column)[None, :], row[:, None], query_end, key_end, BM, BN, LISTED,
                    )  # fmt: skip
                    weight = tl.where(kept, weight, 0.0)
                    if CLEAN:
                        change = tl.where(kept, change, 0.0)
                    if CLEAN & 2:
                        q_tile = clean(q_tile, kept, 0)
                        grad_tile = clean(grad_tile, kept, 0)
                total_v = pair(weight.to(grad_tile.dtype), grad_tile, total_v, PRECISION, UPCAST)
                change = (weight * (change - share[None, :])).to(q_tile.dtype)
                total_k = pair(change, q_tile, total_k, PRECISION, UPCAST)
                met = following
    line = kv_head.to(tl.int64) * N + row
    tl.store(
        grad_k + line[:, None] * E + tl.arange(0, BE)[None, :],
        (total_k * natural).to(grad_k.dtype.element_ty),
        mask=(row < N)[:, None] & (tl.arange(0, BE) < E)[None, :],
    )
    tl.store(
        grad_v + line[:, None] * F + tl.arange(0, BF)[None, :],
        total_v.to(grad_v.dtype.element_ty),
        mask=(row < N)[:, None] & (tl.arange(0, BF) < F)[None, :],
    )

"""The Triton kernels of fused attention, backward: scores are computed again from what the forward pass kept of them.

One kernel walks the lists of queries for the gradient of q, another those of keys for k and v, so that every sum has
one owner and one order. The lists are those of the forward pass, and each tile on them is walked in smaller pieces,
since a gradient needs more room on chip. This module imports Triton; import it only to run a kernel.
"""

# ruff: noqa: ANN001, ANN201, FBT003, N803, N806, PLR0913, PLR0915, PLR0917 - Triton's own conventions
# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from sparta.specialize.attention.flash_forward import clean, load_tile, pair, walk_bounds

__all__ = ["flash_backward_kv", "flash_backward_q", "flash_delta"]


@triton.jit
def flash_delta(o, grad, delta, lines, F, ROWS: tl.constexpr, BF: tl.constexpr):
    """Compute the sum of ``o * grad`` for each line of (lines, F)."""
    line = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, BF)
    place = line.to(tl.int64)[:, None] * F + channel[None, :]
    both = (line < lines)[:, None] & (channel < F)[None, :]
    product = tl.load(o + place, mask=both, other=0.0).to(tl.float32)
    product *= tl.load(grad + place, mask=both, other=0.0).to(tl.float32)
    tl.store(delta + line, tl.sum(product, 1), mask=line < lines)


@triton.jit(do_not_specialize=["scale", "natural"])
def flash_backward_q(
    q, k, v, grad, lse, delta, grad_q, bounds, entries, patterns, groups, lengths, scale, natural, H, KV_H, M, N,
    q_tiles, q_b, q_h, q_m, k_b, k_h, k_n, v_b, v_h, v_n,
    BM: tl.constexpr, BN: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, E: tl.constexpr, BE: tl.constexpr,
    F: tl.constexpr, BF: tl.constexpr, LISTED: tl.constexpr, CLEAN: tl.constexpr, PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of ROWS queries of a tile."""
    PARTS: tl.constexpr = BM // ROWS
    STEPS: tl.constexpr = BN // COLS
    program = tl.program_id(0)
    part = program % PARTS
    rank = (program // PARTS) % q_tiles
    head = program // (PARTS * q_tiles)
    batch = head // H
    kv_head = (head % H) // (H // KV_H)
    tile, begin, whole, end = walk_bounds(bounds, lengths, groups, head, batch, rank, q_tiles, BN, LISTED)
    query_end, key_end = M, N
    if not LISTED:
        query_end = tl.load(lengths + batch)
        key_end = query_end
        end = tl.where(tile * BM < query_end, end, 0)
    first = tile * BM + part * ROWS
    row = first + tl.arange(0, ROWS)
    line = head.to(tl.int64) * M + row
    inside = row < query_end
    q_tile = load_tile(
        q + batch.to(tl.int64) * q_b + (head % H).to(tl.int64) * q_h, first, query_end, q_m, ROWS, E, BE, False
    )
    grad_tile = load_tile(grad + head.to(tl.int64) * M * F, first, query_end, F, ROWS, F, BF, False)
    level = tl.load(lse + line, mask=inside, other=float("inf"))
    share = tl.load(delta + line, mask=inside, other=0.0)
    k += batch.to(tl.int64) * k_b + kv_head.to(tl.int64) * k_h
    v += batch.to(tl.int64) * v_b + kv_head.to(tl.int64) * v_h
    total = tl.zeros((ROWS, BE), tl.float32)
    column = tl.arange(0, COLS)
    for walked in range(begin * STEPS, end * STEPS):
        entry, step = walked // STEPS, walked % STEPS
        met = entry
        if LISTED:
            met = tl.load(entries + 2 * entry)
        key = met * BN + step * COLS
        k_tile = load_tile(k, key, key_end, k_n, COLS, E, BE, False)
        v_tile = load_tile(v, key, key_end, v_n, COLS, F, BF, False)
        weight = tl.exp2(pair(q_tile, k_tile.T, None, PRECISION, UPCAST) * scale - level[:, None])
        change = pair(grad_tile, v_tile.T, None, PRECISION, UPCAST)
        if entry >= whole:
            if LISTED:
                pattern = patterns + tl.load(entries + 2 * entry + 1).to(tl.int64) * (BM * BN)
                place = (part * ROWS + tl.arange(0, ROWS))[:, None] * BN + (step * COLS + column)[None, :]
                kept = tl.load(pattern + place) != 0
            else:
                kept = ((key + column < key_end)[None, :]) & ((row < query_end)[:, None])
            weight = tl.where(kept, weight, 0.0)
            if CLEAN:
                change = tl.where(kept, change, 0.0)
            if CLEAN & 1:
                k_tile = clean(k_tile, kept, 0)
        change = weight * (change - share[:, None])
        total = pair(change.to(k_tile.dtype), k_tile, total, PRECISION, UPCAST)
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
    F: tl.constexpr, BF: tl.constexpr, LISTED: tl.constexpr, CLEAN: tl.constexpr, PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of COLS keys and values of a tile, summed over the heads that share them."""
    PARTS: tl.constexpr = BN // COLS
    STEPS: tl.constexpr = BM // ROWS
    program = tl.program_id(0)
    part = program % PARTS
    tile = (program // PARTS) % k_tiles
    kv_head = program // (PARTS * k_tiles)  # of all kv heads of all batches
    batch = kv_head // KV_H
    query_end, key_end = M, N
    if not LISTED:
        query_end = tl.load(lengths + batch)
        key_end = query_end
    first = tile * BN + part * COLS
    row = first + tl.arange(0, COLS)
    k_tile = load_tile(
        k + batch.to(tl.int64) * k_b + (kv_head % KV_H).to(tl.int64) * k_h, first, key_end, k_n, COLS, E, BE, False
    )
    v_tile = load_tile(
        v + batch.to(tl.int64) * v_b + (kv_head % KV_H).to(tl.int64) * v_h, first, key_end, v_n, COLS, F, BF, False
    )
    total_k = tl.zeros((COLS, BE), tl.float32)
    total_v = tl.zeros((COLS, BF), tl.float32)
    column = tl.arange(0, ROWS)
    for shared in range(H // KV_H):
        head_in = (kv_head % KV_H) * (H // KV_H) + shared
        head = batch * H + head_in
        _, begin, whole, end = walk_bounds(bounds, lengths, groups, head, batch, tile, k_tiles, BM, LISTED)
        if not LISTED:
            end = tl.where(tile * BN < key_end, end, 0)
            # The last tile of keys is masked whichever queries it meets.
            whole = tl.where((tile + 1) * BN <= key_end, whole, 0)
        q_base = q + batch.to(tl.int64) * q_b + head_in.to(tl.int64) * q_h
        grad_base = grad + head.to(tl.int64) * M * F
        line = head.to(tl.int64) * M
        for walked in range(begin * STEPS, end * STEPS):
            entry, step = walked // STEPS, walked % STEPS
            met = entry
            if LISTED:
                met = tl.load(entries + 2 * entry)
            query = met * BM + step * ROWS
            inside = query + column < query_end
            q_tile = load_tile(q_base, query, query_end, q_m, ROWS, E, BE, False)
            grad_tile = load_tile(grad_base, query, query_end, F, ROWS, F, BF, False)
            level = tl.load(lse + line + query + column, mask=inside, other=float("inf"))
            share = tl.load(delta + line + query + column, mask=inside, other=0.0)
            weight = tl.exp2(pair(k_tile, q_tile.T, None, PRECISION, UPCAST) * scale - level[None, :])
            change = pair(v_tile, grad_tile.T, None, PRECISION, UPCAST)
            if entry >= whole:
                if LISTED:
                    pattern = patterns + tl.load(entries + 2 * entry + 1).to(tl.int64) * (BM * BN)
                    place = (step * ROWS + column)[None, :] * BN + (part * COLS + tl.arange(0, COLS))[:, None]
                    kept = tl.load(pattern + place) != 0
                else:
                    kept = (inside[None, :]) & ((row < key_end)[:, None])
                weight = tl.where(kept, weight, 0.0)
                if CLEAN:
                    change = tl.where(kept, change, 0.0)
                if CLEAN & 2:
                    q_tile = clean(q_tile, kept, 0)
                    grad_tile = clean(grad_tile, kept, 0)
            total_v = pair(weight.to(grad_tile.dtype), grad_tile, total_v, PRECISION, UPCAST)
            change = weight * (change - share[None, :])
            total_k = pair(change.to(q_tile.dtype), q_tile, total_k, PRECISION, UPCAST)
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

"""The Triton kernels of ragged products: rows sorted by expert, each group of them times the matrix of its expert.

``count_routes`` and ``place_routes`` sort rows by expert in two small passes; ``ragged_product`` multiplies, reading
rows where they lie or after ``sort_rows``; ``ragged_outer`` makes the gradients of the matrices; ``join_answers`` and
``join_gradients`` sum over the visits of a token. How many rows an expert has is read on the device, by the very
programs that multiply them, so the host never waits for the routing. This module imports Triton.
"""

# ruff: noqa: ANN001, ANN201, ANN202, N803, PLR0913, PLR0917, SIM102 - Triton's own conventions
# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "INTERPRETED",
    "count_routes",
    "join_answers",
    "join_gradients",
    "place_routes",
    "ragged_outer",
    "ragged_product",
    "sort_rows",
]


# ---------------------------------------------------------------------- routing


@triton.jit
def _asked(ids, rows, BLOCK: tl.constexpr, EXPERTS: tl.constexpr):
    """Return the rows of this program, and which expert each asks, one-hot (BLOCK, EXPERTS)."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(ids + row, mask=row < rows, other=-1).to(tl.int32)
    return row, expert, (expert[:, None] == tl.arange(0, EXPERTS)[None, :]).to(tl.int32)


@triton.jit(do_not_specialize=["rows"])
def count_routes(ids, counts, rows, experts, BLOCK: tl.constexpr, EXPERTS: tl.constexpr):
    """Count the rows of each expert in each block of rows: counts (experts, blocks)."""
    _, _, asked = _asked(ids, rows, BLOCK, EXPERTS)
    expert = tl.arange(0, EXPERTS)
    place = counts + expert * tl.num_programs(0) + tl.program_id(0)
    tl.store(place, tl.sum(asked, 0), mask=expert < experts)


@triton.jit(do_not_specialize=["rows"])
def place_routes(ids, counts, ends, order, rows, experts, BLOCK: tl.constexpr, EXPERTS: tl.constexpr):
    """Write the rows by expert, in their own order: order (rows,); `ends` is the running sum of counts."""
    row, expert, asked = _asked(ids, rows, BLOCK, EXPERTS)
    number = tl.arange(0, EXPERTS)
    block = number * tl.num_programs(0) + tl.program_id(0)
    inside = number < experts
    begin = tl.load(ends + block, mask=inside, other=0) - tl.load(counts + block, mask=inside, other=0)
    before = tl.cumsum(asked, 0) - asked + begin[None, :]
    place = tl.sum(asked * before, 1)
    tl.store(order + place, row, mask=(row < rows) & (expert >= 0) & (expert < experts))


@triton.jit
def _groups(ends, experts, blocks, SIZE: tl.constexpr, EXPERTS: tl.constexpr):
    """Return for each expert its first row, the end of its rows, and the end of its tiles of SIZE rows."""
    number = tl.arange(0, EXPERTS)
    end = tl.load(ends + (number + 1) * blocks - 1, mask=number < experts, other=0)
    begin = tl.load(ends + number * blocks - 1, mask=(number > 0) & (number < experts), other=0)
    return begin, end, tl.cumsum(tl.cdiv(end - begin, SIZE), 0)


@triton.jit
def _pick(values, number, chosen):
    """Return the element of a vector at `chosen`."""
    return tl.sum(tl.where(number == chosen, values, 0), 0)


# ---------------------------------------------------------------------- products


@triton.jit
def sort_rows(x, order, out, rows, visits, K, x_stride, ROWS: tl.constexpr, BK: tl.constexpr):
    """Copy the rows of x into the order of their experts: out (rows, K)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BK + tl.arange(0, BK)
    inside = row < rows
    token = (tl.load(order + row, mask=inside, other=0) // visits).to(tl.int64)
    both = inside[:, None] & (column < K)[None, :]
    moved = tl.load(x + token[:, None] * x_stride + column[None, :], mask=both, other=0.0)
    tl.store(out + row.to(tl.int64)[:, None] * K + column[None, :], moved, mask=both)


@triton.jit
def _multiply(
    x, a_rows, begin, matrix, offset, first_column, R, C, stride,
    BM: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr, ACROSS: tl.constexpr, WHOLE: tl.constexpr,
    SPAN: tl.constexpr, SORTED: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Return BM rows times BC columns of a matrix, summed over R.

    ACROSS says that the matrix lies with its columns as rows (C, R), as a weight does; otherwise it is (R, C).
    """
    total = tl.zeros((BM, BC), tl.float32)
    lane = tl.arange(0, BR)
    column = first_column + tl.arange(0, BC)
    for step in range(0, R, BR):
        depth = step + lane
        if SORTED:
            a = x.load([begin, step])
        elif WHOLE:
            a = tl.load(a_rows + depth[None, :])
        else:
            a = tl.load(a_rows + depth[None, :], mask=(depth < R)[None, :], other=0.0)
        if SPAN:
            line = (offset % (R // BR)).to(tl.int32) + step // BR
            b = matrix.load([(offset // (R // BR)).to(tl.int32) + first_column, line, 0]).reshape(BC, BR).T
        elif ACROSS:
            place = matrix + column.to(tl.int64)[:, None] * stride + depth[None, :]
            if WHOLE:
                b = tl.load(place).T
            else:
                b = tl.load(place, mask=(column < C)[:, None] & (depth < R)[None, :], other=0.0).T
        else:
            place = matrix + depth.to(tl.int64)[:, None] * stride + column[None, :]
            if WHOLE:
                b = tl.load(place)
            else:
                b = tl.load(place, mask=(depth < R)[:, None] & (column < C)[None, :], other=0.0)
        if UPCAST:  # the interpreter multiplies bf16 wrongly
            a, b = a.to(tl.float32), b.to(tl.float32)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    return total


@triton.jit
def _product(
    x, matrix, offset, bias, gates, order, out, begin, end, first_column, R, C, x_stride, w_stride, visits,
    BM: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr, ACROSS: tl.constexpr, WHOLE: tl.constexpr,
    SPAN: tl.constexpr, SORTED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_GATES: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Compute one tile of `out`, whose rows are in the order of visits."""
    row = begin + tl.arange(0, BM)
    # Rows beyond the last repeat it: cheaper than a mask, and they are not stored.
    visit = tl.load(order + tl.minimum(row, end - 1))
    a_rows = x
    if not SORTED:
        a_rows = x + (visit // visits).to(tl.int64)[:, None] * x_stride
    total = _multiply(
        x, a_rows, begin, matrix, offset, first_column, R, C, w_stride, BM, BC, BR, ACROSS, WHOLE, SPAN, SORTED,
        PRECISION, UPCAST,
    )  # fmt: skip
    column = first_column + tl.arange(0, BC)
    if HAS_BIAS:
        total += tl.load(bias + column, mask=column < C, other=0.0).to(tl.float32)[None, :]
    if HAS_GATES:
        total *= tl.load(gates + visit).to(tl.float32)[:, None]
    place = out + visit.to(tl.int64)[:, None] * C + column[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=(row < end)[:, None] & (column < C)[None, :])


@triton.jit
def _narrowed(
    x, matrix, half_matrix, offset, bias, gates, order, out, begin, end, first_column, R, C, x_stride, w_stride, visits,
    BM: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr, ACROSS: tl.constexpr, WHOLE: tl.constexpr,
    SPAN: tl.constexpr, SORTED: tl.constexpr, NARROW: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_GATES: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Compute one tile of `out`, in half the width where the last columns fit into it."""
    if NARROW:
        if C - first_column > BC // 2:
            _product(
                x, matrix, offset, bias, gates, order, out, begin, end, first_column, R, C, x_stride, w_stride, visits,
                BM, BC, BR, ACROSS, WHOLE, SPAN, SORTED, HAS_BIAS, HAS_GATES, PRECISION, UPCAST,
            )  # fmt: skip
        else:
            _product(
                x, half_matrix, offset, bias, gates, order, out, begin, end, first_column, R, C, x_stride, w_stride,
                visits, BM, BC // 2, BR, ACROSS, WHOLE, SPAN, SORTED, HAS_BIAS, HAS_GATES, PRECISION, UPCAST,
            )  # fmt: skip
    else:
        _product(
            x, matrix, offset, bias, gates, order, out, begin, end, first_column, R, C, x_stride, w_stride, visits,
            BM, BC, BR, ACROSS, WHOLE, SPAN, SORTED, HAS_BIAS, HAS_GATES, PRECISION, UPCAST,
        )  # fmt: skip


@triton.jit
def ragged_product(
    x, half_x, weights, span, half_span, biases, gates, order, ends, out, experts, blocks, visits, R, C, x_stride,
    w_stride, BM: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr, EXPERTS: tl.constexpr, ACROSS: tl.constexpr,
    WHOLE: tl.constexpr, SPAN: tl.constexpr, SORTED: tl.constexpr, HALVES: tl.constexpr, NARROW: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_GATES: tl.constexpr, ALIGNED: tl.constexpr, PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Compute all tiles of out (rows, C) that fall to this program.

    `weights` and `biases` hold the address of each expert's. With SPAN, `span` describes the memory of all weights, and
    `weights` says where in it each begins, in steps of BR; with SORTED, `x` describes rows in the order of experts.
    Those of halves copy half as much at a time.
    """
    number = tl.arange(0, EXPERTS)
    begins, row_ends, tile_ends = _groups(ends, experts, blocks, BM, EXPERTS)
    across = tl.cdiv(C, BC)
    for tile in tl.range(tl.program_id(0), tl.max(tile_ends, 0) * across, tl.num_programs(0)):
        row_tile = tile // across
        first_column = (tile % across) * BC
        expert = tl.sum((tile_ends <= row_tile).to(tl.int32), 0)
        end = _pick(row_ends, number, expert)
        begin = _pick(begins, number, expert)
        tiles_before = _pick(tile_ends, number, expert) - tl.cdiv(end - begin, BM)
        begin += (row_tile - tiles_before) * BM
        offset = tl.load(weights + expert)
        matrix, half_matrix = span, half_span
        if not SPAN:
            matrix = offset.to(tl.pointer_type(out.dtype.element_ty))
            if ALIGNED:
                matrix = tl.multiple_of(matrix, 16)
            half_matrix = matrix
        bias = out
        if HAS_BIAS:
            bias = tl.load(biases + expert).to(tl.pointer_type(out.dtype.element_ty))
        if HALVES:
            if end - begin > BM // 2:
                _narrowed(
                    x, matrix, half_matrix, offset, bias, gates, order, out, begin, end, first_column, R, C, x_stride,
                    w_stride, visits, BM, BC, BR, ACROSS, WHOLE, SPAN, SORTED, NARROW, HAS_BIAS, HAS_GATES, PRECISION,
                    UPCAST,
                )  # fmt: skip
            else:
                _narrowed(
                    half_x, matrix, half_matrix, offset, bias, gates, order, out, begin, end, first_column, R, C,
                    x_stride, w_stride, visits, BM // 2, BC, BR, ACROSS, WHOLE, SPAN, SORTED, NARROW, HAS_BIAS,
                    HAS_GATES, PRECISION, UPCAST,
                )  # fmt: skip
        else:
            _narrowed(
                x, matrix, half_matrix, offset, bias, gates, order, out, begin, end, first_column, R, C, x_stride,
                w_stride, visits, BM, BC, BR, ACROSS, WHOLE, SPAN, SORTED, NARROW, HAS_BIAS, HAS_GATES, PRECISION,
                UPCAST,
            )  # fmt: skip


@triton.jit
def ragged_outer(
    grad, x, gates, order, ends, grad_weights, grad_biases, blocks, visits, N, K, grad_stride, x_stride,
    BN: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_GATES: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Compute one tile of the gradient of one weight: the sum over its rows of gate * grad^T x, (experts, N, K)."""
    wide, high = tl.cdiv(K, BK), tl.cdiv(N, BN)
    program = tl.program_id(0)
    expert = program // (wide * high)
    n = (program // wide) % high * BN + tl.arange(0, BN)
    k_tile = program % wide
    k = k_tile * BK + tl.arange(0, BK)
    end = tl.load(ends + (expert + 1) * blocks - 1)
    begin = tl.load(ends + expert * blocks - 1, mask=expert > 0, other=0)
    total = tl.zeros((BN, BK), tl.float32)
    bias_total = tl.zeros((BN,), tl.float32)
    lane = tl.arange(0, BR)
    for first in range(begin, end, BR):
        row = first + lane
        inside = row < end
        visit = tl.load(order + row, mask=inside, other=0)
        token = (visit // visits).to(tl.int64)
        left = tl.load(grad + token[:, None] * grad_stride + n[None, :], mask=inside[:, None] & (n < N)[None, :], other=0.0)  # fmt: skip  # noqa: E501
        right = tl.load(x + token[:, None] * x_stride + k[None, :], mask=inside[:, None] & (k < K)[None, :], other=0.0)
        if HAS_GATES:
            share = tl.load(gates + visit, mask=inside, other=0.0).to(tl.float32)
            left = (left.to(tl.float32) * share[:, None]).to(grad.dtype.element_ty)
        if HAS_BIAS:
            bias_total += tl.sum(left.to(tl.float32), 0)
        if UPCAST:
            left, right = left.to(tl.float32), right.to(tl.float32)
        total = tl.dot(left.T, right, total, input_precision=PRECISION)
    place = grad_weights + (expert.to(tl.int64) * N + n)[:, None] * K + k[None, :]
    tl.store(place, total.to(grad_weights.dtype.element_ty), mask=(n < N)[:, None] & (k < K)[None, :])
    if HAS_BIAS:
        if k_tile == 0:
            tl.store(grad_biases + expert.to(tl.int64) * N + n, bias_total.to(grad_biases.dtype.element_ty), mask=n < N)


# ---------------------------------------------------------------------- sums over the visits of a token


@triton.jit
def join_answers(answers, y, N, VISITS: tl.constexpr, BN: tl.constexpr):
    """Compute y (tokens, N), the sum of answers (tokens, VISITS, N)."""
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    token = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BN,), tl.float32)
    for visit in tl.static_range(VISITS):
        place = answers + (token * VISITS + visit) * N + column
        total += tl.load(place, mask=column < N, other=0.0).to(tl.float32)
    tl.store(y + token * N + column, total.to(y.dtype.element_ty), mask=column < N)


@triton.jit
def join_gradients(
    parts, x, grad, gates, ids, biases, grad_x, grad_gates, N, K, x_stride, grad_stride,
    VISITS: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_GATES: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a token and of its gates from parts (tokens, VISITS, K), each grad times a weight."""
    token = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    for first in range(0, K, BLOCK):
        column = first + lane
        inside = column < K
        total = tl.zeros((BLOCK,), tl.float32)
        for visit in tl.static_range(VISITS):
            part = tl.load(parts + (token * VISITS + visit) * K + column, mask=inside, other=0.0).to(tl.float32)
            if HAS_GATES:
                part *= tl.load(gates + token * VISITS + visit).to(tl.float32)
            total += part
        tl.store(grad_x + token * K + column, total.to(grad_x.dtype.element_ty), mask=inside)
    if HAS_GATES:
        for visit in range(VISITS):
            share = tl.zeros((BLOCK,), tl.float32)
            for first in range(0, K, BLOCK):
                column = first + lane
                inside = column < K
                part = tl.load(parts + (token * VISITS + visit) * K + column, mask=inside, other=0.0).to(tl.float32)
                share += part * tl.load(x + token * x_stride + column, mask=inside, other=0.0).to(tl.float32)
            if HAS_BIAS:
                expert = tl.load(ids + token * VISITS + visit)
                bias = tl.load(biases + expert).to(tl.pointer_type(x.dtype.element_ty))
                for first in range(0, N, BLOCK):
                    column = first + lane
                    inside = column < N
                    part = tl.load(grad + token * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
                    share += part * tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
            place = grad_gates + token * VISITS + visit
            tl.store(place, tl.sum(share, 0).to(grad_gates.dtype.element_ty))


INTERPRETED = not isinstance(ragged_product, triton.runtime.JITFunction)
"""Whether Triton's interpreter runs the kernels, on tensors of the CPU."""

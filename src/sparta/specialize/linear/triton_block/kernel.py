"""The Triton kernel of a block-sparse linear operator.

One program computes tokens × one block row of the weight at a time: it walks over the kept blocks of that row and reads
the matching columns of x. The column of the next block is loaded one block early, so that the pipeline of tile loads
never waits for an index. This module imports Triton; import it only to run a kernel.
"""

# ruff: noqa: ANN001, ANN201, ANN202, N803, N806, PLR0913, PLR0917, SIM108 - Triton's own conventions
# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["INTERPRETED", "block_linear"]


@triton.jit
def _zeros(BLOCK_M: tl.constexpr, H: tl.constexpr, WEIGHT_FIRST: tl.constexpr):
    if WEIGHT_FIRST:
        total = tl.zeros((H, BLOCK_M), tl.float32)
    else:
        total = tl.zeros((BLOCK_M, H), tl.float32)
    return total


@triton.jit
def _add_product(total, a, b, WEIGHT_FIRST: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """Return total + a b^T, or its transpose with the weight b as the left operand."""
    if UPCAST:  # the interpreter multiplies bf16 wrongly
        a, b = a.to(tl.float32), b.to(tl.float32)
    elif a.dtype != b.dtype:  # a weight in few bits
        b = b.to(a.dtype)
    if WEIGHT_FIRST:
        total = tl.dot(b, a.T, total, input_precision=PRECISION)
    else:
        total = tl.dot(a, b.T, total, input_precision=PRECISION)
    return total


@triton.jit
def _sum_by_descriptor(
    x, values, columns, begin, end, column, first_token, BLOCK_M: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    BLOCKS: tl.constexpr, WEIGHT_FIRST: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Return x W^T for one tile; x and values are tensor descriptors, `column` is the first one."""
    total = _zeros(BLOCK_M, H, WEIGHT_FIRST)
    for step in range(begin, end):
        for block in tl.static_range(BLOCKS):
            following = tl.load(columns + step * BLOCKS + block + 1)
            a = x.load([first_token, column])
            b = values.load([step * H, block * W])
            total = _add_product(total, a, b, WEIGHT_FIRST, PRECISION, UPCAST)
            column = following
    return total


@triton.jit
def _sum_by_pointer(
    x, values, columns, begin, end, first_token, M, K, x_stride, BLOCK_M: tl.constexpr, H: tl.constexpr,
    W: tl.constexpr, BLOCKS: tl.constexpr, WEIGHT_FIRST: tl.constexpr, WHOLE: tl.constexpr, PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Return x W^T for one tile; x and values are pointers, and the blocks of a step are read side by side."""
    total = _zeros(BLOCK_M, H, WEIGHT_FIRST)
    STEP: tl.constexpr = W * BLOCKS
    token = first_token + tl.arange(0, BLOCK_M)
    # Rows beyond the last repeat it: cheaper than a mask, and they are not stored.
    x_rows = x + tl.minimum(token, M - 1).to(tl.int64)[:, None] * x_stride
    lane = tl.arange(0, STEP)
    w_tile = values + begin.to(tl.int64) * (H * STEP) + tl.arange(0, H)[:, None] * STEP + lane[None, :]
    column = tl.load(columns + begin * BLOCKS + lane // W)
    for step in range(begin, end):
        following = tl.load(columns + (step + 1) * BLOCKS + lane // W)
        # Said on the sum, because what is known of a value is lost when a loop carries it.
        k = tl.multiple_of(tl.max_contiguous(column + lane % W, W), W)
        if WHOLE:
            a = tl.load(x_rows + k[None, :])
        else:
            a = tl.load(x_rows + k[None, :], mask=k[None, :] < K, other=0.0)
        b = tl.load(w_tile)
        total = _add_product(total, a, b, WEIGHT_FIRST, PRECISION, UPCAST)
        w_tile += H * STEP
        column = following
    return total


@triton.jit
def _ask_early(stored, begin, end, BYTES: tl.constexpr, LINES: tl.constexpr, MOST: tl.constexpr):
    """Have the kept blocks of a row come as far as the L2 cache; what is still written to them is seen."""
    first = stored.to(tl.int64) + begin.to(tl.int64) * BYTES
    count = (end - begin) * BYTES
    place = tl.arange(0, LINES) * 128
    for more in tl.range(0, tl.minimum(count, MOST), LINES * 128, num_stages=1):
        address = first + tl.minimum(more + place, count - 128)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1];\nmov.u32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def _gelu(x, KIND: tl.constexpr):
    """Return GELU; for results of 16 bits as the C++ kernels have it, right to a twentieth of what rounding changes."""
    square = x * x
    if tl.bfloat16 == KIND:
        power = 2.19671138e-6 * square - 6.24397535e-5
        power = power * square - 5.62693442e-4
        power = power * square + 0.105785592
        power = power * square + 2.30163852
        y = x / (1.0 + tl.exp2(-x * power))
    elif tl.float16 == KIND:
        power = 4.84855148e-9 * square - 3.64983450e-7
        power = power * square + 1.10426617e-5
        power = power * square - 1.55515992e-4
        power = power * square - 1.12950840e-4
        power = power * square + 0.104871727
        power = power * square + 2.30218829
        y = x / (1.0 + tl.exp2(-x * power))
    else:
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    return y


@triton.jit
def _finish(
    total, bias, residual, x_scale, w_scale, token, channel, inside, M, N, ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, X_SCALED: tl.constexpr, W_SCALED: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """Return ``activation(total * scales + bias) + residual`` in float32."""
    if X_SCALED:
        total *= tl.load(x_scale + token, mask=token < M, other=0.0)[:, None]
    if W_SCALED:
        total *= tl.load(w_scale + channel, mask=channel < N, other=0.0)[None, :]
    if HAS_BIAS:
        total += tl.load(bias + channel, mask=channel < N, other=0.0).to(tl.float32)[None, :]
    if ACTIVATION == "relu":
        total = tl.where(total < 0, 0.0, total)  # keeps NaN
    elif ACTIVATION == "gelu":
        total = _gelu(total, KIND)
    elif ACTIVATION == "silu":
        total = total / (1.0 + tl.exp(-total))
    if HAS_RESIDUAL:
        place = residual + token.to(tl.int64)[:, None] * N + channel[None, :]
        total += tl.load(place, mask=inside, other=0.0).to(tl.float32)
    return total


@triton.jit(do_not_specialize=["M", "token_tiles", "tiles"])
def block_linear(
    x, values, columns, schedule, stored, bias, residual, x_scale, w_scale, y, M, N, K, x_stride, block_rows,
    token_tiles, tiles, BLOCK_M: tl.constexpr, H: tl.constexpr, W: tl.constexpr, BLOCKS: tl.constexpr,
    GROUP: tl.constexpr, TMA: tl.constexpr, WEIGHT_FIRST: tl.constexpr, WHOLE: tl.constexpr, FLATTEN: tl.constexpr,
    EARLY: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    X_SCALED: tl.constexpr, W_SCALED: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Compute all tiles of y that fall to this program; `stored` are the values again, as a pointer."""
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLATTEN):
        group = tile // (GROUP * block_rows)
        inside_group = tile - group * (GROUP * block_rows)
        height = tl.minimum(token_tiles - group * GROUP, GROUP)
        first_token = (group * GROUP + inside_group % height) * BLOCK_M
        entry = schedule + (inside_group // height) * 4
        block_row, begin, end, column = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
        if EARLY:
            # The index is older than the kernel before this one; x, the weight and the memory of y may not be.
            tl.extra.cuda.gdc_launch_dependents()
            BYTES: tl.constexpr = H * W * BLOCKS * stored.dtype.element_ty.primitive_bitwidth // 8
            if inside_group % height + group == 0:  # others would ask for the same
                _ask_early(stored, begin, end, BYTES, 128, 65536)
            tl.extra.cuda.gdc_wait()
        if TMA:
            total = _sum_by_descriptor(
                x, values, columns, begin, end, column, first_token, BLOCK_M, H, W, BLOCKS, WEIGHT_FIRST, PRECISION,
                UPCAST,
            )  # fmt: skip
        else:
            total = _sum_by_pointer(
                x, values, columns, begin, end, first_token, M, K, x_stride, BLOCK_M, H, W, BLOCKS, WEIGHT_FIRST, WHOLE,
                PRECISION, UPCAST,
            )  # fmt: skip
        if WEIGHT_FIRST:
            total = total.T
        token = first_token + tl.arange(0, BLOCK_M)
        channel = block_row * H + tl.arange(0, H)
        inside = (token < M)[:, None] & (channel < N)[None, :]
        total = _finish(
            total, bias, residual, x_scale, w_scale, token, channel, inside, M, N, ACTIVATION, HAS_BIAS, HAS_RESIDUAL,
            X_SCALED, W_SCALED, y.dtype if TMA == 2 else y.dtype.element_ty,
        )  # fmt: skip
        if TMA == 2:
            y.store([first_token, block_row * H], total.to(y.dtype))
        else:
            place = y + token.to(tl.int64)[:, None] * N + channel[None, :]
            tl.store(place, total.to(y.dtype.element_ty), mask=inside)


INTERPRETED = not isinstance(block_linear, triton.runtime.JITFunction)
"""Whether Triton's interpreter runs the kernel, on tensors of the CPU."""

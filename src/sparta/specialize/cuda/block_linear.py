"""The Triton kernel of a block-sparse linear operator, and its launch.

One program computes tokens × one block row of the weight at a time: it walks over the kept blocks of that row and reads
the matching columns of x. The one idea to know: the column of the next step is loaded one step early, so that the
pipeline of tile loads never waits for an index. This module imports Triton; import it only to run a kernel.
"""

# ruff: noqa: ANN001, ANN202, N803, PLR0913 - Triton's own conventions
# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator, no-untyped-call"

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from sparta.specialize.cuda.tile import BlockTile

__all__ = ["BlockLinearLauncher"]


@triton.jit
def _sum_by_descriptor(
    x, values, columns, begin, end, first_token, BLOCK_M: tl.constexpr, H: tl.constexpr, STEP: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):
    """Return x W^T for one tile; x and values are tensor descriptors."""
    if WEIGHT_FIRST:
        total = tl.zeros((H, BLOCK_M), tl.float32)
    else:
        total = tl.zeros((BLOCK_M, H), tl.float32)
    column = tl.load(columns + begin)
    for step in range(begin, end):
        following = tl.load(columns + step + 1)
        a = x.load([first_token, column])
        b = values.load([step * H, 0])
        if UPCAST:
            a, b = a.to(tl.float32), b.to(tl.float32)
        if WEIGHT_FIRST:
            total = tl.dot(b, a.T, total, input_precision=PRECISION)
        else:
            total = tl.dot(a, b.T, total, input_precision=PRECISION)
        column = following
    return total


@triton.jit
def _sum_by_pointer(
    x, values, columns, begin, end, first_token, M, K, x_stride, BLOCK_M: tl.constexpr, H: tl.constexpr,
    W: tl.constexpr, STEP: tl.constexpr, WEIGHT_FIRST: tl.constexpr, WHOLE: tl.constexpr, PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Return x W^T for one tile; x and values are pointers."""
    if WEIGHT_FIRST:
        total = tl.zeros((H, BLOCK_M), tl.float32)
    else:
        total = tl.zeros((BLOCK_M, H), tl.float32)
    BLOCKS: tl.constexpr = STEP // W
    token = first_token + tl.arange(0, BLOCK_M)
    # Rows beyond the last repeat it: cheaper than a mask, and they are not stored.
    x_rows = x + tl.minimum(token, M - 1).to(tl.int64)[:, None] * x_stride
    lane = tl.arange(0, STEP)
    w_tile = values + begin.to(tl.int64) * (H * STEP) + tl.arange(0, H)[:, None] * STEP + lane[None, :]
    column = tl.load(columns + begin * BLOCKS + lane // W)
    for step in range(begin, end):
        following = tl.load(columns + (step + 1) * BLOCKS + lane // W)
        k = tl.max_contiguous(tl.multiple_of(column, W) + lane % W, W)
        if WHOLE:
            a = tl.load(x_rows + k[None, :])
        else:
            a = tl.load(x_rows + k[None, :], mask=k[None, :] < K, other=0.0)
        b = tl.load(w_tile)
        w_tile += H * STEP
        if UPCAST:
            a, b = a.to(tl.float32), b.to(tl.float32)
        if WEIGHT_FIRST:
            total = tl.dot(b, a.T, total, input_precision=PRECISION)
        else:
            total = tl.dot(a, b.T, total, input_precision=PRECISION)
        column = following
    return total


@triton.jit
def _finish(total, bias, residual, token, channel, inside, N, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr,
            HAS_RESIDUAL: tl.constexpr):  # fmt: skip
    """Return ``activation(total + bias) + residual`` in float32."""
    if HAS_BIAS:
        total += tl.load(bias + channel, mask=channel < N, other=0.0).to(tl.float32)[None, :]
    if ACTIVATION == "relu":
        total = tl.where(total < 0, 0.0, total)  # keeps NaN
    elif ACTIVATION == "gelu":
        total = 0.5 * total * (1.0 + tl.erf(total * 0.7071067811865476))
    elif ACTIVATION == "silu":
        total = total / (1.0 + tl.exp(-total))
    if HAS_RESIDUAL:
        place = residual + token.to(tl.int64)[:, None] * N + channel[None, :]
        total += tl.load(place, mask=inside, other=0.0).to(tl.float32)
    return total


@triton.jit(do_not_specialize=["M", "token_tiles", "tiles"])
def block_linear(
    x, values, columns, schedule, bias, residual, y, M, N, K, x_stride, block_rows, token_tiles, tiles,
    BLOCK_M: tl.constexpr, H: tl.constexpr, W: tl.constexpr, STEP: tl.constexpr, GROUP: tl.constexpr,
    TMA: tl.constexpr, WEIGHT_FIRST: tl.constexpr, WHOLE: tl.constexpr, FLATTEN: tl.constexpr,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Compute all tiles of y that fall to this program."""
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLATTEN):
        group = tile // (GROUP * block_rows)
        inside_group = tile - group * (GROUP * block_rows)
        height = tl.minimum(token_tiles - group * GROUP, GROUP)
        first_token = (group * GROUP + inside_group % height) * BLOCK_M
        entry = schedule + (inside_group // height) * 3
        block_row, begin, end = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
        if TMA:
            total = _sum_by_descriptor(
                x, values, columns, begin, end, first_token, BLOCK_M, H, STEP, WEIGHT_FIRST, PRECISION, UPCAST
            )
        else:
            total = _sum_by_pointer(
                x, values, columns, begin, end, first_token, M, K, x_stride, BLOCK_M, H, W, STEP, WEIGHT_FIRST, WHOLE,
                PRECISION, UPCAST,
            )  # fmt: skip
        if WEIGHT_FIRST:
            total = total.T
        token = first_token + tl.arange(0, BLOCK_M)
        channel = block_row * H + tl.arange(0, H)
        inside = (token < M)[:, None] & (channel < N)[None, :]
        total = _finish(total, bias, residual, token, channel, inside, N, ACTIVATION, HAS_BIAS, HAS_RESIDUAL)
        place = y + token.to(tl.int64)[:, None] * N + channel[None, :]
        tl.store(place, total.to(y.dtype.element_ty), mask=inside)


_INTERPRETED = not isinstance(block_linear, triton.runtime.JITFunction)


class BlockLinearLauncher:
    """Launches the kernel for one weight shape, tile and epilogue; keeps what Triton compiled, to start it quickly.

    Parameters
    ----------
    shape
        (N, K) of the weight.
    whole
        Whether every stored block lies wholly inside the weight along K, so that columns need no bounds check.
    """

    def __init__(self, shape: tuple[int, int], tile: BlockTile, activation: str | None, *, whole: bool) -> None:
        self.shape, self.tile, self.activation, self.whole = shape, tile, activation, whole
        self._compiled: dict[tuple[Any, ...], Any] = {}
        self._processors: dict[torch.device, int] = {}

    def __call__(self, packed: Sequence[Tensor], x: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        """Return ``activation(x W^T + bias) + residual`` for x (M, K) with unit stride along K."""
        values, columns, schedule = packed
        (outputs, inputs), tile, tokens = self.shape, self.tile, x.shape[0]
        y = torch.empty(tokens, outputs, dtype=x.dtype, device=x.device)
        if y.numel() == 0:
            return y
        stride, itemsize = x.stride(0), x.element_size()
        aligned = x.data_ptr() % 16 == 0
        tma = bool(tile.tma) and aligned and stride * itemsize % 16 == 0
        token_tiles = -(-tokens // tile.tokens)
        tiles = token_tiles * schedule.shape[0]
        a: Any = x
        b: Any = values
        if tma:
            a = TensorDescriptor(x, [tokens, inputs], [stride, 1], [tile.tokens, tile.step])
            b = TensorDescriptor(
                values, [values.shape[0] * tile.height, tile.step], [tile.step, 1], [tile.height, tile.step]
            )
        precision = "tf32" if x.dtype == torch.float32 and _tf32() else "ieee"
        arguments = (
            a, b, columns, schedule, bias, residual, y, tokens, outputs, inputs, stride, schedule.shape[0], token_tiles,
            tiles, tile.tokens, tile.height, tile.width, tile.step, tile.group, tma, bool(tile.weight_first), self.whole,
            tile.ctas > 0, self.activation, bias is not None, residual is not None, precision, _INTERPRETED,
        )  # fmt: skip
        grid = (min(tiles, tile.ctas * self._count(x.device)) if tile.ctas else tiles, 1, 1)
        if _INTERPRETED:
            block_linear[grid](*arguments)
            return y
        key = (
            x.device, x.dtype, aligned, stride % 16, tma, precision,
            bias is None or bias.data_ptr() % 16, residual is None or residual.data_ptr() % 16,
        )  # fmt: skip
        with torch.cuda.device_of(x):
            compiled = self._compiled.get(key)
            if compiled is None:
                self._compiled[key] = block_linear[grid](*arguments, num_warps=tile.warps, num_stages=tile.stages)
            else:
                compiled[grid](*arguments)
        return y

    def _count(self, device: torch.device) -> int:
        """Return the number of multiprocessors."""
        if device not in self._processors:
            on_cuda = device.type == "cuda"
            self._processors[device] = torch.cuda.get_device_properties(device).multi_processor_count if on_cuda else 4
        return self._processors[device]


def _tf32() -> bool:
    """Return whether torch multiplies float32 in TF32."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"

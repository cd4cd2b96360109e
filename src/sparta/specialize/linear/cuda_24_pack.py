"""The Triton kernels that pack a 2:4 weight for ``cuda-24-matrix``: what training does in every step.

They read the weight once and write values and places where
:class:`~sparta.specialize.linear.cuda_24_matrix_layout.MatrixLayout` has them: one takes any strides; the other packs a
weight and its transpose, of 16 bits, together. This module imports Triton; import it only to run a kernel.
"""

# ruff: noqa: ANN001, ANN201, ANN202, N803, N806, PLR0913, PLR0917 - Triton's own conventions
# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparta.specialize.cuda.launcher import Launcher

__all__ = ["INTERPRETED", "pack_both", "pack_both_on_gpu", "pack_on_gpu", "pack_pairs"]


@triton.jit
def pack_pairs(
    weight, places, selectors, packed, N, K, row_stride, column_stride, steps, ITEMS: tl.constexpr, REST: tl.constexpr
):  # fmt: skip
    """Pack one step of one slab of 64 outputs: ITEMS values of each output, then REST elements of places."""
    number = tl.program_id(0).to(tl.int64)
    slab, step = number // steps, number % steps
    line, item = tl.arange(0, 64), tl.arange(0, ITEMS)
    row, group = slab * 64 + line, step * (ITEMS // 2) + item // 2
    # Two bits for each of two places, then a bit for each that says whether it is live.
    place = tl.load(places + row[:, None] * (steps * (ITEMS // 2)) + group[None, :]).to(tl.int32)
    which = (item % 2)[None, :]
    column = group[None, :] * 4 + ((place >> (which * 2)) & 3)
    inside = (((place >> (which + 4)) & 1) != 0) & (row < N)[:, None] & (column < K)
    values = tl.load(weight + row[:, None] * row_stride + column * column_stride, mask=inside, other=0)
    HALF: tl.constexpr = ITEMS // 4  # elements of 16 bytes
    half = ((item // HALF) % 2)[None, :] ^ ((line // 4) % 2)[:, None]
    at = (item // (2 * HALF) * (128 * HALF) + item % HALF)[None, :] + line[:, None] * (2 * HALF) + half * HALF
    target = packed + number * (64 * ITEMS + REST)
    tl.store(target + at, values)
    rest = tl.arange(0, REST)
    tl.store(target + 64 * ITEMS + rest, tl.load(selectors + number * REST + rest))


@triton.jit
def live_pair(place, first, second):
    """Return two values of 16 bits, 0 where they are not live, as one of 32."""
    low = tl.where((place >> 4) & 1 != 0, first & 0xFFFF, 0)
    return low | (tl.where((place >> 5) & 1 != 0, second & 0xFFFF, 0) << 16)


@triton.jit
def store_chunk(packed, number, pairs, line, quarter, inner, selectors):
    """Store a step of a slab: pairs (64, 4, 4) of live values of each output, and then the places."""
    target = packed + number * 1152
    half = (quarter % 2) ^ ((line // 4) % 2)
    tl.store(target + (quarter // 2 * 512 + line * 8 + half * 4) + inner, pairs)
    rest = tl.arange(0, 128)
    tl.store(target + 1024 + rest, tl.load(selectors + number * 128 + rest))


@triton.jit
def pack_both(
    weight, fours, places, selectors, packed, places_t, selectors_t, packed_t, N, K, steps, steps_t, blocks
):  # fmt: skip
    """Pack 64 rows and 64 columns of the weight, and the same as columns and rows of the transposed one.

    `fours` are the same weight, in integers of four neighbours of a row.
    """
    number = tl.program_id(0).to(tl.int64)
    upper, left = number // blocks, number % blocks
    line = tl.arange(0, 64)[:, None, None]
    quarter, inner = tl.arange(0, 4)[None, :, None], tl.arange(0, 4)[None, None, :]
    group = quarter * 4 + inner
    if left < steps:
        row, four = upper * 64 + line, left * 16 + group
        place = tl.load(places + row * (steps * 16) + four).to(tl.int32)
        word = tl.load(fours + row * (K // 4) + four, mask=(row < N) & (four < K // 4), other=0)
        first = (word >> ((place & 3) * 16).to(tl.int64)).to(tl.int32)
        second = (word >> (((place >> 2) & 3) * 16).to(tl.int64)).to(tl.int32)
        pairs = live_pair(place, first, second)
        store_chunk(packed, upper * steps + left, pairs, line, quarter, inner, selectors)
    if upper < steps_t:
        column, row = left * 64 + line, upper * 64 + group * 4
        place = tl.load(places_t + column * (steps_t * 16) + (upper * 16 + group)).to(tl.int32)
        first = tl.zeros((64, 4, 4), tl.int32)
        second = first
        for j in tl.static_range(4):
            value = tl.load(weight + (row + j) * K + column, mask=(row < N) & (column < K), other=0).to(tl.int32)
            first = tl.where((place & 3) == j, value, first)
            second = tl.where(((place >> 2) & 3) == j, value, second)
        pairs = live_pair(place, first, second)
        store_chunk(packed_t, left * steps_t + upper, pairs, line, quarter, inner, selectors_t)


INTERPRETED = not isinstance(pack_pairs, triton.runtime.JITFunction)
_pack = Launcher(pack_pairs, interpreted=INTERPRETED)
_pack_both = Launcher(pack_both, interpreted=INTERPRETED)


def pack_on_gpu(weight: Tensor, places: Tensor, selectors: Tensor) -> Tensor:
    """Return the packed weight as bytes (slabs, steps, ...).

    Parameters
    ----------
    weight
        (N, K), integers of 8 or 16 bits, of any strides.
    places
        uint8 (slabs * 64, groups): two bits for each of two places in a group, then a bit for each that is live.
    selectors
        uint8 (slabs, steps, ...), as they stand after the values.
    """
    slabs, steps, rest = selectors.shape
    size = weight.element_size()
    packed = torch.empty((slabs, steps, 4096 + rest), dtype=torch.uint8, device=weight.device)
    arguments = (
        weight, places, selectors.view(weight.dtype), packed.view(weight.dtype), *weight.shape, *weight.stride(), steps,
        64 // size, rest // size,
    )  # fmt: skip
    _pack(slabs * steps, arguments, weight.device, {"num_warps": 4})
    return packed


def pack_both_on_gpu(
    weight: Tensor, index: tuple[Tensor, Tensor], transposed: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Return a weight and its transpose, packed, as :func:`pack_on_gpu` packs each of them.

    Parameters
    ----------
    weight
        (N, K), integers of 16 bits, contiguous; N and K are multiples of 4.
    index, transposed
        Places and selectors of the weight and of its transpose, as :func:`pack_on_gpu` takes them.
    """
    both = [
        torch.empty((*selectors.shape[:2], 4608), dtype=torch.uint8, device=weight.device)
        for _, selectors in (index, transposed)
    ]
    (rows, steps), (blocks, steps_t) = (packed.shape[:2] for packed in both)
    first, second = (
        (places, selectors.view(torch.int32), packed.view(torch.int32))
        for (places, selectors), packed in zip((index, transposed), both, strict=True)
    )
    arguments = (weight, weight.view(torch.int64), *first, *second, *weight.shape, steps, steps_t, blocks)
    _pack_both(rows * blocks, arguments, weight.device, {"num_warps": 4})
    return both[0], both[1]

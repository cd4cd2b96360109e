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
def store_pairs(tile, places, selectors, packed, number, rows, group, steps):
    """Store one step of a slab: of a tile (64, 64) of 16 bits the live pairs of every four columns, then the places."""
    place = tl.load(places + rows[:, None] * (steps * 16) + group[None, :]).to(tl.int32)
    fours, which = tl.reshape(tile.to(tl.int32) & 0xFFFF, (64, 16, 4)), tl.arange(0, 4)[None, None, :]
    first = tl.sum(tl.where((place & 3)[:, :, None] == which, fours, 0), 2)
    second = tl.sum(tl.where(((place >> 2) & 3)[:, :, None] == which, fours, 0), 2)
    pairs = tl.where((place & 16) != 0, first, 0) | (tl.where((place & 32) != 0, second, 0) << 16)
    line, four = tl.arange(0, 64)[:, None], tl.arange(0, 16)[None, :]
    half = (four // 4 % 2) ^ (line // 4 % 2)
    target = packed + number * 1152
    tl.store(target + four // 8 * 512 + line * 8 + half * 4 + four % 4, pairs)
    rest = tl.arange(0, 128)
    tl.store(target + 1024 + rest, tl.load(selectors + number * 128 + rest))


@triton.jit
def pack_both(weight, places, selectors, packed, places_t, selectors_t, packed_t, N, K, steps, steps_t, blocks):
    """Pack 64 rows and 64 columns of the weight, and the same as columns and rows of the transposed one."""
    number = tl.program_id(0).to(tl.int64)
    upper, left = number // blocks, number % blocks
    line, four = tl.arange(0, 64), tl.arange(0, 16)
    row, column = upper * 64 + line, left * 64 + line
    inside = (row < N)[:, None] & (column < K)[None, :]
    tile = tl.load(weight + row[:, None] * K + column[None, :], mask=inside, other=0)
    if left < steps:
        store_pairs(tile, places, selectors, packed, upper * steps + left, row, left * 16 + four, steps)
    if upper < steps_t:
        turned = tl.trans(tile)
        store_pairs(turned, places_t, selectors_t, packed_t, left * steps_t + upper, column, upper * 16 + four, steps_t)


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
    arguments = (weight, *first, *second, *weight.shape, steps, steps_t, blocks)
    _pack_both(rows * blocks, arguments, weight.device, {"num_warps": 4})
    return both[0], both[1]

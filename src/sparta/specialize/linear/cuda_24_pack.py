"""The Triton kernel that packs a 2:4 weight for ``cuda-24-matrix``: what training does in every step.

It reads the weight once, from any strides, and writes values and places where
:class:`~sparta.specialize.linear.cuda_24_matrix_layout.MatrixLayout` has them. This module imports Triton; import it
only to run the kernel.
"""

# ruff: noqa: ANN001, ANN201, N803, N806, PLR0913, PLR0917 - Triton's own conventions
# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparta.specialize.cuda.launcher import Launcher

__all__ = ["INTERPRETED", "pack_on_gpu", "pack_pairs"]


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


INTERPRETED = not isinstance(pack_pairs, triton.runtime.JITFunction)
_pack = Launcher(pack_pairs, interpreted=INTERPRETED)


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

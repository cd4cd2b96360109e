"""Dense convolutions of 3x3 taps with fewer products: what :mod:`.cpu_dense` needs to have them computed so.

Winograd's transform computes 2x2 pixels with 16 products instead of 36. It costs sums before and after, and a weight
that is 16 / 9 as large, so it pays where an image has many tiles and a layer is not so large that reading its weight is
what takes the time. See ``native/winograd.h``.
"""

from __future__ import annotations

import ctypes
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sparta.specialize.conv.cpu_image import plan_image
from sparta.specialize.conv.spec import ConvGeometry
from sparta.specialize.cpu.library import WINOGRAD_PLAN

__all__ = ["Winograd", "packed_blocks", "takes_winograd"]

_TAPS = (3, 3)
_FEWEST_CHANNELS = 32  # of fewer, transforming tiles takes as long as multiplying them
_MOST_WEIGHTS = 256 * 256  # of more, reading them takes as long as multiplying them
_FEWEST_TILES = 48
_TILE_CHANNELS = 32  # kTileChannels of native/winograd.h
_LINE = 16


def takes_winograd(shape: tuple[int, ...], geometry: ConvGeometry) -> bool:
    """Whether a layer with a weight of this shape may be computed with fewer products.

    >>> takes_winograd((64, 64, 3, 3), ConvGeometry.make(2, padding=1))
    True
    """
    plain = set(geometry.stride) == set(geometry.dilation) == {1} and geometry.groups == 1
    wide = len(shape) == 4 and min(shape[:2]) >= _FEWEST_CHANNELS and shape[0] * shape[1] <= _MOST_WEIGHTS
    return plain and wide and shape[2:] == _TAPS


class Winograd:
    """How one layer is computed with fewer products.

    Parameters
    ----------
    block, tokens
        Rows and tiles that a kernel multiplies at once.
    chunk
        Input channels that are multiplied together.
    """

    def __init__(self, block: int, tokens: int, chunk: int) -> None:
        self._block, self._tokens, self._chunk = block, tokens, chunk

    def pack(self, weight: Tensor) -> Tensor:
        """Return the transformed values of a weight (N, C, 3, 3), place by place of a tile."""
        # The matrix that takes three taps to four places.
        rows = [[1.0, 0.0, 0.0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0.0, 0.0, 1.0]]
        matrix = torch.tensor(rows, dtype=torch.float64)
        tiles = torch.einsum("ir,ncrs,js->ijnc", matrix, weight.double(), matrix).float()
        return packed_blocks(tiles.flatten(0, 1), self._block, self._chunk)

    def planned(self, padding: tuple[tuple[int, int], ...], shape: tuple[int, ...]) -> tuple[int, tuple[Any, ...]]:
        """Return the address of the plan for images of this shape, and what it is of; 0 where there are few tiles."""
        images, channels, rows, columns = shape
        out = [size + sum(pads) - 2 for size, pads in zip((rows, columns), padding, strict=True)]
        tiles = [-(-size // 2) for size in out]
        if tiles[0] * tiles[1] < _FEWEST_TILES:
            return 0, ()
        pads = [
            (pair[0], 2 * count + 2 - size - pair[0])
            for pair, count, size in zip(padding, tiles, (rows, columns), strict=True)
        ]
        plan = plan_image(ConvGeometry((2, 2), tuple(pads), (1, 1)), (4, 4), (rows, columns), image="columns")
        lines = -(-(self._tokens + 1 + plan.reach + 2 * _LINE) // _LINE)
        plane = _LINE * (lines + 1 - lines % 2)
        arrays = (
            torch.tensor(plan.slot_rows, dtype=torch.int32),
            torch.tensor(plan.slot_columns, dtype=torch.int32),
            torch.ones(len(plan.slot_rows) * _TILE_CHANNELS, dtype=torch.uint8),
        )
        slot = _TILE_CHANNELS * plane
        offsets = [4 * (slot * which + at) for which, at in zip(plan.tap_slots, plan.tap_offsets, strict=True)]
        pixels = rows * columns
        sizes = (images, channels * pixels, pixels, columns, 1, _TILE_CHANNELS, rows, columns, *plan.out_size, 2, 2)
        copies = (len(plan.slot_rows), plan.row_width, self._tokens + 1, plan.reach, plane, 0, 0, 0)
        ends = (0, 0, 0, 0, *(array.data_ptr() for array in arrays))
        made = ctypes.create_string_buffer(WINOGRAD_PLAN.pack(*ends, *sizes, *copies, self._chunk, *offsets))
        return ctypes.addressof(made), (made, *arrays)


def packed_blocks(weights: Tensor, block: int, chunk: int) -> Tensor:
    """Return weights (G, N, K) as dense kernels read them: by group, chunk of columns, and block of rows."""
    groups, rows, columns = weights.shape
    missing = -rows % block
    whole = functional.pad(weights, (0, 0, 0, missing)) if missing else weights
    blocks = whole.reshape(groups, -1, block, columns).transpose(2, 3)
    bounds = [*range(0, columns, chunk), columns]
    chunks = [blocks[:, :, begin:end].reshape(groups, -1) for begin, end in pairwise(bounds)]
    return torch.cat(chunks, 1).reshape(-1)

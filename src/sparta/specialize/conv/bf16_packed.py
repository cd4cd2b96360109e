"""A pruned convolution in bf16, in the layout its kernel reads: :class:`PackedBf16Conv`.

Lists are those of a :class:`~sparta.specialize.conv.cpu_packed.PackedConv`, a channel and tap for each group of rows,
taken two by two: the halves of a pair are any two entries of a list, because their values are interleaved in registers.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparta.errors import NameNotFoundError, ShapeError, ValueRangeError, did_you_mean, message
from sparta.specialize.conv.bf16_images import Bf16Images
from sparta.specialize.conv.cpu_image import ImagePlan, plan_image
from sparta.specialize.conv.cpu_packed import PackedConv
from sparta.specialize.conv.int8_images import Ready
from sparta.specialize.conv.spec import ConvGeometry
from sparta.specialize.cpu.chain import StepKind
from sparta.specialize.cpu.library import PanelMatrix
from sparta.specialize.cpu.packing import Bools, Ints, Layout, pack_entries, running_sums

__all__ = ["LAYOUTS", "PackedBf16Conv"]

LAYOUTS = ("flat", "columns", "taps")
"""How images are copied, as ``PackedConv`` says; here no vector needs to be aligned."""
_MOST_VECTORS = {1: 4, 4: 3, 8: 1}  # by the rows of a block; a vector has twice as many pixels as one of float32
_PAIR = 2


class PackedBf16Conv(Bf16Images, PackedConv):
    """The mask of a convolution in bf16, packed; every call brings the values that :meth:`pack_short` made.

    Parameters
    ----------
    mask
        (N, C / groups, KH, KW) or (N, C / groups, K), bool.
    geometry, isa, tile
        As of a ``PackedConv``; tiles are panels with blocks of 1, 4 or 8 and up to 4, 3 or 1 vectors.
    image
        One of :data:`LAYOUTS`; images of layers with one tap are read where they are, if nothing is padded or left out.

    Examples
    --------
    >>> weight = torch.ones(4, 2, 3, 3)
    >>> packed = PackedBf16Conv(weight != 0, ConvGeometry.make(2, padding=1), block=4)
    >>> packed.run(torch.ones(1, 2, 5, 5), packed.pack_short(weight))[0, 0, 0]
    tensor([ 8., 12., 12., 12.,  8.])
    """

    kind = StepKind.BF16_CONV

    def __init__(
        self, mask: Tensor, geometry: ConvGeometry, *, image: str = "flat", isa: str | None = None, **tile: Any
    ) -> None:
        if image not in LAYOUTS:
            raise NameNotFoundError(did_you_mean(str(image), LAYOUTS, "image layout"))
        self.weight_shape, self.mask = tuple(mask.shape), mask.cpu()
        super().__init__(None, self.mask, geometry, image=image, isa=isa, **tile)
        plain = self.tile.interleave == 1 and not self.tile.k_chunk and not self.tile.prefetch
        if not plain or self.tile.mv > _MOST_VECTORS[self.tile.block]:
            allowed = "panels of blocks of 1, 4 or 8 with up to 4, 3 or 1 vectors, and nothing else"
            raise ValueRangeError(message(f"the tile {self.tile}", allowed))

    def _entries(self, mask: Bools) -> tuple[Layout, Ints, Ints, Ints]:
        """Return the layout of pairs, and first row, channel and tap of the halves, one after the other."""
        outputs, each, taps = mask.shape
        layout, first_row, column = pack_entries(mask.reshape(outputs, each * taps), self.tile)
        counts = np.diff(layout.arrays["starts"].numpy())
        before, starts = running_sums(counts), running_sums(-(-counts // _PAIR))
        group = np.repeat(np.arange(len(counts)), counts)
        rank = np.arange(len(group)) - before[group]
        halves = np.full(_PAIR * int(starts[-1]), -1, dtype=np.int64)
        halves[_PAIR * starts[group] + rank] = np.arange(len(group))
        # One that is left alone is both halves of a pair, each with half of its weight.
        alone = halves[1::_PAIR] < 0
        halves[1::_PAIR] = np.where(alone, halves[::_PAIR], halves[1::_PAIR])
        self._alone = torch.from_numpy(alone)
        row, columns = first_row[halves], column[halves]
        source = self._sources(mask, row[::_PAIR], columns.reshape(-1, _PAIR))
        listed = replace(layout, arrays={**layout.arrays, "starts": torch.from_numpy(starts)}, source=source)
        return listed, row, columns // max(taps, 1), columns % max(taps, 1)

    def _sources(self, mask: Bools, row: Ints, columns: Ints) -> Tensor:
        """Return where in the weight the halves (pairs, rows, 2) of each row are, -1 for pruned ones."""
        outputs, inputs = mask.shape[0], mask.shape[1] * mask.shape[2]
        rows = row[:, None] + np.arange(self.tile.block)
        flat = rows[:, :, None] * inputs + columns[:, None, :]
        inside = np.broadcast_to((rows < outputs)[:, :, None], flat.shape)
        live = mask.reshape(-1)[np.where(inside, flat, 0)] & inside if mask.size else inside
        positions = np.where(live, flat, -1)
        return torch.from_numpy(positions.astype(np.int32) if mask.size < 2**31 else positions)

    def pack_short(self, weight: Tensor) -> Tensor:
        """Return the live values of a weight, rounded to bfloat16, two for each row of a pair."""
        if tuple(weight.shape) != self.weight_shape:
            raise ShapeError(
                message(f"a weight of shape {tuple(weight.shape)}", f"{self.weight_shape}, as when packed")
            )
        flat, source = weight.detach().cpu().to(torch.bfloat16).reshape(-1), self.layout.source
        if not len(flat):
            return torch.zeros(source.shape, dtype=torch.bfloat16)
        found = torch.where(source >= 0, flat[source.clamp_min(0).long()], 0)
        found[self._alone] *= 0.5
        return found

    @property
    def packed_like(self) -> Tensor:
        """A tensor on the device "meta" like those that :meth:`pack_short` returns."""
        return torch.empty(self.layout.source.shape, dtype=torch.bfloat16, device="meta")

    def _run(self, address: int, call: bytes) -> int:
        return int(self.library.handle.sparta_multiply_bf16_conv(address, call))

    def _ready_for(self, shape: Sequence[int], threads: int, values: Tensor, activation: int) -> Ready:
        """Return what calls for images of this shape have in common."""
        flat = torch.empty(tuple(shape), device="meta")
        size, strides = self._sizes(flat)
        plan = self._plan(size, threads, contiguous=True)
        result = torch.Size((shape[0], self.shape[0], *self._out_size(flat, plan)))
        matrix = PanelMatrix.from_buffer_copy(plan.matrix)
        matrix.values = values.data_ptr()
        images = 0 if 0 in result else result[0]
        rest = (*plan.addresses, images, *strides, *plan.numbers.values(), activation, threads)
        return Ready(tuple(shape), result, addressof(matrix), rest, b"", (plan, matrix, values))

    def _sizes(self, flat: Tensor) -> tuple[tuple[int, int], tuple[int, ...]]:
        """Return rows, columns and strides of contiguous images; one row where no pixel needs its neighbours."""
        size, strides = flat.shape[2:], flat.stride()
        if self._dims == 1:
            return (1, size[0]), (*strides[:2], 0, strides[2])
        if self._pointwise and flat.numel():
            return (1, size[0] * size[1]), (*strides[:2], 0, strides[3])
        return (size[0], size[1]), strides

    def _layout_of(self, size: tuple[int, int], threads: int, *, contiguous: bool, without_gaps: bool) -> ImagePlan:
        del without_gaps
        return plan_image(
            self._geometry,
            self._kernel,
            size,
            image="flat" if self._pointwise else self.image,
            channels=self._channels,
            tile=self.tile.mv * _PAIR * self.library.lanes,
            threads=threads,
            contiguous=contiguous,
        )

    def _matrix(self, offsets: Tensor) -> PanelMatrix:
        """Return the C structure; offsets are those of numbers in 16 bits."""
        offsets.div_(_PAIR, rounding_mode="floor")
        return super()._matrix(offsets)

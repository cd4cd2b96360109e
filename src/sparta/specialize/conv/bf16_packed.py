"""A pruned convolution in bf16, in the layout its kernel reads: :class:`PackedBf16Conv`.

Lists are those of a :class:`~sparta.specialize.conv.cpu_packed.PackedConv`, a channel and tap for each group of rows,
put together two by two. The halves of a pair are any two entries of a list, because each has an address of its own;
those of one parity are paired last, since their loads begin between two places. Where that costs no more products,
whole places are listed, which need one load and not two.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparta.errors import ShapeError, ValueRangeError, message
from sparta.specialize.conv.bf16_images import PAIR, Bf16Images
from sparta.specialize.conv.cpu_packed import PackedConv
from sparta.specialize.conv.int8_images import Ready
from sparta.specialize.conv.spec import ConvGeometry
from sparta.specialize.cpu.chain import StepKind
from sparta.specialize.cpu.library import PanelMatrix
from sparta.specialize.cpu.packing import Bools, Ints, Layout, pack_entries, running_sums

__all__ = ["PackedBf16Conv"]

_WHOLE_PLACES = 2  # kWholePlaces of native/bf16_conv.h
_HALF_BYTES = 2


class PackedBf16Conv(Bf16Images, PackedConv):
    """The mask of a convolution in bf16, packed; every call brings the values that :meth:`pack_short` made.

    Parameters
    ----------
    mask
        (N, C / groups, KH, KW) or (N, C / groups, K), bool.
    geometry, image, isa, tile
        As of a ``PackedConv``; tiles are panels with blocks of 1, 4 or 8 and nothing else than ``mv``.

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
        self.weight_shape, self.mask = tuple(mask.shape), mask.cpu()
        super().__init__(None, self.mask, geometry, image=image, isa=isa, **tile)
        if self.tile.interleave != 1 or self.tile.k_chunk or self.tile.prefetch:
            raise ValueRangeError(message(f"the tile {self.tile}", "panels of blocks of 1, 4 or 8 with nothing but mv"))
        # From here on channels are places, and entries know which half of theirs they are.
        self._entry_half = self._entry_channel % PAIR
        self._entry_channel //= PAIR
        self._channels = -(-self._channels // PAIR)

    def _entries(self, mask: Bools) -> tuple[Layout, Ints, Ints, Ints]:
        """Return the layout of pairs, and first row, channel and tap of the halves, one after the other.

        Of whole places there is one entry for each.
        """
        outputs, each, taps = mask.shape
        of_group = outputs // self.geometry.groups
        layout, first_row, column = pack_entries(mask.reshape(outputs, each * taps), self.tile)
        parity = (first_row // max(of_group, 1) * each + column // max(taps, 1)) % PAIR
        group = first_row // self.tile.block
        pair, half, pairs = _paired(group, parity, layout.groups)
        starts = running_sums(pairs)
        slots = np.full((int(starts[-1]), PAIR), -1, dtype=np.int64)
        slots[starts[group] + pair, half] = np.arange(len(group))
        self._single = torch.from_numpy(slots[:, 1] < 0)  # one alone is both halves, each with half of its weight
        slots[:, 1] = np.where(slots[:, 1] < 0, slots[:, 0], slots[:, 1])
        self._whole = False
        if self.tile.block > 1 and each % PAIR == 0:
            places = self._whole_places(group, column, taps, layout.groups)
            if len(places[0]) <= len(slots):
                return self._listed_whole(mask, layout, places)
        entry = slots.reshape(-1)
        row, columns = first_row[entry], column[entry]
        arrays = {**layout.arrays, "starts": torch.from_numpy(starts)}
        listed = replace(layout, arrays=arrays, source=self._sources(mask, row[::PAIR], columns.reshape(-1, PAIR)))
        return listed, row, columns // max(taps, 1), columns % max(taps, 1)

    def _whole_places(self, group: Ints, column: Ints, taps: int, groups: int) -> tuple[Ints, Ints, Ints]:
        """Return groups, places and taps of all places of which any half is live, and how many each group has."""
        width = int(column.max(initial=-1) + 1 + PAIR * taps)
        key = group * width + column // (PAIR * taps) * taps + column % taps
        found = np.unique(key)
        group = found // width
        return group, found % width, np.bincount(group, minlength=groups)

    def _listed_whole(
        self, mask: Bools, layout: Layout, places: tuple[Ints, Ints, Ints]
    ) -> tuple[Layout, Ints, Ints, Ints]:
        (group, place, counts), taps = places, mask.shape[2]
        self._whole, self._single = True, torch.zeros(len(group), dtype=torch.bool)
        row, channel, tap = group * self.tile.block, PAIR * (place // taps), place % taps
        columns = (channel[:, None] + np.arange(PAIR)) * taps + tap[:, None]
        arrays = {**layout.arrays, "starts": torch.from_numpy(running_sums(counts))}
        return replace(layout, arrays=arrays, source=self._sources(mask, row, columns)), row, channel, tap

    def _sources(self, mask: Bools, row: Ints, columns: Ints) -> Tensor:
        """Return where in the weight the halves (entries, rows, 2) of each row are, -1 for pruned ones."""
        outputs, inputs = mask.shape[0], mask.shape[1] * mask.shape[2]
        rows = row[:, None] + np.arange(self.tile.block)
        flat = rows[:, :, None] * inputs + columns[:, None, :]
        inside = np.broadcast_to((rows < outputs)[:, :, None], flat.shape)
        live = mask.reshape(-1)[np.where(inside, flat, 0)] & inside if mask.size else inside
        positions = np.where(live, flat, -1)
        return torch.from_numpy(positions.astype(np.int32) if mask.size < 2**31 else positions)

    def pack_short(self, weight: Tensor) -> Tensor:
        """Return the live values of a weight, rounded to bfloat16, two for each row of an entry."""
        if tuple(weight.shape) != self.weight_shape:
            raise ShapeError(message(f"a weight of shape {tuple(weight.shape)}", f"{self.weight_shape}, as when packed"))
        flat, source = weight.detach().cpu().to(torch.bfloat16).reshape(-1), self.layout.source
        if not len(flat):
            return torch.zeros(source.shape, dtype=torch.bfloat16)
        found = torch.where(source >= 0, flat[source.clamp_min(0).long()], 0)
        found[self._single] *= 0.5
        return found

    @property
    def packed_like(self) -> Tensor:
        """A tensor on the device "meta" like those that :meth:`pack_short` returns."""
        return torch.empty(self.layout.source.shape, dtype=torch.bfloat16, device="meta")

    def _run(self, address: int, call: bytes) -> int:
        return int(self.library.handle.sparta_multiply_bf16_conv(address, call))

    def _ready_for(self, shape: Sequence[int], threads: int, values: Tensor, activation: int) -> Ready:
        """Return what calls for images of this shape have in common."""
        places = (shape[0], self._channels, *shape[2:])
        flat = torch.empty(places, device="meta")
        size, strides = self._sizes(flat)
        plan = self._plan(size, threads, contiguous=True)
        result = torch.Size((shape[0], self.shape[0], *self._out_size(flat, plan)))
        matrix = PanelMatrix.from_buffer_copy(plan.matrix)
        matrix.values = values.data_ptr()
        images = 0 if 0 in result else result[0]
        rest = (*plan.addresses, images, *strides, *plan.numbers.values(), activation, threads)
        return Ready(places, result, addressof(matrix), rest, b"", (plan, matrix, values))

    def _sizes(self, flat: Tensor) -> tuple[tuple[int, int], tuple[int, ...]]:
        """Return rows, columns and strides of contiguous places; one row where no pixel needs its neighbours."""
        size, strides = flat.shape[2:], flat.stride()
        if self._dims == 1:
            return (1, size[0]), (*strides[:2], 0, strides[2])
        if self._pointwise and flat.numel():
            return (1, size[0] * size[1]), (*strides[:2], 0, strides[3])
        return (size[0], size[1]), strides

    def _matrix(self, offsets: Tensor) -> PanelMatrix:
        """Return the C structure; offsets lead to halves, not to places."""
        offsets[: len(self._entry_half)] += torch.from_numpy(_HALF_BYTES * self._entry_half).to(offsets.dtype)
        matrix = super()._matrix(offsets)
        matrix.interleave = _WHOLE_PLACES if self._whole else 1
        return matrix


def _paired(group: Ints, parity: Ints, groups: int) -> tuple[Ints, Ints, Ints]:
    """Return which pair of its group each entry is in, as which half, and how many pairs each group has.

    An even and an odd one are a pair, in the order of each; of those that one parity has more, two neighbours are. Of
    an odd number the last is alone.
    """
    kind = PAIR * group + parity
    counts = np.bincount(kind, minlength=PAIR * groups).reshape(groups, PAIR)
    order = np.argsort(kind, kind="stable")
    rank = np.empty(len(group), dtype=np.int64)
    rank[order] = np.arange(len(group)) - running_sums(counts.reshape(-1))[kind[order]]
    both = counts.min(axis=1, initial=0)[group] if not len(counts) else counts.min(axis=1)[group]
    beyond = rank - both
    pair = np.where(beyond < 0, rank, both + beyond // PAIR)
    half = np.where(beyond < 0, parity, beyond % PAIR)
    pairs = counts.min(axis=1) + -(-(counts.max(axis=1) - counts.min(axis=1)) // PAIR)
    return pair, half, pairs

"""A pruned convolution of 8-bit integers in the layout its kernel reads.

:class:`PackedInt8Conv` is a :class:`~sparta.specialize.conv.cpu_packed.PackedConv` over *places*, four neighbouring
input channels in 32 bits: a place of a tap is stored if any of its four weights is live. Images are rounded to places
in the call, sums are exact integers in every build, and results leave in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sparta.errors import ShapeError, ValueRangeError, message
from sparta.specialize.conv.cpu_packed import PackedConv
from sparta.specialize.conv.int8_images import UNIT, Int8Images, Ready
from sparta.specialize.conv.spec import ConvGeometry
from sparta.specialize.cpu.chain import StepKind
from sparta.specialize.cpu.library import PanelMatrix
from sparta.specialize.cpu.packing import Bools, Ints, Layout
from sparta.specialize.int8_linear.cpu_gathered import gathered_entries

__all__ = ["PackedInt8Conv"]


class PackedInt8Conv(Int8Images, PackedConv):
    """The mask of an int8 convolution, packed; every call brings the values that :meth:`pack_integers` made.

    Parameters
    ----------
    mask
        (N, C / groups, KH, KW) or (N, C / groups, K), bool. With several groups, C / groups is a multiple of 4.
    geometry, image, isa, tile
        As of a ``PackedConv``; tiles are panels with blocks of 1 or 4 and nothing else than ``mv``, runs, or gathered.

    Examples
    --------
    >>> from sparta.specialize.int8_linear.quantization import Quantization
    >>> weight = torch.ones(4, 2, 3, 3, dtype=torch.int8)
    >>> packed = PackedInt8Conv(weight != 0, ConvGeometry.make(2, padding=1), block=4)
    >>> scales = (torch.ones(4), None)
    >>> packed.run(torch.ones(1, 2, 5, 5), packed.pack_integers(weight), scales, Quantization(1.0))[0, 0, 0]
    tensor([ 8., 12., 12., 12.,  8.])
    """

    kind = StepKind.INT8_CONV
    forms = ("panel", "runs", "gathered")

    def __init__(
        self, mask: Tensor, geometry: ConvGeometry, *, image: str = "flat", isa: str | None = None, **tile: Any
    ) -> None:
        self.weight_shape = tuple(mask.shape)
        if mask.dim() < 3 or (geometry.groups > 1 and mask.shape[1] % UNIT):
            given = f"a mask of shape {self.weight_shape} in {geometry.groups} groups"
            raise ShapeError(message(given, "(N, C / groups, ...) with C / groups a multiple of 4, or one group"))
        self.mask = mask.cpu()
        super().__init__(None, _by_places(self.mask).any(-1), geometry, image=image, isa=isa, **tile)
        tile_ = self.tile
        if tile_.block not in (1, 4, 16, 32) or tile_.interleave != 1 or tile_.k_chunk or tile_.prefetch:
            allowed = "panels of blocks of 1 or 4, gathered, or runs; nothing else than mv"
            raise ValueRangeError(message(f"the tile {tile_}", allowed))

    def _entries(self, mask: Bools) -> tuple[Layout, Ints, Ints, Ints]:
        """Gathered places come tap by tap, so that those of a tap which skips none lie evenly in the image."""
        if self.tile.form != "gathered":
            return super()._entries(mask)
        outputs, places, taps = mask.shape
        layout, first_row, column = gathered_entries(mask.transpose(0, 2, 1).reshape(outputs, taps * places))
        source = layout.source
        if mask.size:  # positions are those of (outputs, places, taps)
            row, place = source // (taps * places), source % (taps * places)
            there = row * (places * taps) + place % places * taps + place // places
            source = torch.where(source >= 0, there, -1).to(source.dtype)
        return replace(layout, source=source), first_row, column % max(places, 1), column // max(places, 1)

    def pack_integers(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the live values of a weight, int8, and the sums of its output channels."""
        if tuple(weight.shape) != self.weight_shape or weight.dtype != torch.int8:
            given = f"a weight of shape {tuple(weight.shape)} and {weight.dtype}"
            raise ShapeError(message(given, f"{self.weight_shape} and int8, as when packed"))
        live = torch.where(self.mask, weight.detach().cpu(), 0)
        numbers = _by_places(live).reshape(-1).view(torch.int32)
        source = self.layout.source.long()
        found = numbers[source.clamp_min(0)] if numbers.numel() else numbers.new_zeros(len(source))
        return torch.where(source >= 0, found, 0), live.flatten(1).sum(1, dtype=torch.int32)

    @property
    def packed_shape(self) -> tuple[int, ...]:
        """Return the shape of what :meth:`pack_integers` returns."""
        return tuple(self.layout.source.shape)

    def _run(self, address: int, call: bytes) -> int:
        return int(self.library.handle.sparta_multiply_int8_conv(address, call))

    def _ready_for(self, shape: Sequence[int], threads: int, values: Tensor, activation: int) -> Ready:
        """Return what calls for images of this shape have in common."""
        places = (shape[0], -(-shape[1] // UNIT), *shape[2:])
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


def _by_places(tensor: Tensor) -> Tensor:
    """Return (N, C, ...) as (N, ceil(C / 4), ..., 4), filled up with zeros."""
    missing = -tensor.shape[1] % UNIT
    if missing:
        tensor = functional.pad(tensor, (0, 0) * (tensor.dim() - 2) + (0, missing))
    shape = (tensor.shape[0], tensor.shape[1] // UNIT, UNIT, *tensor.shape[2:])
    return tensor.reshape(shape).movedim(2, -1)

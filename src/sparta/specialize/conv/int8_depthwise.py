"""Depthwise convolutions of 8-bit integers: four planes at a time, in places, as their neighbours have them.

A group of one channel has no place of its own, so the kernels of :mod:`sparta.specialize.conv.int8_packed` do not take
it; here four channels that do not meet share one, and the weights of four taps of a row are multiplied at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from sparta.errors import ShapeError, message
from sparta.specialize.conv.cpu_dense import DepthwiseConv
from sparta.specialize.conv.int8_images import UNIT, Int8Images, Ready
from sparta.specialize.conv.spec import ConvGeometry
from sparta.specialize.cpu.chain import StepKind
from sparta.specialize.cpu.library import DEPTHWISE_CALL, Library

__all__ = ["Int8Depthwise", "is_depthwise"]

_NO_SLOTS = (0, 0, 0)  # addresses that belong to copies of bands, of which there are none
_NO_STRIDES = (0, 0, 0, 0)
_NO_BANDS = (0, 0, 0, 0, 0, 0)
_NO_ENDS = (0, 0, 0, 0)
_NO_BYTES = (0, 0.0, 0, 0, 0)


def is_depthwise(shape: Sequence[int], groups: int) -> bool:
    """Whether a weight of this shape has one output channel for each group of one input channel.

    >>> is_depthwise((8, 1, 3, 3), 8), is_depthwise((16, 1, 3, 3), 8)
    (True, False)
    """
    return groups > 1 and len(shape) > 2 and shape[0] == groups and shape[1] == 1


class Int8Depthwise(Int8Images):
    """A depthwise convolution of integers; every call brings the values that :meth:`pack_integers` made.

    Parameters
    ----------
    mask
        (C, 1, KH, KW) or (C, 1, K), bool.
    geometry
        With C groups.
    isa
        Instruction set; None for the best.

    Examples
    --------
    >>> from sparta.specialize.int8_linear.quantization import Quantization
    >>> weight = torch.ones(2, 1, 3, 3, dtype=torch.int8)
    >>> conv = Int8Depthwise(weight != 0, ConvGeometry.make(2, padding=1, groups=2))
    >>> scales = (torch.ones(2), None)
    >>> conv.run(torch.ones(1, 2, 4, 4), conv.pack_integers(weight), scales, Quantization(1.0))[0, 0, 0]
    tensor([4., 6., 6., 4.])
    """

    kind = StepKind.INT8_DEPTHWISE

    def __init__(self, mask: Tensor, geometry: ConvGeometry, isa: str | None = None) -> None:
        self.weight_shape, self.geometry, self.mask = tuple(mask.shape), geometry, mask.cpu()
        if not is_depthwise(self.weight_shape, geometry.groups):
            given = f"a mask of shape {self.weight_shape} in {geometry.groups} groups"
            raise ShapeError(message(given, "(C, 1, ...) in C groups"))
        self._planes = DepthwiseConv(self.weight_shape, geometry, isa)

    @property
    def library(self) -> Library:  # type: ignore[override]
        """The kernels."""
        return self._planes.library

    @property
    def packed_shape(self) -> tuple[int, ...]:
        """Return (places, kernel rows, fours of taps, 4): four taps in each value."""
        channels, _, *kernel = self.weight_shape
        rows, columns = (1, *kernel) if len(kernel) == 1 else kernel
        return -(-channels // UNIT), rows, -(-columns // UNIT), UNIT

    def pack_integers(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the values of a weight, int8, four taps of a row in one, and the sums of its channels."""
        if tuple(weight.shape) != self.weight_shape or weight.dtype != torch.int8:
            given = f"a weight of shape {tuple(weight.shape)} and {weight.dtype}"
            raise ShapeError(message(given, f"{self.weight_shape} and int8, as when packed"))
        live = torch.where(self.mask, weight.detach().cpu(), 0)
        places, rows, fours, _ = self.packed_shape
        taps = live.reshape(self.weight_shape[0], rows, -1)
        whole = functional.pad(taps, (0, UNIT * fours - taps.shape[2], 0, 0, 0, UNIT * places - taps.shape[0]))
        values = whole.reshape(places, UNIT, rows, fours, UNIT).permute(0, 2, 3, 1, 4).contiguous()
        return values.view(torch.int32).squeeze(-1), live.flatten(1).sum(1, dtype=torch.int32)

    def _run(self, address: int, call: bytes) -> int:
        del address
        return int(self.library.handle.sparta_int8_depthwise(call))

    def _ready_for(self, shape: Sequence[int], threads: int, values: Tensor, activation: int) -> Ready:
        plan = self._planes.plan(tuple(shape), threads)
        places = (shape[0], -(-shape[1] // UNIT), *shape[2:])
        _, _, _, rows, columns, out_rows, out_columns, *_ = plan.rest
        numbers = (places[1], rows, columns, out_rows, out_columns)
        images = 0 if 0 in plan.shape else shape[0]
        rest = (*_NO_SLOTS, images, *_NO_STRIDES, *numbers, *(1, 1), *_NO_BANDS, activation, threads)
        tail = DEPTHWISE_CALL.pack(*_NO_ENDS, values.data_ptr(), *plan.rest, activation, threads, *_NO_BYTES)
        return Ready(places, torch.Size(plan.shape), 0, rest, tail, (plan, values))

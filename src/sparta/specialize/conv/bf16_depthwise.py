"""Depthwise convolutions in bf16, as their neighbours in a chain have their images.

Products are those of fp32: what is gained is half of the memory, which is what bounds such layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparta.errors import ShapeError, message
from sparta.specialize.conv.bf16_images import Bf16Images
from sparta.specialize.conv.cpu_dense import DepthwiseConv
from sparta.specialize.conv.int8_depthwise import is_depthwise
from sparta.specialize.conv.int8_images import Ready
from sparta.specialize.conv.spec import ConvGeometry
from sparta.specialize.cpu.chain import StepKind
from sparta.specialize.cpu.library import DEPTHWISE_CALL, Library

__all__ = ["Bf16Depthwise"]

_NO_SLOTS = (0, 0, 0)  # addresses that belong to copies of bands, of which there are none
_NO_STRIDES = (0, 0, 0, 0)
_NO_BANDS = (0, 0, 0, 0, 0, 0)
_NO_ENDS = (0, 0, 0, 0)
_REAL_RESULT = (0, 0.0, 0, 0, 0)


class Bf16Depthwise(Bf16Images):
    """A depthwise convolution in bf16; every call brings the values that :meth:`pack_short` made.

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
    >>> weight = torch.ones(2, 1, 3, 3)
    >>> conv = Bf16Depthwise(weight != 0, ConvGeometry.make(2, padding=1, groups=2))
    >>> conv.run(torch.ones(1, 2, 4, 4), conv.pack_short(weight))[0, 0, 0]
    tensor([4., 6., 6., 4.])
    """

    kind = StepKind.BF16_DEPTHWISE

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
    def packed_like(self) -> Tensor:
        """A tensor on the device "meta" like those that :meth:`pack_short` returns."""
        return torch.empty(self.mask.numel(), device="meta")

    def pack_short(self, weight: Tensor) -> Tensor:
        """Return the live values of a weight, rounded to bfloat16 and kept in float32, as they are multiplied."""
        if tuple(weight.shape) != self.weight_shape:
            raise ShapeError(
                message(f"a weight of shape {tuple(weight.shape)}", f"{self.weight_shape}, as when packed")
            )
        live = torch.where(self.mask, weight.detach().cpu(), 0)
        return live.to(torch.bfloat16).float().reshape(-1)

    def _run(self, address: int, call: bytes) -> int:
        del address
        return int(self.library.handle.sparta_bf16_depthwise(call))

    def _ready_for(self, shape: Sequence[int], threads: int, values: Tensor, activation: int) -> Ready:
        plan = self._planes.plan(tuple(shape), threads)
        _, _, _, rows, columns, out_rows, out_columns, *_ = plan.rest
        numbers = (shape[1], rows, columns, out_rows, out_columns)
        images = 0 if 0 in plan.shape else shape[0]
        rest = (*_NO_SLOTS, images, *_NO_STRIDES, *numbers, *(1, 1), *_NO_BANDS, activation, threads)
        tail = DEPTHWISE_CALL.pack(*_NO_ENDS, values.data_ptr(), *plan.rest, activation, threads, *_REAL_RESULT)
        return Ready(tuple(shape), torch.Size(plan.shape), 0, rest, tail, (plan, values))

"""A pruned convolution of 8-bit integers in the layout its kernel reads.

:class:`PackedInt8Conv` is a :class:`~sparta.specialize.conv.cpu_packed.PackedConv` over *places*, four neighbouring
input channels in 32 bits: a place of a tap is stored if any of its four weights is live. Images are rounded to places
in the call, sums are exact integers in every build, and results leave in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sparta.errors import ShapeError, ValueRangeError, message
from sparta.specialize.conv.cpu_packed import PackedConv
from sparta.specialize.conv.spec import ConvGeometry
from sparta.specialize.cpu.library import INT8_CONV_CALL, activation_code
from sparta.specialize.int8_linear.cpu_packed import SCALES
from sparta.specialize.int8_linear.quantization import Quantization

__all__ = ["UNIT", "PackedInt8Conv"]

UNIT = 4
_LEAST_WEIGHT = -128


class PackedInt8Conv(PackedConv):
    """The mask of an int8 convolution, packed; every call brings the values that :meth:`pack_integers` made.

    Parameters
    ----------
    mask
        (N, C / groups, KH, KW) or (N, C / groups, K), bool. With several groups, C / groups is a multiple of 4.
    geometry, image, isa, tile
        As of a ``PackedConv``; tiles have blocks of 1 or 4, and nothing else than ``mv``.

    Examples
    --------
    >>> weight = torch.ones(4, 2, 3, 3, dtype=torch.int8)
    >>> packed = PackedInt8Conv(weight != 0, ConvGeometry.make(2, padding=1), block=4)
    >>> scales = (torch.ones(4), None)
    >>> packed.run(torch.ones(1, 2, 5, 5), packed.pack_integers(weight), scales, Quantization(1.0))[0, 0, 0]
    tensor([ 8., 12., 12., 12.,  8.])
    """

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
        if tile_.block not in (1, 4) or tile_.interleave != 1 or tile_.k_chunk or tile_.prefetch:
            raise ValueRangeError(message(f"the tile {tile_}", "panels of blocks of 1 or 4, and mv"))

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

    def run(
        self,
        x: Tensor,
        packed: Sequence[Tensor],
        scales: tuple[Tensor, Tensor | None],
        grid: Quantization,
        *,
        activation: str | None = None,
        residual: Tensor | None = None,
        threads: int | None = None,
    ) -> Tensor:
        """Return ``activation(sums * multiplier + offset) + residual`` in float32, contiguous.

        Parameters
        ----------
        x
            (B, C, H, W) or (B, C, L) in real numbers, rounded on the way.
        packed
            What :meth:`pack_integers` returned.
        scales
            Multiplier and offset or None, (N,), float32.
        grid
            The static grid of x.
        """
        channels = self.weight_shape[1] * self.geometry.groups
        if x.dim() != len(self.weight_shape) or x.shape[1] != channels:
            given = f"x of shape {tuple(x.shape)}"
            raise ShapeError(message(given, f"(B, {channels}, ...) with {len(self.weight_shape)} dims"))
        if grid.dynamic or not SCALES[0] <= grid.scale <= SCALES[1]:
            raise ValueRangeError(
                message(f"the grid {grid}", f"a static one with a scale of {SCALES[0]} to {SCALES[1]}")
            )
        real = self._checked(x, "x", tuple(x.shape)).contiguous()
        places = torch.empty(x.shape[0], -(-channels // UNIT), *x.shape[2:])  # four bytes in each
        images, size, strides = self._images(places)
        count = torch.get_num_threads() if threads is None else threads
        plan = self._plan(size, count, contiguous=True)
        shape = (images.shape[0], self.shape[0], *self._out_size(x, plan))
        y = torch.empty(shape)
        added = None if residual is None else self._checked(residual, "residual", shape).contiguous()
        values, row_sums = packed
        if values.shape != self.layout.source.shape or values.dtype != torch.int32 or not values.is_contiguous():
            given = f"packed values of shape {tuple(values.shape)}"
            raise ShapeError(message(given, fix="take what pack_integers() returned"))
        multiplier, offset = (None if s is None else self._checked(s, "a scale", (self.shape[0],)) for s in scales)
        kept = [None if s is None else s.contiguous() for s in (multiplier, offset)]
        call = INT8_CONV_CALL.pack(
            places.data_ptr(),
            y.data_ptr(),
            0,
            0 if added is None else added.data_ptr(),
            *plan.addresses,
            0 if 0 in shape else shape[0],
            *strides,
            *plan.numbers.values(),
            activation_code(activation),
            count,
            real.data_ptr(),
            *(0 if s is None else s.data_ptr() for s in kept),
            row_sums.data_ptr(),
            channels,
            1.0 / grid.scale,
            grid.format == "uint8",
            grid.zero_point,
            self._no_least_weight(values),
        )
        self.library.multiply_int8_conv(addressof(plan.matrix_for(values)), call)
        return y

    def _no_least_weight(self, values: Tensor) -> bool:
        """Tell whether no weight is -128; looked at once for each set of values."""
        known: tuple[int, int, bool] | None = getattr(self, "_looked_at", None)
        key = (values.data_ptr(), values._version)
        if known is None or known[:2] != key:
            known = self._looked_at = (*key, not bool((values.view(torch.int8) == _LEAST_WEIGHT).any()))
        return known[2]


def _by_places(tensor: Tensor) -> Tensor:
    """Return (N, C, ...) as (N, ceil(C / 4), ..., 4), filled up with zeros."""
    missing = -tensor.shape[1] % UNIT
    if missing:
        tensor = functional.pad(tensor, (0, 0) * (tensor.dim() - 2) + (0, missing))
    shape = (tensor.shape[0], tensor.shape[1] // UNIT, UNIT, *tensor.shape[2:])
    return tensor.reshape(shape).movedim(2, -1)

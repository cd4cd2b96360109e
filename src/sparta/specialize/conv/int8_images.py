"""Convolutions of 8-bit integers as Python calls them: real images in, rounded on the way, and real numbers out.

:class:`Int8Images` is what all their kernels share: how a call is filled in, alone and as a step of a chain, where
images come and leave in places, four neighbouring channels in 32 bits.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparta.errors import ShapeError, ValueRangeError, message
from sparta.specialize.conv.cpu_packed import checked_real
from sparta.specialize.conv.spec import ConvGeometry
from sparta.specialize.cpu.chain import ImageProduct, Step, StepKind
from sparta.specialize.cpu.library import INT8_CONV_CALL, Library, activation_code, raise_for
from sparta.specialize.cpu.packing import is_float
from sparta.specialize.int8_linear.cpu_packed import SCALES
from sparta.specialize.int8_linear.quantization import Quantization

__all__ = ["UNIT", "Int8Images", "Ready"]

UNIT = 4
"""Channels in a place."""
_LEAST_WEIGHT = -128
_KEPT_SIZES = 8
_REAL_ENDS = (0, 0, 0.0, 0, 0, 0)  # neither the image nor the result is in places, and there is no second result
_REAL, _ROUNDED, _PLACES = 0, 1, 2  # kinds of residuals, as native/int8_places.h numbers them


class Ready(NamedTuple):
    """What calls for images of one shape have in common.

    Attributes
    ----------
    places
        The shape of the images in places.
    shape
        Of the result.
    address
        Of the packed weight, or 0.
    rest
        The numbers of a call after its first four addresses.
    tail
        What follows the call of a convolution.
    alive
        What the addresses are of.
    """

    places: tuple[int, ...]
    shape: torch.Size
    address: int
    rest: tuple[Any, ...]
    tail: bytes
    alive: tuple[Any, ...]


class _End(NamedTuple):
    """The last numbers of a call, and what keeps their addresses alive."""

    numbers: tuple[float, ...]
    rounding: tuple[float, ...]  # of the image: the inverse scale, whether it is unsigned, the zero point
    alive: tuple[Any, ...]


class Int8Images(ABC):
    """A convolution of integers: the calls that its kernel takes."""

    kind: StepKind
    weight_shape: tuple[int, ...]
    geometry: ConvGeometry
    library: Library

    @abstractmethod
    def pack_integers(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the values of a weight, int8, as the kernel reads them, and the sums of its output channels."""

    @property
    @abstractmethod
    def packed_shape(self) -> tuple[int, ...]:
        """Of the values that :meth:`pack_integers` returns."""

    @abstractmethod
    def _ready_for(self, shape: Sequence[int], threads: int, values: Tensor, activation: int) -> Ready:
        """Return what calls for images of this shape have in common."""

    @abstractmethod
    def _run(self, address: int, call: bytes) -> int:
        """Run a call of the library."""

    def run(
        self,
        x: Tensor,
        packed: Sequence[Tensor],
        scales: tuple[Tensor, Tensor | None],
        grid: Quantization,
        *,
        activation: str | None = None,
        residual: Tensor | None = None,
        adding: Quantization | None = None,
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
        adding
            The static grid that the residual is rounded to, if it is.
        """
        channels = self.weight_shape[1] * self.geometry.groups
        if x.dim() != len(self.weight_shape) or x.shape[1] != channels:
            given = f"x of shape {tuple(x.shape)}"
            raise ShapeError(message(given, f"(B, {channels}, ...) with {len(self.weight_shape)} dims"))
        real = checked_real(x, "x", tuple(x.shape)).contiguous()
        end = self._end(packed, scales, grid)
        count = torch.get_num_threads() if threads is None else threads
        ready = self._ready_for(x.shape, count, packed[0], activation_code(activation))
        places, y = torch.empty(ready.places), torch.empty(ready.shape)
        added = None if residual is None else checked_real(residual, "residual", tuple(y.shape)).contiguous()
        ends = (places.data_ptr(), y.data_ptr(), 0, 0 if added is None else added.data_ptr())
        numbers = (*end.numbers, *_REAL_ENDS, *_added(adding))
        call = INT8_CONV_CALL.pack(*ends, *ready.rest, real.data_ptr(), *numbers) + ready.tail
        failed = self._run(ready.address, call)
        if failed:
            raise_for(failed)
        return y

    def fast_path_for(
        self,
        packed: Sequence[Tensor],
        scales: tuple[Tensor, Tensor | None],
        grid: Quantization,
        activation: str | None,
        adding: Quantization | None = None,
    ) -> Callable[..., Tensor | None]:
        """Return a call with these values, scales and grid, which takes x and a residual.

        It returns None for tensors that are not contiguous float32 on the CPU, or of other shapes. What depends on the
        size of the images is found once for each.
        """
        end, code = self._end(packed, scales, grid), activation_code(activation)
        last = (*end.numbers, *_REAL_ENDS, *_added(adding))
        multiply, pack = self._run, INT8_CONV_CALL.pack
        threads, empty, dims = torch.get_num_threads, torch.empty, len(self.weight_shape)
        channels, ready = self.weight_shape[1] * self.geometry.groups, dict[tuple[Any, ...], Ready]()

        def call(x: Tensor, residual: Tensor | None = None, _alive: Any = end) -> Tensor | None:
            shape = x.shape
            if not is_float(x) or len(shape) != dims or shape[1] != channels:
                return None
            key = shape, threads()
            found = ready.get(key)
            if found is None:
                if len(ready) >= _KEPT_SIZES:
                    ready.clear()
                found = ready[key] = self._ready_for(shape, key[1], packed[0], code)
            added = 0
            if residual is not None:
                if residual.shape != found.shape or not is_float(residual):
                    return None
                added = residual.data_ptr()
            places, y = empty(found.places), empty(found.shape)
            ends = (places.data_ptr(), y.data_ptr(), 0, added)
            failed = multiply(found.address, pack(*ends, *found.rest, x.data_ptr(), *last) + found.tail)
            if failed:
                raise_for(failed)
            return y

        return call

    def product_for(
        self,
        packed: Sequence[Tensor],
        scales: tuple[Tensor, Tensor | None],
        grid: Quantization,
        activation: str | None,
        adding: Quantization | None = None,
    ) -> Callable[[tuple[int, ...], int], ImageProduct | None]:
        """Return the same as a step of a chain, as a function of the images' shape and of threads.

        It returns None for shapes that do not fit.
        """
        end, code = self._end(packed, scales, grid), activation_code(activation)
        channels = self.weight_shape[1] * self.geometry.groups

        def made(shape: tuple[int, ...], threads: int) -> ImageProduct | None:
            if len(shape) != len(self.weight_shape) or shape[1] != channels or 0 in shape:
                return None
            found = self._ready_for(shape, threads, packed[0], code)
            added = None if adding is None else _rounding(adding)

            def step(places: bool, to: tuple[Any, ...] | None, bytes_added: bool) -> Step:  # noqa: FBT001 - the item's
                ends = (places, to is not None, *((0.0, 0, 0) if to is None else to), 0)
                residual = _added(adding, in_bytes=bytes_added)
                call = INT8_CONV_CALL.pack(0, 0, 0, 0, *found.rest, 0, *end.numbers, *ends, *residual) + found.tail
                return Step(self.kind, call, found.address, (found, end))

            room, plain = 4 * math.prod(found.places), step(places=False, to=None, bytes_added=False)
            return ImageProduct(plain, tuple(found.shape), room, end.rounding, step, adding=added)

        return made

    def _end(self, packed: Sequence[Tensor], scales: tuple[Tensor, Tensor | None], grid: Quantization) -> _End:
        """Return what a call brings beside images, checked, with what keeps it alive."""
        if grid.dynamic or not SCALES[0] <= grid.scale <= SCALES[1]:
            allowed = f"a static one with a scale of {SCALES[0]} to {SCALES[1]}"
            raise ValueRangeError(message(f"the grid {grid}", allowed))
        values, row_sums = packed
        if values.shape != self.packed_shape or values.dtype != torch.int32 or not values.is_contiguous():
            given = f"packed values of shape {tuple(values.shape)}"
            raise ShapeError(message(given, fix="take what pack_integers() returned"))
        kept = [None if s is None else checked_real(s, "a scale", (self.weight_shape[0],)).contiguous() for s in scales]
        addresses = [0 if s is None else s.data_ptr() for s in kept]
        channels = self.weight_shape[1] * self.geometry.groups
        rounding = _rounding(grid)
        numbers = (*addresses, row_sums.data_ptr(), channels, *rounding, self._no_least_weight(values))
        return _End(numbers, rounding, (kept, values, row_sums))

    def _no_least_weight(self, values: Tensor) -> bool:
        """Tell whether no weight is -128; looked at once for each set of values."""
        known: tuple[int, int, bool] | None = getattr(self, "_looked_at", None)
        key = (values.data_ptr(), values._version)
        if known is None or known[:2] != key:
            known = self._looked_at = (*key, not bool((values.view(torch.int8) == _LEAST_WEIGHT).any()))
        return known[2]


def _rounding(grid: Quantization) -> tuple[float, bool, int]:
    """Return a grid as kernels read it: the inverse scale, whether its integers are unsigned, the zero point."""
    return 1.0 / grid.scale, grid.format == "uint8", grid.zero_point


def _added(grid: Quantization | None, *, in_bytes: bool = False) -> tuple[float, ...]:
    """Return what a call says of its residual: real numbers, which may be rounded to a grid, or bytes of it."""
    if grid is None:
        return _REAL, 0.0, 0.0, 0, 0
    inverse, unsigned, zero = _rounding(grid)
    return _PLACES if in_bytes else _ROUNDED, inverse, grid.scale, unsigned, zero

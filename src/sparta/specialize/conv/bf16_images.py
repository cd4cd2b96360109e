"""Convolutions in bf16 as Python calls them: real images in, rounded on the way, and real numbers out.

:class:`Bf16Images` is what all their kernels share: how a call is filled in, alone and as a step of a chain, where
images come and leave in bf16. Sums, bias and activation are float32.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sparta.errors import ShapeError, message
from sparta.specialize.conv.cpu_packed import checked_real
from sparta.specialize.conv.int8_images import Ready
from sparta.specialize.conv.spec import ConvGeometry
from sparta.specialize.cpu.chain import IN_BF16, ImageProduct, Step, StepKind, kept_bytes
from sparta.specialize.cpu.library import BF16_CONV_CALL, Library, activation_code, raise_for
from sparta.specialize.cpu.packing import is_float

__all__ = ["Bf16Images"]

_BEYOND = 32  # numbers of a line: kernels read whole vectors, and so beyond the last number
_KEPT_SIZES = 8


class Bf16Images(ABC):
    """A convolution in bf16: the calls that its kernel takes."""

    kind: StepKind
    weight_shape: tuple[int, ...]
    geometry: ConvGeometry
    library: Library

    @abstractmethod
    def pack_short(self, weight: Tensor) -> Tensor:
        """Return the values of a weight, rounded to bf16, as the kernel reads them."""

    @property
    @abstractmethod
    def packed_like(self) -> Tensor:
        """A tensor on the device "meta" like those that :meth:`pack_short` returns."""

    @abstractmethod
    def _ready_for(self, shape: Sequence[int], threads: int, values: Tensor, activation: int) -> Ready:
        """Return what calls for images of this shape have in common."""

    @abstractmethod
    def _run(self, address: int, call: bytes) -> int:
        """Run a call of the library."""

    @property
    def channels(self) -> int:
        """Channels of an image."""
        return self.weight_shape[1] * self.geometry.groups

    def run(
        self,
        x: Tensor,
        values: Tensor,
        bias: Tensor | None = None,
        *,
        activation: str | None = None,
        residual: Tensor | None = None,
        threads: int | None = None,
    ) -> Tensor:
        """Return ``activation(conv(x, W) + bias) + residual`` in float32, contiguous.

        Parameters
        ----------
        x
            (B, C, H, W) or (B, C, L) of any float dtype, rounded on the way.
        values
            What :meth:`pack_short` returned.
        bias
            (N,).
        residual
            Like the result; it is added as it is.
        """
        if x.dim() != len(self.weight_shape) or x.shape[1] != self.channels:
            given = f"x of shape {tuple(x.shape)}"
            raise ShapeError(message(given, f"(B, {self.channels}, ...) with {len(self.weight_shape)} dims"))
        whole = x.dtype == torch.bfloat16 and x.is_cpu
        real = None if whole else checked_real(x, "x", tuple(x.shape)).contiguous()
        shift = None if bias is None else checked_real(bias, "bias", self.weight_shape[:1]).contiguous()
        count = torch.get_num_threads() if threads is None else threads
        ready = self._ready_for(x.shape, count, self._checked(values), activation_code(activation))
        short, y = _room_for(ready), torch.empty(ready.shape)
        if real is None:
            short[: x.numel()].view(x.shape).copy_(x.detach())
        added = None if residual is None else checked_real(residual, "residual", tuple(y.shape)).contiguous()
        ends = [0 if each is None else each.data_ptr() for each in (short, y, shift, added)]
        image = 0 if real is None else real.data_ptr()
        failed = self._run(ready.address, self._call(ends, ready, image, short=real is None))
        if failed:
            raise_for(failed)
        return y

    def fast_path_for(
        self, values: Tensor, bias: Tensor | None, activation: str | None
    ) -> Callable[..., Tensor | None] | None:
        """Return a call with these values and this bias, which takes x and a residual.

        It returns None for tensors that are not contiguous float32 on the CPU, or of other shapes. What depends on the
        size of the images is found once for each.
        """
        if not self._reads(bias):
            return None
        code, shift = activation_code(activation), 0 if bias is None else bias.data_ptr()
        values, ready = self._checked(values), dict[tuple[Any, ...], Ready]()
        dims, channels = len(self.weight_shape), self.channels

        def call(x: Tensor, residual: Tensor | None = None, _alive: Any = (values, bias)) -> Tensor | None:
            shape = x.shape
            if not is_float(x) or len(shape) != dims or shape[1] != channels:
                return None
            key = shape, torch.get_num_threads()
            found = ready.get(key)
            if found is None:
                if len(ready) >= _KEPT_SIZES:
                    ready.clear()
                found = ready[key] = self._ready_for(shape, key[1], values, code)
            added = 0
            if residual is not None:
                if residual.shape != found.shape or not is_float(residual):
                    return None
                added = residual.data_ptr()
            short, y = _room_for(found), torch.empty(found.shape)
            ends = (short.data_ptr(), y.data_ptr(), shift, added)
            failed = self._run(found.address, self._call(ends, found, x.data_ptr()))
            if failed:
                raise_for(failed)
            return y

        return call

    def product_for(
        self, values: Tensor, bias: Tensor | None = None, activation: str | None = None
    ) -> Callable[[tuple[int, ...], int], ImageProduct | None] | None:
        """Return the same as a step of a chain, as a function of the images' shape and of threads.

        None where a bias would have to be converted; the function returns None for shapes that do not fit.
        """
        if not self._reads(bias):
            return None
        code, shift = activation_code(activation), 0 if bias is None else bias.data_ptr()
        values = self._checked(values)

        def made(shape: tuple[int, ...], threads: int) -> ImageProduct | None:
            if len(shape) != len(self.weight_shape) or shape[1] != self.channels or 0 in shape:
                return None
            found = self._ready_for(shape, threads, values, code)

            def step(short: bool, to: tuple[Any, ...] | None, short_added: bool) -> Step:  # noqa: FBT001 - the item's
                call = self._call((0, 0, shift, 0), found, 0, short=short, to=to is not None, added=short_added)
                return Step(self.kind, call, found.address, (found, values, bias))

            return ImageProduct(
                step(short=False, to=None, short_added=False),
                tuple(found.shape),
                kept_bytes(shape, torch.bfloat16),
                IN_BF16,
                step,
                adding=IN_BF16,
                hands=torch.bfloat16,
            )

        return made

    def _call(
        self,
        ends: Sequence[int],
        ready: Ready,
        image: int,
        *,
        short: bool = False,
        to: bool = False,
        added: bool = False,
    ) -> bytes:
        """Return a call; ends are the addresses of the image in bf16, y, bias and residual."""
        sizes = (self.channels, self.weight_shape[0])
        return BF16_CONV_CALL.pack(*ends, *ready.rest, image, 0, *sizes, short, to, added) + ready.tail

    def _reads(self, bias: Tensor | None) -> bool:
        return bias is None or (is_float(bias) and bias.shape == self.weight_shape[:1])

    def _checked(self, values: Tensor) -> Tensor:
        like = self.packed_like
        if values.shape != like.shape or values.dtype != like.dtype or not values.is_contiguous():
            given = f"packed values of shape {tuple(values.shape)} and {values.dtype}"
            raise ShapeError(message(given, f"{tuple(like.shape)} and {like.dtype}", "take what pack_short() returned"))
        return values


def _room_for(ready: Ready) -> Tensor:
    """Return memory for the images of a call in bf16, and some behind them."""
    return torch.empty(math.prod(ready.places) + _BEYOND, dtype=torch.bfloat16)

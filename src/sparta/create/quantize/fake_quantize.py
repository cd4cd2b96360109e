"""The quantizer: watches the range of a tensor and rounds it to the integer grid of that range, still as floats.

One small module does it for weights and activations alike. Its range is no buffer, so a model has the same parameters,
buffers and keys before and after quantization, and an average of its weights goes on. Everything is computed in float32
and without a host-device wait, whatever dtype or autocast context the tensor comes from, and gradients pass straight
through wherever a value lies inside the range.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from sparta.create.quantize.scheme import QuantizationArgs

__all__ = ["Quantizer", "fake_quantize", "grid_of_range", "to_integers"]

_SMALLEST_SCALE = 2.0**-100  # its inverse is still a float32


def grid_of_range(low: Tensor, high: Tensor, args: QuantizationArgs) -> tuple[Tensor, Tensor]:
    """Return the scale (float32) and zero point (int32) of the grid that covers a range and has 0 on it.

    Parameters
    ----------
    low, high
        The range, one value or one per channel. A range that is not known (infinite) or empty gets the scale 1.

    Examples
    --------
    >>> scale, zero_point = grid_of_range(torch.tensor(-1.0), torch.tensor(3.0), QuantizationArgs(symmetric=False))
    >>> round(scale.item(), 4), zero_point.item()
    (0.0157, 64)
    """
    known = low.isfinite() & high.isfinite()
    low = torch.where(known, low, 0.0).float().clamp(max=0.0)
    high = torch.where(known, high, 0.0).float().clamp(min=0.0)
    if args.symmetric:
        scale = torch.maximum(-low, high) / args.quant_max
        zero_point = torch.zeros_like(scale, dtype=torch.int32)
        return torch.where(scale > 0, scale.clamp(min=_SMALLEST_SCALE), 1.0), zero_point
    scale = (high - low) / (args.quant_max - args.quant_min)
    scale = torch.where(scale > 0, scale.clamp(min=_SMALLEST_SCALE), 1.0)
    zero_point = (args.quant_min - low / scale).round().clamp(args.quant_min, args.quant_max)
    return scale, zero_point.to(torch.int32)


def fake_quantize(
    values: Tensor, scale: Tensor, zero_point: Tensor, args: QuantizationArgs, axis: int | None = None
) -> Tensor:
    """Return `values` rounded to the grid, in their own dtype; the gradient is 1 inside the range and 0 outside.

    Parameters
    ----------
    scale, zero_point
        One value, or one for each index along `axis`.

    Examples
    --------
    >>> fake_quantize(torch.tensor([0.0, 0.26, 9.0]), torch.tensor(0.1), torch.tensor(0), QuantizationArgs(num_bits=4))
    tensor([0.0000, 0.3000, 0.7000])
    """
    if values.numel() == 0:
        return values
    zero_point = zero_point.to(torch.int32)
    if args.kind == "float":
        steps = _over_channels(scale, values, axis)
        return (_rounded_fp8(values.float() / steps) * steps).to(values.dtype)
    if axis is None:
        rounded = torch.fake_quantize_per_tensor_affine(
            values.float(), scale, zero_point, args.quant_min, args.quant_max
        )
    else:
        rounded = torch.fake_quantize_per_channel_affine(
            values.float(), scale, zero_point, axis, args.quant_min, args.quant_max
        )
    return rounded.to(values.dtype)


def to_integers(
    values: Tensor, scale: Tensor, zero_point: Tensor, args: QuantizationArgs, axis: int | None = None
) -> Tensor:
    """Return the numbers that :func:`fake_quantize` rounds `values` to, as int8, uint8 or float8_e4m3fn.

    ``(integers - zero_point) * scale`` is the fake-quantised tensor, bit for bit.

    >>> to_integers(torch.tensor([0.0, -0.26]), torch.tensor(0.1), torch.tensor(0), QuantizationArgs())
    tensor([ 0, -3], dtype=torch.int8)
    """
    if args.kind == "float":
        return _rounded_fp8(values.float() / _over_channels(scale, values, axis)).to(args.dtype)
    rounded = fake_quantize(values.float(), scale, zero_point, args, axis)
    shape = [-1 if dim == axis else 1 for dim in range(values.dim())] if axis is not None else []
    integers = (rounded / scale.reshape(shape)).round() + zero_point.reshape(shape)
    return integers.to(args.dtype)


def _over_channels(scale: Tensor, values: Tensor, axis: int | None) -> Tensor:
    return scale if axis is None else scale.reshape([-1 if dim == axis else 1 for dim in range(values.dim())])


class _RoundFp8(torch.autograd.Function):
    """Rounds to e4m3; the gradient passes straight through."""

    @staticmethod
    def forward(ctx: Any, numbers: Tensor) -> Tensor:
        del ctx
        return numbers.to(torch.float8_e4m3fn).to(numbers.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        del ctx
        return gradients[0]


def _rounded_fp8(numbers: Tensor) -> Tensor:
    """Return numbers rounded to e4m3; beyond its largest number they saturate, and have no gradient."""
    rounded: Tensor = _RoundFp8.apply(numbers.clamp(-448.0, 448.0))  # type: ignore[no-untyped-call]
    return rounded


class Quantizer(nn.Module):
    """Watches a tensor's range and rounds the tensor to the grid of that range.

    Parameters
    ----------
    args
        Bits, symmetry, strategy.
    axis, channels
        For ``"channel"``: the axis that has a scale for each index, and its size. None: one scale.
    moving
        True for activations: the range is a moving average over training batches. False for weights: it is that of
        the tensor as it is.

    Examples
    --------
    >>> quantizer = Quantizer(QuantizationArgs(num_bits=2), moving=False)
    >>> quantizer(torch.tensor([-1.0, 0.0, 0.4, 0.6]))
    tensor([-1.,  0.,  0.,  1.])
    """

    def __init__(
        self,
        args: QuantizationArgs,
        *,
        axis: int | None = None,
        channels: int = 1,
        moving: bool,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.args, self.axis, self.moving = args, axis, moving
        self.observing = True
        self.calibrated = False
        self.watch_always = False
        shape = () if axis is None else (channels,)
        self.low = torch.full(shape, torch.inf, device=device)
        self.high = torch.full(shape, -torch.inf, device=device)

    def forward(self, values: Tensor) -> Tensor:
        """Return `values`, of any shape, rounded; the range moves first if it is being watched.

        A quantizer that has seen nothing takes the first batch it sees, in whatever mode.
        """
        live = self.training or self.watch_always or not self.moving
        if (self.observing and live) or not self.calibrated:
            self.observe(values.detach())
        scale, zero_point = self.grid()
        return fake_quantize(values, scale, zero_point, self.args, self.axis)

    def grid(self) -> tuple[Tensor, Tensor]:
        """Return the scale and the zero point of the present range."""
        return grid_of_range(self.low, self.high, self.args)

    @torch.no_grad()
    def observe(self, values: Tensor) -> None:
        """Move the range by one batch; a batch with a value that is not finite is left out."""
        if values.numel() == 0:
            return
        if self.axis is None:
            low, high = torch.aminmax(values)
        else:
            others = [dim for dim in range(values.dim()) if dim != self.axis]
            low, high = (values.amin(others), values.amax(others)) if others else (values, values)
        low, high = low.float(), high.float()
        finite = low.isfinite() & high.isfinite()
        if self.moving:
            share = self.args.averaging
            low = torch.where(self.low.isfinite(), self.low + share * (low - self.low), low)
            high = torch.where(self.high.isfinite(), self.high + share * (high - self.high), high)
        self.low.copy_(torch.where(finite, low, self.low))
        self.high.copy_(torch.where(finite, high, self.high))
        self.calibrated = True

    def set_range(self, low: Tensor, high: Tensor) -> None:
        """Take a range that was saved."""
        self.low.copy_(low)
        self.high.copy_(high)
        self.calibrated = bool(torch.isfinite(low).all())

    def extra_repr(self) -> str:
        """Return what `print(model)` shows."""
        return f"{self.args}{'' if self.observing else ', frozen'}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:  # noqa: FBT001, FBT002 - torch's
        """Follow the model to its device, but stay float32: a moving average in half precision stands still."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.low = self.low.to(fn(self.low).device)
        self.high = self.high.to(fn(self.high).device)
        return self

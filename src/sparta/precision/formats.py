"""Numbers of fewer bits: how a weight is rounded, with one scale per output channel, and how an input is.

int8 is symmetric for weights and has a zero point for inputs; fp8 (e4m3) has scales alone. Zero is a point of every
grid, so what is pruned stays zero; which weights are live is no matter of rounding and is not read from the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparta.errors import ValueRangeError, message

__all__ = ["FP8_MAX", "Float8", "RoundedWeight", "round_fp8", "round_weight"]

FP8_MAX = 448.0
"""The largest number of e4m3."""
_LEAST_SCALE = 2.0**-100  # whose inverse is still a number in float32


class RoundedWeight(NamedTuple):
    """A weight on a grid: its real numbers, and the scales of its output channels (N,), float32."""

    values: Tensor
    scales: Tensor


def round_weight(weight: Tensor, axis: int, format: str = "int8") -> RoundedWeight:
    """Return a weight rounded to ``'int8'`` or ``'fp8_e4m3'``, with one scale for each index along an axis.

    The values are ``number * scale`` in float32 to the last bit, in the dtype and strides of the weight.

    Examples
    --------
    >>> rounded = round_weight(torch.tensor([[1.27, 0.001], [0.0, 0.0]]), 0)
    >>> rounded.values, rounded.scales
    (tensor([[1.2700, 0.0000],
            [0.0000, 0.0000]]), tensor([0.0100, 1.0000]))
    """
    real = weight.detach().float()
    if not bool(real.isfinite().all()):
        raise ValueRangeError(message("a weight with NaN or infinity", "finite weights"))
    others = [dim for dim in range(real.dim()) if dim != axis]
    peaks = real.abs().amax(others) if others else real.abs()
    most = 127.0 if format == "int8" else FP8_MAX
    scales = torch.where(peaks > 0, (peaks / most).clamp_min(_LEAST_SCALE), 1.0)
    shape = [-1 if dim == axis else 1 for dim in range(real.dim())]
    steps = real / scales.reshape(shape)
    numbers = steps.round().clamp(-127, 127) if format == "int8" else round_fp8(steps)
    values = torch.empty_like(weight)
    values.copy_(numbers * scales.reshape(shape))
    return RoundedWeight(values, scales)


def round_fp8(numbers: Tensor) -> Tensor:
    """Return numbers rounded to e4m3, in their own dtype; what is too large becomes the largest, NaN stays.

    >>> round_fp8(torch.tensor([1.06, 1000.0, -1000.0]))
    tensor([   1.,  448., -448.])
    """
    return numbers.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).to(numbers.dtype)


@dataclass(frozen=True)
class Float8:
    """The e4m3 numbers that an input is rounded to: ``number * scale``.

    Parameters
    ----------
    scale
        Of the whole tensor; None gives each row its own, its largest magnitude over 448.

    Examples
    --------
    >>> Float8(1 / 448).rounded(torch.tensor([[1.0, 0.011]])).tolist() == Float8().rounded(
    ...     torch.tensor([[1.0, 0.011]])).tolist()
    True
    """

    scale: float | None = None

    def __post_init__(self) -> None:
        if self.scale is not None and not 0 < self.scale < float("inf"):
            raise ValueRangeError(message(f"a scale of {self.scale}", "a number above 0"))

    @property
    def dynamic(self) -> bool:
        """Whether each row has a scale of its own."""
        return self.scale is None

    def rounded(self, x: Tensor) -> Tensor:
        """Return x rounded, in its own dtype."""
        real = x.float()
        if self.scale is None:
            peaks = real.abs().amax(-1, keepdim=True)
            scale: Any = torch.where(peaks > 0, (peaks / FP8_MAX).clamp_min(_LEAST_SCALE), 1.0)
        else:
            scale = self.scale
        rounded: Tensor = round_fp8(real / scale) * scale
        return rounded.to(x.dtype)

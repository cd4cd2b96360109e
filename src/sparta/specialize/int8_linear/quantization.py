"""Quantization: how 8-bit integers stand for real numbers, of a layer's input, and of its output where the next has it.

A static grid is known beforehand, from calibration. A dynamic one is made in every call, with a scale for each token.
The scale of a weight is not here: it is part of its TeSA, one per output channel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from sparta.errors import NameNotFoundError, ValueRangeError, did_you_mean, message
from sparta.tesa.bits import bit_format

__all__ = ["DTYPES", "RANGES", "Quantization"]

RANGES = {"int8": (-128, 127), "uint8": (0, 255)}
"""The least and the largest integer of each format."""
DTYPES: Mapping[str, torch.dtype] = {
    name: dtype for name in (*RANGES, "fp32") if (dtype := bit_format(name).dtype) is not None
}
"""The dtypes of those formats, and of real numbers."""
_LEAST_SCALE = torch.finfo(torch.float32).tiny
_LEAST_TOKEN_SCALE = 1e-37  # kLeastScale of native/bytes.h
_LARGEST = 127


@dataclass(frozen=True)
class Quantization:
    """The 8-bit integers that stand for real numbers: ``(integer - zero_point) * scale``.

    Numbers beyond the range become the nearest end of it, and NaN the least integer.

    Parameters
    ----------
    scale, zero_point
        Of a static grid.
    format
        ``'int8'`` or ``'uint8'``.
    dynamic
        Whether every token has a scale of its own, its largest absolute value over 127; see :meth:`per_token`. A token
        with NaN or inf has none, and its results are NaN or inf.

    Examples
    --------
    >>> Quantization.covering(0.0, 510.0)
    Quantization(scale=2.0, zero_point=0, format='uint8', dynamic=False)
    """

    scale: float
    zero_point: int = 0
    format: str = "int8"
    dynamic: bool = False

    def __post_init__(self) -> None:
        low, high = _range(self.format)
        if self.dynamic and (self.scale, self.zero_point, self.format) != (1.0, 0, "int8"):
            given = f"a dynamic grid with the scale {self.scale} and the zero point {self.zero_point} in {self.format}"
            raise ValueRangeError(message(given, "1.0, 0 and int8", "use Quantization.per_token()"))
        if not (self.scale > 0 and math.isfinite(self.scale) and low <= self.zero_point <= high):
            given = f"a scale of {self.scale} and a zero point of {self.zero_point} in {self.format}"
            raise ValueRangeError(message(given, f"a scale above 0, and a zero point of {low} to {high}"))

    @staticmethod
    def per_token() -> Quantization:
        """Return the dynamic grid: int8, symmetric, with a scale for each token of each call.

        >>> Quantization.per_token().rounded(torch.tensor([[0.2, 1.0, 127.0], [0.2, 1.0, 1.27]])) > 0
        tensor([[False,  True,  True],
                [ True,  True,  True]])
        """
        return Quantization(1.0, dynamic=True)

    @staticmethod
    def covering(low: float, high: float, format: str = "uint8") -> Quantization:
        """Return the integers that cover `low` to `high` in 256 steps, widened to hold 0 exactly."""
        least, most = _range(format)
        low, high = min(0.0, low), max(0.0, high)
        # The inverse of a smaller scale is no number in float32.
        scale = max((high - low) / 255, _LEAST_SCALE) if high > low else 1.0
        return Quantization(scale, max(least, min(most, least + round(-low / scale))), format)

    @staticmethod
    def of(given: Any) -> Quantization:
        """Return a grid from a pair (scale, zero point), or from anything with these attributes.

        What has ``args.quant_min`` too, as an exported quantiser's grid does, says by it whether integers have a sign.
        """
        if isinstance(given, Quantization):
            return given
        if isinstance(given, Sequence) and not isinstance(given, str):
            return Quantization(*given)
        if not hasattr(given, "scale") or not hasattr(given, "zero_point"):
            raise ValueRangeError(message(f"the grid {given!r}", "(scale, zero_point) or an object with these"))
        args = getattr(given, "args", None)
        low, high = getattr(args, "quant_min", -128), getattr(args, "quant_max", 127)
        if high - low > 255 or high - low < 254:
            raise ValueRangeError(message(f"a grid of integers from {low} to {high}", "8 bits"))
        return Quantization(float(given.scale), int(given.zero_point), "uint8" if low >= 0 else "int8")

    def to_dict(self, of: str = "input") -> dict[str, Any]:
        """Return the grid as the attributes of a kernel spec."""
        fields = asdict(self)
        if not self.dynamic:
            del fields["dynamic"]
        return {f"{of}_{name}": value for name, value in fields.items()}

    @staticmethod
    def from_dict(attributes: Mapping[str, Any], of: str = "input") -> Quantization:
        """Return the grid that attributes of a kernel spec hold."""
        fields = {name: attributes[f"{of}_{name}"] for name in ("scale", "zero_point", "format")}
        return Quantization(**fields, dynamic=bool(attributes.get(f"{of}_dynamic", False)))

    @staticmethod
    def of_output(attributes: Mapping[str, Any]) -> Quantization | None:
        """Return the grid of a layer's output, or None where it returns real numbers."""
        return Quantization.from_dict(attributes, "output") if "output_format" in attributes else None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the integers."""
        return DTYPES[self.format]

    def integers(self, x: Tensor) -> Tensor:
        """Return x rounded to a static grid, as 8-bit integers."""
        if self.dynamic:
            raise ValueRangeError(message("the integers of a dynamic grid", "a static one", "use token_integers()"))
        return self._cut((x * (1.0 / self.scale)).round_().add_(self.zero_point))

    def token_integers(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return x (..., K) rounded to the dynamic grid, as int8, and the scale of each token, (..., 1) in float32.

        >>> [each.tolist() for each in Quantization.per_token().token_integers(torch.tensor([[2.0, -4.0]]))]
        [[[64, -127]], [[0.031496062874794006]]]
        """
        real = x.float()
        largest = real.abs().amax(-1, keepdim=True) if x.shape[-1] else real.new_zeros(*x.shape[:-1], 1)
        scales = (largest / _LARGEST).clamp_min(_LEAST_TOKEN_SCALE)
        return self._cut((real * (1.0 / scales)).round_()), scales

    def _cut(self, whole: Tensor) -> Tensor:
        low, high = RANGES[self.format]
        # fmax() takes the other where one is NaN.
        return torch.fmax(whole, whole.new_tensor(low)).clamp_(max=high).to(self.dtype)

    def real(self, integers: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the numbers that integers of a static grid stand for."""
        return ((integers.to(torch.float64) - self.zero_point) * self.scale).to(dtype)

    def rounded(self, x: Tensor) -> Tensor:
        """Return x (..., K) rounded to the grid, in its own dtype."""
        if not self.dynamic:
            return self.real(self.integers(x), x.dtype)
        integers, scales = self.token_integers(x)
        return (integers.double() * scales.double()).to(x.dtype)


def _range(format: str) -> tuple[int, int]:
    if format not in RANGES:
        raise NameNotFoundError(did_you_mean(format, RANGES, "format of 8-bit integers"))
    return RANGES[format]

"""Schemes: how many bits a tensor gets, and how a number becomes an integer.

A :class:`Scheme` says it for the three tensors of a layer (weights, inputs, outputs), each by a
:class:`QuantizationArgs` or not at all. Zero is always an exact point of the grid (symmetric grids have no zero point,
the others a whole one), so whatever pruning made zero stays zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

import torch

from sparta.errors import NameNotFoundError, ValueRangeError, did_you_mean, message
from sparta.tesa.bits import BitFormat, bit_format

__all__ = ["PRESETS", "QuantizationArgs", "Scheme"]

Strategy = Literal["tensor", "channel"]
Kind = Literal["int", "float"]
_LARGEST_FP8 = 448


@dataclass(frozen=True)
class QuantizationArgs:
    """How one tensor is quantised.

    Parameters
    ----------
    num_bits
        Bits of an integer, 2 to 8.
    symmetric
        True: signed integers around 0, without the lowest one (8 bits: -127 to 127), so that the grid is its own
        mirror image. False: unsigned integers with a zero point (8 bits: 0 to 255).
    strategy
        ``"tensor"``: one scale for all. ``"channel"``: one for each output channel; for weights only.
    averaging
        How much a new batch moves the observed range of an activation: 1 takes the batch, 0.01 a hundredth of it.
    kind
        ``"int"``, or ``"float"`` for 8-bit floating point (e4m3): numbers up to 448 times the scale, symmetric.

    Examples
    --------
    >>> args = QuantizationArgs(num_bits=4)
    >>> args.quant_min, args.quant_max, str(args.format)
    (-7, 7, 'int4')
    >>> QuantizationArgs(symmetric=False).quant_max
    255
    """

    num_bits: int = 8
    symmetric: bool = True
    strategy: Strategy = "tensor"
    averaging: float = 0.01
    kind: Kind = "int"

    def __post_init__(self) -> None:
        if self.kind not in {"int", "float"}:
            raise NameNotFoundError(did_you_mean(str(self.kind), ["int", "float"], "kind of numbers"))
        if self.kind == "float" and (self.num_bits != 8 or self.symmetric is not True):
            given = f"floating point of {self.num_bits!r} bits, symmetric={self.symmetric!r}"
            raise ValueRangeError(message(given, "8 bits, symmetric: e4m3 has a sign and no zero point"))
        if isinstance(self.num_bits, bool) or not isinstance(self.num_bits, int) or not 2 <= self.num_bits <= 8:
            raise ValueRangeError(message(f"num_bits is {self.num_bits!r}", "a whole number from 2 to 8"))
        if not isinstance(self.symmetric, bool):
            raise ValueRangeError(message(f"symmetric is {self.symmetric!r}", "true or false"))
        if self.strategy not in {"tensor", "channel"}:
            raise NameNotFoundError(did_you_mean(str(self.strategy), ["tensor", "channel"], "strategy"))
        if not 0 < self.averaging <= 1:
            raise ValueRangeError(message(f"averaging is {self.averaging!r}", "a number above 0 and up to 1"))

    @property
    def quant_min(self) -> int:
        """The lowest integer."""
        return -self.quant_max if self.symmetric else 0

    @property
    def quant_max(self) -> int:
        """The highest integer, or the largest number of e4m3."""
        if self.kind == "float":
            return _LARGEST_FP8
        return (1 << (self.num_bits - 1)) - 1 if self.symmetric else (1 << self.num_bits) - 1

    @property
    def dtype(self) -> torch.dtype:
        """The torch dtype that holds the numbers."""
        if self.kind == "float":
            return torch.float8_e4m3fn
        return torch.int8 if self.symmetric else torch.uint8

    @property
    def format(self) -> BitFormat:
        """The smallest bit format that holds the numbers."""
        if self.kind == "float":
            return bit_format("fp8_e4m3")
        return bit_format(f"{'int' if self.symmetric else 'uint'}{4 if self.num_bits <= 4 else 8}")

    def __str__(self) -> str:
        kind = "e4m3" if self.kind == "float" else "symmetric" if self.symmetric else "asymmetric"
        return f"{self.num_bits} bits {kind} per {self.strategy}"


@dataclass(frozen=True)
class Scheme:
    """How a layer is quantised: its weights, its inputs, its outputs; None leaves them in floating point.

    Examples
    --------
    >>> print(Scheme.of("default"))
    weights 8 bits symmetric per channel, inputs 8 bits asymmetric per tensor
    >>> Scheme.of({"weights": {"num_bits": 4}}).weights.num_bits
    4
    """

    weights: QuantizationArgs | None = None
    input_activations: QuantizationArgs | None = None
    output_activations: QuantizationArgs | None = None

    def __post_init__(self) -> None:
        for which in ("input_activations", "output_activations"):
            args = getattr(self, which)
            if args is not None and args.strategy != "tensor":
                raise ValueRangeError(
                    message(
                        f"{which} with the strategy 'channel'",
                        "'tensor': integer kernels take one scale for an activation",
                        "keep 'channel' for the weights",
                    )
                )
        if self.weights is None and self.input_activations is None and self.output_activations is None:
            raise ValueRangeError(
                message(
                    "a scheme that quantises nothing", fix="give weights or activations, or put the layer in ignore"
                )
            )

    @classmethod
    def of(cls, given: Scheme | str | Mapping[str, Any]) -> Scheme:
        """Return the scheme meant: itself, a preset's name, or a mapping of its fields as a recipe has them."""
        if isinstance(given, Scheme):
            return given
        if isinstance(given, str):
            if given not in PRESETS:
                raise NameNotFoundError(did_you_mean(given, PRESETS, "quantization scheme"))
            return PRESETS[given]
        if not isinstance(given, Mapping):
            raise ValueRangeError(message(f"a scheme of type {type(given).__name__}", "a preset's name or a mapping"))
        known = [field.name for field in fields(cls)]
        parts = {}
        for name, args in given.items():
            if name not in known:
                raise NameNotFoundError(did_you_mean(str(name), known, "part of a quantization scheme"))
            parts[name] = _args_of(args)
        return cls(**parts)

    def to_dict(self) -> dict[str, Any]:
        """Return the scheme as plain values, which :meth:`of` takes back."""
        return {field.name: asdict(args) for field in fields(self) if (args := getattr(self, field.name)) is not None}

    def __str__(self) -> str:
        named = (("weights", self.weights), ("inputs", self.input_activations), ("outputs", self.output_activations))
        return ", ".join(f"{name} {args}" for name, args in named if args is not None)


def _args_of(given: QuantizationArgs | Mapping[str, Any] | None) -> QuantizationArgs | None:
    if given is None or isinstance(given, QuantizationArgs):
        return given
    if not isinstance(given, Mapping):
        raise ValueRangeError(message(f"quantization args {given!r}", "a mapping such as {num_bits: 8}, or null"))
    known = [field.name for field in fields(QuantizationArgs)]
    for name in given:
        if name not in known:
            raise NameNotFoundError(did_you_mean(str(name), known, "quantization argument"))
    return QuantizationArgs(**given)


PRESETS: dict[str, Scheme] = {
    "default": Scheme(QuantizationArgs(strategy="channel"), QuantizationArgs(symmetric=False)),
    "deepsparse": Scheme(QuantizationArgs(), QuantizationArgs(symmetric=False)),
    "tensorrt": Scheme(QuantizationArgs(strategy="channel"), QuantizationArgs()),
    "weights_only": Scheme(QuantizationArgs(strategy="channel")),
    "fp8": Scheme(QuantizationArgs(strategy="channel", kind="float"), QuantizationArgs(kind="float")),
}
"""Schemes by name."""

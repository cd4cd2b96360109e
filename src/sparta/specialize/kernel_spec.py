"""The kernel spec: what one fused operator needs, written down so that any implement can answer it.

The compiler (or a sparse module) makes it, implements read it, the tuning store is keyed by it. Every operand is
described by its :class:`~sparta.tesa.attribute.TeSA`, which already says shape, dynamic dims, bit format and sparsity,
so a kernel spec adds only the operation, the epilogue and the device.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from sparta.errors import NameNotFoundError, ValueRangeError, did_you_mean, message
from sparta.tesa.attribute import TeSA
from sparta.tesa.state import decode_state, encode_state

__all__ = ["ACTIVATIONS", "Epilogue", "KernelSpec", "operand_bucket", "operation_named"]

_OF_GRIDS = ("_scale", "_zero_point")  # attributes whose value costs nothing

ACTIVATIONS = ("relu", "gelu", "silu", "relu6")
"""The activations an epilogue may fuse; ``gelu`` is the exact one."""
# As files of older versions call it.
_RENAMED = {"quantised_linear": "int8_linear", "quantized_linear": "int8_linear"}


@dataclass(frozen=True)
class Epilogue:
    """What is done to a result before it is stored: ``activation(y + bias) + residual``.

    Parameters
    ----------
    bias, activation, residual
        What there is of each.
    residual_first
        The other order, of residual networks: ``relu(y + bias + residual)``. Only with a residual and ``"relu"``.

    Examples
    --------
    >>> str(Epilogue(bias=True, activation="relu"))
    'bias+relu'
    >>> str(Epilogue(bias=True, activation="relu", residual=True, residual_first=True))
    'bias+residual+relu'
    """

    bias: bool = False
    activation: str | None = None
    residual: bool = False
    residual_first: bool = False

    def __post_init__(self) -> None:
        if self.activation is not None and self.activation not in ACTIVATIONS:
            raise NameNotFoundError(did_you_mean(self.activation, ACTIVATIONS, "activation"))
        if self.residual_first and not (self.residual and self.activation == "relu"):
            given = f"residual_first with residual={self.residual} and the activation {self.activation}"
            raise ValueRangeError(message(given, "a residual and the activation 'relu'"))

    def __str__(self) -> str:
        last = [self.activation or "", *["residual"] * self.residual]
        parts = ["bias"] * self.bias + (last[::-1] if self.residual_first else last)
        return "+".join(part for part in parts if part) or "none"


@dataclass(frozen=True)
class KernelSpec:
    """One fused operator: the op, what is known of each operand, the epilogue, the device.

    Parameters
    ----------
    op
        Name of the operation, such as ``"linear"``.
    operands
        The TeSA of each operand by name; for ``linear`` these are ``"input"`` (M, K) with M dynamic, and
        ``"weight"`` (N, K). A dynamic dim has the size that is measured.
    epilogue
        What is fused after it.
    attributes
        The numbers the operation needs beside its operands, such as a convolution's stride.
    device
        Type of the device it runs on.

    Examples
    --------
    >>> weight = TeSA.dense((64, 32), format="fp32")
    >>> spec = KernelSpec("linear", {"input": TeSA.dense((8, 32), format="fp32", dynamic=[0]), "weight": weight})
    >>> KernelSpec.from_dict(spec.to_dict()) == spec
    True
    """

    op: str
    operands: Mapping[str, TeSA]
    epilogue: Epilogue = Epilogue()
    attributes: Mapping[str, Any] = field(default_factory=dict)
    device: str = "cpu"

    def __post_init__(self) -> None:
        object.__setattr__(self, "operands", MappingProxyType(dict(self.operands)))
        object.__setattr__(self, "attributes", MappingProxyType(dict(self.attributes)))

    def __getitem__(self, name: str) -> TeSA:
        """Return the TeSA of an operand."""
        if name not in self.operands:
            raise NameNotFoundError(did_you_mean(name, self.operands, f"operand of {self.op}"))
        return self.operands[name]

    def to_dict(self) -> dict[str, Any]:
        """Return the whole spec as JSON values, masks included (as bits, in base 64)."""
        return {
            "op": self.op,
            "operands": {name: encode_state(tesa) for name, tesa in self.operands.items()},
            "epilogue": vars(self.epilogue).copy(),
            "attributes": dict(self.attributes),
            "device": self.device,
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> KernelSpec:
        """Return the spec that :meth:`to_dict` wrote."""
        missing = {"op", "operands", "epilogue", "attributes", "device"} - set(fields)
        if missing:
            raise ValueRangeError(message(f"a kernel spec without {', '.join(sorted(missing))}", "all five fields"))
        return cls(
            op=operation_named(fields["op"]),
            operands={name: decode_state(state) for name, state in fields["operands"].items()},
            epilogue=Epilogue(**fields["epilogue"]),
            attributes=fields["attributes"],
            device=fields["device"],
        )

    @property
    def digest(self) -> str:
        """A stable hexadecimal digest of everything in the spec; equal specs have equal digests."""
        parts = {
            "op": self.op,
            "operands": {name: tesa.digest for name, tesa in self.operands.items()},
            "epilogue": str(self.epilogue),
            "attributes": dict(self.attributes),
            "device": self.device,
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    @property
    def bucket(self) -> str:
        """A readable key that specs with alike cost share: dynamic sizes and densities are rounded.

        Dynamic sizes go to the next power of two, densities to steps of about a fifth; the mask itself does not
        count, only its pattern does, and of a grid only that there is one.
        """
        operands = [f"{name}={operand_bucket(tesa)}" for name, tesa in sorted(self.operands.items())]
        attributes = [
            f"{key}={'given' if key.endswith(_OF_GRIDS) and value is not None else value}"
            for key, value in sorted(self.attributes.items())
        ]
        return " ".join([self.op, *operands, f"epilogue={self.epilogue}", *attributes])

    def __eq__(self, other: object) -> bool:
        return self.digest == other.digest if isinstance(other, KernelSpec) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.digest)

    def __str__(self) -> str:
        operands = ", ".join(f"{name}: {str(tesa).removeprefix('TeSA ')}" for name, tesa in self.operands.items())
        return f"{self.op} on {self.device} ({operands}; epilogue {self.epilogue})"


def operation_named(given: object) -> str:
    """Return the name of an operation for a name that a file gives, which an older version may have written.

    >>> operation_named("quantized_linear")
    'int8_linear'
    """
    return _RENAMED.get(str(given), str(given))


def operand_bucket(tesa: TeSA, *, coarse: bool = False) -> str:
    """Return what operands with alike cost have in common: sizes, format, pattern and density.

    Dynamic sizes are rounded up to a power of two, densities go to steps of about a fifth; the coarse form rounds all
    sizes, and densities to steps of about two fifths.

    >>> operand_bucket(TeSA.dense((700, 100), format="fp32", dynamic=[0]))
    '<=1024x100:fp32'
    >>> operand_bucket(TeSA.dense((700, 100), format="fp32"), coarse=True)
    '1024x128:fp32'
    """
    text, steps = [], 2 if coarse else 4
    for dim, size in enumerate(tesa.shape):
        power = 1 << max(0, size - 1).bit_length()
        text.append(str(power) if coarse else f"<={power}" if dim in tesa.dynamic else str(size))
    known = "x".join(text) + f":{tesa.format}"
    if tesa.count("live") == tesa.numel:
        return known
    step = round(steps * math.log2(tesa.density)) / steps if tesa.density else -math.inf
    return f"{known}:{tesa.describe_pattern().replace(' ', '-')}@{2**step:.3f}"

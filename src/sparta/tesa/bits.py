"""Bit formats: how many bits a live element has, and what kind of number they are.

The formats form one total order, fewest bits first, so that "the smaller of two formats" is always defined and does not
depend on who asks. The last entry, ``any``, means that nothing is known of the format; it loses against every other
when two attributes are joined.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparta.errors import NameNotFoundError, ShapeError, did_you_mean, message
from sparta.tesa.grid import Grid

__all__ = ["ANY", "FORMATS", "BitFormat", "bit_format", "format_of_bits", "parameter_grid"]


@dataclass(frozen=True)
class BitFormat:
    """One way to store a number.

    Parameters
    ----------
    name
        The name users write, such as ``"int4"``.
    bits
        Bits an element takes; 0 only for ``any``, whose size is not known.
    kind
        ``"int"``, ``"uint"``, ``"float"`` or ``"any"``.
    dtype
        The torch dtype that holds it, or None where torch has none of that width.
    """

    name: str
    bits: int
    kind: str
    dtype: torch.dtype | None

    @property
    def code(self) -> int:
        """Position in the total order of formats, fewest bits first."""
        return _CODES[self.name]

    def holds(self, other: BitFormat) -> bool:
        """Whether every value of `other` can be stored in this format without loss.

        >>> bit_format("int8").holds(bit_format("int4")), bit_format("bf16").holds(bit_format("fp16"))
        (True, False)
        """
        if self == other or self.kind == "any":
            return True
        if other.kind == "any":
            return False
        low, high = _EXACT[other.name]
        my_low, my_high = _EXACT[self.name]
        if other.kind != "float":  # integers: the target must hold every integer of the range
            return my_low <= low and high <= my_high
        return self.kind == "float" and all(
            mine >= theirs for mine, theirs in zip(_FLOATS[self.name], _FLOATS[other.name], strict=True)
        )

    def __str__(self) -> str:
        return self.name


def _dtype(name: str) -> torch.dtype | None:
    found = getattr(torch, name, None)
    return found if isinstance(found, torch.dtype) else None


ANY = BitFormat("any", 0, "any", None)
"""Nothing is known of the format."""

FORMATS: tuple[BitFormat, ...] = (
    BitFormat("int4", 4, "int", _dtype("int4")),
    BitFormat("uint4", 4, "uint", _dtype("uint4")),
    BitFormat("int8", 8, "int", torch.int8),
    BitFormat("uint8", 8, "uint", torch.uint8),
    BitFormat("fp8_e4m3", 8, "float", _dtype("float8_e4m3fn")),
    BitFormat("fp8_e5m2", 8, "float", _dtype("float8_e5m2")),
    BitFormat("int16", 16, "int", torch.int16),
    BitFormat("bf16", 16, "float", torch.bfloat16),
    BitFormat("fp16", 16, "float", torch.float16),
    BitFormat("int32", 32, "int", torch.int32),
    BitFormat("fp32", 32, "float", torch.float32),
    BitFormat("int64", 64, "int", torch.int64),
    BitFormat("fp64", 64, "float", torch.float64),
    ANY,
)
"""All formats in their order: fewest bits first, ``any`` last."""

_CODES = {f.name: code for code, f in enumerate(FORMATS)}
_ALIASES = {
    "fp8": "fp8_e4m3", "float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2", "float16": "fp16", "half": "fp16",
    "bfloat16": "bf16", "float32": "fp32", "float": "fp32", "float64": "fp64", "double": "fp64",
}  # fmt: skip
# (exponent bits, significand bits with the implicit one) of each floating format.
_FLOATS = {
    "fp8_e4m3": (4, 4), "fp8_e5m2": (5, 3), "bf16": (8, 8), "fp16": (5, 11), "fp32": (8, 24), "fp64": (11, 53),
}  # fmt: skip
# The range in which each format holds every integer.
_EXACT: dict[str, tuple[int, int]] = {
    **{f.name: (-(2 ** (f.bits - 1)), 2 ** (f.bits - 1) - 1) for f in FORMATS if f.kind == "int"},
    **{f.name: (0, 2**f.bits - 1) for f in FORMATS if f.kind == "uint"},
    **{name: (-(2**digits), 2**digits) for name, (_, digits) in _FLOATS.items()},
}
# The widths people write, and the codes of the original system for formats that share a width.
_BITS = {4: "int4", 7: "uint8", 8: "int8", 16: "fp16", 31: "int32", 32: "fp32", 33: "any", 64: "fp64"}


def bit_format(given: BitFormat | str | torch.dtype | None) -> BitFormat:
    """Return the format for a name, a torch dtype, or None (nothing is known).

    >>> bit_format("int4").bits, bit_format(torch.bfloat16).name, bit_format("half").name
    (4, 'bf16', 'fp16')
    """
    if given is None:
        return ANY
    if isinstance(given, BitFormat):
        return given
    name = str(given).removeprefix("torch.")
    name = _ALIASES.get(name, name)
    if name not in _CODES:
        raise NameNotFoundError(did_you_mean(name, [*_CODES, *_ALIASES], "bit format"))
    return FORMATS[_CODES[name]]


def format_of_bits(bits: int) -> BitFormat:
    """Return the format meant by a width: 4 int4, 8 int8, 16 fp16, 32 fp32, 64 fp64.

    The original's codes for the second format of a width are understood too: 7 uint8, 31 int32, 33 any.
    """
    if bits not in _BITS:
        known = ", ".join(f"{b} ({name})" for b, name in _BITS.items())
        raise NameNotFoundError(f"no bit format has the width {bits}; allowed: 0 (pruned), {known}.")
    return FORMATS[_CODES[_BITS[bits]]]


def parameter_grid(shape: tuple[int, ...], given: float | Tensor, group: int | Sequence[int] | None, what: str) -> Grid:
    """Return the grid of a quantisation parameter given as a number, one per channel, or one per group."""
    cells = torch.as_tensor(given, dtype=torch.float64).detach().cpu()
    if cells.dim() == 0:
        return Grid.uniform(shape, cells.item(), torch.float64)
    if group is None and tuple(cells.shape) == shape[:1]:
        group = (1, *shape[1:])
        cells = cells.reshape(-1, *(1 for _ in shape[1:]))
    elif isinstance(group, int):
        group = (*(1 for _ in shape[1:]), group)
    if group is None:
        raise ShapeError(
            message(
                f"{what} of shape {tuple(cells.shape)} for a tensor of shape {shape}",
                "a number, or one value for each output channel",
                "pass `group` to say how many elements share a value",
            )
        )
    block = tuple(min(g, max(1, s)) for g, s in zip(group, shape, strict=True))
    return Grid(shape, block, cells.clone()).canonical()

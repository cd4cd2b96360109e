"""Bit rounding: bring a TeSA's bit formats to those that a device can compute with.

A weight may mix formats element by element; a kernel runs one. Rounding up never loses a value, and a mixed tensor can
also be split into a sum of tensors with one format each. :func:`roundings` lists the alternatives (all int8, or int4 +
int8, ...) and leaves the choice to measurement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import torch
from torch import Tensor

from sparta.errors import ValueRangeError, message
from sparta.tesa.algebra import CONSTANT, LIVE
from sparta.tesa.attribute import TeSA
from sparta.tesa.bits import ANY, FORMATS, BitFormat, bit_format
from sparta.tesa.grid import Grid

__all__ = ["round_bits", "roundings", "split_bits"]


def round_bits(tesa: TeSA, available: Sequence[BitFormat | str]) -> TeSA:
    """Return the TeSA with every live element in the smallest available format that holds it without loss.

    Parameters
    ----------
    available
        The formats the device computes with.

    Examples
    --------
    >>> mixed = TeSA.from_bits(torch.tensor([[0, 4], [4, 8]]))
    >>> print(round_bits(mixed, ["int8", "fp32"]))
    TeSA 2×2, unstructured, density 0.75, int8
    """
    targets = sorted({bit_format(f) for f in available}, key=lambda f: f.code)
    code_map = torch.arange(len(FORMATS), dtype=torch.uint8)
    for found in tesa.formats():
        code_map[found.code] = _holder(found, targets).code
    return replace(tesa, code=Grid(tesa.shape, tesa.code.block, code_map[tesa.code.cells.long()]).canonical())


def split_bits(tesa: TeSA) -> tuple[TeSA, ...]:
    """Return one TeSA a bit format, fewest bits first; each live element is live in exactly one of them.

    The tensor is the sum of its parts: in each part the elements of the other parts are constant 0. Constants and
    dead elements of `tesa` stay what they are in the first part and are 0 in the others.
    """
    found = list(tesa.formats())
    if len(found) <= 1:
        return (tesa,)
    return tuple(_part(tesa, part, keep_rest=position == 0) for position, part in enumerate(found))


def roundings(tesa: TeSA, available: Sequence[BitFormat | str], most: int = 2) -> list[tuple[TeSA, ...]]:
    """Return the ways to run the tensor with at most `most` of the available formats, fewest parts first.

    Each way is a tuple of TeSAs with one bit format each, whose sum is the tensor.
    """
    if most < 1:
        raise ValueRangeError(message(f"most={most}", "at least 1 format"))
    targets = sorted({bit_format(f) for f in available}, key=lambda f: f.code)
    present = list(tesa.formats())
    ways: list[tuple[TeSA, ...]] = []
    for size in range(1, most + 1):
        for chosen in combinations(targets, size):
            used = {next((t for t in chosen if t.holds(f)), None) for f in present}
            if present and used == set(chosen):
                ways.append(split_bits(round_bits(tesa, chosen)))
    return ways or [split_bits(round_bits(tesa, targets))]


def _part(tesa: TeSA, part: BitFormat, *, keep_rest: bool) -> TeSA:
    """Return the part of `tesa` in one format; `keep_rest` says whether it also holds what is not live."""

    def state(states: Tensor, codes: Tensor) -> Tensor:
        elsewhere = torch.where(states == LIVE, CONSTANT, states if keep_rest else CONSTANT)
        return torch.where((states == LIVE) & (codes == part.code), LIVE, elsewhere).to(torch.uint8)

    return replace(
        tesa,
        state=Grid.combine(state, tesa.state, tesa.code),
        value=tesa.value if keep_rest else Grid.uniform(tesa.shape, 0.0, torch.float64),
        code=Grid.uniform(tesa.shape, part.code, torch.uint8),
    )


def _holder(wanted: BitFormat, targets: Sequence[BitFormat]) -> BitFormat:
    """Return the smallest of `targets` that holds `wanted`."""
    if wanted == ANY:
        raise ValueRangeError(
            message("live elements of unknown bit format", "a known format", "call `with_format` first")
        )
    for target in targets:
        if target.holds(wanted):
            return target
    names = ", ".join(t.name for t in targets) or "none"
    raise ValueRangeError(
        message(f"no available format holds {wanted} without loss (available: {names})", fix="add a wider format")
    )

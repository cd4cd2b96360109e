"""A TeSA in words: its shape, pattern, density and bits, for `print` and for tables."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparta.tesa.attribute import TeSA

__all__ = ["bits", "pattern", "tesa"]


def tesa(described: TeSA) -> str:
    """Return one line that tells a person what a TeSA says."""
    sizes = [f"{s}*" if d in described.dynamic else str(s) for d, s in enumerate(described.shape)]
    parts = [f"TeSA {'×'.join(sizes) or 'scalar'}", pattern(described), f"density {described.density:.4g}"]
    if described.count("dead"):
        parts.append(f"{described.count('dead')} dead")
    if bool((described.value.cells != 0).any()):
        parts.append("constants other than 0")
    return ", ".join([*parts, bits(described)])


def pattern(described: TeSA) -> str:
    """Return the pattern of the live elements: ``"dense"``, ``"block 32×32"``, ``"2:4"``."""
    found = described.pattern.pattern
    return "dense" if found is None else str(found)


def bits(described: TeSA) -> str:
    """Return the bit formats of the live elements: ``"int8, scale per 1×128"``, ``"int4 25%, int8 50%"``."""
    found = described.formats()
    if len(found) > 1:
        return ", ".join(f"{f} {100 * n / described.numel:.0f}%" for f, n in found.items())
    text = str(next(iter(found))) if found else "no live element"
    if not described.scale.is_uniform:
        return f"{text}, scale per {'×'.join(map(str, described.scale.block))}"
    return f"{text}, one scale" if found and math.isfinite(described.scale.value()) else text

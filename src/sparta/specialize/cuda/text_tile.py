"""TextTile: what is tuned in a CUDA kernel, as one line of text.

Tuning results and run-time ops hold text, kernels want numbers; every tile and plan is both. A line names its numbers,
so that an old line stays readable when a number with a default is added.
"""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any, ClassVar, Self

from sparta.errors import ValueRangeError, message

__all__ = ["TextTile"]


class TextTile:
    """Base of frozen dataclasses of numbers that are written as ``name=number,name=number``.

    Examples
    --------
    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Tile(TextTile):
    ...     _choices: ClassVar[dict[str, tuple[int, ...]]] = {"rows": (16, 32)}
    ...     rows: int = 16
    ...     warps: int = 4
    >>> str(Tile(32)), Tile.parse("warps=8")
    ('rows=32,warps=4', Tile(rows=16, warps=8))
    """

    _choices: ClassVar[dict[str, tuple[int, ...]]] = {}
    """Of the numbers that may have few values, which."""
    _noun: ClassVar[str] = "tile"

    def __post_init__(self) -> None:
        for name, allowed in self._choices.items():
            if getattr(self, name) not in allowed:
                raise ValueRangeError(message(f"{name} is {getattr(self, name)}", ", ".join(map(str, allowed))))

    def __str__(self) -> str:
        return ",".join(f"{name}={int(value)}" for name, value in asdict(self).items())  # type: ignore[call-overload]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return what ``str`` wrote."""
        parts = dict(part.partition("=")[::2] for part in text.split(","))
        known = [field.name for field in fields(cls)]  # type: ignore[arg-type]
        if not set(parts) <= set(known) or not all(value.isdigit() for value in parts.values()):
            names = ", ".join(known)
            raise ValueRangeError(message(f"the {cls._noun} {text!r}", f"name=number with the names {names}"))
        numbers: dict[str, Any] = {name: int(value) for name, value in parts.items()}
        return cls(**numbers)

"""The tile of a fused attention kernel: how many queries and keys meet at once, and who copies them.

An :class:`AttentionTile` is all that is tuned in ``triton-flash``. The one idea to know: the lists of kept tiles are
made for one tile size, and the backward kernels walk the same lists in smaller pieces.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

from sparta.errors import ValueRangeError, message

__all__ = ["AttentionTile"]

_SIZES = (16, 32, 64, 128)


@dataclass(frozen=True)
class AttentionTile:
    """How attention is cut.

    Parameters
    ----------
    queries, keys
        The tile of scores that is computed at once.
    stages, warps
        Depth of the software pipeline of keys and values; warps of a program.
    tma
        1 copies keys and values by the bulk copy engine (Hopper and later).

    Examples
    --------
    >>> AttentionTile.parse(str(AttentionTile(64, 32))) == AttentionTile(64, 32)
    True
    """

    queries: int = 128
    keys: int = 64
    stages: int = 2
    warps: int = 4
    tma: int = 0

    def __post_init__(self) -> None:
        for name, allowed in (
            ("queries", _SIZES),
            ("keys", _SIZES),
            ("warps", (1, 2, 4, 8)),
            ("tma", (0, 1)),
        ):
            if getattr(self, name) not in allowed:
                raise ValueRangeError(message(f"{name} is {getattr(self, name)}", ", ".join(map(str, allowed))))
        if self.stages < 1:
            raise ValueRangeError(message(f"stages is {self.stages}", "1 or more"))

    def __str__(self) -> str:
        return ",".join(f"{name}={value}" for name, value in asdict(self).items())

    @classmethod
    def parse(cls, text: str) -> AttentionTile:
        """Return the tile that ``str(tile)`` wrote."""
        parts = dict(part.partition("=")[::2] for part in text.split(","))
        known = {field.name for field in fields(cls)}
        if not set(parts) <= known or not all(value.isdigit() for value in parts.values()):
            raise ValueRangeError(message(f"the tile {text!r}", f"name=number with the names {', '.join(known)}"))
        return cls(**{name: int(value) for name, value in parts.items()})

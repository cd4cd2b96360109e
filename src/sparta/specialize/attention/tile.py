"""The tile of a fused attention kernel: how many queries and keys meet at once, and who copies them.

An :class:`AttentionTile` is all that is tuned in ``triton-flash``. The lists of kept tiles are made for one tile size,
and the backward kernels walk the same lists in smaller pieces.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sparta.errors import ValueRangeError, message
from sparta.specialize.cuda.text_tile import TextTile

__all__ = ["AttentionTile"]

_SIZES = (16, 32, 64, 128)


@dataclass(frozen=True)
class AttentionTile(TextTile):
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

    _choices: ClassVar[dict[str, tuple[int, ...]]] = {
        "queries": _SIZES,
        "keys": _SIZES,
        "warps": (1, 2, 4, 8),
        "tma": (0, 1),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stages < 1:
            raise ValueRangeError(message(f"stages is {self.stages}", "1 or more"))

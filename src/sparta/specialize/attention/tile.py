"""The tile of a fused attention kernel: how many queries and keys meet at once, and who copies them.

An :class:`AttentionTile` is all that is tuned in ``triton-flash``. The lists of kept tiles are made for one tile size;
gradients, which need more room on chip, have a tile and lists of their own where they are asked for.
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
    back_queries, back_keys
        The tile of the lists for gradients; 0 where it is that of the scores.

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
    back_queries: int = 0
    back_keys: int = 0

    _choices: ClassVar[dict[str, tuple[int, ...]]] = {
        "queries": _SIZES,
        "keys": _SIZES,
        "warps": (1, 2, 4, 8),
        "tma": (0, 1),
        "back_queries": (0, *_SIZES),
        "back_keys": (0, *_SIZES),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stages < 1:
            raise ValueRangeError(message(f"stages is {self.stages}", "1 or more"))

    def for_gradients(self, *, own: bool = True) -> tuple[int, int]:
        """Return the tile (queries, keys) in which gradients are computed; not its own, that of the scores.

        >>> AttentionTile(64, 64, back_queries=128).for_gradients()
        (128, 64)
        """
        if not own:
            return self.queries, self.keys
        return self.back_queries or self.queries, self.back_keys or self.keys

"""The tile of a ragged product: how many rows of an expert, and how many of its outputs, are computed at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sparta.errors import ValueRangeError, message
from sparta.specialize.cuda.text_tile import TextTile

__all__ = ["RaggedTile"]

_SIZES = (16, 32, 64, 128, 256)


@dataclass(frozen=True)
class RaggedTile(TextTile):
    """How the products of all experts are cut.

    Parameters
    ----------
    rows, columns, depth
        The tile: rows of one expert, outputs, and inputs that are multiplied at once.
    stages, warps
        Depth of the software pipeline; warps of a program.
    ctas
        Programs that stay on each multiprocessor and take tiles until none is left; 0 starts one program a tile.
    tma
        1 copies weights by the bulk copy engine (Hopper and later) where their addresses allow it.
    halves
        1 computes the last rows of an expert in a tile of half the height where they fit.
    ordered
        1 first copies rows into the order of experts, so that the copy engine can fetch them too.

    Examples
    --------
    >>> RaggedTile.parse(str(RaggedTile(64, halves=1))) == RaggedTile(64, halves=1)
    True
    """

    rows: int = 128
    columns: int = 128
    depth: int = 64
    stages: int = 3
    warps: int = 4
    ctas: int = 2
    tma: int = 0
    halves: int = 0
    ordered: int = 0

    _choices: ClassVar[dict[str, tuple[int, ...]]] = {
        **dict.fromkeys(("rows", "columns", "depth"), _SIZES),
        "warps": (1, 2, 4, 8),
        **dict.fromkeys(("tma", "halves", "ordered"), (0, 1)),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stages < 1 or self.ctas < 0 or (self.halves and self.rows < 32):
            given = f"stages={self.stages}, ctas={self.ctas}, halves={self.halves} of {self.rows} rows"
            raise ValueRangeError(message(given, "stages of 1 or more, ctas of 0 or more, halves of 32 rows or more"))

"""What the kernels of batched products and softmax are told: how the sparse matrix is stored, and how it is cut.

A plan is plain numbers that fit into one line of text, so that run-time ops hold no state. A matrix is stored whole or
as the values of its kept blocks, and a tile of it is addressed in one of three ways: by strides, inside one block, or
element by element through a table of blocks.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

from sparta.specialize.cuda.text_tile import TextTile

__all__ = ["ProductTile", "SoftmaxTile", "SparsePlan", "parsed_plan"]

_SIZES = (16, 32, 64, 128)
_WARPS = (1, 2, 4, 8)


@dataclass(frozen=True)
class ProductTile(TextTile):
    """How a product is cut.

    Parameters
    ----------
    height, width
        The tile of the sparse matrix, as it is stored.
    free
        Columns of the dense operand that meet a tile at once, where the sparse matrix is an operand.
    depth
        Terms of the sum that are taken at once, where the sparse matrix is the result.
    stages, warps
        Depth of the software pipeline; warps of a program.
    tma
        1 copies tiles by the bulk copy engine (Hopper and later), where it can address the operands.

    Examples
    --------
    >>> ProductTile.parse(str(ProductTile(64, 32))) == ProductTile(64, 32)
    True
    """

    height: int = 64
    width: int = 64
    free: int = 64
    depth: int = 32
    stages: int = 3
    warps: int = 4
    tma: int = 0

    _choices: ClassVar[dict[str, tuple[int, ...]]] = {
        "height": _SIZES, "width": _SIZES, "free": (*_SIZES, 256), "depth": _SIZES, "stages": tuple(range(1, 9)),
        "warps": _WARPS, "tma": (0, 1),
    }  # fmt: skip


@dataclass(frozen=True)
class SoftmaxTile(TextTile):
    """How a softmax is cut.

    Parameters
    ----------
    height, width
        The tile of the scores, as they are stored.
    rows
        Rows that a program takes at once.
    warps
        Warps of a program.

    Examples
    --------
    >>> str(SoftmaxTile(32, 32, rows=2))
    'height=32,width=32,rows=2,warps=4'
    """

    height: int = 32
    width: int = 32
    rows: int = 4
    warps: int = 4

    _choices: ClassVar[dict[str, tuple[int, ...]]] = {
        "height": _SIZES,
        "width": _SIZES,
        "rows": (1, 2, 4, 8, 16),
        "warps": _WARPS,
    }


@dataclass(frozen=True)
class SparsePlan(TextTile):
    """How one sparse matrix is stored, and how its tiles are found.

    Attributes
    ----------
    rows, cols
        Of the matrix, as it is stored.
    block_height, block_width, kept
        The blocks of compressed values, and how many there are; 0, 0, 0 for a matrix that is stored whole.
    height, width
        The tile.
    longest
        The most tiles that a row of tiles keeps.
    most
        The most tiles that one mask keeps.
    complete
        1 where the kept tiles are all that is stored, so that results need not be cleared first.

    Examples
    --------
    >>> SparsePlan(64, 64, 32, 32, 4, 16, 16, 2, 4, 1).address
    1
    """

    _noun: ClassVar[str] = "plan"
    rows: int
    cols: int
    block_height: int
    block_width: int
    kept: int
    height: int
    width: int
    longest: int
    most: int
    complete: int

    @property
    def compressed(self) -> bool:
        """Whether the values of kept blocks are stored, and not the whole matrix."""
        return self.block_height > 0

    @property
    def address(self) -> int:
        """How a tile is found: 0 by strides, 1 inside one block, 2 through the table of blocks."""
        if not self.compressed:
            return 0
        return 1 if self.block_height % self.height == 0 and self.block_width % self.width == 0 else 2

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """(rows, cols), or (values,)."""
        return (self.kept * self.block_height * self.block_width,) if self.compressed else (self.rows, self.cols)

    @property
    def table_columns(self) -> int:
        """Blocks along a row of the table."""
        return -(-self.cols // self.block_width) if self.compressed else 1

    def tiles(self, *, turned: bool) -> int:
        """Return how many tiles there are along the rows, or turned along the columns."""
        return -(-self.cols // self.width) if turned else -(-self.rows // self.height)


@functools.lru_cache(maxsize=1024)
def parsed_plan(text: str) -> tuple[SparsePlan, str]:
    """Return the two halves of a line that ops take: a plan, and the text of a tile.

    >>> parsed_plan(str(SparsePlan(8, 8, 0, 0, 0, 16, 16, 1, 1, 1)) + ";rows=1")[1]
    'rows=1'
    """
    plan, _, tile = text.partition(";")
    return SparsePlan.parse(plan), tile

"""The tile: how a block-sparse weight is cut and how the kernel walks over it.

A :class:`BlockTile` is all that is tuned in the CUDA block kernel. A tile changes the speed, never the result (beyond
the order in which sums are rounded).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sparta.errors import ValueRangeError, message
from sparta.specialize.cuda.text_tile import TextTile

__all__ = ["BlockTile"]

_SIZES = (16, 32, 64, 128, 256)


@dataclass(frozen=True)
class BlockTile(TextTile):
    """How a weight is packed and multiplied.

    Parameters
    ----------
    tokens
        Rows of x that one program multiplies at once.
    height, width
        The block (h, w) in which kept weights are stored; finer than the mask's blocks costs nothing but index.
    blocks
        Kept blocks of a block row that are multiplied at once; narrow blocks are put side by side.
    stages, warps
        Depth of the software pipeline; warps of a program.
    tma
        0 reads tiles by ordinary loads, 1 by the bulk copy engine (Hopper and later), 2 stores by it too.
    weight_first
        1 has the weight as the left operand of the matrix unit, so that tokens may be its wide side.
    ctas
        Programs that stay on each multiprocessor and walk over many tiles; 0 starts one program a tile.
    flatten
        1 lets the pipeline run on from one tile into the next, for programs that walk over many.
    group
        Tiles of tokens that are worked on before the next ones, so that they stay in the L2 cache.
    early
        1 starts programs while the kernel before is still ending (Hopper and later), which then wait for its results.

    Examples
    --------
    >>> BlockTile.parse(str(BlockTile(64, 32, 32, blocks=2))) == BlockTile(64, 32, 32, blocks=2)
    True
    """

    tokens: int = 128
    height: int = 64
    width: int = 64
    blocks: int = 1
    stages: int = 4
    warps: int = 4
    tma: int = 0
    weight_first: int = 0
    ctas: int = 0
    flatten: int = 0
    group: int = 8
    early: int = 0

    _choices: ClassVar[dict[str, tuple[int, ...]]] = {
        **dict.fromkeys(("tokens", "height", "width"), _SIZES),
        **dict.fromkeys(("blocks", "warps"), (1, 2, 4, 8)),
        "tma": (0, 1, 2),
        **dict.fromkeys(("weight_first", "flatten", "early"), (0, 1)),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stages < 1 or self.ctas < 0 or self.group < 1:
            given = f"stages={self.stages}, ctas={self.ctas}, group={self.group}"
            raise ValueRangeError(message(given, "stages and group of 1 or more, ctas of 0 or more"))

    @property
    def step(self) -> int:
        """Input channels that are multiplied at once."""
        return self.width * self.blocks

    def shared_bytes(self, itemsize: int) -> int:
        """Return about how much shared memory a program takes: the pipeline, and the result on its way out.

        >>> BlockTile(128, 128, 64, stages=3).shared_bytes(2)
        131072
        """
        stage = (self.tokens + self.height) * self.step * itemsize
        return stage * self.stages + self.tokens * self.height * itemsize

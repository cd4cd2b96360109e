"""How ``cuda-24-matrix`` cuts its work, and which of the ways are worth timing for a problem.

A multiprocessor is kept busy by one block. What a block fetches for a step of the input channels grows with the sides
of its tile, and what it multiplies with their product; so tiles are large where there are enough of them, and where
there are not, blocks share the steps of one tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from sparta.specialize.cuda.few_tokens import SHARED_BYTES
from sparta.specialize.cuda.text_tile import TextTile

__all__ = ["ROW", "SHAPES", "MatrixTile", "matrix_tiles", "shaped"]

ROW = 128
"""Bytes of a token that are copied at once."""
_SLAB = 64  # outputs that a warpgroup multiplies at once
_UNIT = 16  # tokens whose sums are written together
_STAGED = 64  # tokens of a warpgroup's results on their way out
_PITCH = 144  # bytes between them
_MOST_OUTPUTS = 256  # the weight is laid out for so many at once
# Tokens times slabs of a warpgroup whose sums fit its registers, by blocks on a multiprocessor and warpgroups of each.
_MOST_SUMS = {(1, 1): 384, (1, 2): 384, (1, 3): 128, (2, 1): 128, (2, 2): 64, (2, 3): 0}
SHAPES = (
    (16, 1, 1, 1, 1, 2), (16, 2, 1, 1, 1, 2), (16, 1, 1, 1, 2, 2), (16, 1, 1, 1, 1, 1), (32, 1, 1, 1, 1, 2),
    (32, 2, 1, 1, 1, 2), (32, 1, 1, 1, 2, 2), (32, 1, 1, 2, 1, 2), (64, 1, 1, 1, 1, 2), (64, 1, 1, 2, 1, 2),
    (64, 1, 1, 1, 2, 2), (64, 2, 1, 1, 1, 2), (64, 2, 1, 2, 1, 2), (64, 3, 1, 2, 1, 2), (64, 1, 1, 2, 2, 1),
    (128, 1, 1, 1, 1, 1), (128, 1, 1, 2, 1, 1), (128, 2, 1, 1, 1, 1), (128, 2, 1, 2, 1, 1), (128, 3, 1, 1, 1, 1),
    (128, 3, 1, 2, 1, 1), (128, 2, 2, 1, 1, 1), (128, 2, 2, 2, 1, 1), (256, 2, 1, 1, 1, 1), (256, 2, 1, 2, 1, 1),
    (176, 2, 2, 1, 1, 1), (192, 2, 2, 1, 1, 1),
)  # fmt: skip
"""Tokens, groups, each, split, ctas and depth of the tiles that were among the fastest somewhere on an H200."""
_TIMED = 5
# What fits times on an H200. Clusters of so many blocks run at once. Shared memory moves 128 bytes a cycle, and what is
# copied into it waits for what multiplications read: both operands of each. In cycles: of a copy and its barriers, to
# begin and end, and between two tiles; and bytes of the weight that all of memory brings in one.
_AT_ONCE = {1: 132, 2: 66}
_SHARED_RATE = 128
_STEPPED, _AROUND, _BETWEEN = 100, 3000, 1500
_STREAMED = 2200


@dataclass(frozen=True)
class MatrixTile(TextTile):
    """How blocks of threads cut their work; it changes the speed, and of the result only how sums are rounded.

    Parameters
    ----------
    tokens
        Rows of x that a block multiplies.
    groups
        Warpgroups of a block that multiply.
    cluster
        Blocks beside each other along the outputs, which fetch x for each other.
    stages
        Copies that are on their way at once.
    ctas
        Blocks that share a multiprocessor.
    group
        Tiles of tokens that are worked on before the next ones, so that they stay in the L2 cache.
    each
        Times 64 outputs of each warpgroup.
    split
        Blocks that share the input channels of one tile, where there are fewer tiles than multiprocessors.
    depth
        Steps of 128 bytes of a token that are copied, waited for and multiplied at once.

    Examples
    --------
    >>> MatrixTile.parse(str(MatrixTile(128, 1))).shared_bytes(2) < SHARED_BYTES
    True
    """

    tokens: int = 256
    groups: int = 2
    cluster: int = 2
    stages: int = 4
    ctas: int = 1
    group: int = 8
    each: int = 1
    split: int = 1
    depth: int = 1

    _choices: ClassVar[dict[str, tuple[int, ...]]] = {
        "tokens": (16, 32, 64, 128, 176, 192, 256),
        "groups": (1, 2, 3),
        "cluster": (1, 2),
        "stages": tuple(range(2, 33)),
        "ctas": (1, 2),
        "group": (1, 2, 4, 8, 16),
        "each": (1, 2),
        "split": tuple(range(1, 9)),
        "depth": (1, 2),
    }

    @property
    def pieces(self) -> int:
        """Slabs of 64 outputs of a block."""
        return self.groups * self.each

    @property
    def outputs(self) -> int:
        """Outputs of the blocks that share x."""
        return _SLAB * self.pieces * self.cluster

    def shared_bytes(self, itemsize: int) -> int:
        """Return the shared memory of a block: the ring of x and the weight, results, barriers, what aligns them."""
        results = self.groups * (min(self.tokens, _STAGED) * _PITCH + self.tokens * 4)
        return self._ring_bytes(itemsize) + results + self.stages * 16 + 1024

    def _ring_bytes(self, itemsize: int) -> int:
        step = self.tokens * ROW + self.pieces * (4096 + 1024 // itemsize)
        return self.stages * -(-step * self.depth // 1024) * 1024

    def fits(self, itemsize: int) -> bool:
        """Whether a multiprocessor has room for its blocks, threads for their sums, and the ring for those of parts."""
        units = self.tokens // _UNIT
        sums = self.split * -(-units // self.split) * self.pieces * _UNIT * _SLAB * 4
        return (
            self.ctas * (self.shared_bytes(itemsize) + 1024) <= SHARED_BYTES + 1024
            and self.tokens * self.each <= _MOST_SUMS[self.ctas, self.groups]
            and self.outputs <= _MOST_OUTPUTS
            and (self.split == 1 or (self.cluster == 1 and sums <= self._ring_bytes(itemsize)))
        )


def deepest(tile: MatrixTile, itemsize: int) -> MatrixTile:
    """Return a tile with as many stages as a multiprocessor has room for.

    >>> deepest(MatrixTile(256, 2, 1), 2).stages
    5
    """
    fitting = [each for each in tile._choices["stages"] if replace(tile, stages=each).fits(itemsize)]
    return replace(tile, stages=max(fitting, default=tile.stages))


def matrix_tiles(shape: Sequence[int], tokens: int, itemsize: int) -> list[MatrixTile]:
    """Return the tiles that are worth timing for a weight of this shape (N, K), the best guess first.

    >>> [matrix_tiles((4096, 4096), tokens, 2)[0].tokens for tokens in (64, 128, 4096)]
    [64, 64, 176]
    """
    tiles = [shaped(shape, itemsize) for shape in SHAPES]
    fitting = [tile for tile in tiles if tile.fits(itemsize)]
    return sorted(fitting, key=lambda tile: _guessed_cycles(tile, shape, tokens, itemsize))[:_TIMED]


def shaped(numbers: Sequence[int], itemsize: int) -> MatrixTile:
    """Return the deepest tile of one of :data:`SHAPES`.

    >>> shaped((64, 2, 1, 2, 1, 2), 2).split
    2
    """
    tokens, groups, each, split, ctas, depth = numbers
    return deepest(MatrixTile(tokens, groups, 1, 2, ctas, each=each, split=split, depth=depth), itemsize)


def _guessed_cycles(tile: MatrixTile, shape: Sequence[int], tokens: int, itemsize: int) -> float:
    """Guess how long a product takes; it only has to put tiles in order."""
    n, k = shape
    pieces, steps = tile.pieces, -(-k * itemsize // ROW)
    tiles = -(-tokens // tile.tokens) * -(-n // (_SLAB * pieces))
    weight = 4096 + 1024 // itemsize
    read = 2 * pieces * (tile.tokens * ROW // 2 + 2048)
    step = (read + tile.tokens * ROW + pieces * weight) / _SHARED_RATE + _STEPPED / tile.depth
    at_once = _AT_ONCE[tile.split]
    beside = min(tile.ctas, -(-tiles // at_once))  # blocks that share a multiprocessor
    rounds = -(-tiles // (at_once * tile.ctas))
    work = -(-steps // tile.split) * step * beside
    # Those that share steps begin again in every round.
    taken = rounds * (work + _AROUND) if tile.split > 1 else _AROUND + rounds * (work + _BETWEEN)
    return max(taken, _AROUND + weight * n * steps / _SLAB / _STREAMED)

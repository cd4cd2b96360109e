"""Which tiles are worth timing for a layer: a handful, by the number of tokens and the pattern of the mask.

:func:`candidates` lists them, the best guess first; :func:`default` is that guess. Blocks pay only along output
channels, so a mask is seen by the height of its blocks, and a 1xB pattern is unstructured here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from sparta.errors import ValueRangeError, message
from sparta.specialize.cpu.tile import Tile
from sparta.specialize.cpu.toolchain import chosen_isa

__all__ = ["candidates", "default"]

_LANES = {"avx512": 16, "avx2": 8, "portable": 4}
# Up to this many tokens, reading the weights as a stream may be faster than filling vectors with tokens.
_FEW_TOKENS = 4
# From this many input channels on, a wide tile of activations outgrows the first and the second level of caches.
_SOME_INPUTS, _MANY_INPUTS = 512, 1536
# Four rows that share loads want their inputs near, and enough weights that rows have columns in common.
_QUAD_INPUTS, _QUAD_DENSITY = 256, 0.12
_STREAM_AHEAD = 4096
_BITMAP_DENSITY = 0.25


def candidates(
    M: int,  # noqa: N803 - the paper's letters
    N: int,  # noqa: N803
    K: int,  # noqa: N803
    density: float,
    block: Sequence[int] = (1, 1),
    isa: str | None = None,
) -> list[dict[str, Any]]:
    """Return the tiles worth timing, as keyword arguments of :class:`PackedLinear`, the best guess first.

    Parameters
    ----------
    M, N, K
        Tokens, output channels, input channels.
    density
        The fraction of live weights.
    block
        (h, w) of the mask's blocks.
    isa
        Instruction set; ``None`` for the best.

    Examples
    --------
    >>> candidates(128, 768, 768, 0.1, (4, 1), isa="portable")[0]["block"]
    4
    """
    if min(M, N, K) < 0 or not 0.0 <= density <= 1.0 or len(block) != 2 or min(block) < 1:
        given = f"M={M}, N={N}, K={K}, density={density}, block={tuple(block)}"
        raise ValueRangeError(message(given, "sizes of 0 or more, a density in [0, 1], a block (h, w)"))
    chosen = chosen_isa(isa)
    height = int(block[0])
    tiles: list[Tile] = []
    if M <= _FEW_TOKENS:
        tiles += _stream_tiles(height, density, chosen)
    if M > 1:
        tiles += _panel_tiles(M, K, height, density, chosen)
    return [tile.to_dict() for tile in dict.fromkeys(tiles)]


def default(
    M: int,  # noqa: N803 - the paper's letters
    N: int,  # noqa: N803
    K: int,  # noqa: N803
    density: float,
    block: Sequence[int] = (1, 1),
    isa: str | None = None,
) -> dict[str, Any]:
    """Return the tile to use without timing any.

    Examples
    --------
    >>> default(1, 768, 768, 0.1, (16, 1), isa="portable")["form"]
    'columns'
    """
    return candidates(M, N, K, density, block, isa)[0]


def _stream_tiles(height: int, density: float, isa: str) -> Iterable[Tile]:
    """Yield the forms for a few tokens; the tallest columns the blocks fill first."""
    for block in (16, 8, 4):
        if height % block == 0:
            yield Tile("columns", block, prefetch=_STREAM_AHEAD)
            yield Tile("columns", block)
    if height % 4:
        if isa == "avx512":
            # A bit for every weight or a byte for every live one: whichever is less.
            forms = [Tile("permuted", 16), Tile("bitmap", 1)]
            for form in forms if density < _BITMAP_DENSITY else reversed(forms):
                yield replace(form, prefetch=_STREAM_AHEAD)
                yield form
        yield Tile("rows", 1, prefetch=_STREAM_AHEAD)
        yield Tile("rows", 1)
        # Nearly full columns waste little and need no index for each weight.
        if density > 0.5:
            yield Tile("columns", 16, prefetch=_STREAM_AHEAD)


def _panel_tiles(tokens: int, inputs: int, height: int, density: float, isa: str) -> Iterable[Tile]:
    """Yield the tiles for many tokens."""
    most = min(4, -(-tokens // _LANES[isa]))
    if height % 4 == 0:
        # Sixteen registers hold at most 12 sums beside inputs and weights; AVX-512 has 32.
        widest = {8: 3, 4: 4} if isa == "avx512" else {8: 1, 4: 2}
        # Four vectors of tokens keep the multipliers busy with blocks of 4; with fewer, 8 rows share a load better.
        blocks = (4,) if height % 8 else (4, 8) if min(most, widest[4]) == 4 else (8, 4)
        for block in blocks:
            for mv in range(min(most, widest[block]), 0, -1):
                for chunk in _chunks(inputs, mv, block):
                    yield Tile("panel", block, mv, k_chunk=chunk)
            if block == 8 and min(most, widest[8]) > 1 and inputs > _MANY_INPUTS:
                yield Tile("panel", block, min(most, widest[8]), prefetch=4)
        return
    # Very sparse rows have few columns in common, but a single vector gains by four rows all the same.
    quads = list(_quad_tiles(most, inputs, isa)) if density >= _QUAD_DENSITY or most == 1 else []
    yield from quads
    for mv in sorted({most, min(most, 2), 1}, reverse=True):
        for interleave in (2,) if quads else (2, 1) if mv <= 2 else (1, 2):
            for chunk in _chunks(inputs, mv, 1)[: 3 if interleave == 1 else 1]:
                yield Tile("panel", 1, mv, interleave, k_chunk=chunk)


def _quad_tiles(most: int, inputs: int, isa: str) -> Iterable[Tile]:
    """Yield the tiles of four rows that share what they load: sixteen sums with AVX-512, eight without."""
    widest = min(most, 4 if isa == "avx512" else 2)
    for mv in dict.fromkeys((widest, min(widest, 2))):
        near = _QUAD_INPUTS if inputs > _QUAD_INPUTS and mv > 1 else 0
        yield Tile("panel", 1, mv, 4, k_chunk=near)
        if near and mv == widest and inputs <= _MANY_INPUTS:
            yield Tile("panel", 1, mv, 4)


def _chunks(inputs: int, mv: int, block: int) -> tuple[int, ...]:
    """Return the chunks of input channels to try, for tiles that are too wide for the caches without.

    Blocks use what they load several times, so they gain less, and pay more for taking up sums again.
    """
    if mv < 3 or inputs <= _SOME_INPUTS:
        return (0,)
    if inputs <= _MANY_INPUTS:
        return (384, 0) if block == 1 else (0, 384)
    return (384, 768, 0) if block == 1 else (768, 384, 0)

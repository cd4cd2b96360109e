"""The C++ kernels as implements of convolutions: ``cpu`` for any sparse conv2d and conv1d on the CPU.

What is tuned is the tile, as for a linear layer over the pixels, and the layout of the image's copy. An implement only
offers both; which pays depends on the image and the mask, and measurement tells.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sparta.common.tuning import TunableItemCfg
from sparta.specialize.conv.cpu_grid import GRID, plan_grid
from sparta.specialize.conv.cpu_packed import PackedConv
from sparta.specialize.conv.cpu_phases import PHASES, has_phases
from sparta.specialize.conv.spec import ConvGeometry, ConvKernel
from sparta.specialize.cpu.candidates import candidates
from sparta.specialize.cpu.device import runs_here
from sparta.specialize.cpu.kernel import PackedKernel
from sparta.specialize.cpu.packing import QUAD_ROWS, columns_of
from sparta.specialize.cpu.tile import Tile
from sparta.specialize.cpu.toolchain import chosen_isa
from sparta.specialize.implement import Implement, Params, Support
from sparta.specialize.kernel_spec import KernelSpec
from sparta.tesa.attribute import TeSA

__all__ = ["CpuConv1d", "CpuConv2d", "block_height", "conv_images", "conv_layouts", "conv_tiles"]

_VECTOR_BYTES = 64
_NEAR_BYTES = 32 * 1024  # of the first level of caches, for the input
# Bytes of input in a chunk of channels, by the rows that are computed at once. Four rows that share loads read so
# little twice that more of it may come from the second level, but for wide tiles.
_CHUNKS = {1: (_NEAR_BYTES,), 2: (2 * _NEAR_BYTES,), 4: (5 * _NEAR_BYTES // 4, 2 * _NEAR_BYTES)}
_WIDE_QUADS = (7, 5)  # vectors of tokens; images of 14, 28 and 56 columns are cut into whole ones of seven
_ENTRIES_AHEAD = 4
_ROWS = 4  # of the blocks that kernels like best
_SHORT_ROW = 14  # pixels: of fewer, a gap after each row costs more than a copy for each shift
_LARGE_IMAGE = 14 * 14  # pixels
_MOST_GRID_FLOATS = 512 * 1024  # of the copy of a band
_QUAD_DENSITY = 0.07  # from which four rows of several taps have enough in common to share what they load
_FILLED = 0.7  # the share of live weights from which blocks with gaps are faster than single rows


class _CpuConvKernel(PackedKernel, ConvKernel):
    def __init__(self, spec: KernelSpec, tile: Tile, image: str) -> None:
        geometry = ConvGeometry.from_dict(spec.attributes)
        mask = spec["weight"].mask("cpu")
        super().__init__(PackedConv(None, mask, geometry, image=image, **tile.to_dict()), spec.epilogue)


class _CpuConv(Implement):
    """Hand-written C++ kernels, compiled for this machine at their first use."""

    name = "cpu"
    version = 4
    every_epilogue = True
    any_mask = True

    def supports(self, spec: KernelSpec) -> Support:
        """Any mask and geometry on the CPU in fp32, bf16 and fp16, where there is a compiler."""
        return runs_here(spec)

    def space(self, spec: KernelSpec) -> Mapping[str, TunableItemCfg]:
        """Return the tiles and image layouts that are worth timing."""
        return {
            "tile": TunableItemCfg("choice", _value=[str(tile) for tile in conv_tiles(spec)]),
            "image": TunableItemCfg("choice", _value=list(conv_layouts(spec))),
        }

    def default(self, spec: KernelSpec) -> dict[str, Any]:
        """Return the best guess."""
        return {"tile": str(conv_tiles(spec)[0]), "image": conv_layouts(spec)[0]}

    def build(self, spec: KernelSpec, params: Params) -> ConvKernel:
        """Compile the library if it is not there yet, and pack the mask."""
        return _CpuConvKernel(spec, Tile.parse(params["tile"]), params["image"])


class CpuConv2d(_CpuConv):
    """Hand-written C++ kernels for conv2d."""

    op = "conv2d"


class CpuConv1d(_CpuConv):
    """Hand-written C++ kernels for conv1d."""

    op = "conv1d"


def conv_tiles(spec: KernelSpec) -> list[Tile]:
    """Return the tiles worth timing, the best guess first: wide ones, of a linear layer over the output's pixels."""
    weight = spec["weight"]
    geometry = ConvGeometry.from_dict(spec.attributes)
    pixels = math.prod(geometry.output_size(spec["input"].shape[2:], weight.shape[2:]))
    exact = max(math.gcd(weight.state.block[0], weight.shape[0] // geometry.groups), 1)
    tiles = _tiles_of(weight, pixels, exact)
    if geometry.groups > 1:  # whose rows read other channels: few share what wide tiles load
        tiles = [tile for tile in tiles if tile.mv not in _WIDE_QUADS]
    if block_height(spec) == exact:
        return tiles
    # Where blocks have gaps, single rows store less, and may win.
    return [*_tiles_of(weight, pixels, block_height(spec)), tiles[0], tiles[-1]]


def _tiles_of(weight: TeSA, pixels: int, height: int) -> list[Tile]:
    """Return the tiles for a mask that is seen as blocks of so many rows."""
    found = candidates(max(pixels, 2), weight.shape[0], math.prod(weight.shape[1:]), weight.density, (height, 1))
    panels = [replace(tile, k_chunk=0, prefetch=0) for tile in (Tile(**each) for each in found) if tile.form == "panel"]
    if height == 1 and math.prod(weight.shape[2:]) > 1 and weight.density >= _QUAD_DENSITY:
        panels = [_shared_loads(tile) for tile in panels]
    # A tile with fewer than half the sums of the largest loads too much for what it multiplies.
    most = max(tile.block * tile.mv for tile in panels)
    wide = [tile for tile in dict.fromkeys(panels) if 2 * tile.block * tile.mv >= most]
    if wide[0].block > 1:
        return list(dict.fromkeys(_block_tiles(wide, weight.shape)))
    return list(dict.fromkeys([*_wide_quads(pixels, weight), *_unstructured_tiles(wide, weight.shape)]))


def _wide_quads(pixels: int, weight: TeSA) -> list[Tile]:
    """Return tiles of four rows by more vectors than others hold, where there are so many.

    In near chunks; with one tap, also in larger ones and whole: lists are longer then, and fewer.
    """
    if chosen_isa(None) != "avx512" or weight.density < _QUAD_DENSITY / 2:
        return []
    fit = [Tile(mv=mv, interleave=QUAD_ROWS) for mv in _WIDE_QUADS if pixels > (mv - 1) * _VECTOR_BYTES // 4]
    near = [_in_chunks(tile, weight.shape, _CHUNKS[QUAD_ROWS][0]) for tile in fit]
    if math.prod(weight.shape[2:]) > 1:
        return near
    return [*near, *(_in_chunks(tile, weight.shape, _CHUNKS[QUAD_ROWS][1]) for tile in fit[1:]), *fit[:1]]


def _shared_loads(tile: Tile) -> Tile:
    """Return a tile of single rows as one of four rows that share what they load, where registers hold its sums."""
    widest = 4 if chosen_isa(None) == "avx512" else 2
    return replace(tile, interleave=QUAD_ROWS) if tile.interleave == 1 and tile.mv <= widest else tile


def block_height(spec: KernelSpec) -> int:
    """Return the rows of the blocks that a mask is made of; 4 where such blocks hold few pruned weights.

    Dead channels leave gaps in blocks, and so does a live weight that happens to be 0; blocks of 4 multiply so much
    faster than single rows that some gaps do not matter.
    """
    weight, groups = spec["weight"], int(spec.attributes["groups"])
    each = weight.shape[0] // groups
    height = max(math.gcd(weight.state.block[0], each), 1)
    if height % _ROWS == 0 or (groups > 1 and each % _ROWS) or not weight.numel:
        return height
    counts, _ = columns_of(weight.mask("cpu").flatten(1).numpy(), _ROWS)
    stored = _ROWS * int(counts.sum())
    return _ROWS if stored and weight.count("live") >= _FILLED * stored else height


def _unstructured_tiles(wide: Sequence[Tile], shape: Sequence[int]) -> list[Tile]:
    """Return each tile in chunks of channels, smaller ones for rows that are computed one by one, and whole.

    The last is the plainest, which any configuration may name.
    """
    found = []
    for tile in wide:
        sizes = _CHUNKS[tile.interleave]
        if tile.interleave == 2 and math.prod(shape[2:]) == 1:  # so sparse that little of it is read more than once
            sizes = (*sizes, 4 * _NEAR_BYTES)
        found += [_in_chunks(tile, shape, nbytes) for nbytes in sizes]
        found.append(tile)
    return [*found, Tile()]


def _block_tiles(wide: Sequence[Tile], shape: Sequence[int]) -> list[Tile]:
    """Return tiles that ask for their inputs ahead: blocks multiply what they load so often that there is time to."""
    tallest = sorted(wide, key=lambda tile: (-tile.block * tile.mv, -tile.block))
    ahead = [replace(tile, prefetch=_ENTRIES_AHEAD) for tile in tallest]
    chunked = [_in_chunks(tile, shape, 4 * _NEAR_BYTES) for tile in ahead if tile.block == tallest[0].block]
    return [*ahead, *chunked[:2], tallest[0]]


def _in_chunks(tile: Tile, shape: Sequence[int], nbytes: int) -> Tile:
    """Return a tile with chunks of channels, all alike, of which all rows read no more than so many bytes."""
    channels, taps = shape[1], math.prod(shape[2:])
    # A run for each row of taps, not aligned; with one tap, its vectors.
    window = math.prod(shape[2:-1]) * (tile.mv + (2 if taps > 1 else 0)) * _VECTOR_BYTES
    together = max(1, nbytes // window)
    if together >= channels:
        return tile
    return replace(tile, k_chunk=-(-channels // -(-channels // together)) * taps)


def conv_layouts(spec: KernelSpec) -> tuple[str, ...]:
    """Return the layouts worth timing in fp32, the best guess first.

    An unstructured weight with several taps loads most, and nearly always across two cache lines, but from a grid of
    regions. Small regions overlap by more than they hold, and the rows of large ones leave the caches.
    """
    images, kernel, size = conv_images(spec), spec["weight"].shape[2:], spec["input"].shape[2:]
    geometry = ConvGeometry.from_dict(spec.attributes)
    if math.prod(kernel) == 1 and set(geometry.stride) == {1} and not any(map(sum, geometry.padding)):
        # As it is, or a copy whose planes begin in different sets of a cache and on lines of their own.
        whole_lines = math.prod(size) % (_VECTOR_BYTES // 4) == 0
        phases = len(size) == 2 and geometry.groups == 1 and has_phases(spec["input"].shape[1], size)
        alike = block_height(spec) % _ROWS == 0  # blocks use what they load so often that lines do not matter
        return ("columns", PHASES) if phases and not whole_lines and not alike else ("flat", "columns")
    if math.prod(kernel) == 1 or len(kernel) == 1 or block_height(spec) % _ROWS == 0:
        return images
    if math.prod(geometry.output_size(size, kernel)) < _LARGE_IMAGE:
        return images
    channels = spec["weight"].shape[1] * geometry.groups
    plan = plan_grid(geometry, (kernel[0], kernel[1]), (size[0], size[1]), channels=channels)
    fits = len(plan.slot_rows) * channels * plan.plane <= _MOST_GRID_FLOATS
    return (GRID, "rows", "flat") if fits else images


def conv_images(spec: KernelSpec) -> tuple[str, ...]:
    """Return the layouts worth timing, the best guess first.

    An unstructured weight loads a vector for every multiplication and gains by aligned ones; blocks use what they load
    several times, and gain by rows without gaps where rows are short. With one tap, rows need no other alignment than
    pixels.
    """
    if math.prod(spec["weight"].shape[2:]) == 1:
        return ("flat", "taps")
    if block_height(spec) % _ROWS:
        return ("rows", "taps", "flat")
    geometry = ConvGeometry.from_dict(spec.attributes)
    short = geometry.output_size(spec["input"].shape[2:], spec["weight"].shape[2:])[-1] < _SHORT_ROW
    return ("columns", "flat", "taps") if short else ("flat", "columns", "taps")

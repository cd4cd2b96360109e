"""Shuffles of channels: between channels and pixels, and among the groups of a convolution.

Nothing is computed; a channel before is a place in a group of channels after, or the other way round, so the axes are
products of the same factors.
"""

from __future__ import annotations

import torch
from torch import fx

from sparta.propagation.axes import Axes
from sparta.propagation.constants import Known, any_over
from sparta.propagation.op import Op, shape_of
from sparta.propagation.registry import rule
from sparta.tesa.grid import Grid

__all__: list[str] = []

_aten = torch.ops.aten
_Seen = list[tuple[fx.Node, Grid]]

# ---------------------------------------------------------------------- channels become pixels, and back

_TO_PIXELS, _TO_CHANNELS = _aten.pixel_shuffle.default, _aten.pixel_unshuffle.default


def _many(op: Op) -> tuple[fx.Node, fx.Node, int]:
    """Return the side with many channels, the side with few, and how many become one."""
    if op.node.target is _TO_PIXELS:
        return op["self"], op.node, int(op["upscale_factor"]) ** 2
    return op.node, op["self"], int(op["downscale_factor"]) ** 2


def _channels(grid: Grid) -> Grid:
    """Return what holds for any pixel of each channel."""
    rank = len(grid.shape)
    return any_over(grid, [rank - 2, rank - 1])


def _moved(op: Op, line: Grid, target: fx.Node) -> Grid:
    """Return flags of channels (any pixel) carried to the other side of a shuffle."""
    many, few, times = _many(op)
    lead = shape_of(few)[:-2]
    shape = shape_of(target)
    if target is many:
        carried = line.reshape((*lead, 1)).broadcast_to((*lead, times)).reshape((*shape[:-2], 1, 1))
    else:
        carried = any_over(line.reshape((*lead, times)), [len(lead)]).reshape((*lead, 1, 1))
    return carried.broadcast_to(shape)


@rule("constants", _TO_PIXELS, _TO_CHANNELS)
def shuffled_pixels(op: Op) -> Known | None:
    """Know the channels that are 0 at every pixel."""
    zero = op.known(op["self"]).zero()
    live = _moved(op, _channels(Grid(zero.shape, zero.block, ~zero.cells)), op.node)
    return Known(Grid(live.shape, live.block, ~live.cells), Grid.uniform(op.shape, 0.0, torch.float64))


@rule("observed", _TO_PIXELS, _TO_CHANNELS)
def shuffled_pixels_observed(op: Op, seen: Grid) -> _Seen:
    """Observe the channels that an observed one came from."""
    return [(op["self"], _moved(op, _channels(seen), op["self"]))]


@rule("axes", _TO_PIXELS, _TO_CHANNELS)
def shuffled_pixels_axes(op: Op, axes: Axes) -> None:
    """Cut a channel with all the channels that its pixels are."""
    many, few, times = _many(op)
    rank = len(op.shape)
    place = axes.free(times)
    axes.keep(place, "pixels of one channel")
    axes.product(axes.of(many, rank - 3), [axes.of(few, rank - 3), place], op.node)
    for node in (many, few):
        for dim in (rank - 2, rank - 1):
            axes.keep(axes.of(node, dim), "pixels")
    for dim in range(rank - 3):
        axes.equal(axes.of(many, dim), axes.of(few, dim))


# ---------------------------------------------------------------------- groups are interleaved

_INTERLEAVE = (_aten.channel_shuffle.default, _aten.native_channel_shuffle.default)


def _groups(op: Op) -> tuple[int, int]:
    return int(op["groups"]), op.shape[1] // int(op["groups"])


def _turned(grid: Grid, first: int, second: int) -> Grid:
    """Return a grid whose channels, first × second of them, are taken in the other order."""
    head, tail = grid.shape[0], grid.shape[2:]
    rank = 3 + len(tail)
    apart = grid.reshape((head, first, second, *tail)).permute((0, 2, 1, *range(3, rank)))
    return apart.reshape(grid.shape)


@rule("constants", *_INTERLEAVE)
def interleaved(op: Op) -> Known | None:
    """Take what is known in the new order."""
    return op.known(op["self"]).map(lambda g: _turned(g, *_groups(op)))


@rule("observed", *_INTERLEAVE)
def interleaved_observed(op: Op, seen: Grid) -> _Seen:
    """Observe in the old order."""
    groups, each = _groups(op)
    return [(op["self"], _turned(seen, each, groups))]


@rule("axes", *_INTERLEAVE)
def interleaved_axes(op: Op, axes: Axes) -> None:
    """Keep the groups, and cut the same channels of each."""
    groups, each = (axes.free(size) for size in _groups(op))
    axes.keep(groups, "interleaved groups")
    axes.product(axes.of(op["self"], 1), [groups, each], op.node)
    axes.product(axes.of(op.node, 1), [each, groups], op.node)
    for dim in range(len(op.shape)):
        if dim != 1:
            axes.equal(axes.of(op["self"], dim), axes.of(op.node, dim))

"""Parts of tensors: slices, picks, turns and repetitions.

Along one dim each of these ops is an index, `take` on the way forward and `spread` on the way back, and in terms of
axes a concatenation of stretches.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx

from sparta.propagation.axes import Axes
from sparta.propagation.constants import Known, spread
from sparta.propagation.edit import Edit
from sparta.propagation.op import Op, dynamic_dims, shape_of
from sparta.propagation.registry import rule
from sparta.tesa.grid import Grid

__all__ = ["others_equal", "stretch", "take_known"]

_aten = torch.ops.aten
_Seen = list[tuple[fx.Node, Grid]]

# ---------------------------------------------------------------------- one index along one dim


def _slice_index(op: Op) -> tuple[fx.Node, int, Tensor, int] | None:
    """Return source, dim, the positions taken, and the step of a slice; None where a bound is known at run time."""
    source = op["self"]
    size = shape_of(source)[op["dim"] % len(shape_of(source))]
    if any(isinstance(op[n], fx.Node) for n in ("start", "end", "step")):
        return None
    positions = range(size)[slice(op["start"], op["end"], op["step"])]
    return (
        source,
        op["dim"] % len(shape_of(source)),
        torch.arange(size)[positions.start : positions.stop : op["step"]],
        op["step"],
    )


def take_known(known: Known, dim: int, index: Tensor, out: Sequence[int] | None = None) -> Known:
    """Take what is known at some positions of a dim, reshaped where the output has another rank."""
    taken = known.map(lambda g: g.take(dim, index))
    return taken if out is None else taken.map(lambda g: g.reshape(out))


def _unknown_slice(op: Op) -> Known | None:
    """Return what is known of a slice whose bounds are known at run time: what holds along the whole dim."""
    source = op["self"]
    dim = op["dim"] % len(shape_of(source))
    return op.known(source).uniform_over([dim]).map(lambda g: g.broadcast_to(op.shape))


@rule("constants", _aten.slice.Tensor)
def cut_out(op: Op) -> Known | None:
    """Take what is known of the slice."""
    found = _slice_index(op)
    return _unknown_slice(op) if found is None else take_known(op.known(found[0]), found[1], found[2])


@rule("observed", _aten.slice.Tensor)
def cut_out_observed(op: Op, seen: Grid) -> _Seen:
    """Observe the slice and nothing outside of it."""
    found = _slice_index(op)
    if found is None:
        return []
    source, dim, index, _ = found
    return [(source, spread(seen, dim, index, shape_of(source)[dim]))]


def others_equal(axes: Axes, source: fx.Node, out: fx.Node, dim: int) -> None:
    """Tie every dim but `dim` to the same dim of the output."""
    for other in range(len(shape_of(out))):
        if other != dim:
            axes.equal(axes.of(source, other), axes.of(out, other))


@rule("axes", _aten.slice.Tensor)
def cut_out_axes(op: Op, axes: Axes) -> None:
    """Tie the slice to its stretch of the dim."""
    found = _slice_index(op)
    source = op["self"]
    dim = op["dim"] % len(shape_of(source))
    others_equal(axes, source, op.node, dim)
    if found is None or not len(found[2]) or dim in dynamic_dims(source):
        axes.keep(axes.of(source, dim), "sliced at run time")
        axes.keep(axes.of(op.node, dim), "sliced at run time")
        return
    if found[3] != 1:
        axes.select(axes.of(source, dim), axes.of(op.node, dim), found[2], op.node)
        return
    stretch(axes, source, dim, (int(found[2][0]), axes.of(op.node, dim)), op.node)


def stretch(axes: Axes, source: fx.Node, dim: int, part: tuple[int, int], node: fx.Node) -> None:
    """Tie an axis to the stretch of a dim that begins at `part[0]`."""
    start, middle = part
    length = axes.size(middle)
    rest = shape_of(source)[dim] - start - length
    axes.concat(axes.of(source, dim), [axes.free(start), middle, axes.free(rest)], node)


@rule("rewrite", _aten.slice.Tensor)
def move_slice(op: Op, edit: Edit) -> None:
    """Count the bounds of the slice in kept indices."""
    found = _slice_index(op)
    if found is None or not len(found[2]):
        return
    source, dim, index, step = found
    if step != 1:
        _take_kept(op, edit, dim, index)
        return
    if not edit.is_cut_along(source, dim):
        return
    start = int(edit.axes.kept(source, dim)[: int(index[0])].sum())
    edit.set(op.node, "start", start)
    edit.set(op.node, "end", start + edit.size(op.node, dim))


def _select(op: Op) -> tuple[fx.Node, int, int] | None:
    source = op["self"]
    dim = op["dim"] % len(shape_of(source))
    if isinstance(op["index"], fx.Node):
        return None
    return source, dim, op["index"] % shape_of(source)[dim]


@rule("constants", _aten.select.int)
def pick(op: Op) -> Known | None:
    """Take what is known of the one index."""
    found = _select(op)
    return None if found is None else take_known(op.known(found[0]), found[1], torch.tensor([found[2]]), op.shape)


@rule("observed", _aten.select.int)
def pick_observed(op: Op, seen: Grid) -> _Seen:
    """Observe the one index."""
    found = _select(op)
    if found is None:
        return []
    source, dim, index = found
    wide = seen.reshape((*op.shape[:dim], 1, *op.shape[dim:]))
    return [(source, spread(wide, dim, torch.tensor([index]), shape_of(source)[dim]))]


@rule("axes", _aten.select.int)
def pick_axes(op: Op, axes: Axes) -> None:
    """Keep the index that is picked."""
    found = _select(op)
    if found is None:
        axes.keep_all(op["self"], "indexed at run time")
        axes.keep_all(op.node, "indexed at run time")
        return
    source, dim, index = found
    for new in range(len(op.shape)):
        axes.equal(axes.of(source, new + (new >= dim)), axes.of(op.node, new))
    axes.keep(axes.of(source, dim), "picked by its index", torch.arange(shape_of(source)[dim]) == index)


@rule("rewrite", _aten.select.int)
def move_pick(op: Op, edit: Edit) -> None:
    """Count the index in kept indices."""
    found = _select(op)
    if found is not None:
        source, dim, index = found
        edit.set(op.node, "index", int(edit.axes.kept(source, dim)[:index].sum()))


@rule("constants", _aten.flip.default, _aten.roll.default)
def turn(op: Op) -> Known | None:
    """Take what is known in the turned order."""
    known = op.known(op["self"])
    orders = _orders(op)
    for dim, index in orders or []:
        known = take_known(known, dim, index)
    return None if orders is None else known


@rule("observed", _aten.flip.default, _aten.roll.default)
def turn_observed(op: Op, seen: Grid) -> _Seen:
    """Turn back what is observed."""
    orders = _orders(op)
    for dim, index in reversed(orders or []):
        seen = spread(seen, dim, index, op.shape[dim])
    return [] if orders is None else [(op["self"], seen)]


@rule("axes", _aten.flip.default, _aten.roll.default)
def turn_axes(op: Op, axes: Axes) -> None:
    """Cut the turned dims in their new order: an index takes what is left."""
    orders = _orders(op)
    if orders is None:
        axes.keep_all(op["self"], "rolled as one line")
        axes.keep_all(op.node, "rolled as one line")
        return
    turned = {d for d, _ in orders}
    for dim in range(len(op.shape)):
        if dim not in turned:
            axes.equal(axes.of(op["self"], dim), axes.of(op.node, dim))
        elif len(orders) > 1:
            axes.keep(axes.of(op["self"], dim), "flipped or rolled with other dims")
            axes.keep(axes.of(op.node, dim), "flipped or rolled with other dims")
    if len(orders) == 1:
        dim, index = orders[0]
        axes.select(axes.of(op["self"], dim), axes.of(op.node, dim), index, op.node)


@rule("rewrite", _aten.flip.default, _aten.roll.default)
def turn_by_index(op: Op, edit: Edit) -> None:
    """Take what is left of the turned dim by an index."""
    orders = _orders(op) or []
    if len(orders) == 1:
        _take_kept(op, edit, *orders[0])


def _take_kept(op: Op, edit: Edit, dim: int, index: Tensor) -> None:
    """Replace an op that takes ``index`` of a dim of its input by one that takes the kept of them."""
    source = op["self"]
    if not edit.is_cut_along(source, dim) and not edit.is_cut_along(op.node, dim):
        return
    positions = edit.literal(op.node, edit.positions((source, dim), index[edit.kept(op.node, dim)]))
    edit.replace(op.node, _aten.index_select.default, (source, dim, positions))


def _orders(op: Op) -> list[tuple[int, Tensor]] | None:
    """Return for each turned dim the positions in their new order; None for a roll of the flattened tensor."""
    rank = len(op.shape)
    if "shifts" not in op.arguments:
        return [(d % rank, torch.arange(op.shape[d % rank]).flip(0)) for d in op["dims"]]
    if not op["dims"] and rank != 1:
        return None  # rolled as one long line
    pairs = zip(op["dims"] or [0], op["shifts"], strict=True)
    return [(d % rank, torch.arange(op.shape[d % rank]).roll(s)) for d, s in pairs]


# ---------------------------------------------------------------------- repeating each index

_REPEAT = _aten.repeat_interleave.self_int


def _repeat(op: Op) -> tuple[int, Tensor] | None:
    """Return the dim and the positions that each index is repeated from, or None without a dim."""
    if op["dim"] is None or isinstance(op["repeats"], fx.Node):
        return None
    dim = op.dim(op["dim"])
    return dim, torch.arange(op.shape[dim]) // max(1, op["repeats"])


@rule("constants", _REPEAT)
def repeat(op: Op) -> Known | None:
    """Repeat what is known of each index."""
    found = _repeat(op)
    return None if found is None else take_known(op.known(op["self"]), *found)


@rule("observed", _REPEAT)
def repeat_observed(op: Op, seen: Grid) -> _Seen:
    """Observe an index where any of its repetitions is."""
    found = _repeat(op)
    return [] if found is None else [(op["self"], spread(seen, *found, shape_of(op["self"])[found[0]]))]


@rule("axes", _REPEAT)
def repeat_axes(op: Op, axes: Axes) -> None:
    """Cut an index with all its repetitions."""
    found = _repeat(op)
    if found is None or op["output_size"] is not None:
        axes.keep_all(op["self"], "repeated")
        axes.keep_all(op.node, "repeated")
        return
    times = axes.free(op["repeats"])
    axes.keep(times, "repeated as often as before")
    others_equal(axes, op["self"], op.node, found[0])
    axes.product(axes.of(op.node, found[0]), [axes.of(op["self"], found[0]), times], op.node)


# ---------------------------------------------------------------------- repeating the whole

_TILE = _aten.repeat.default


def _tiles(op: Op) -> list[tuple[int, int, Tensor]] | None:
    """Return (dim, times, positions) of each dim of the output, or None where a number is known at run time only."""
    if any(isinstance(times, fx.Node) for times in op["repeats"]):
        return None
    lead = len(op.shape) - len(shape_of(op["self"]))
    sizes = (*(1 for _ in range(lead)), *shape_of(op["self"]))
    return [(d, t, torch.arange(s * t) % max(1, s)) for d, (s, t) in enumerate(zip(sizes, op["repeats"], strict=True))]


@rule("constants", _TILE)
def tile(op: Op) -> Known | None:
    """Repeat what is known."""
    tiles = _tiles(op)
    if tiles is None:
        return None
    lead = len(op.shape) - len(shape_of(op["self"]))
    known = op.known(op["self"]).map(lambda g: g.reshape((*(1 for _ in range(lead)), *g.shape)))
    for dim, times, index in tiles:
        known = take_known(known, dim, index) if times != 1 else known
    return known


@rule("observed", _TILE)
def tile_observed(op: Op, seen: Grid) -> _Seen:
    """Observe an element where any of its repetitions is."""
    tiles = _tiles(op)
    if tiles is None:
        return []
    shape = shape_of(op["self"])
    sizes = (*(1 for _ in range(len(op.shape) - len(shape))), *shape)
    for dim, times, index in tiles:
        seen = spread(seen, dim, index, sizes[dim]) if times != 1 else seen
    return [(op["self"], seen.reshape(shape))]


@rule("axes", _TILE)
def tile_axes(op: Op, axes: Axes) -> None:
    """Cut an index with all its repetitions."""
    tiles = _tiles(op)
    lead = len(op.shape) - len(shape_of(op["self"]))
    moving = set(dynamic_dims(op.node))
    for dim, times in [(d, t) for d, t, _ in tiles] if tiles else [(d, 0) for d in range(len(op.shape))]:
        out = axes.of(op.node, dim)
        if dim >= lead and times == 1:
            axes.equal(axes.of(op["self"], dim - lead), out)
        elif dim >= lead and times > 1 and dim not in moving:
            copies = axes.free(times)
            axes.keep(copies, "repeated as often as before")
            axes.product(out, [copies, axes.of(op["self"], dim - lead)], op.node)
        else:
            axes.keep(out, "repeated")
            if dim >= lead:
                axes.keep(axes.of(op["self"], dim - lead), "repeated")

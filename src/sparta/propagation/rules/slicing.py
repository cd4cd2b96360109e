"""Parts of tensors: slices, picks, turns, concatenations, stacks and splits.

Along one dim each of these ops is an index, `take` on the way forward and `spread` on the way back, and in terms of
axes a concatenation of stretches.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor, fx

from sparta.propagation.axes import Axes
from sparta.propagation.constants import Known, spread
from sparta.propagation.edit import Edit
from sparta.propagation.op import Op, dynamic_dims, shape_of, tensor_inputs
from sparta.propagation.registry import rule
from sparta.propagation.rules.indexing import line_axes, line_observed, line_of
from sparta.tesa.grid import Grid

__all__: list[str] = []

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


def _take(known: Known, dim: int, index: Tensor, out: Sequence[int] | None = None) -> Known:
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
    return _unknown_slice(op) if found is None else _take(op.known(found[0]), found[1], found[2])


@rule("observed", _aten.slice.Tensor)
def cut_out_observed(op: Op, seen: Grid) -> _Seen:
    """Observe the slice and nothing outside of it."""
    found = _slice_index(op)
    if found is None:
        return []
    source, dim, index, _ = found
    return [(source, spread(seen, dim, index, shape_of(source)[dim]))]


def _others_equal(axes: Axes, source: fx.Node, out: fx.Node, dim: int) -> None:
    for other in range(len(shape_of(out))):
        if other != dim:
            axes.equal(axes.of(source, other), axes.of(out, other))


@rule("axes", _aten.slice.Tensor)
def cut_out_axes(op: Op, axes: Axes) -> None:
    """Tie the slice to its stretch of the dim."""
    found = _slice_index(op)
    source = op["self"]
    dim = op["dim"] % len(shape_of(source))
    _others_equal(axes, source, op.node, dim)
    if found is None or not len(found[2]) or dim in dynamic_dims(source):
        axes.keep(axes.of(source, dim), "sliced at run time")
        axes.keep(axes.of(op.node, dim), "sliced at run time")
        return
    if found[3] != 1:
        axes.select(axes.of(source, dim), axes.of(op.node, dim), found[2], op.node)
        return
    _stretch(axes, source, dim, (int(found[2][0]), axes.of(op.node, dim)), op.node)


def _stretch(axes: Axes, source: fx.Node, dim: int, part: tuple[int, int], node: fx.Node) -> None:
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
    return None if found is None else _take(op.known(found[0]), found[1], torch.tensor([found[2]]), op.shape)


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
    turns = _turns(op)
    for dim, index in turns or []:
        known = _take(known, dim, index)
    return None if turns is None else known


@rule("observed", _aten.flip.default, _aten.roll.default)
def turn_observed(op: Op, seen: Grid) -> _Seen:
    """Turn back what is observed."""
    turns = _turns(op)
    for dim, index in reversed(turns or []):
        seen = spread(seen, dim, index, op.shape[dim])
    return [] if turns is None else [(op["self"], seen)]


@rule("axes", _aten.flip.default, _aten.roll.default)
def turn_axes(op: Op, axes: Axes) -> None:
    """Cut the turned dims in their new order: an index takes what is left."""
    turns = _turns(op)
    if turns is None:
        axes.keep_all(op["self"], "rolled as one line")
        axes.keep_all(op.node, "rolled as one line")
        return
    turned = {d for d, _ in turns}
    for dim in range(len(op.shape)):
        if dim not in turned:
            axes.equal(axes.of(op["self"], dim), axes.of(op.node, dim))
        elif len(turns) > 1:
            axes.keep(axes.of(op["self"], dim), "flipped or rolled with other dims")
            axes.keep(axes.of(op.node, dim), "flipped or rolled with other dims")
    if len(turns) == 1:
        dim, index = turns[0]
        axes.select(axes.of(op["self"], dim), axes.of(op.node, dim), index, op.node)


@rule("rewrite", _aten.flip.default, _aten.roll.default)
def turn_by_index(op: Op, edit: Edit) -> None:
    """Take what is left of the turned dim by an index."""
    turns = _turns(op) or []
    if len(turns) == 1:
        _take_kept(op, edit, *turns[0])


def _take_kept(op: Op, edit: Edit, dim: int, index: Tensor) -> None:
    """Replace an op that takes ``index`` of a dim of its input by one that takes the kept of them."""
    source = op["self"]
    if not edit.is_cut_along(source, dim) and not edit.is_cut_along(op.node, dim):
        return
    positions = edit.literal(op.node, edit.positions((source, dim), index[edit.kept(op.node, dim)]))
    edit.replace(op.node, _aten.index_select.default, (source, dim, positions))


def _turns(op: Op) -> list[tuple[int, Tensor]] | None:
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
    return None if found is None else _take(op.known(op["self"]), *found)


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
    _others_equal(axes, op["self"], op.node, found[0])
    axes.product(axes.of(op.node, found[0]), [axes.of(op["self"], found[0]), times], op.node)


# ---------------------------------------------------------------------- cat, stack, split


def _parts(op: Op) -> tuple[list[fx.Node], int]:
    return list(op["tensors"]), op["dim"] % len(op.shape)


@rule("constants", _aten.cat.default)
def cat(op: Op) -> Known | None:
    """Put what is known of the parts end to end."""
    nodes, dim = _parts(op)
    if any(len(shape_of(n)) != len(op.shape) for n in nodes):
        return None
    knowns = [op.known(n) for n in nodes]
    return Known(Grid.cat([k.const for k in knowns], dim), Grid.cat([k.value for k in knowns], dim))


@rule("observed", _aten.cat.default)
def cat_observed(op: Op, seen: Grid) -> _Seen:
    """Observe each part in its stretch."""
    nodes, dim = _parts(op)
    if any(len(shape_of(n)) != len(op.shape) for n in nodes):
        return []
    sizes = [shape_of(n)[dim] for n in nodes]
    starts = [0, *accumulate(sizes)]
    return [
        (n, seen.take(dim, torch.arange(start, start + size)))
        for n, start, size in zip(nodes, starts, sizes, strict=False)
    ]


@rule("axes", _aten.cat.default)
def cat_axes(op: Op, axes: Axes) -> None:
    """Tie each part to its stretch of the output."""
    nodes, dim = _parts(op)
    for node in nodes:
        if len(shape_of(node)) != len(op.shape):
            axes.keep_all(op.node, "a part without dims")
            axes.keep_all(node, "a part without dims")
            return
        _others_equal(axes, node, op.node, dim)
    axes.concat(axes.of(op.node, dim), [axes.of(n, dim) for n in nodes], op.node)


@rule("constants", _aten.stack.default)
def stack(op: Op) -> Known | None:
    """Put what is known of the parts side by side."""
    nodes, dim = _parts(op)
    shape = (*op.shape[:dim], 1, *op.shape[dim + 1 :])
    knowns = [op.known(n).map(lambda g: g.reshape(shape)) for n in nodes]
    return Known(Grid.cat([k.const for k in knowns], dim), Grid.cat([k.value for k in knowns], dim))


@rule("observed", _aten.stack.default)
def stack_observed(op: Op, seen: Grid) -> _Seen:
    """Observe each part at its index."""
    nodes, dim = _parts(op)
    return [(n, seen.take(dim, torch.tensor([i])).reshape(shape_of(n))) for i, n in enumerate(nodes)]


@rule("axes", _aten.stack.default)
def stack_axes(op: Op, axes: Axes) -> None:
    """Cut all parts alike and keep every part."""
    nodes, dim = _parts(op)
    axes.keep(axes.of(op.node, dim), "stacked")
    for node in nodes:
        for old in range(len(shape_of(node))):
            axes.equal(axes.of(node, old), axes.of(op.node, old + (old >= dim)))


def _piece(op: Op) -> tuple[fx.Node, int, int, Op] | None:
    """Return source, dim and start of one output of a split, and the split; None for another op's output."""
    split, number = op.node.args
    if not isinstance(split, fx.Node) or not isinstance(number, int) or split.target not in _SPLITS:
        return None
    whole = Op(split, op.facts)
    source = whole["self"]
    dim = whole["dim"] % len(shape_of(source))
    if split.target is _aten.unbind.int:
        return source, dim, number, whole
    sizes = [value.shape[dim] for value in split.meta["val"]]
    if dim in dynamic_dims(source) or not all(isinstance(s, int) for s in sizes):
        return None
    return source, dim, sum(sizes[:number]), whole


_SPLITS = (
    *(_aten.split.Tensor, _aten.split.sizes, _aten.split_with_sizes.default, _aten.chunk.default),
    _aten.unbind.int,
)


def _piece_index(op: Op, found: tuple[fx.Node, int, int, Op]) -> Tensor:
    source, dim, start, whole = found
    length = 1 if whole.node.target is _aten.unbind.int else op.shape[dim]
    del source
    return torch.arange(start, start + length)


@rule("constants", operator.getitem)
def piece(op: Op) -> Known | None:
    """Take what is known of one piece of a split."""
    found = _piece(op)
    if found is None:
        return None
    return _take(op.known(found[0]), found[1], _piece_index(op, found), op.shape)


@rule("observed", operator.getitem)
def piece_observed(op: Op, seen: Grid) -> _Seen:
    """Observe the piece in its stretch."""
    found = _piece(op)
    line = line_of(op)
    if line is not None:
        return line_observed(op, line[0], line[1], remains=line[2], seen=seen)
    if found is None:
        inputs = tensor_inputs(op.node.all_input_nodes[0])
        return [(n, Grid.uniform(shape_of(n), 1, torch.bool)) for n in inputs]
    source, dim, _, whole = found
    if whole.node.target is _aten.unbind.int:
        seen = seen.reshape((*op.shape[:dim], 1, *op.shape[dim:]))
    return [(source, spread(seen, dim, _piece_index(op, found), shape_of(source)[dim]))]


@rule("axes", operator.getitem)
def piece_axes(op: Op, axes: Axes) -> None:
    """Tie the piece to its stretch."""
    found = _piece(op)
    line = line_of(op)
    if line is not None:
        line_axes(op, line[0], line[1], remains=line[2], axes=axes)
        return
    if found is None:
        axes.keep_all(op.node, "one of several outputs")
        return
    source, dim, start, whole = found
    if whole.node.target is _aten.unbind.int:
        for new in range(len(op.shape)):
            axes.equal(axes.of(source, new + (new >= dim)), axes.of(op.node, new))
        axes.keep(axes.of(source, dim), "unbound")
        return
    _others_equal(axes, source, op.node, dim)
    _stretch(axes, source, dim, (start, axes.of(op.node, dim)), op.node)


@rule("axes", *_SPLITS)
def split_axes(op: Op, axes: Axes) -> None:
    """Leave it to the pieces, unless the dim is dynamic."""
    source = op["self"]
    dim = op["dim"] % len(shape_of(source))
    if dim in dynamic_dims(source):
        axes.keep_all(source, "split along a dynamic dim")


@rule("rewrite", *(s for s in _SPLITS if s is not _aten.unbind.int))
def resize_split(op: Op, edit: Edit) -> None:
    """Write the new sizes into the op."""
    source = op["self"]
    dim = op["dim"] % len(shape_of(source))
    flags = edit.axes.kept(source, dim)
    if bool(flags.all()):
        return
    sizes = [int(value.shape[dim]) for value in op.node.meta["val"]]
    edit.replace(
        op.node, _aten.split_with_sizes.default, (source, [int(p.sum()) for p in torch.split(flags, sizes)], dim)
    )

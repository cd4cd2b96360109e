"""Tensors put together and taken apart: concatenations, stacks and splits.

A concatenation is its parts end to end, in what is known, in what is observed and in terms of axes; a split is the same
read backwards, one output at a time.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, fx

from sparta.propagation.axes import Axes
from sparta.propagation.constants import Known, spread
from sparta.propagation.edit import Edit
from sparta.propagation.op import Op, dynamic_dims, shape_of, tensor_inputs
from sparta.propagation.registry import Direction, pieces_of, rule, rule_for, ruled_by_pieces
from sparta.propagation.rules.indexing import line_axes, line_observed, line_of
from sparta.propagation.rules.slicing import others_equal, stretch, take_known
from sparta.tesa.grid import Grid

__all__: list[str] = []

_aten = torch.ops.aten
_Seen = list[tuple[fx.Node, Grid]]


_SPLITS = ruled_by_pieces(
    *(_aten.split.Tensor, _aten.split.sizes, _aten.split_with_sizes.default, _aten.chunk.default),
    _aten.unbind.int,
)


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
        others_equal(axes, node, op.node, dim)
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


def _own_rule(direction: Direction, op: Op) -> Callable[..., Any] | None:
    """Return the rule of one result of an op that has several, or None."""
    made = op.node.args[0]
    return rule_for(direction, pieces_of(made.target)) if isinstance(made, fx.Node) else None


def _piece_index(op: Op, found: tuple[fx.Node, int, int, Op]) -> Tensor:
    source, dim, start, whole = found
    length = 1 if whole.node.target is _aten.unbind.int else op.shape[dim]
    del source
    return torch.arange(start, start + length)


@rule("constants", operator.getitem)
def piece(op: Op) -> Known | None:
    """Take what is known of one piece of a split."""
    own = _own_rule("constants", op)
    if own is not None:
        known: Known | None = own(op)
        return known
    found = _piece(op)
    if found is None:
        return None
    return take_known(op.known(found[0]), found[1], _piece_index(op, found), op.shape)


@rule("observed", operator.getitem)
def piece_observed(op: Op, seen: Grid) -> _Seen:
    """Observe the piece in its stretch."""
    own = _own_rule("observed", op)
    if own is not None:
        stated: _Seen = own(op, seen)
        return stated
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
    own = _own_rule("axes", op)
    if own is not None:
        own(op, axes)
        return
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
    others_equal(axes, source, op.node, dim)
    stretch(axes, source, dim, (start, axes.of(op.node, dim)), op.node)


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

"""Elements picked and placed by index tensors: index, gather, scatter, index_put, sort and top-k.

An index is known only at run time unless it is a constant of the graph, so along the indexed dim a fact must hold
everywhere to hold anywhere; along all other dims facts and cuts pass through.
"""

from __future__ import annotations

import operator

import torch
from torch import Tensor, fx

from sparta.propagation.axes import Axes
from sparta.propagation.constants import Known, any_over, spread, unbroadcast
from sparta.propagation.edit import Edit
from sparta.propagation.op import Op, dynamic_dims, is_tensor, shape_of
from sparta.propagation.registry import rule, ruled_by_pieces
from sparta.tesa.grid import Grid

__all__ = ["LINES", "line_axes", "line_observed", "line_of"]

_aten = torch.ops.aten
_Seen = list[tuple[fx.Node, Grid]]

# ---------------------------------------------------------------------- index


class _Index:
    """Where the dims of ``source[indices]`` come from."""

    def __init__(self, op: Op) -> None:
        self.source: fx.Node = op["self"]
        rank = len(shape_of(self.source))
        if "indices" in op.arguments:
            listed = list(op["indices"])
        else:  # index_select
            listed = [op["index"] if d == op["dim"] % rank else None for d in range(rank)]
        self.indices: list[fx.Node] = [n for n in listed if n is not None]
        self.dims = [d for d, n in enumerate(listed) if n is not None]
        self.rest = [d for d in range(rank) if d not in self.dims]
        together = self.dims == list(range(self.dims[0], self.dims[0] + len(self.dims)))
        self.width = max(len(shape_of(n)) for n in self.indices)
        # Indexed dims that are not next to each other come first in the result.
        self.start = self.dims[0] if together else 0

    def plain(self) -> bool:
        """Whether all indices are numbers (a mask selects a number of elements that is known at run time only)."""
        return all(is_tensor(n) and n.meta["val"].dtype not in {torch.bool, torch.uint8} for n in self.indices)

    def position(self, dim: int) -> int:
        """Return the dim of the result that a dim of the source became."""
        before = self.rest.index(dim)
        return before if before < self.start else before + self.width

    def constant(self, op: Op) -> Tensor | None:
        """Return the positions that are taken, if there is one index of one dim and it is a constant."""
        if len(self.indices) != 1 or self.width != 1:
            return None
        known = op.known(self.indices[0])
        if not known.all or dynamic_dims(self.indices[0]):
            return None
        size = shape_of(self.source)[self.dims[0]]
        return known.value.dense().long() % max(1, size)


_INDEX = (_aten.index.Tensor, _aten._unsafe_index.Tensor, _aten.index_select.default)


@rule("constants", *_INDEX)
def indexed(op: Op) -> Known | None:
    """Know what a constant index takes, or what holds all along the indexed dims."""
    index = _Index(op)
    if not index.plain():
        return None
    taken = index.constant(op)
    if taken is not None:
        return op.known(index.source).map(lambda g: g.take(index.dims[0], taken))
    shape = [1] * len(op.shape)
    for dim in index.rest:
        shape[index.position(dim)] = shape_of(index.source)[dim]
    known = op.known(index.source).uniform_over(index.dims)
    return known.map(lambda g: g.reshape(shape).broadcast_to(op.shape))


@rule("observed", *_INDEX)
def indexed_observed(op: Op, seen: Grid) -> _Seen:
    """Observe what a constant index takes, or all along the indexed dims."""
    index = _Index(op)
    if not index.plain():
        return []
    shape = shape_of(index.source)
    taken = index.constant(op)
    if taken is not None:
        return [(index.source, spread(seen, index.dims[0], taken, shape[index.dims[0]]))]
    line = any_over(seen, range(index.start, index.start + index.width))
    narrow = [1 if d in index.dims else s for d, s in enumerate(shape)]
    return [(index.source, line.reshape(narrow).broadcast_to(shape))]


@rule("axes", *_INDEX)
def indexed_axes(op: Op, axes: Axes) -> None:
    """Cut the other dims alike, and the indexed one where the index is a constant that can be rewritten."""
    index = _Index(op)
    for node in index.indices:
        axes.keep_all(node, "an index")
    if not index.plain():
        axes.keep_all(index.source, "picked by a mask")
        axes.keep_all(op.node, "picked by a mask")
        return
    for dim in index.rest:
        axes.equal(axes.of(index.source, dim), axes.of(op.node, index.position(dim)))
    taken = index.constant(op)
    if taken is not None and len(taken):
        axes.select(axes.of(index.source, index.dims[0]), axes.of(op.node, index.dims[0]), taken, op.node)
        return
    for dim in index.dims:
        axes.keep(axes.of(index.source, dim), "indexed at run time")
    for dim in range(index.start, index.start + index.width):
        axes.keep(axes.of(op.node, dim), "indexed at run time")


@rule("rewrite", *_INDEX)
def rewrite_index(op: Op, edit: Edit) -> None:
    """Count a constant index in kept positions."""
    index = _Index(op)
    taken = index.constant(op) if index.plain() else None
    if taken is None:
        return
    source = (index.source, index.dims[0])
    if edit.is_cut_along(*source) or edit.is_cut_along(op.node, index.dims[0]):
        positions = edit.positions(source, taken[edit.kept(op.node, index.dims[0])])
        literal = edit.literal(op.node, positions)
        if "indices" in op.arguments:
            edit.set(op.node, "indices", [*(None,) * index.dims[0], literal])
        else:
            edit.set(op.node, "index", literal)


# ---------------------------------------------------------------------- gather and scatter


def _same_size(source: fx.Node, index: fx.Node, dim: int) -> bool:
    """Whether source and index have one size along all dims but `dim`."""
    pairs = zip(shape_of(source), shape_of(index), strict=True)
    return all(a == b for d, (a, b) in enumerate(pairs) if d != dim)


@rule("constants", _aten.gather.default)
def gathered(op: Op) -> Known | None:
    """Know what holds along the whole dim."""
    source, dim = op["self"], op.dim(op["dim"])
    if not op.shape or not _same_size(source, op["index"], dim):
        return None
    return op.known(source).uniform_over([dim]).map(lambda g: g.broadcast_to(op.shape))


@rule("observed", _aten.gather.default)
def gathered_observed(op: Op, seen: Grid) -> _Seen:
    """Observe the whole dim; the index does not matter where all it could pick is one constant."""
    source, index, dim = op["self"], op["index"], op.dim(op["dim"])
    if not op.shape or not _same_size(source, index, dim):
        return []
    known = gathered(op)
    needed = seen if known is None else Grid.combine(lambda s, c: s & ~c, seen, known.const)
    return [(source, any_over(seen, [dim]).broadcast_to(shape_of(source))), (index, needed)]


@rule("axes", _aten.gather.default)
def gathered_axes(op: Op, axes: Axes) -> None:
    """Keep the dim that is indexed, cut the others alike."""
    source, index, dim = op["self"], op["index"], op.dim(op["dim"])
    _lines(op, axes, [source, index], dim)


def _lines(op: Op, axes: Axes, nodes: list[fx.Node], dim: int) -> None:
    """Keep `dim` of several tensors, and cut the other dims alike where they have one size."""
    for node in nodes:
        for other in range(len(op.shape)):
            if other == dim or not _same_size(node, op.node, dim):
                axes.keep(axes.of(node, other), "indexed at run time")
                axes.keep(axes.of(op.node, other), "indexed at run time")
            else:
                axes.equal(axes.of(node, other), axes.of(op.node, other))
    axes.keep(axes.of(op.node, dim), "indexed at run time")


_SCATTER = (_aten.scatter.src, _aten.scatter.value, _aten.scatter_add.default)


@rule("constants", *_SCATTER)
def scattered(op: Op) -> Known | None:
    """Know the zeros that remain where zeros are placed among zeros."""
    target, dim = op["self"], op.dim(op["dim"])
    if not op.shape or not _same_size(target, op["index"], dim):
        return None
    zero = op.known(target).uniform_over([dim]).zero()
    if "src" in op.arguments:
        if not _same_size(target, op["src"], dim):
            return None
        zero = Grid.combine(torch.logical_and, zero, op.known(op["src"]).uniform_over([dim]).zero())
    elif isinstance(op["value"], fx.Node) or float(op["value"]) != 0:
        return None
    return Known(zero.broadcast_to(op.shape), Grid.uniform(op.shape, 0.0, torch.float64))


@rule("observed", *_SCATTER)
def scattered_observed(op: Op, seen: Grid) -> _Seen:
    """Observe what is placed, and where, through the whole dim; what it replaces as it is."""
    target, index, dim = op["self"], op["index"], op.dim(op["dim"])
    if not op.shape or not _same_size(target, index, dim):
        return []
    line = any_over(seen, [dim])
    found = [(target, seen), (index, line.broadcast_to(shape_of(index)))]
    if "src" in op.arguments and _same_size(target, op["src"], dim):
        found.append((op["src"], line.broadcast_to(shape_of(op["src"]))))
    return found


@rule("axes", *_SCATTER)
def scattered_axes(op: Op, axes: Axes) -> None:
    """Keep the dim that is indexed, cut the others alike."""
    nodes = [op["self"], op["index"], *([op["src"]] if "src" in op.arguments else [])]
    if not op.shape:
        return
    _lines(op, axes, nodes, op.dim(op["dim"]))


# ---------------------------------------------------------------------- index_add, index_copy, index_put


@rule("axes", _aten.index_add.default, _aten.index_copy.default)
def added_rows_axes(op: Op, axes: Axes) -> None:
    """Keep the dim that is indexed, cut the others alike."""
    dim = op.dim(op["dim"])
    axes.keep_all(op["index"], "an index")
    _lines(op, axes, [op["self"], op["source"]], dim)


@rule("observed", _aten.index_add.default, _aten.index_copy.default)
def added_rows_observed(op: Op, seen: Grid) -> _Seen:
    """Observe what is placed through the whole dim."""
    line = any_over(seen, [op.dim(op["dim"])])
    return [(op["self"], seen), (op["source"], line.broadcast_to(shape_of(op["source"])))]


@rule("constants", _aten.index_add.default, _aten.index_copy.default)
def added_rows(op: Op) -> Known | None:
    """Know the zeros that remain where zeros are added to zeros."""
    dim = op.dim(op["dim"])
    zeros = [op.known(op[n]).uniform_over([dim]).zero() for n in ("self", "source")]
    both = Grid.combine(torch.logical_and, *zeros)
    return Known(both.broadcast_to(op.shape), Grid.uniform(op.shape, 0.0, torch.float64))


_PUT = (_aten.index_put.default, _aten._unsafe_index_put.default)


def _leading(index: _Index) -> bool:
    """Whether numbers index the first dims, so that the others are the last dims of what is put there."""
    return index.plain() and index.dims == list(range(len(index.dims)))


@rule("constants", *_PUT)
def put(op: Op) -> Known | None:
    """Know the zeros that remain where zeros are put among zeros."""
    index, values = _Index(op), op.known(op["values"]).zero()
    extra = len(values.shape) - len(index.rest)
    if not _leading(index) or extra < 0:
        return None
    placed = any_over(Grid(values.shape, values.block, ~values.cells), range(extra))
    line = placed.reshape((*(1 for _ in index.dims), *placed.shape[extra:])).broadcast_to(op.shape)
    zero = op.known(op["self"]).uniform_over(index.dims).zero().broadcast_to(op.shape)
    const = Grid.combine(lambda z, p: z & ~p, zero, line)
    return Known(const, Grid.uniform(op.shape, 0.0, torch.float64))


@rule("observed", *_PUT)
def put_observed(op: Op, seen: Grid) -> _Seen:
    """Observe what is put somewhere wherever it may land, and what it replaces as it is."""
    index, shape = _Index(op), shape_of(op["values"])
    if not _leading(index) or len(shape) < len(index.rest):
        return [(op["self"], seen)]
    line = any_over(seen, index.dims).reshape(tuple(op.shape[d] for d in index.rest))
    wide = line.broadcast_to((*shape[: len(shape) - len(index.rest)], *line.shape))
    return [(op["self"], seen), (op["values"], unbroadcast(wide, shape))]


@rule("axes", *_PUT)
def put_axes(op: Op, axes: Axes) -> None:
    """Keep the indexed dims, cut the others alike."""
    index = _Index(op)
    for node in index.indices:
        axes.keep_all(node, "an index")
    values = op["values"]
    for dim in index.dims:
        axes.keep(axes.of(op["self"], dim), "indexed at run time")
        axes.keep(axes.of(op.node, dim), "indexed at run time")
    lead = index.width + len(index.rest) - len(shape_of(values))
    picked = set(range(index.start, index.start + index.width))
    tied = {index.position(d): d for d in index.rest} if index.plain() else {}
    for dim in index.rest:
        axes.equal(axes.of(op["self"], dim), axes.of(op.node, dim))
        if not index.plain():
            axes.keep(axes.of(op.node, dim), "picked by a mask")
    for dim in range(len(shape_of(values))):
        if dim + lead in picked or dim + lead not in tied:
            axes.keep(axes.of(values, dim), "indexed at run time")
        else:
            axes.broadcast_dim((values, dim), (op.node, tied[dim + lead]))


# ---------------------------------------------------------------------- sort, top-k, largest along a dim

LINES = ruled_by_pieces(
    *(_aten.topk.default, _aten.sort.default, _aten.sort.stable, _aten.max.dim, _aten.min.dim),
    *(_aten.kthvalue.default, _aten.median.dim, _aten.cummax.default, _aten.cummin.default),
)


def line_of(op: Op) -> tuple[fx.Node, int, bool] | None:
    """Return source and dim of an op that returns several results along lines, and whether the dim remains."""
    made = op.node.args[0]
    if op.node.target is not operator.getitem or not isinstance(made, fx.Node) or made.target not in LINES:
        return None
    whole = Op(made, op.facts)
    source: fx.Node = whole["self"]
    rank = len(shape_of(source))
    return source, whole["dim"] % max(1, rank), len(op.shape) == rank


def line_observed(op: Op, source: fx.Node, dim: int, *, remains: bool, seen: Grid) -> _Seen:
    """Observe the whole line of an observed result."""
    shape = shape_of(source)
    if not shape:
        return [(source, seen)]
    line = any_over(seen, [dim]) if remains else seen.reshape((*op.shape[:dim], 1, *op.shape[dim:]))
    return [(source, line.broadcast_to(shape))]


def line_axes(op: Op, source: fx.Node, dim: int, *, remains: bool, axes: Axes) -> None:
    """Keep the line, cut the other dims alike."""
    for old in range(len(shape_of(source))):
        new = old if remains else old - (old > dim)
        if old == dim:
            axes.keep(axes.of(source, old), "sorted or searched along it")
            if remains:
                axes.keep(axes.of(op.node, new), "sorted or searched along it")
        else:
            axes.equal(axes.of(source, old), axes.of(op.node, new))


@rule("axes", *LINES)
def several_results(op: Op, axes: Axes) -> None:
    """Keep the line; the rest is left to the results, each a node of its own."""
    if shape_of(op["self"]):
        axes.keep(axes.of(op["self"], op["dim"]), "sorted or searched along it")

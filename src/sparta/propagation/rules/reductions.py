"""Reductions, softmax and pooling: many elements become one.

A reduction is known only where all that goes into it is; on the way back, what looks at one output looks at all the
inputs it came from.
"""

from __future__ import annotations

import math

import torch
from torch import fx

from sparta.propagation.axes import Axes
from sparta.propagation.constants import Known, any_over, with_dims
from sparta.propagation.edit import Edit
from sparta.propagation.op import Op, dynamic_dims, shape_of
from sparta.propagation.registry import rule
from sparta.tesa.grid import Grid

__all__: list[str] = []

_aten = torch.ops.aten
_Seen = list[tuple[fx.Node, Grid]]

_SUMS = (_aten.sum.default, _aten.sum.dim_IntList, _aten.mean.default, _aten.mean.dim)
_COUNTED = frozenset({_aten.sum.default, _aten.sum.dim_IntList})
_EXTREMES = (_aten.amax.default, _aten.amin.default)
_OTHERS = (
    *(_aten.var.dim, _aten.var.correction, _aten.std.dim, _aten.std.correction, _aten.prod.dim_int),
    *(_aten.any.dim, _aten.all.dim, _aten.argmax.default, _aten.argmin.default, _aten.logsumexp.default),
)


def _reduced(op: Op) -> tuple[fx.Node, list[int]]:
    source: fx.Node = op["self"]
    return source, op.dims(op.arguments.get("dim"), len(shape_of(source)))


def _sum_over(grid: Grid, dims: list[int]) -> Grid:
    """Return the sum of the values along `dims`; those dims then have size 1."""
    cells = grid.cells
    for dim in dims:
        count, block, size = cells.shape[dim], grid.block[dim], grid.shape[dim]
        sizes = torch.full((count,), float(block), dtype=torch.float64)
        sizes[-1] = size - block * (count - 1)
        view = [-1 if d == dim else 1 for d in range(cells.dim())]
        cells = (cells * sizes.reshape(view)).sum(dim, keepdim=True)
    return with_dims(grid, dims, cells)


@rule("constants", *_SUMS)
def total(op: Op) -> Known | None:
    """Know a sum or a mean of constants."""
    source, dims = _reduced(op)
    known = op.known(source).finite()
    if op.node.target in _COUNTED and set(dynamic_dims(source)) & set(dims):
        known = known.only(known.zero())  # how many are summed is known at run time only
    open_ = any_over(Grid(known.shape, known.const.block, ~known.const.cells), dims)
    value = _sum_over(known.value, dims)
    if op.node.target in {_aten.mean.default, _aten.mean.dim}:
        count = math.prod(known.shape[d] for d in dims)
        value = Grid(value.shape, value.block, value.cells / count)
    const = Grid(open_.shape, open_.block, ~open_.cells)
    return Known(const, value).only(const).map(lambda g: g.reshape(op.shape))


@rule("constants", *_EXTREMES)
def extreme(op: Op) -> Known | None:
    """Know the largest or smallest of equal constants."""
    source, dims = _reduced(op)
    return op.known(source).uniform_over(dims).map(lambda g: g.reshape(op.shape))


@rule("observed", *_SUMS, *_EXTREMES, *_OTHERS, _aten.linalg_vector_norm.default)
def reduced_observed(op: Op, seen: Grid) -> _Seen:
    """Observe all that goes into an observed output."""
    source, dims = _reduced(op)
    shape = shape_of(source)
    narrow = tuple(1 if d in dims else s for d, s in enumerate(shape))
    return [(source, seen.reshape(narrow).broadcast_to(shape))]


def _tie_rest(op: Op, axes: Axes, source: fx.Node, dims: list[int]) -> None:
    keeps = len(shape_of(source)) == len(op.shape)
    new = 0
    for dim in range(len(shape_of(source))):
        if dim not in dims:
            axes.equal(axes.of(source, dim), axes.of(op.node, dim if keeps else new))
            new += 1
        elif keeps:
            axes.keep(axes.of(op.node, dim), "a reduced dim")


@rule("axes", *_SUMS)
def total_axes(op: Op, axes: Axes) -> None:
    """Let the reduced dim lose constants: their sum is added afterwards."""
    source, dims = _reduced(op)
    _tie_rest(op, axes, source, dims)
    if len(dims) == 1:
        axes.absorb(source, dims[0], op.node, fold=True)
    else:
        for dim in dims:
            axes.keep(axes.of(source, dim), "reduced with other dims")


@rule("rewrite", *_SUMS)
def complete_total(op: Op, edit: Edit) -> None:
    """Add the constants that were cut, and divide a mean by the size it had."""
    source, dims = _reduced(op)
    if len(dims) != 1 or bool(edit.axes.kept(source, dims[0]).all()):
        return
    size = shape_of(source)[dims[0]]
    cut = float(edit.cut_values(source, dims[0]).sum())
    is_mean = op.node.target in {_aten.mean.default, _aten.mean.dim}
    if cut:
        edit.after(op.node, _aten.add.Scalar, cut / size if is_mean else cut)
    if is_mean:
        edit.after(op.node, _aten.mul.Scalar, edit.size(source, dims[0]) / size)


_NORM = _aten.linalg_vector_norm.default


@rule("constants", _NORM)
def length(op: Op) -> Known | None:
    """Know the length of a line of zeros."""
    source, dims = _reduced(op)
    if op["ord"] <= 0 or not op.facts.assume_finite:
        return None
    zero = op.known(source).zero()
    moved = any_over(Grid(zero.shape, zero.block, ~zero.cells), dims)
    const = Grid(moved.shape, moved.block, ~moved.cells).reshape(op.shape)
    return Known(const, Grid.uniform(op.shape, 0.0, torch.float64))


@rule("axes", _NORM)
def length_axes(op: Op, axes: Axes) -> None:
    """Let the reduced dims lose zeros, which add nothing to a length."""
    source, dims = _reduced(op)
    _tie_rest(op, axes, source, dims)
    for dim in dims:
        if op["ord"] > 0:
            axes.absorb(source, dim, op.node, fold=False)
        else:
            axes.keep(axes.of(source, dim), "a reduced dim")


@rule("axes", *_EXTREMES, *_OTHERS)
def reduced_axes(op: Op, axes: Axes) -> None:
    """Keep the reduced dims."""
    source, dims = _reduced(op)
    _tie_rest(op, axes, source, dims)
    for dim in dims:
        axes.keep(axes.of(source, dim), "a reduced dim")


# ---------------------------------------------------------------------- softmax and running sums

_SOFTMAX = (_aten.softmax.int, _aten._softmax.default)
_ALONG = (*_SOFTMAX, _aten.log_softmax.int, _aten._log_softmax.default, _aten.cumsum.default)


@rule("constants", *_SOFTMAX)
def softmax(op: Op) -> Known | None:
    """Know a logit of -inf as the probability 0, next to logits that are not -inf."""
    known = op.known(op["self"])
    dim = op.dim(op["dim"])
    if not op.facts.assume_finite:
        return None
    masked = Grid.combine(lambda c, v: c & (v == -math.inf), known.const, known.value)
    other = any_over(Grid(masked.shape, masked.block, ~masked.cells), [dim]).broadcast_to(op.shape)
    const = Grid.combine(torch.logical_and, masked, other)
    return Known(const, Grid.uniform(op.shape, 0.0, torch.float64))


@rule("constants", _aten.cumsum.default)
def running_sum(op: Op) -> Known | None:
    """Know the running sum of a line of zeros."""
    zero = op.known(op["self"]).zero()
    if not op.shape:
        return None
    moved = any_over(Grid(zero.shape, zero.block, ~zero.cells), [op.dim(op["dim"])])
    const = Grid(moved.shape, moved.block, ~moved.cells).broadcast_to(op.shape)
    return Known(const, Grid.uniform(op.shape, 0.0, torch.float64))


@rule("observed", *_ALONG)
def along_observed(op: Op, seen: Grid) -> _Seen:
    """Observe the whole line of an observed output."""
    source = op["self"]
    return [(source, any_over(seen, [op.dim(op["dim"])]).broadcast_to(shape_of(source)))]


@rule("axes", *_ALONG)
def along_axes(op: Op, axes: Axes) -> None:
    """Keep the line, cut the other dims alike."""
    axes.broadcast(op["self"], op.node)
    axes.keep(axes.of(op.node, op.dim(op["dim"])), "normalised or summed along it")


# ---------------------------------------------------------------------- pooling and resizing

_POOLS = {
    **{getattr(_aten, f"{kind}{n}d").default: n for kind in ("max_pool", "adaptive_avg_pool") for n in (1, 2, 3)},
    _aten.avg_pool1d.default: 1,
    _aten.avg_pool2d.default: 2,
    _aten.avg_pool3d.default: 3,
    _aten.upsample_nearest1d.vec: 1,
    _aten.upsample_nearest2d.vec: 2,
    _aten.upsample_nearest3d.vec: 3,
    _aten.upsample_linear1d.vec: 1,
    _aten.upsample_bilinear2d.vec: 2,
    _aten.upsample_bicubic2d.vec: 2,
}
_AVERAGES = frozenset({_aten.avg_pool1d.default, _aten.avg_pool2d.default, _aten.avg_pool3d.default})


def _spatial(op: Op) -> tuple[fx.Node, list[int]]:
    source = op.inputs[0]
    rank = len(shape_of(source))
    return source, list(range(rank - _POOLS[op.node.target], rank))


@rule("constants", *_POOLS)
def pool(op: Op) -> Known | None:
    """Know a channel that is one constant everywhere: every window of it is that constant."""
    source, dims = _spatial(op)
    known = op.known(source).uniform_over(dims)
    if op.node.target in _AVERAGES and any(op["padding"]) and op["count_include_pad"]:
        known = known.only(known.zero())  # the border counts as zeros
    if op.node.target in _AVERAGES and op.arguments.get("divisor_override"):
        known = known.only(known.zero())
    return known.map(lambda g: g.broadcast_to(op.shape))


@rule("observed", *_POOLS)
def pool_observed(op: Op, seen: Grid) -> _Seen:
    """Observe a channel whose output is observed anywhere."""
    source, dims = _spatial(op)
    return [(source, any_over(seen, dims).broadcast_to(shape_of(source)))]


@rule("axes", *_POOLS)
def pool_axes(op: Op, axes: Axes) -> None:
    """Keep the dims of the windows, cut the others alike."""
    source, dims = _spatial(op)
    for dim in range(len(op.shape)):
        if dim in dims:
            axes.keep(axes.of(source, dim), "pooled")
            axes.keep(axes.of(op.node, dim), "pooled")
        else:
            axes.equal(axes.of(source, dim), axes.of(op.node, dim))

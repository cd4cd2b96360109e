"""Element-wise ops: f(constant) is a constant, and its value is what f itself says.

The op is run on the cells of the grids, so that sigmoid, exp, gelu or hardswish are right by construction. Only a
product (and a selection) lets one operand decide alone; 0 × x is 0 because no value of a model that works is infinite,
which :func:`sparta.propagation.propagate` lets you deny with ``assume_finite=False``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce

import torch
from torch import Tensor, fx

from sparta.propagation.axes import Axes
from sparta.propagation.constants import Known, unbroadcast
from sparta.propagation.op import Op, dtype_of, shape_of
from sparta.propagation.registry import rule
from sparta.tesa.grid import Grid

__all__: list[str] = []

_aten = torch.ops.aten
_Seen = list[tuple[fx.Node, Grid]]

_SAME_VALUE = (
    *(_aten.clone, _aten.contiguous, _aten.alias, _aten.detach, _aten.detach_, _aten.lift_fresh_copy, _aten.lift_fresh),
    *(_aten.to, _aten._to_copy, _aten.type_as, _aten.dropout, _aten.native_dropout, _aten.feature_dropout),
    *(_aten.alpha_dropout,),
)


_ZEROING = frozenset({_aten.dropout.default, _aten.feature_dropout.default})


@rule("constants", "pointwise")
def elementwise(op: Op) -> Known | None:
    """Evaluate the op where all its operands are constants."""
    operands = op.inputs
    if not operands or any(dtype_of(n).is_complex for n in (op.node, *operands)):
        return None
    knowns = [op.known(n).map(lambda g: g.broadcast_to(op.shape)) for n in operands]
    if not all(k.any for k in knowns):
        return None
    const = Grid.combine(lambda *cells: reduce(torch.logical_and, cells), *(k.const for k in knowns))

    def run(*cells: Tensor) -> Tensor:
        # Where an operand is not known, 1 stands in for it: no op of this family dislikes a 1.
        given = {
            n: torch.where(known, value, 1.0).to(dtype_of(n))
            for n, known, value in zip(operands, cells[::2], cells[1::2], strict=True)
        }
        args = fx.map_arg(op.node.args, lambda n: given[n])
        kwargs = fx.map_arg(dict(op.node.kwargs), lambda n: given[n])
        result: Tensor = op.node.target(*args, **kwargs)  # type: ignore[operator]
        return result.to(dtype_of(op.node)).to(torch.float64)

    if any(not isinstance(n.meta.get("val"), Tensor) for n in op.node.all_input_nodes):
        return None  # a size that is known at run time only
    value = Grid.combine(run, *(grid for k in knowns for grid in (k.const, k.value)))
    return Known(const, value).only(const)


@rule("observed", "pointwise")
def elementwise_observed(op: Op, seen: Grid) -> _Seen:
    """Observe of each operand what is observed of the output."""
    return [(n, unbroadcast(seen, shape_of(n))) for n in op.inputs]


@rule("axes", "pointwise")
def elementwise_axes(op: Op, axes: Axes) -> None:
    """Cut operands and output alike, except along dims that are broadcast."""
    for operand in op.inputs:
        axes.broadcast(operand, op.node)


# ---------------------------------------------------------------------- the same values


@rule("constants", *_SAME_VALUE)
def same_value(op: Op) -> Known | None:
    """Pass constants on, rounded as the output's dtype rounds them."""
    source = op.inputs[0]
    known, dtype = op.known(source), dtype_of(op.node)
    if op.arguments.get("train") or op.arguments.get("training"):
        # What is dropped becomes 0, and what is left is scaled: a 0 stays 0.
        return known.only(known.zero()) if op.node.target in _ZEROING else None
    if dtype.is_complex or dtype_of(source).is_complex:
        return None
    rounded = known.value.cells.to(dtype).to(torch.float64)
    return Known(known.const, Grid(known.shape, known.value.block, rounded).canonical()).only(known.const)


@rule("observed", *_SAME_VALUE)
def same_value_observed(op: Op, seen: Grid) -> _Seen:
    """Observe of the input what is observed of the output."""
    return [(op.inputs[0], seen)]


@rule("axes", *_SAME_VALUE)
def same_value_axes(op: Op, axes: Axes) -> None:
    """Cut input and output alike."""
    axes.broadcast(op.inputs[0], op.node)


# ---------------------------------------------------------------------- products and selections


@rule("constants", _aten.mul.Tensor, _aten.multiply.Tensor)
def product(op: Op) -> Known | None:
    """Know a product where both factors are known, or where one of them is 0."""
    known = elementwise(op) or Known.live(op.shape)
    if not op.facts.assume_finite:
        return known
    for factor in op.inputs:
        zero = op.known(factor).zero().broadcast_to(op.shape)
        const = Grid.combine(torch.logical_or, known.const, zero)
        # Where both are constants the evaluated product stands: 0 × -inf is NaN, not 0.
        known = Known(const, known.value)
    return known


@rule("observed", _aten.mul.Tensor, _aten.multiply.Tensor)
def product_observed(op: Op, seen: Grid) -> _Seen:
    """Do not observe a factor where the other is 0; of two zeros the first is the one that is kept."""
    first, second = op["self"], op["other"]
    if not op.facts.assume_finite or not isinstance(second, fx.Node) or first is second:
        return elementwise_observed(op, seen)
    zeros = [op.known(n).zero().broadcast_to(op.shape) for n in (first, second)]
    of_first = Grid.combine(lambda s, z1, z2: s & (z1 | ~z2), seen, *zeros)
    of_second = Grid.combine(lambda s, z1: s & ~z1, seen, zeros[0])
    return [(first, unbroadcast(of_first, shape_of(first))), (second, unbroadcast(of_second, shape_of(second)))]


@rule("constants", _aten.div.Tensor)
def quotient(op: Op) -> Known | None:
    """Know 0 / x as 0: x cannot be 0 in a model whose values are finite."""
    known = elementwise(op) or Known.live(op.shape)
    divisor = op["other"]
    if not op.facts.assume_finite or not isinstance(divisor, fx.Node):
        return known
    zero = op.known(op["self"]).zero().broadcast_to(op.shape)
    unknown = op.known(divisor).const.broadcast_to(op.shape)
    const = Grid.combine(lambda c, z, d: c | (z & ~d), known.const, zero, unknown)
    return Known(const, known.value)


@rule("constants", _aten.where.self)
def selection(op: Op) -> Known | None:
    """Know the element that a known condition selects, or both where they are the same constant."""
    condition, first, second = (op.known(op[n]).map(lambda g: g.broadcast_to(op.shape)) for n in _WHERE)
    grids = [g for k in (condition, first, second) for g in (k.const, k.value)]
    const = Grid.combine(
        lambda c, cv, a, av, b, bv: torch.where(c, torch.where(cv != 0, a, b), a & b & (av == bv)), *grids
    )
    value = Grid.combine(
        lambda c, cv, av, bv: torch.where(c & (cv == 0), bv, av),
        *(condition.const, condition.value, first.value, second.value),
    )
    return Known(const, value).only(const)


@rule("observed", _aten.where.self)
def selection_observed(op: Op, seen: Grid) -> _Seen:
    """Do not observe the branch that a known condition never selects."""
    condition, first, second = (op[name] for name in _WHERE)
    known = op.known(condition).map(lambda g: g.broadcast_to(op.shape))
    never_second = Grid.combine(lambda s, c, v: s & ~(c & (v != 0)), seen, known.const, known.value)
    never_first = Grid.combine(lambda s, c, v: s & ~(c & (v == 0)), seen, known.const, known.value)
    return [
        (condition, unbroadcast(seen, shape_of(condition))),
        (first, unbroadcast(never_first, shape_of(first))),
        (second, unbroadcast(never_second, shape_of(second))),
    ]


_WHERE = ("condition", "self", "other")


@rule("constants", _aten.masked_fill.Scalar)
def filled(op: Op) -> Known | None:
    """Know the fill value where the mask is known to be set, and the input where it is known not to be."""
    source, mask = (op.known(op[n]).map(lambda g: g.broadcast_to(op.shape)) for n in ("self", "mask"))
    if isinstance(op["value"], fx.Node):
        return None
    fill = float(op["value"])
    const = Grid.combine(lambda c, m, mv: m & ((mv != 0) | c), source.const, mask.const, mask.value)
    value = Grid.combine(lambda v, mv: torch.where(mv != 0, fill, v), source.value, mask.value)
    return Known(const, value).only(const)


@rule("observed", _aten.masked_fill.Scalar)
def filled_observed(op: Op, seen: Grid) -> _Seen:
    """Do not observe the input where the mask is known to be set."""
    source, mask = op["self"], op["mask"]
    known = op.known(mask).map(lambda g: g.broadcast_to(op.shape))
    left = Grid.combine(lambda s, c, v: s & ~(c & (v != 0)), seen, known.const, known.value)
    return [(source, unbroadcast(left, shape_of(source))), (mask, unbroadcast(seen, shape_of(mask)))]


@rule("constants", _aten.prelu.default)
def prelu(op: Op) -> Known | None:
    """Evaluate PReLU channel by channel where input and slope are constants."""
    source, slope = op.known(op["self"]), op.known(op["weight"])
    line = slope.map(lambda g: _per_channel(g, op.shape))
    const = Grid.combine(lambda c, v, k: c & (k | (v >= 0)), source.const, source.value, line.const)
    value = Grid.combine(lambda v, w: torch.where(v >= 0, v, v * w), source.value, line.value)
    return Known(const, value).only(const)


@rule("observed", _aten.prelu.default)
def prelu_observed(op: Op, seen: Grid) -> _Seen:
    """Observe the slope of a channel where the channel is observed."""
    slope = op["weight"]
    return [(op["self"], seen), (slope, _channel_seen(seen, shape_of(slope)))]


@rule("axes", _aten.prelu.default)
def prelu_axes(op: Op, axes: Axes) -> None:
    """Cut channels of the input with their slopes."""
    axes.broadcast(op["self"], op.node)
    if math.prod(shape_of(op["weight"])) > 1 and len(op.shape) > 1:
        axes.equal(axes.of(op["weight"], 0), axes.of(op.node, 1))


def _per_channel(grid: Grid, shape: tuple[int, ...]) -> Grid:
    """Return a grid of one value per channel (dim 1) broadcast to `shape`."""
    if math.prod(grid.shape) == 1 or len(shape) < 2:
        return grid.broadcast_to(shape)
    return grid.reshape((1, grid.shape[0], *(1 for _ in shape[2:]))).broadcast_to(shape)


def _channel_seen(seen: Grid, shape: tuple[int, ...]) -> Grid:
    """Return which slopes are observed, for a parameter of one value or of one value per channel (dim 1)."""
    size, rank = math.prod(shape), len(seen.shape)
    if size == 1 or rank < 2:
        return unbroadcast(seen, shape)
    return unbroadcast(seen, (1, size, *(1 for _ in range(rank - 2)))).reshape(shape)


# ---------------------------------------------------------------------- triangles

_TRIANGLES: dict[object, Callable[..., Tensor]] = {_aten.tril.default: torch.tril, _aten.triu.default: torch.triu}


@rule("constants", *_TRIANGLES)
def triangle(op: Op) -> Known | None:
    """Know the zeros of the other triangle, and what is known in this one."""
    known = op.known(op["self"])
    if isinstance(op["diagonal"], fx.Node) or len(op.shape) < 2 or math.prod(op.shape[-2:]) > op.facts.cell_limit:
        return known.only(known.zero())
    inside = _TRIANGLES[op.node.target](torch.ones(op.shape[-2:], dtype=torch.bool), op["diagonal"])
    stays = Grid.from_dense(inside).broadcast_to(op.shape)
    const = Grid.combine(lambda c, s: c | ~s, known.const, stays)
    value = Grid.combine(lambda v, s: torch.where(s, v, 0.0), known.value, stays)
    return Known(const, value).only(const)


@rule("observed", *_TRIANGLES)
def triangle_observed(op: Op, seen: Grid) -> _Seen:
    """Observe of the input what is observed of the output."""
    return [(op["self"], seen)]


@rule("axes", *_TRIANGLES)
def triangle_axes(op: Op, axes: Axes) -> None:
    """Keep the two dims of the triangle, cut the others alike."""
    axes.broadcast(op["self"], op.node)
    for dim in (-2, -1):
        axes.keep(axes.of(op.node, dim), "a triangle")

"""Ops that change a tensor's shape: views, permutations, repetitions, padding.

Nothing is computed, so what is known of an element goes with it. A reshape regroups dims, and the smallest groups that
hold the same elements are treated one by one, so a dynamic batch dim does not spoil the rest.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from sparta.propagation.axes import Axes
from sparta.propagation.constants import Known, nothing, unbroadcast
from sparta.propagation.edit import Edit
from sparta.propagation.op import Op, dynamic_dims, shape_of
from sparta.propagation.registry import rule
from sparta.tesa.grid import Grid, reshape_groups

__all__: list[str] = []

_aten = torch.ops.aten
_Seen = list[tuple[fx.Node, Grid]]

# ---------------------------------------------------------------------- regrouping dims

_RESHAPES = (
    *(_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default, _aten.view_copy.default),
    *(_aten.flatten.using_ints, _aten.unflatten.int, _aten.unsqueeze.default),
    *(_aten.squeeze.default, _aten.squeeze.dim, _aten.squeeze.dims, _aten.reshape_as.default, _aten.view_as.default),
)


def _reshaped(grid: Grid, source: fx.Node, out: fx.Node, *, back: bool) -> Grid | None:
    """Return the grid after a reshape (or before it), or None where a dynamic dim is mixed with what is known."""
    old, new = (shape_of(out), shape_of(source)) if back else (shape_of(source), shape_of(out))
    if 0 in old:
        return None
    changing = [set(dynamic_dims(n)) for n in ((out, source) if back else (source, out))]
    for before, after in reshape_groups(old, new):
        dims = range(before.start, before.stop)
        mixed = any(d in changing[0] for d in dims) or any(d in changing[1] for d in range(after.start, after.stop))
        if mixed and any(grid.varies_along(d) for d in dims):
            return None
    return grid.reshape(new)


@rule("constants", *_RESHAPES)
def reshape(op: Op) -> Known | None:
    """Regroup what is known as the elements are regrouped."""
    source = op["self"]
    known = op.known(source)
    const, value = (_reshaped(g, source, op.node, back=False) for g in (known.const, known.value))
    return None if const is None or value is None else Known(const, value)


@rule("observed", *_RESHAPES)
def reshape_observed(op: Op, seen: Grid) -> _Seen:
    """Observe the elements that are observed after the regrouping."""
    grid = _reshaped(seen, op["self"], op.node, back=True)
    # Another tensor may lend its shape.
    lent = [(n, nothing(shape_of(n))) for n in op.inputs if n is not op["self"]]
    return lent if grid is None else [(op["self"], grid), *lent]


@rule("axes", *_RESHAPES)
def reshape_axes(op: Op, axes: Axes) -> None:
    """Tie the dims of each group through their flattened product."""
    source = op["self"]
    changing = set(dynamic_dims(source)), set(dynamic_dims(op.node))
    for before, after in reshape_groups(shape_of(source), op.shape):
        old, new = range(before.start, before.stop), range(after.start, after.stop)
        if len(old) == len(new) == 1:
            axes.equal(axes.of(source, old[0]), axes.of(op.node, new[0]))
            continue
        sides = [[axes.of(source, d) for d in old], [axes.of(op.node, d) for d in new]]
        if changing[0].intersection(old) or changing[1].intersection(new):
            for axis in (*sides[0], *sides[1]):
                axes.keep(axis, "regrouped with a dynamic dim")
            continue
        whole = axes.free(int(torch.Size(shape_of(source)[before]).numel()))
        for side in sides:
            axes.product(whole, side, op.node)


@rule("rewrite", _aten.view.default, _aten.reshape.default, _aten._unsafe_view.default, _aten.view_copy.default)
def resize_view(op: Op, edit: Edit) -> None:
    """Write the new sizes into the op."""
    name = "size" if "size" in op.arguments else "shape"
    _resize(op, edit, name, 0)


@rule("axes", _aten.reshape_as.default, _aten.view_as.default)
def reshape_as_axes(op: Op, axes: Axes) -> None:
    """Tie the dims of each group, and cut what lends its shape alike."""
    reshape_axes(op, axes)
    if op["other"] is not op["self"]:
        axes.broadcast(op["other"], op.node)


@rule("rewrite", _aten.unflatten.int)
def resize_unflatten(op: Op, edit: Edit) -> None:
    """Write the new sizes into the op."""
    _resize(op, edit, "sizes", op.dim(op["dim"], len(shape_of(op["self"]))))


def _resize(op: Op, edit: Edit, name: str, offset: int) -> None:
    sizes = list(op[name])
    for position, size in enumerate(sizes):
        dim = offset + position
        if isinstance(size, int) and size != -1 and edit.size(op.node, dim) != op.shape[dim]:
            sizes[position] = edit.size(op.node, dim)
    edit.set(op.node, name, [edit.copies[s] if isinstance(s, fx.Node) else s for s in sizes])


# ---------------------------------------------------------------------- permuting dims


def _order(op: Op) -> list[int]:
    """Return for each dim of the output the dim of the input that it was."""
    rank = len(op.shape)
    order = list(range(rank))
    if "dims" in op.arguments:
        return [d % rank for d in op["dims"]]
    if op.node.target is _aten.numpy_T.default or rank < 2:
        return order[::-1]
    # Without named dims (`t` of a matrix, `mT` of a batch of them) the last two change places.
    first, second = (op["dim0"] % rank, op["dim1"] % rank) if "dim0" in op.arguments else (rank - 2, rank - 1)
    order[first], order[second] = order[second], order[first]
    return order


_PERMUTES = (_aten.permute.default, _aten.transpose.int, _aten.t.default, _aten.mT.default, _aten.numpy_T.default)


@rule("constants", *_PERMUTES)
def permute(op: Op) -> Known | None:
    """Permute what is known."""
    return op.known(op["self"]).map(lambda g: g.permute(_order(op)))


@rule("observed", *_PERMUTES)
def permute_observed(op: Op, seen: Grid) -> _Seen:
    """Permute back what is observed."""
    order = _order(op)
    return [(op["self"], seen.permute([order.index(d) for d in range(len(order))]))]


@rule("axes", *_PERMUTES)
def permute_axes(op: Op, axes: Axes) -> None:
    """Cut each dim with the one it became."""
    for new, old in enumerate(_order(op)):
        axes.equal(axes.of(op["self"], old), axes.of(op.node, new))


# ---------------------------------------------------------------------- repeating

_EXPANDS = (_aten.expand.default, _aten.broadcast_to.default, _aten.expand_copy.default)


@rule("constants", *_EXPANDS, _aten.expand_as.default)
def expand(op: Op) -> Known | None:
    """Repeat what is known."""
    return op.known(op["self"]).map(lambda g: g.broadcast_to(op.shape))


@rule("observed", *_EXPANDS, _aten.expand_as.default)
def expand_observed(op: Op, seen: Grid) -> _Seen:
    """Observe an element where any of its repetitions is."""
    lent = [(n, nothing(shape_of(n))) for n in op.inputs if n is not op["self"]]
    return [(op["self"], unbroadcast(seen, shape_of(op["self"]))), *lent]


@rule("axes", *_EXPANDS, _aten.expand_as.default)
def expand_axes(op: Op, axes: Axes) -> None:
    """Cut alike along the dims that are not repeated; what lends its shape goes with the result."""
    for node in op.inputs:
        axes.broadcast(node, op.node)


@rule("rewrite", *_EXPANDS)
def resize_expand(op: Op, edit: Edit) -> None:
    """Write the new sizes into the op."""
    _resize(op, edit, "size", 0)


# ---------------------------------------------------------------------- padding, and shapes without values


def _padding(op: Op) -> dict[int, tuple[int, int]]:
    pad, rank = list(op["pad"]), len(op.shape)
    return {rank - 1 - i // 2: (pad[i], pad[i + 1]) for i in range(0, len(pad), 2) if pad[i] or pad[i + 1]}


@rule("constants", _aten.pad.default, _aten.constant_pad_nd.default)
def pad(op: Op) -> Known | None:
    """Know the border, and what is known inside."""
    if op.arguments.get("mode", "constant") != "constant" or any(isinstance(p, fx.Node) for p in op["pad"]):
        return None
    if any(a < 0 or b < 0 for a, b in _padding(op).values()):
        return None
    known, fill = op.known(op["self"]), float(op["value"] or 0)
    for dim, sides in _padding(op).items():

        def border(size: int, value: float, grid: Grid, dim: int = dim) -> Grid:
            shape = tuple(size if d == dim else s for d, s in enumerate(grid.shape))
            return Grid.uniform(shape, value, grid.cells.dtype)

        known = Known(
            *(
                Grid.cat([border(sides[0], value, grid), grid, border(sides[1], value, grid)], dim)
                for grid, value in ((known.const, 1.0), (known.value, fill))
            )
        )
    return known


@rule("observed", _aten.pad.default, _aten.constant_pad_nd.default)
def pad_observed(op: Op, seen: Grid) -> _Seen:
    """Observe what lies inside the border."""
    if op.arguments.get("mode", "constant") != "constant" or any(isinstance(p, fx.Node) for p in op["pad"]):
        return []
    if any(a < 0 or b < 0 for a, b in _padding(op).values()):
        return []
    source = op["self"]
    for dim, sides in _padding(op).items():
        seen = seen.take(dim, torch.arange(sides[0], sides[0] + shape_of(source)[dim]))
    return [(source, seen)]


@rule("axes", _aten.pad.default, _aten.constant_pad_nd.default)
def pad_axes(op: Op, axes: Axes) -> None:
    """Keep the dims that are padded, cut the others alike."""
    padded = _padding(op) if not any(isinstance(p, fx.Node) for p in op["pad"]) else dict.fromkeys(range(len(op.shape)))
    for dim in range(len(op.shape)):
        if dim in padded:
            axes.keep(axes.of(op["self"], dim), "padded")
            axes.keep(axes.of(op.node, dim), "padded")
        else:
            axes.equal(axes.of(op["self"], dim), axes.of(op.node, dim))


_LIKE: dict[object, Callable[[Op], float | None]] = {
    _aten.zeros_like.default: lambda _: 0.0,
    _aten.ones_like.default: lambda _: 1.0,
    _aten.full_like.default: lambda op: None if isinstance(op["fill_value"], fx.Node) else float(op["fill_value"]),
}


@rule("constants", *_LIKE)
def like(op: Op) -> Known | None:
    """Know every element of a tensor that is filled."""
    value = _LIKE[op.node.target](op)
    if value is None:
        return None
    return Known(Grid.uniform(op.shape, 1, torch.bool), Grid.uniform(op.shape, value, torch.float64))


@rule("observed", *_LIKE)
def like_observed(op: Op, seen: Grid) -> _Seen:
    """Observe nothing: only the shape matters."""
    del seen
    return [(op["self"], nothing(shape_of(op["self"])))]


@rule("axes", *_LIKE)
def like_axes(op: Op, axes: Axes) -> None:
    """Cut alike."""
    axes.broadcast(op["self"], op.node)


# ---------------------------------------------------------------------- tensors made from numbers

_MADE: dict[object, Callable[[Op], float | None]] = {
    **{op: lambda _: 0.0 for op in (_aten.zeros.default, _aten.new_zeros.default)},
    **{op: lambda _: 1.0 for op in (_aten.ones.default, _aten.new_ones.default)},
    **dict.fromkeys((_aten.full.default, _aten.new_full.default), _LIKE[_aten.full_like.default]),
}


@rule("constants", *_MADE)
def made(op: Op) -> Known | None:
    """Know every element of a tensor that is filled."""
    value = _MADE[op.node.target](op)
    if value is None:
        return None
    return Known(Grid.uniform(op.shape, 1, torch.bool), Grid.uniform(op.shape, value, torch.float64))


@rule("observed", *_MADE)
def made_observed(op: Op, seen: Grid) -> _Seen:
    """Observe nothing: another tensor lends its dtype and device only."""
    del seen
    return [(n, nothing(shape_of(n))) for n in op.inputs]


@rule("axes", *_MADE)
def made_axes(op: Op, axes: Axes) -> None:
    """Tie nothing: any size can be made."""
    for dim in range(len(op.shape)):
        axes.of(op.node, dim)


@rule("rewrite", *_MADE)
def resize_made(op: Op, edit: Edit) -> None:
    """Write the new sizes into the op."""
    _resize(op, edit, "size", 0)

"""Lookups in embedding tables.

Which row is looked up is not known, so a column of the output is a constant only where the whole column of the table is
one and the same constant.
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


@rule("constants", _aten.embedding.default)
def embedding(op: Op) -> Known | None:
    """Know the columns that hold one constant in all rows of the table."""
    known = op.known(op["weight"]).uniform_over([0])
    lead = len(op.shape) - 1
    return known.map(lambda g: g.reshape((*(1,) * lead, g.shape[1])).broadcast_to(op.shape))


@rule("observed", _aten.embedding.default)
def embedding_observed(op: Op, seen: Grid) -> _Seen:
    """Observe the columns that are observed, in all rows."""
    weight, indices = op["weight"], op["indices"]
    line = any_over(seen, range(len(op.shape) - 1)).reshape((1, op.shape[-1]))
    return [(weight, line.broadcast_to(shape_of(weight))), (indices, Grid.uniform(shape_of(indices), 1, torch.bool))]


@rule("axes", _aten.embedding.default)
def embedding_axes(op: Op, axes: Axes) -> None:
    """Cut columns of the table, never rows."""
    weight, indices = op["weight"], op["indices"]
    axes.keep(axes.of(weight, 0), "looked up by an index")
    axes.equal(axes.of(weight, 1), axes.of(op.node, len(op.shape) - 1))
    for dim in range(len(shape_of(indices))):
        axes.equal(axes.of(indices, dim), axes.of(op.node, dim))

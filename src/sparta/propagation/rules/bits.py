"""Bit formats: ops that only move or select elements hand the format of their inputs on.

A format is a promise about the values of a tensor, so it survives exactly the ops that make no new values; arithmetic
gives its output the format of its dtype.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from sparta.propagation.op import Op, dtype_of, is_tensor
from sparta.propagation.registry import rule
from sparta.tesa.bits import BitFormat

__all__: list[str] = []

_aten = torch.ops.aten

_MOVES = (
    *(_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default, _aten.flatten.using_ints),
    *(_aten.unflatten.int, _aten.unsqueeze.default, _aten.squeeze.default, _aten.squeeze.dim, _aten.squeeze.dims),
    *(
        _aten.permute.default,
        _aten.transpose.int,
        _aten.t.default,
        _aten.numpy_T.default,
        _aten.mT.default,
        _aten.expand.default,
    ),
    *(_aten.slice.Tensor, _aten.select.int, _aten.flip.default, _aten.roll.default, _aten.cat.default),
    *(_aten.stack.default, _aten.index_select.default, _aten.embedding.default, _aten.clone.default),
    *(_aten.contiguous.default, _aten.alias.default, _aten.detach.default, _aten.to.dtype, _aten.to.device),
    *(_aten.max_pool1d.default, _aten.max_pool2d.default, _aten.max_pool3d.default, _aten.relu.default),
    *(_aten.amax.default, _aten.amin.default, _aten.maximum.default, _aten.minimum.default),
)


@rule("bits", *_MOVES, operator.getitem)
def moved(op: Op) -> BitFormat | None:
    """Return the one format of all inputs, if they have one and the output's dtype can hold it."""
    nodes = op.inputs or [n for split in op.node.all_input_nodes for n in split.all_input_nodes]
    values = [n for n in nodes if is_tensor(n) and dtype_of(n).is_floating_point]
    found = {op.facts.format_of(n) for n in values}
    return found.pop() if len(found) == 1 else None


@rule("needs", *_MOVES)
def enough(op: Op, node: fx.Node) -> BitFormat | None:
    """Need of the inputs what is needed of the output: rounding keeps the order, so it may as well come first."""
    del node
    return op.facts.needed.get(op.node)


@rule("needs", operator.getitem)
def enough_of_a_piece(op: Op, node: fx.Node) -> BitFormat | None:
    """Need of what is split what is needed of the piece."""
    del node
    return op.facts.needed.get(op.node)


@rule("bits", _aten.dropout.default)
def dropped(op: Op) -> BitFormat | None:
    """Return the input's format in eval mode, in which dropout does nothing."""
    return None if op["train"] else op.facts.format_of(op["input"])

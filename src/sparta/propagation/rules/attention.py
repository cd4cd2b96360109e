"""Scaled dot-product attention, fused: heads, widths, and why a head can go.

A head whose values are all 0 gives 0 whatever its queries and keys are; a head that no one observes needs neither. The
output is an average of value rows, so a constant of every value row is a constant of the output, unless a mask may hide
all rows.
"""

from __future__ import annotations

import math

import torch
from torch import fx

from sparta.propagation.axes import Axes
from sparta.propagation.constants import Known, any_over, unbroadcast
from sparta.propagation.edit import Edit
from sparta.propagation.op import Op, shape_of
from sparta.propagation.registry import rule
from sparta.tesa.grid import Grid

__all__: list[str] = []

_SDPA = torch.ops.aten.scaled_dot_product_attention.default
_Seen = list[tuple[fx.Node, Grid]]


def _repeats(op: Op) -> int:
    """Return how many query heads share a key head."""
    heads = [shape_of(op[n])[-3] if len(shape_of(op[n])) > 2 else 1 for n in ("query", "key")]
    return heads[0] // heads[1] if op["enable_gqa"] else 1


def _repeated(grid: Grid, times: int) -> Grid:
    """Return the grid of a tensor whose heads are repeated for the query heads."""
    if times == 1:
        return grid
    dim = len(grid.shape) - 3
    return grid.take(dim, torch.arange(grid.shape[dim] * times) // times)


def _unrepeated(grid: Grid, times: int) -> Grid:
    """Return what is observed of a head that is repeated for several query heads."""
    if times == 1:
        return grid
    *lead, heads, length, width = grid.shape
    split = grid.reshape((*lead, heads // times, times, length, width))
    return any_over(split, [len(lead) + 1]).reshape((*lead, heads // times, length, width))


@rule("constants", _SDPA)
def attention(op: Op) -> Known | None:
    """Know the outputs of values that are one constant in every row."""
    if not op.facts.assume_finite:
        return None
    rank = len(op.shape)
    known = op.known(op["value"]).uniform_over([rank - 2]).finite()
    if op["attn_mask"] is not None or op["is_causal"] or op["dropout_p"]:
        known = known.only(known.zero())  # a row that sees nothing, or drops something, does not give the constant
    times = _repeats(op)
    return known.map(lambda g: _repeated(g, times).broadcast_to(op.shape))


@rule("observed", _SDPA)
def attention_observed(op: Op, seen: Grid) -> _Seen:
    """Observe values through observed columns, queries and keys of heads whose values are not constant."""
    rank, times = len(op.shape), _repeats(op)
    query, key, value, mask = (op[n] for n in ("query", "key", "value", "attn_mask"))
    of_value = any_over(seen, [rank - 2])
    result = [(value, _to_input(of_value, value, times))]
    const = attention(op)
    moved = seen if const is None else Grid.combine(lambda s, c: s & ~c, seen, const.const)
    head = any_over(moved, [rank - 1])
    width = (*op.shape[:-1], shape_of(query)[-1])
    result.append((query, unbroadcast(head.broadcast_to(width), shape_of(query))))
    keys = any_over(head, [rank - 2]).broadcast_to((*op.shape[:-2], shape_of(key)[-2], shape_of(key)[-1]))
    result.append((key, unbroadcast(_unrepeated(keys, times), shape_of(key))))
    if mask is not None:
        scores = head.broadcast_to((*op.shape[:-1], shape_of(key)[-2]))
        result.append((mask, unbroadcast(scores, shape_of(mask))))
    return result


def _to_input(line: Grid, node: fx.Node, times: int) -> Grid:
    """Return what is observed of the values, from one row of what is observed of the output."""
    shape = shape_of(node)
    narrow = _unrepeated(line, times)
    return unbroadcast(narrow.broadcast_to((*narrow.shape[:-2], *shape[-2:])), shape)


@rule("axes", _SDPA)
def attention_axes(op: Op, axes: Axes) -> None:
    """Cut heads of queries, keys and values together, and the widths where the product is 0."""
    query, key, value, mask = (op[n] for n in ("query", "key", "value", "attn_mask"))
    rank, times = len(op.shape), _repeats(op)
    axes.equal(axes.of(query, rank - 2), axes.of(op.node, rank - 2))
    axes.equal(axes.of(value, rank - 1), axes.of(op.node, rank - 1))
    axes.equal(axes.of(query, rank - 1), axes.of(key, rank - 1))
    axes.absorb_pair((query, rank - 1), (key, rank - 1), op.node)
    for node in (key, value):
        axes.keep(axes.of(node, rank - 2), "attended to")
    for dim in range(rank - 2):
        axes.equal(axes.of(query, dim), axes.of(op.node, dim))
        if dim == rank - 3 and times > 1:
            axes.equal(axes.of(key, dim), axes.of(value, dim))
            axes.product(axes.of(query, dim), [axes.of(key, dim), axes.free(times)], op.node)
        else:
            axes.broadcast_dim((key, dim), (op.node, dim))
            axes.broadcast_dim((value, dim), (op.node, dim))
    if mask is not None:
        lead = rank - len(shape_of(mask))
        for dim in range(len(shape_of(mask)) - 1):
            axes.broadcast_dim((mask, dim), (op.node, dim + lead))
        axes.keep(axes.of(mask, len(shape_of(mask)) - 1), "attended to")


@rule("rewrite", _SDPA)
def keep_scale(op: Op, edit: Edit) -> None:
    """Keep the scale that belongs to the width before the cut."""
    query = op["query"]
    width = shape_of(query)[-1]
    if op["scale"] is None and edit.size(query, len(shape_of(query)) - 1) != width:
        edit.set(op.node, "scale", 1 / math.sqrt(width))

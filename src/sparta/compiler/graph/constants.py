"""Constants: masks and matrices that a graph computes from nothing but its own tensors are computed once.

``self.mask[:t, :t]`` is a slice of a buffer, and fixed when sizes are. Only what attention and products read is
computed beforehand; everything else stays as the model has it, and small.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from sparta.aten import arguments_of
from sparta.compiler.graph.program import Program, drop_unused, free_name

__all__ = ["fixed_value", "fold_constants", "kept_pairs"]

_aten = torch.ops.aten
_ATTENTION = _aten.scaled_dot_product_attention.default
_PRODUCTS = (_aten.bmm.default, _aten.matmul.default)


def fold_constants(program: Program) -> tuple[Program, int]:
    """Return the program with fixed masks and matrices as tensors of its own, and how many masks are not read any more.

    A mask that keeps all pairs is left out, and one that keeps each query's past becomes ``is_causal``.
    """
    graph, _ = program.copy()
    tensors = dict(program.tensors)
    plain = 0
    for node in list(graph.nodes):
        for operand in _wanted(node):
            value = fixed_value(operand, tensors, {})
            if value is None or operand.op == "get_attr":
                continue
            name = free_name(tensors, f"{operand.name}_fixed")
            tensors[name] = value.contiguous()
            with graph.inserting_before(node):
                node.replace_input_with(operand, graph.get_attr(name))
        plain += _without_mask(node, tensors) if node.target is _ATTENTION else 0
    drop_unused(graph)
    used = {str(node.target) for node in graph.nodes if node.op == "get_attr"}
    return Program(graph, {name: tensors[name] for name in tensors if name in used}, program.origins), plain


def kept_pairs(mask: Tensor) -> Tensor | None:
    """Return a mask of attention as bool, without leading dims of size 1; None for one that shifts scores.

    >>> kept_pairs(torch.tensor([[0.0, -torch.inf]])).tolist()
    [[True, False]]
    """
    if mask.dtype != torch.bool:
        kept = mask == 0
        if not bool((kept | (mask == -torch.inf)).all()):
            return None
        mask = kept
    while mask.dim() > 2 and mask.shape[0] == 1:
        mask = mask[0]
    return mask


def _wanted(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the operands of a call that are worth computing beforehand where they are fixed."""
    if node.target is _ATTENTION:
        mask = arguments_of(node)["attn_mask"]
        if isinstance(mask, fx.Node):
            yield mask
    elif node.target in _PRODUCTS:
        yield from (argument for argument in node.args if isinstance(argument, fx.Node))


def fixed_value(node: fx.Node, tensors: dict[str, Tensor], seen: dict[fx.Node, Any]) -> Any:
    """Return what a node computes from fixed tensors alone, or None where it does not."""
    if node in seen:
        return seen[node]
    result = None
    pure = node.target is operator.getitem or (
        isinstance(node.target, torch._ops.OpOverload)
        and not node.target._schema.is_mutable
        and torch.Tag.nondeterministic_seeded not in node.target.tags
    )
    if node.op == "get_attr":
        result = tensors.get(str(node.target))
    elif node.op == "call_function" and pure:
        inputs = {source: fixed_value(source, tensors, seen) for source in node.all_input_nodes}
        if all(value is not None for value in inputs.values()):
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: inputs[source])
            with torch.no_grad():
                result = node.target(*args, **kwargs)  # type: ignore[operator]
    seen[node] = result
    return result


def _without_mask(node: fx.Node, tensors: dict[str, Tensor]) -> int:
    """Leave out a fixed mask that attention need not read; return whether there was one."""
    call = arguments_of(node)
    mask = call["attn_mask"]
    if not isinstance(mask, fx.Node) or mask.op != "get_attr" or call["is_causal"]:
        return 0
    kept = kept_pairs(tensors[str(mask.target)])
    if kept is None or kept.dim() != 2:
        return 0
    causal = kept.shape[0] == kept.shape[1] and bool((kept == torch.ones_like(kept).tril()).all())
    if not causal and not bool(kept.all()):
        return 0
    node.args, node.kwargs = node.args[:3], {k: v for k, v in node.kwargs.items() if k in ("scale", "enable_gqa")}
    dropout = call["dropout_p"]
    node.kwargs = {**node.kwargs, "dropout_p": dropout, "is_causal": causal}
    return 1

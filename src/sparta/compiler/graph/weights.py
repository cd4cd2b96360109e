"""Weights: what a forward computes from its own tensors alone, and a layer then takes for its weight, is computed once.

Weight standardisation (NF-ResNets), spectral scales and quantisation written by hand are of this kind. As tensors of
their own such weights can be pruned, cut and lowered like any other: a statistic over a row would have to read the
columns that go. The captured graph is changed in place, before anything is derived from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from sparta.aten import arguments_of
from sparta.compiler.graph.constants import fixed_value
from sparta.compiler.graph.program import drop_unused, free_name
from sparta.modules import set_member
from sparta.propagation.capture import Captured
from sparta.tesa.attribute import TeSA

__all__ = ["with_computed_weights"]

_aten = torch.ops.aten
_LAYERS = frozenset(
    {
        _aten.linear.default,
        *(getattr(_aten, f"conv{n}d").default for n in (1, 2, 3)),
        *(getattr(_aten, f"conv{n}d").padding for n in (1, 2, 3)),
        _aten.conv_transpose1d.default,
        _aten.conv_transpose2d.input,
        _aten.conv_transpose3d.input,
    }
)


def with_computed_weights(captured: Captured, given: Mapping[str, TeSA]) -> tuple[Captured, dict[str, TeSA]]:
    """Return the captured model with computed weights as tensors, and what is known of them: their zeros.

    Parameters
    ----------
    given
        What is pruned, by the names of the model's tensors: weights are computed from what is left.
    """
    wanted = list(_computed(captured.graph))
    if not wanted:
        return captured, {}
    tensors = {**captured.tensors, **captured.literals}
    masked = {name: given[name].apply(t.detach()) if name in given else t.detach() for name, t in tensors.items()}
    found: dict[str, Tensor] = {}
    places: list[tuple[fx.Node, fx.Node, str]] = []
    names: dict[fx.Node, str] = {}
    seen: dict[fx.Node, Any] = {}
    for node, operand in wanted:
        value = fixed_value(operand, masked, seen)
        if isinstance(value, Tensor):
            if operand not in names:
                names[operand] = free_name({**tensors, **found}, f"{_source(operand)}_computed")
                found[names[operand]] = value.contiguous()
            places.append((node, operand, names[operand]))
    for node, operand, name in places:  # nothing changes before all are there
        set_member(captured.module, name, found[name])
        with captured.graph.inserting_before(node):
            fixed = captured.graph.get_attr(name)
        fixed.meta = dict(operand.meta)
        node.replace_input_with(operand, fixed)
    drop_unused(captured.graph)
    captured.module.recompile()
    zeros = {name: TeSA.from_mask(value != 0) for name, value in found.items() if bool((value == 0).any())}
    return replace(captured, literals={**captured.literals, **found}), zeros


def _computed(graph: fx.Graph) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield layers with the weights and biases that are neither tensors of the model nor depend on an input.

    What is rounded keeps its calls: integers and their scales are read from them.
    """
    depends: set[fx.Node] = set()
    for node in graph.nodes:
        other = node.op not in ("get_attr", "call_function") or "quantize" in str(node.target)
        if other or any(source in depends for source in node.all_input_nodes):
            depends.add(node)
        if node.target in _LAYERS:
            call = arguments_of(node)
            for operand in (call["weight"], call.get("bias")):
                if isinstance(operand, fx.Node) and operand.op == "call_function" and operand not in depends:
                    yield node, operand


def _source(node: fx.Node) -> str:
    """Return the name of the largest tensor that a weight is computed from."""
    names, queue = {}, [node]
    while queue:
        each = queue.pop()
        queue += each.all_input_nodes
        if each.op == "get_attr" and isinstance(each.meta.get("val"), Tensor):
            names[str(each.target)] = each.meta["val"].numel()
    return max(names, key=lambda name: names[name], default="weight")

"""Combine: a program and the kernels chosen for some of its sub-graphs become one runnable graph.

A sub-graph that runs dense keeps its own ATen calls, untouched; only where a sparse kernel was chosen does a call of a
kernel module take their place. Layers that are one product read their outputs as views of its result.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx, nn

from sparta.compiler.graph.program import Program, assemble, drop_unused
from sparta.compiler.lower.joined import JoinedSubGraph
from sparta.compiler.lower.subgraph import SubGraph
from sparta.compiler.run.int8_links import link_layers

__all__ = ["combined", "module_name"]

_aten = torch.ops.aten


def combined(
    program: Program, kernels: Mapping[SubGraph, nn.Module], present: Mapping[str, nn.Module] | None = None
) -> fx.GraphModule:
    """Return the program with kernel modules in the places of these sub-graphs, beside those that are in it by name."""
    graph, copies = program.copy()
    modules: dict[str, nn.Module] = dict(present or {})
    for subgraph, module in kernels.items():
        name = module_name(subgraph)
        modules[name] = module
        if isinstance(subgraph, JoinedSubGraph):
            _put_joined(graph, copies, subgraph, name)
            continue
        last = copies[subgraph.nodes[-1]]
        arguments = [copies[subgraph.anchor.x]]
        if subgraph.residual is not None:
            arguments.append(copies[subgraph.residual])
        with graph.inserting_before(last):
            call = graph.create_node("call_module", name, tuple(arguments))
        last.replace_all_uses_with(call)
        for node in reversed(subgraph.nodes):
            graph.erase_node(copies[node])
        copies[subgraph.nodes[-1]] = call  # what the next sub-graph may start from or add
    link_layers(graph, modules)
    drop_unused(graph)
    graph.lint()
    return assemble(graph, program.tensors, modules)


def _put_joined(graph: fx.Graph, copies: dict[fx.Node, fx.Node], subgraph: JoinedSubGraph, name: str) -> None:
    """Let layers read their outputs from one product, which is computed where the first of them was."""
    with graph.inserting_before(copies[subgraph.nodes[0]]):
        whole = graph.create_node("call_module", name, (copies[subgraph.anchor.x],))
    for node, first, end in subgraph.outputs:
        call = copies[node]
        with graph.inserting_before(call):
            part = graph.call_function(_aten.slice.Tensor, (whole, -1, first, end))
        call.replace_all_uses_with(part)
        graph.erase_node(call)
        copies[node] = part
        _reshape_views(part)


def _reshape_views(part: fx.Node) -> None:
    """Let views of a part of a product copy it where they must: it has gaps, which the capture knew nothing of."""
    waiting, seen = [part], {part}
    while waiting:
        for user in waiting.pop().users:
            if user.target is _aten.view.default:
                user.target = _aten.reshape.default
            is_view = isinstance(user.target, torch._ops.OpOverload) and user.target.is_view
            if user not in seen and (is_view or user.target is _aten.reshape.default):
                seen.add(user)
                waiting.append(user)


def module_name(subgraph: SubGraph) -> str:
    """Return the name of a sub-graph's kernel module, next to where its weight was."""
    number = subgraph.name.partition("#")[2]
    return f"{subgraph.anchor.weight}_kernel" + (f"_{number}" if number else "")

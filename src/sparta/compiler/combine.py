"""Combine: a program and the kernels chosen for some of its sub-graphs become one runnable graph.

The one idea to know: a sub-graph that runs dense keeps its own ATen calls, untouched; only where a sparse kernel was
chosen does a call of a kernel module take their place.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx, nn

from sparta.compiler.link import link_layers
from sparta.compiler.partition import SubGraph
from sparta.compiler.program import Program, assemble, drop_unused

__all__ = ["combined", "module_name"]


def combined(program: Program, kernels: Mapping[SubGraph, nn.Module]) -> fx.GraphModule:
    """Return the program with kernel modules in the places of these sub-graphs."""
    graph, copies = program.copy()
    modules: dict[str, nn.Module] = {}
    for group, module in kernels.items():
        name = module_name(group)
        modules[name] = module
        last = copies[group.nodes[-1]]
        arguments = [copies[group.anchor.x]]
        if group.residual is not None:
            arguments.append(copies[group.residual])
        with graph.inserting_before(last):
            call = graph.create_node("call_module", name, tuple(arguments))
        last.replace_all_uses_with(call)
        for node in reversed(group.nodes):
            graph.erase_node(copies[node])
        copies[group.nodes[-1]] = call  # what the next sub-graph may start from or add
    link_layers(graph, modules)
    drop_unused(graph)
    graph.lint()
    return assemble(graph, program.tensors, modules)


def module_name(group: SubGraph) -> str:
    """Return the name of a sub-graph's kernel module, next to where its weight was."""
    number = group.name.partition("#")[2]
    return f"{group.anchor.weight}_kernel" + (f"_{number}" if number else "")

"""Fixed: a graph for any size becomes one for given sizes, in which every number that follows from them is written out.

Asking a tensor for its size and computing with it is Python at each call; and a mask that is made from sizes is a
constant once they are fixed. What depends on the values of tensors stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from sparta.compiler.graph.program import Program, copied, drop_unused, run_without_values

__all__ = ["fixed_module", "fixed_program"]

_DEPENDS_ON_VALUES = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


def fixed_program(program: Program, inputs: Sequence[Any], *, computed: bool = True) -> Program:
    """Return a program for the sizes of these flat inputs; the same one where it has no other.

    Parameters
    ----------
    computed
        Whether the program is run to find its numbers; see :meth:`Program.shapes`.
    """
    if not asks_for_sizes(program.graph):
        return program
    graph = _fixed(program.module(), program.graph, inputs, computed=computed)
    used = {str(node.target) for node in graph.nodes if node.op == "get_attr"}
    return Program(graph, {name: t for name, t in program.tensors.items() if name in used}, program.origins)


def fixed_module(module: fx.GraphModule, inputs: Sequence[Any]) -> fx.GraphModule:
    """Return a graph module for the sizes of these flat inputs, with the same tensors and kernels."""
    return fx.GraphModule(module, _fixed(module, module.graph, inputs), "Fixed")


def asks_for_sizes(graph: fx.Graph) -> bool:
    """Whether a graph asks its tensors for their sizes."""
    return any(_asks(node) for node in graph.nodes)


def _asks(node: fx.Node) -> bool:
    return str(node.target).startswith(("aten.sym_size", "aten.sym_numel", "aten.sym_stride"))


def _fixed(module: fx.GraphModule, graph: fx.Graph, inputs: Sequence[Any], *, computed: bool = True) -> fx.Graph:
    numbers = _Numbers(module)
    if computed or not run_without_values(numbers, inputs):
        numbers = _Numbers(module)
        with torch.no_grad():
            numbers.run(*inputs)
    fresh, copies = copied(graph)
    for node in graph.nodes:
        copy = copies.get(node)
        if copy is None or node.name not in numbers.seen or node.op != "call_function":
            continue
        _write_out(copy, numbers.seen[node.name])
        fresh.erase_node(copy)
    drop_unused(fresh)
    fresh.lint()
    return fresh


def _write_out(node: fx.Node, value: float) -> None:
    """Put a number in the places in which the result of a node is used."""

    def written(used: fx.Node) -> Any:
        return value if used is node else used

    for user in list(node.users):
        user.args, user.kwargs = fx.map_arg(user.args, written), fx.map_arg(user.kwargs, written)


class _Numbers(fx.Interpreter):
    """Runs a graph and keeps the numbers that follow from sizes alone."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.seen: dict[str, Any] = {}
        self._by_value: set[fx.Node] = set()

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        tags = n.target.tags if isinstance(n.target, torch._ops.OpOverload) else ()
        if any(tag in _DEPENDS_ON_VALUES for tag in tags) or any(m in self._by_value for m in n.all_input_nodes):
            self._by_value.add(n)
        elif n.op == "call_function" and isinstance(result, (bool, int, float)):
            self.seen[n.name] = result
        return result

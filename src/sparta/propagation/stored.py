"""Graph modules as plain data, so that `pickle`, `torch.save` and `copy.deepcopy` take a compact model like any other.

Torch's own pickling of a graph module writes its source and traces it again on loading, which loses how the arguments
of a call are flattened. Here the nodes themselves are written: ops by their names, everything else as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.fx.graph import _PyTreeCodeGen, _PyTreeInfo
from torch.utils import _pytree as pytree

__all__ = ["StoredGraph", "plain_tree", "restored", "stored"]


@dataclass(frozen=True)
class _Reference:
    """Stands for another node in the arguments of a node."""

    name: str


@dataclass(frozen=True)
class _OpName:
    """Stands for an ATen overload, or one of another library that must be imported before loading."""

    path: tuple[str, str, str]


@dataclass(frozen=True)
class StoredGraph:
    """A graph as data.

    Parameters
    ----------
    nodes
        ``(op, name, target, args, kwargs, modules)`` of each node in order.
    names, inputs, results
        Names of the arguments, and how arguments and results are flattened; None for a graph that flattens nothing.
    """

    nodes: tuple[tuple[Any, ...], ...]
    names: list[str] | None
    inputs: Any
    results: Any


def stored(graph: fx.Graph) -> StoredGraph:
    """Return a graph as data.

    >>> graph = fx.Graph()
    >>> _ = graph.output(graph.call_function(torch.ops.aten.relu.default, (graph.placeholder("x"),)))
    >>> [str(node.target) for node in restored(stored(graph)).nodes]
    ['x', 'aten.relu.default', 'output']
    """

    def reference(node: fx.Node) -> Any:
        return _Reference(node.name)

    def data(value: Any) -> Any:
        return fx.map_arg(value, reference)

    nodes = []
    for node in graph.nodes:
        target = node.target
        if isinstance(target, torch._ops.OpOverload):
            namespace, _, name = target._schema.name.partition("::")
            target = _OpName((namespace, name, target._overloadname))
        stack = {key: (path, str(kind)) for key, (path, kind) in (node.meta.get("nn_module_stack") or {}).items()}
        nodes.append((node.op, node.name, target, data(node.args), data(dict(node.kwargs)), stack))
    info = getattr(graph._codegen, "pytree_info", None)
    if info is None:
        return StoredGraph(tuple(nodes), None, None, None)
    results = None if info.out_spec is None else _tree_data(info.out_spec)
    return StoredGraph(tuple(nodes), list(info.orig_args), _tree_data(info.in_spec), results)


def restored(data: StoredGraph) -> fx.Graph:
    """Return the graph of :func:`stored`."""
    graph = fx.Graph()
    found: dict[str, fx.Node] = {}

    def value(given: Any) -> Any:
        return _replaced(given, found)

    for op, name, target, args, kwargs, stack in data.nodes:
        node = graph.create_node(op, _target(target), value(args), value(kwargs), name=name)
        if stack:
            node.meta["nn_module_stack"] = stack
        found[name] = node
    if data.names is not None:
        results = None if data.results is None else _tree(data.results)
        graph.set_codegen(_PyTreeCodeGen(_PyTreeInfo(data.names, _tree(data.inputs), results)))
    return graph


def _tree_data(spec: pytree.TreeSpec) -> Any:
    """Return how a nesting is flattened as plain data."""
    if spec.is_leaf():
        return ()
    return spec.type, spec.context, [_tree_data(child) for child in spec.children()]


def _tree(data: Any) -> pytree.TreeSpec:
    """Return what :func:`_tree_data` was made from."""
    if not data:
        return pytree.treespec_leaf()
    kind, context, children = data
    return pytree.TreeSpec(kind, context, [_tree(child) for child in children])


def _target(target: Any) -> Any:
    if not isinstance(target, _OpName):
        return target
    namespace, name, overload = target.path
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


def _replaced(given: Any, found: dict[str, fx.Node]) -> Any:
    """Put nodes back in the place of references, in any nesting of lists, tuples, dicts and slices."""
    if isinstance(given, _Reference):
        return found[given.name]
    if isinstance(given, list | tuple):
        return type(given)(_replaced(item, found) for item in given)
    if isinstance(given, dict):
        return {key: _replaced(item, found) for key, item in given.items()}
    if isinstance(given, slice):
        return slice(*(_replaced(item, found) for item in (given.start, given.stop, given.step)))
    return given


def plain_tree(module: nn.Module) -> nn.Module:
    """Return a module with the parameters, buffers and modules of another one, themselves and not copies."""
    root = nn.Module()
    root._parameters.update(module._parameters)
    root._buffers.update(module._buffers)
    root._modules.update(module._modules)
    root._non_persistent_buffers_set = set(module._non_persistent_buffers_set)
    root.training = module.training
    return root

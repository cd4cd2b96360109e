"""Graphs as JSON: a list of ATen calls with their arguments, written and read without running anything.

Nodes are named, arguments that are other nodes are references, everything else is a literal. The one idea to know:
reading resolves targets from an allow-list (pure ATen ops, arithmetic on sizes, our own kernels), so that a file can
describe a computation and nothing else.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

import sparta.compiler.operators  # noqa: F401 - the ops that a stored graph may name
from sparta.errors import FileFormatError, message

__all__ = ["graph_from_json", "graph_text", "graph_to_json"]

_OPERATORS: dict[str, Callable[..., Any]] = {
    f"operator.{name}": getattr(operator, name)
    for name in ("getitem", "add", "sub", "mul", "floordiv", "truediv", "mod", "neg", "pow", "and_", "or_", "not_")
}
_OPERATORS |= {f"operator.{name}": getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
_OPERATORS |= {
    f"torch.{name}": getattr(torch, name) for name in ("sym_max", "sym_min", "sym_float", "sym_int", "sym_not")
}
_NAMES = {function: name for name, function in _OPERATORS.items()}
_REFUSED = frozenset({"from_file"})
"""ATen ops that reach outside of the computation."""


def graph_text(graph: fx.Graph) -> str:
    """Return a graph as text that is equal for equal graphs; what cannot be written is named by its type."""
    try:
        return json.dumps(graph_to_json(graph), sort_keys=True)
    except FileFormatError:
        return str(graph)


def graph_to_json(graph: fx.Graph) -> list[dict[str, Any]]:
    """Return the nodes of a graph as JSON values.

    Examples
    --------
    >>> graph = fx.Graph()
    >>> x = graph.placeholder("x")
    >>> _ = graph.output((graph.call_function(torch.ops.aten.relu.default, (x,)),))
    >>> [node["target"] for node in graph_to_json(graph)]
    ['x', 'aten.relu.default', 'output']
    """
    return [
        {
            "op": node.op,
            "name": node.name,
            "target": _target_name(node),
            "args": _encoded(node.args),
            "kwargs": _encoded(dict(node.kwargs)),
        }
        for node in graph.nodes
    ]


def graph_from_json(nodes: Sequence[Mapping[str, Any]]) -> fx.Graph:
    """Return the graph that :func:`graph_to_json` wrote; raises for anything that is not a computation."""
    graph = fx.Graph()
    made: dict[str, fx.Node] = {}
    try:
        for fields in nodes:
            op, name = str(fields["op"]), str(fields["name"])
            args, kwargs = _decoded(fields["args"], made), _decoded(fields["kwargs"], made)
            if op == "output":
                graph.output(args[0])
                continue
            target = _target(op, str(fields["target"]))
            made[name] = graph.create_node(op, target, tuple(args), kwargs, name)
        graph.lint()
    except FileFormatError:
        raise
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError) as error:
        raise FileFormatError(
            message(f"the stored graph does not fit together ({error})", fix="save it again")
        ) from error
    return graph


def _target(op: str, name: str) -> Callable[..., Any] | str:
    if op not in ("placeholder", "get_attr", "call_function", "call_module"):
        raise FileFormatError(message(f"the stored graph has a node of kind {op!r}", "calls and tensors"))
    return _function(name) if op == "call_function" else name


def _target_name(node: fx.Node) -> str:
    if node.op != "call_function":
        return str(node.target)
    if node.target in _NAMES:
        return _NAMES[node.target]
    if isinstance(node.target, torch._ops.OpOverload):
        name = str(node.target)
        _function(name)  # refuses what could not be read back
        return name
    raise FileFormatError(
        message(f"the model calls {node.target}, which cannot be written", "ATen ops", "keep it out of the saved model")
    )


def _function(name: str) -> Callable[..., Any]:
    """Return the function that a target names, from the allow-list."""
    if name in _OPERATORS:
        return _OPERATORS[name]
    namespace, _, rest = name.partition(".")
    packet, _, overload = rest.partition(".")
    if namespace in ("aten", "sparta") and packet not in _REFUSED:
        found = getattr(getattr(getattr(torch.ops, namespace), packet, None), overload or "default", None)
        if isinstance(found, torch._ops.OpOverload) and not found._schema.is_mutable:
            return found
    raise FileFormatError(
        message(
            f"the graph calls {name!r}",
            "ATen ops that change nothing in place, arithmetic on sizes, and sparta's own",
            "do not load files of this kind from people you do not trust",
        )
    )


def _encoded(value: Any) -> Any:  # noqa: ANN401, PLR0911 - a case a kind of literal
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if isinstance(value, bool) or value is None or isinstance(value, (int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, (tuple, list, fx.immutable_collections.immutable_list)):
        items = [_encoded(item) for item in value]
        return {"tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, dict):
        return {"dict": {str(key): _encoded(item) for key, item in value.items()}}
    if isinstance(value, slice):
        return {"slice": [_encoded(part) for part in (value.start, value.stop, value.step)]}
    for kind, known in (("dtype", torch.dtype), ("layout", torch.layout), ("memory_format", torch.memory_format)):
        if isinstance(value, known):
            return {kind: str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    raise FileFormatError(message(f"an argument of type {type(value).__name__}", "numbers, strings, lists and dtypes"))


def _decoded(value: Any, made: Mapping[str, fx.Node]) -> Any:  # noqa: ANN401, PLR0911 - a case a kind of literal
    if isinstance(value, list):
        return [_decoded(item, made) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "node":
        return made[inner]
    if kind == "float":
        return float(inner)
    if kind == "tuple":
        return tuple(_decoded(item, made) for item in inner)
    if kind == "dict":
        return {str(key): _decoded(item, made) for key, item in inner.items()}
    if kind == "slice":
        return slice(*(_decoded(part, made) for part in inner))
    if kind == "device":
        return torch.device(inner)
    known = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}.get(kind)
    found = getattr(torch, str(inner), None)
    if known is None or not isinstance(found, known):
        raise FileFormatError(
            message(f"the stored graph has the argument {value}", "numbers, strings, lists and dtypes")
        )
    return found

"""Graphs as JSON: a list of ATen calls with their arguments, written and read without running anything.

Nodes are named, arguments that are other nodes are references, everything else is a literal. A graph becomes Python
source when it runs, so nothing of a file reaches that source as it stands: nodes and inputs are renamed, functions come
from :mod:`sparta.compiler.graph.allowed`, keywords from the function's schema, and literals are numbers, checked text,
and constants of torch that are looked up here.
"""

from __future__ import annotations

import json
import keyword
import math
import re
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

import sparta.compiler.run.ops  # noqa: F401 - the ops that a stored graph may name
from sparta.compiler.graph.allowed import check_arguments, check_text, checked, function_named, name_of
from sparta.errors import FileFormatError, message

__all__ = ["graph_from_json", "graph_text", "graph_to_json"]

_MOST_NODES = 1_000_000
_INT64 = 1 << 63
_FLOATS = {"float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"}
_INTEGERS = {"int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool"}
_DTYPES = frozenset(_FLOATS | _INTEGERS | {"complex128", "complex64", "complex32"})
_LAYOUTS = frozenset({"strided"})
_MEMORY_FORMATS = frozenset({"contiguous_format", "channels_last", "channels_last_3d", "preserve_format"})
_CONSTANTS = {"dtype": _DTYPES, "layout": _LAYOUTS, "memory_format": _MEMORY_FORMATS}
_DEVICE = re.compile(r"cpu|cuda(:[0-9]{1,2})?")
_MEMBER = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*")


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
            "target": name_of(node.target) if node.op == "call_function" else str(node.target),
            "args": _encoded(node.args),
            "kwargs": _encoded(dict(node.kwargs)),
        }
        for node in graph.nodes
    ]


def graph_from_json(nodes: Sequence[Mapping[str, Any]]) -> fx.Graph:
    """Return the graph that :func:`graph_to_json` wrote; raises for anything that is not a computation."""
    if not isinstance(nodes, list) or len(nodes) > _MOST_NODES or not nodes or nodes[-1].get("op") != "output":
        raise FileFormatError(message("the stored graph is not a list of calls that ends in an output"))
    graph = fx.Graph()
    made: dict[str, fx.Node] = {}
    try:
        for place, fields in enumerate(nodes[:-1]):
            made[str(fields["name"])] = _node(graph, place, fields, made)
        graph.output(_decoded(nodes[-1]["args"], made)[0])
        graph.lint()
    except FileFormatError:
        raise
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, AssertionError, RuntimeError) as error:
        raise FileFormatError(
            message(f"the stored graph does not fit together ({error})", fix="save it again")
        ) from error
    return graph


def _node(graph: fx.Graph, place: int, fields: Mapping[str, Any], made: Mapping[str, fx.Node]) -> fx.Node:
    """Add one call or tensor to a graph, under a name of our own."""
    op, target, name = str(fields["op"]), str(fields["target"]), f"v{place}"
    args, kwargs = _decoded(fields["args"], made), _decoded(fields["kwargs"], made)
    if not isinstance(args, (list, tuple)) or not isinstance(kwargs, dict):
        raise FileFormatError(message("a call in the stored graph whose arguments are no list", fix="save it again"))
    if op == "placeholder" and not args and not kwargs:
        return graph.create_node(op, name, name=name)
    if op == "get_attr" and not args and not kwargs:
        return graph.create_node(op, _member(target), name=name)
    if op == "call_module" and not kwargs and len(args) <= 2 and all(_is_operand(arg) for arg in args):
        return graph.create_node(op, _member(target), tuple(args), name=name)
    if op != "call_function":
        raise FileFormatError(message(f"the stored graph has a node of kind {op!r}", "calls and tensors"))
    function = function_named(target)
    _check_arguments(function, target, args, kwargs)
    function = checked(function) if isinstance(function, torch._ops.OpOverload) else function
    return graph.create_node(op, function, tuple(args), kwargs, name)


def _is_operand(arg: object) -> bool:
    return arg is None or isinstance(arg, fx.Node)


def _member(name: str) -> str:
    """Return the name of a tensor or kernel of the file, which becomes an attribute's name."""
    parts = name.split(".")
    if not _MEMBER.fullmatch(name) or any(keyword.iskeyword(p) or p.startswith("__") for p in parts):
        raise FileFormatError(
            message(f"the stored graph names {name[:60]!r}", "letters, digits and underscores between dots")
        )
    return name


def _check_arguments(function: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise unless a function could take these arguments."""
    if not isinstance(function, torch._ops.OpOverload):
        given = [
            value for value in args if not isinstance(value, (fx.Node, bool, int, float, slice, tuple, type(None)))
        ]
        if kwargs or given or len(args) > 2:
            raise FileFormatError(message(f"the arguments of {name} in the stored graph", "up to two numbers"))
        return
    check_arguments(function, args, kwargs)


def _encoded(value: Any) -> Any:  # noqa: PLR0911 - a case a kind of literal
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


def _decoded(value: Any, made: Mapping[str, fx.Node]) -> Any:
    if isinstance(value, list):
        return [_decoded(item, made) for item in value]
    if isinstance(value, dict):
        if len(value) != 1:
            raise _unknown(value)
        ((kind, inner),) = value.items()
        return _decoded_kind(kind, inner, made)
    if isinstance(value, str):
        return check_text(value)
    if isinstance(value, int) and not -_INT64 <= value < _INT64:
        raise FileFormatError(message("the stored graph has a number beyond 64 bits"))
    return value


def _decoded_kind(kind: str, inner: Any, made: Mapping[str, fx.Node]) -> Any:  # noqa: PLR0911 - one per kind of literal
    if kind == "node":
        return made[inner]
    if kind == "float" and inner in ("inf", "-inf", "nan"):
        return float(inner)
    if kind == "tuple":
        return tuple(_decoded(item, made) for item in inner)
    if kind == "dict":
        return {str(key): _decoded(item, made) for key, item in inner.items()}
    if kind == "slice" and len(inner) == 3:
        return slice(*(_decoded(part, made) for part in inner))
    if kind == "device" and _DEVICE.fullmatch(str(inner)):
        return torch.device(inner)
    if isinstance(inner, str) and inner in _CONSTANTS.get(kind, ()):
        return getattr(torch, inner)
    raise _unknown({kind: inner})


def _unknown(value: object) -> FileFormatError:
    return FileFormatError(
        message(f"the stored graph has the argument {reprlib.repr(value)}", "numbers, text, lists and dtypes")
    )

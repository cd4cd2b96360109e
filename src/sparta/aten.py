"""ATen calls in a graph: their arguments by the names that the op's schema gives them.

A captured call passes some arguments by position, some by keyword, and leaves out those at their defaults. Every pass
and rule reads and writes them here by name, so none of them depends on how the call was written.
"""

from __future__ import annotations

from typing import Any

from torch import fx

__all__ = ["argument_of", "arguments_of", "set_argument"]


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of an ATen call by their schema names, defaults filled in.

    >>> import torch
    >>> graph = fx.Graph()
    >>> x = graph.placeholder("x")
    >>> call = graph.call_function(torch.ops.aten.softmax.int, (x,), {"dim": 1})
    >>> arguments_of(call)
    {'self': x, 'dim': 1, 'dtype': None}
    """
    found = {}
    for position, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if position < len(node.args):
            found[argument.name] = node.args[position]
        else:
            found[argument.name] = node.kwargs.get(argument.name, argument.default_value)
    return found


def argument_of(node: fx.Node, name: str) -> Any:
    """Return one argument of an ATen call by its schema name, or its default."""
    return arguments_of(node)[name]


def set_argument(node: fx.Node, name: str, value: Any) -> None:
    """Set an argument of an ATen call by its schema name, in the place where the call has it.

    >>> import torch
    >>> graph = fx.Graph()
    >>> call = graph.call_function(torch.ops.aten.softmax.int, (graph.placeholder("x"), 1))
    >>> set_argument(call, "dim", 2)
    >>> call.args
    (x, 2)
    """
    position = [argument.name for argument in node.target._schema.arguments].index(name)  # type: ignore[union-attr]
    if position < len(node.args):
        node.update_arg(position, value)
    else:
        node.update_kwarg(name, value)

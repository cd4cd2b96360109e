"""Quick: the same graph with less Python around each call, for models whose layers take microseconds.

Calls of ATen overloads become calls of torch's own functions, tensors are looked up once, and a ReLU that alone reads
a kernel's result writes in place. The one idea to know: this changes how a graph is called and never what it computes;
the graph that is saved and given to Inductor stays the plain one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx

from sparta.compiler.program import copied

__all__ = ["quickened"]

_aten = torch.ops.aten
_QUICKER: dict[object, Callable[..., Any]] = {
    _aten.linear.default: torch._C._nn.linear,
    _aten.gelu.default: torch._C._nn.gelu,
    _aten.silu.default: torch._C._nn.silu,
    _aten.scaled_dot_product_attention.default: torch._C._nn.scaled_dot_product_attention,
    _aten.relu.default: torch.relu,
    _aten.tanh.default: torch.tanh,
    _aten.sigmoid.default: torch.sigmoid,
    _aten.add.Tensor: torch.add,
    _aten.sub.Tensor: torch.sub,
    _aten.mul.Tensor: torch.mul,
    _aten.div.Tensor: torch.div,
    _aten.matmul.default: torch.matmul,
    _aten.conv1d.default: torch.conv1d,
    _aten.conv2d.default: torch.conv2d,
    _aten.layer_norm.default: torch.layer_norm,
    _aten.transpose.int: torch.transpose,
    _aten.permute.default: torch.permute,
    _aten.flatten.using_ints: torch.flatten,
}


def quickened(module: fx.GraphModule) -> Callable[..., Any]:
    """Return a function of flat inputs that computes what a graph module does.

    It holds the module's tensors as they are now: make it anew when they are replaced by others.

    >>> graph = fx.Graph()
    >>> x = graph.placeholder("x")
    >>> _ = graph.output((graph.call_function(torch.ops.aten.relu.default, (x,)),))
    >>> quickened(fx.GraphModule(torch.nn.Module(), graph))(torch.tensor([-1.0, 2.0]))
    (tensor([0., 2.]),)
    """
    graph, _ = copied(module.graph)
    first = next(iter(graph.nodes))
    tensors = []
    for node in list(graph.nodes):
        if node.op == "get_attr":
            path, _, last = str(node.target).rpartition(".")
            tensors.append(getattr(module.get_submodule(path), last))
            with graph.inserting_before(first):
                lifted = graph.placeholder(f"tensor_{len(tensors)}")
            node.replace_all_uses_with(lifted)
            first = node.next if node is first else first
            graph.erase_node(node)
        elif node.op == "call_function" and node.target in _QUICKER:
            node.target = torch.relu_ if _owns_its_input(node) else _QUICKER[node.target]
    return partial(fx.GraphModule(module, graph).forward, *tensors)


def _owns_its_input(node: fx.Node) -> bool:
    """Whether a ReLU is all that reads a kernel's result, as behind a residual sum: it may then write in place."""
    if node.target is not _aten.relu.default:
        return False
    source = node.args[0]
    return isinstance(source, fx.Node) and source.op == "call_module" and len(source.users) == 1

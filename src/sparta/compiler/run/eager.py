"""Eager: the same graph with less Python around each call, for models whose layers take microseconds.

Calls of ATen overloads become calls of torch's own functions, tensors and kernels are looked up once, and a ReLU or
ReLU6 that alone reads what a layer has just made writes in place. This changes how a graph is called and never what it
computes; the graph that is saved and given to Inductor stays the plain one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import fx

from sparta.compiler.graph.program import copied
from sparta.compiler.run.kernel_module import KernelModule
from sparta.modules import member
from sparta.specialize.cpu.pool import max_pool2d

__all__ = ["quicker", "with_fast_paths"]

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
    _aten.max_pool2d.default: max_pool2d,
    _aten.transpose.int: torch.transpose,
    _aten.permute.default: torch.permute,
    _aten.flatten.using_ints: torch.flatten,
}
_IN_PLACE: dict[object, Callable[..., Any]] = {
    _aten.relu.default: torch.relu_,
    _aten.hardtanh.default: torch._C._nn.hardtanh_,
}
# Calls that return a tensor of their own, never a view of another.
_FRESH = frozenset(
    {_aten.linear.default, _aten.conv1d.default, _aten.conv2d.default, _aten.add.Tensor, _aten.batch_norm.default}
)


def quicker(target: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's own function for a call of an ATen overload, where there is one.

    >>> quicker(torch.ops.aten.relu.default) is torch.relu
    True
    """
    return _QUICKER.get(target, target)


def with_fast_paths(
    module: fx.GraphModule, *, any_size: bool = False, sizes: Mapping[str, int] | None = None
) -> Callable[..., Any]:
    """Return a function of flat inputs that computes what a graph module does.

    It holds the module's tensors as they are now: make it again when they are replaced by others. For inputs of `any
    size` each kernel module chooses the kernel at the call; where the `sizes` of the inputs of kernel modules are
    known, by their names, it holds the kernels for these.

    >>> graph = fx.Graph()
    >>> x = graph.placeholder("x")
    >>> _ = graph.output((graph.call_function(torch.ops.aten.relu.default, (x,)),))
    >>> with_fast_paths(fx.GraphModule(torch.nn.Module(), graph))(torch.tensor([-1.0, 2.0]))
    (tensor([0., 2.]),)
    """
    graph, _ = copied(module.graph)
    first = next(iter(graph.nodes))
    in_place = {node for node in graph.nodes if node.target in _IN_PLACE and _owns_its_input(node)}
    tensors = []
    for node in list(graph.nodes):
        if node.op == "get_attr":
            tensors.append(member(module, str(node.target)))
            with graph.inserting_before(first):
                lifted = graph.placeholder(f"tensor_{len(tensors)}")
            node.replace_all_uses_with(lifted)
            first = node.next if node is first else first
            graph.erase_node(node)
        elif not any_size and (short := _fast_path_of(module, node, sizes)) is not None:
            node.op, node.target = "call_function", short
        elif node in in_place:
            node.target = _IN_PLACE[node.target]
        elif node.op == "call_function" and node.target in _QUICKER:
            node.target = _QUICKER[node.target]
    return partial(fx.GraphModule(module, graph).forward, *tensors)


def _fast_path_of(module: fx.GraphModule, node: fx.Node, sizes: Mapping[str, int] | None) -> Callable[..., Any] | None:
    """Return the short way through a kernel that a node calls."""
    layer = module.get_submodule(str(node.target)) if node.op == "call_module" else None
    if not isinstance(layer, KernelModule):
        return None
    if "scales" in node.kwargs:  # x is rounded already
        return layer.forward
    return layer.fast_path((sizes or {}).get(str(node.target)))


def _owns_its_input(node: fx.Node) -> bool:
    """Whether a call is all that reads the result of a kernel or layer: it may then write in place."""
    source = node.args[0]
    if not isinstance(source, fx.Node) or len(source.users) != 1:
        return False
    return source.op == "call_module" or source.target in _FRESH

"""Rounding once: layers that read the same activation in fp8 share its codes and scales. Norms by kernels of ours.

Without this each layer rounds x in a pass of its own, so the queries, keys and values of an attention round one tensor
three times. Rounding becomes a call of the graph. Where x comes from a norm or a gated product, one kernel of ours
makes and rounds it; else it is a kernel that rounds, or PyTorch's own calls where Inductor compiles them into what it
makes x by.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from sparta.aten import arguments_of
from sparta.compiler.graph.program import copied
from sparta.compiler.run.kernel_module import KernelModule
from sparta.specialize.scaled_linear.inputs import InputRounding
from sparta.specialize.scaled_linear.producers import norm, rounded_gate, rounded_norm
from sparta.specialize.scaled_linear.spec import fp8_rows

__all__ = ["ROUNDING_CALLS", "rounded_tokens", "traced_rounding", "with_own_norms", "with_shared_rounding"]

_aten = torch.ops.aten
_NORMS = (_aten.rms_norm.default, _aten.layer_norm.default)


def rounded_tokens(x: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    """Return x (..., K) in fp8, of the same shape, and the scales (M,) of its rows."""
    codes, scales = InputRounding(scale)(x.reshape(-1, x.shape[-1]))
    return codes.view(x.shape), scales


def traced_rounding(x: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    """Return what :func:`rounded_tokens` does, by calls that a compiler can fuse with others."""
    codes, scales = fp8_rows(x, scale)
    return codes, scales.flatten()


ROUNDING_CALLS: frozenset[Callable[..., Any]] = frozenset({rounded_tokens, rounded_norm, rounded_gate})
"""Calls that are one kernel each, in which a compiler finds nothing to fuse."""


def with_shared_rounding(module: fx.GraphModule, *, traced: bool = False) -> fx.GraphModule:
    """Return a graph in which activations are rounded to fp8 once; the same one where no layer rounds them.

    It shares tensors and layers with the module, and holds for the kernels as they are now.

    Parameters
    ----------
    traced
        Whether a compiler will look at it.
    """
    layers = {
        name: layer for name, layer in module.named_modules() if isinstance(layer, KernelModule) and layer.rounds_inputs
    }
    if not layers:
        return module
    graph, _ = copied(module.graph)
    for node in list(graph.nodes):
        layer = layers.get(str(node.target)) if node.op == "call_module" else None
        if layer is None or "scales" in node.kwargs:
            continue
        x, scale = node.args[0], layer.fused.attributes["input_scale"]
        readers = [user for user in x.users if _rounds(user, x, scale, layers)]
        keep = len(x.users) > len(readers) or any(x in reader.args[1:] for reader in readers)
        made = _made_rounded(graph, x, scale, layer.live, keep=keep)
        codes, scales, *kept = made or _rounded(graph, node, x, scale, traced=traced)
        if kept:
            x.replace_all_uses_with(kept[0])
        for reader in readers:
            reader.args, reader.kwargs = (codes, *reader.args[1:]), {"scales": scales}
        if made is not None:
            _erase(graph, x)
    graph.lint()
    return fx.GraphModule(module, graph, "Rounded")


def _rounds(user: fx.Node, x: fx.Node, scale: float | None, layers: Mapping[str, KernelModule]) -> bool:
    """Whether a node is a layer that rounds x with a scale."""
    layer = layers.get(str(user.target)) if user.op == "call_module" else None
    return layer is not None and user.args[0] is x and layer.fused.attributes["input_scale"] == scale


def _made_rounded(
    graph: fx.Graph, x: fx.Node, scale: float | None, like: Tensor, *, keep: bool
) -> tuple[fx.Node, ...] | None:
    """Return codes, scales, and x if it is kept, by one call in place of x's own; None where there is none."""
    if x.target in _NORMS:
        found = _norm_arguments(x, like)
        if found is None:
            return None
        target: Callable[..., Any] = rounded_norm
        arguments, more = found
    elif x.target is _aten.mul.Tensor and (gated := _gated(x)) is not None:
        target, arguments, more = rounded_gate, gated[:2], {"activate": gated[2]}
    else:
        return None
    with graph.inserting_before(x):
        whole = graph.call_function(target, arguments, {**more, "scale": scale, "keep": keep})
        return tuple(graph.call_function(operator.getitem, (whole, place)) for place in range(3 if keep else 2))


def with_own_norms(module: fx.GraphModule) -> fx.GraphModule:
    """Return a graph whose norms are one kernel of ours each, for where no compiler fuses them with others.

    It shares tensors and layers with the module, and is the same one where it has no norm.
    """
    if not any(node.target in _NORMS for node in module.graph.nodes):
        return module
    graph, _ = copied(module.graph)
    for node in list(graph.nodes):
        found = _norm_arguments(node, None) if node.target in _NORMS else None
        if found is None:
            continue
        with graph.inserting_before(node):
            node.replace_all_uses_with(graph.call_function(norm, *found))
        graph.erase_node(node)
    graph.lint()
    return fx.GraphModule(module, graph, "Normed")


def _norm_arguments(node: fx.Node, like: Tensor | None) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return what our norms take in place of a call of PyTorch's; None where it is not of the last dim alone.

    `like` is of the dtype and the device of what is normed, from which an epsilon follows that is not given.
    """
    call = arguments_of(node)
    if len(call["normalized_shape"]) != 1 or (like is None and call["eps"] is None):
        return None
    eps = call["eps"] if like is None or call["eps"] is not None else _epsilon(like.dtype, like.device)
    return (call["input"], call["weight"], call.get("bias"), eps), {"rms": node.target is _aten.rms_norm.default}


def _rounded(graph: fx.Graph, layer: fx.Node, x: fx.Node, scale: float | None, *, traced: bool) -> tuple[fx.Node, ...]:
    """Return codes and scales by a call of their own, before a layer."""
    with graph.inserting_before(layer):
        both = graph.call_function(traced_rounding if traced and not _alone(x) else rounded_tokens, (x, scale))
        return tuple(graph.call_function(operator.getitem, (both, place)) for place in range(2))


def _gated(x: fx.Node) -> tuple[fx.Node, fx.Node, bool] | None:
    """Return the gate and what it opens for a product of two, and whether the gate is still to be activated."""
    for gate, up in (x.args, x.args[::-1]):
        if isinstance(gate, fx.Node) and isinstance(up, fx.Node) and gate.target is _aten.silu.default:
            return (gate.args[0], up, True) if len(gate.users) == 1 else (gate, up, False)  # type: ignore[return-value]
    if all(isinstance(each, fx.Node) and _source(each).op == "call_module" for each in x.args):
        return (*x.args, False)  # type: ignore[return-value]
    return None


def _alone(x: fx.Node) -> bool:
    """Whether what makes x is a kernel that no compiler fuses with others."""
    source = _source(x)
    return source.op == "call_module" or source.target is _aten.scaled_dot_product_attention.default


def _source(node: fx.Node) -> fx.Node:
    """Return what a node is a view of."""
    while isinstance(node.target, torch._ops.OpOverload) and (
        node.target.is_view or node.target is _aten.reshape.default
    ):
        node = node.all_input_nodes[0]
    return node


def _erase(graph: fx.Graph, x: fx.Node) -> None:
    """Take a call out, and the activation that only it read."""
    sources = x.all_input_nodes
    graph.erase_node(x)
    for source in sources:
        if not source.users and source.op == "call_function":
            graph.erase_node(source)


@cache
def _epsilon(dtype: torch.dtype, device: torch.device) -> float:
    """Return what PyTorch adds in an RMSNorm without an epsilon of its own: that of the dtype, or of its sums."""
    small = 2.0**-10
    y = torch.rms_norm(torch.full((1, 1), small, dtype=dtype, device=device), (1,))
    found = (small / float(y)) ** 2 - small**2
    return min((torch.finfo(each).eps for each in (dtype, torch.float32)), key=lambda each: abs(found - each))

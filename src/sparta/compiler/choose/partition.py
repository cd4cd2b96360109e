"""Partition: which calls of a program run as one fused kernel.

A sub-graph starts at a layer with fixed weights and takes in what follows it as far as a kernel's epilogue reaches: an
activation and then a residual, or a residual and then a ReLU. Fusing is decided here and only here; the specialiser
gets one kernel spec per sub-graph and may not look further.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from sparta.compiler.graph.program import Program
from sparta.compiler.lower import LOWERINGS, Anchor, Lowering
from sparta.compiler.lower.subgraph import SubGraph
from sparta.errors import SpartaError
from sparta.specialize.implement import implements_of
from sparta.specialize.kernel_spec import Epilogue

__all__ = ["partition"]

_aten = torch.ops.aten
_RELU6 = "relu6"  # sparse kernels on CUDA do not know it: fused, it would leave a layer to dense
_ACTIVATIONS: dict[Any, str] = {
    _aten.relu.default: "relu",
    _aten.relu6.default: _RELU6,
    _aten.silu.default: "silu",
    _aten.gelu.default: "gelu",
}


def partition(program: Program, shapes: Mapping[fx.Node, Tensor]) -> list[SubGraph]:
    """Return the sub-graphs of a program that kernels could run, in the order of the graph.

    Parameters
    ----------
    shapes
        A tensor of each node's shape and dtype, as :meth:`Program.values` returns.
    """
    lowerings = [lowering for lowering in LOWERINGS if _has_implements(lowering.op)]
    found: list[SubGraph] = []
    taken: dict[str, int] = {}
    claimed: set[fx.Node] = set()  # the sum of two layers belongs to the first of them
    for node in program.graph.nodes:
        if node.op != "call_function" or node not in shapes:
            continue
        for lowering in lowerings:
            anchor = lowering.match(node)
            if anchor is not None and anchor.weight in program.tensors and _fits(program, lowering, anchor, shapes):
                device = program.tensors[anchor.weight].device.type
                nodes, residual, epilogue = _reach(shapes, node, claimed, device, has_bias=anchor.bias is not None)
                claimed.update(nodes)
                name = _free_name(anchor.weight, taken)
                weight, bias = _operands(program, anchor)
                found.append(SubGraph(name, lowering, anchor, nodes, residual, epilogue, weight, bias))
                break
    return found


def _has_implements(op: str) -> bool:
    try:
        return bool(implements_of(op))
    except SpartaError:
        return False


def _fits(program: Program, lowering: Lowering, anchor: Anchor, shapes: Mapping[fx.Node, Tensor]) -> bool:
    """Whether kernels could take the operands: floating-point, of one dtype, and not empty."""
    weight = program.tensors[anchor.weight]
    x = shapes.get(anchor.x)
    return (
        x is not None
        and lowering.fits(weight, x)
        and weight.numel() > 0
        and x.numel() > 0
        and weight.is_floating_point()
        and x.dtype == weight.dtype
        and (
            anchor.bias is None
            or program.tensors[anchor.bias].numel() in (1, weight.shape[1 if anchor.transposed else 0])
        )
    )


def _reach(
    shapes: Mapping[fx.Node, Tensor], node: fx.Node, claimed: set[fx.Node], device: str, *, has_bias: bool
) -> tuple[tuple[fx.Node, ...], fx.Node | None, Epilogue]:
    """Return the calls from a layer's own to as far as the epilogue reaches, the residual, and the epilogue."""
    nodes, residual = [node], None
    follower = _only_user(node)
    activation = _activation(follower, device)
    if follower is not None and activation is not None:
        nodes.append(follower)
        follower = _only_user(follower)
    plain_sum = follower is not None and follower.target is _aten.add.Tensor and follower.kwargs.get("alpha", 1) == 1
    if follower is not None and plain_sum and follower not in claimed:
        other = next((argument for argument in follower.args if argument is not nodes[-1]), None)
        if isinstance(other, fx.Node) and other in shapes and _same(shapes[other], shapes[nodes[-1]]):
            residual = other
            nodes.append(follower)
            follower = _only_user(follower)
    added = residual is not None
    last = follower if added and activation is None and _activation(follower, device) == "relu" else None
    if last is not None:
        nodes.append(last)
        return tuple(nodes), residual, Epilogue(bias=has_bias, activation="relu", residual=True, residual_first=True)
    return tuple(nodes), residual, Epilogue(bias=has_bias, activation=activation, residual=added)


def _activation(node: fx.Node | None, device: str) -> str | None:
    """Return the activation that a call is, if it is one that the kernels of a device know."""
    if node is None or node.kwargs.get("approximate", "none") != "none":
        return None
    if node.target is _aten.hardtanh.default and tuple(node.args[1:]) == (0, 6) and not node.kwargs:
        return _RELU6 if device == "cpu" else None
    found = _ACTIVATIONS.get(node.target)
    return None if found == _RELU6 and device != "cpu" else found


def _operands(program: Program, anchor: Anchor) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias as the operation takes them."""
    stored = program.tensors[anchor.weight]
    weight = stored.t().contiguous() if anchor.transposed else stored
    bias = None if anchor.bias is None else program.tensors[anchor.bias]
    return weight, None if bias is None else bias.reshape(-1).expand(weight.shape[0]).contiguous()


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _same(one: Tensor, two: Tensor) -> bool:
    return one.shape == two.shape and one.dtype == two.dtype


def _free_name(weight: str, taken: dict[str, int]) -> str:
    """Return the layer's name, numbered where one weight is used in several places."""
    base = weight.removesuffix("_folded")
    base = base.removesuffix("weight").rstrip(".") or base
    taken[base] = taken.get(base, 0) + 1
    return base if taken[base] == 1 else f"{base}#{taken[base]}"

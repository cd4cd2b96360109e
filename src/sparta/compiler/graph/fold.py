"""Fold: a BatchNorm after a convolution or a linear layer becomes part of its weight and bias, padding gets numbers.

In evaluation a BatchNorm is one factor and one shift per channel, so ``BN(conv(x))`` is a convolution again, with
scaled rows and another bias. Rows are scaled, so every zero of the weight stays a zero and the pattern survives; the
arithmetic is done in float64 and rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from sparta.aten import arguments_of
from sparta.batch_norms import scale_and_shift
from sparta.compiler.graph.program import Program, drop_unused, free_name
from sparta.propagation.compact import Origin

__all__ = ["fold_batch_norms"]

_aten = torch.ops.aten
_NAMED_PADDING = {
    _aten.conv1d.padding: _aten.conv1d.default,
    _aten.conv2d.padding: _aten.conv2d.default,
    _aten.conv3d.padding: _aten.conv3d.default,
}
_LAYERS = frozenset({_aten.conv1d.default, _aten.conv2d.default, _aten.conv3d.default, _aten.linear.default})


def fold_batch_norms(program: Program, shapes: dict[fx.Node, Tensor]) -> tuple[Program, int]:
    """Return the program without the BatchNorms that directly follow a layer, and how many there were.

    Parameters
    ----------
    shapes
        For each node of the program's graph, a tensor of its shape, as :meth:`Program.values` returns.
    """
    graph, copies = program.copy()
    tensors, origins = dict(program.tensors), dict(program.origins)
    _number_padding(graph, tensors)
    ranks = {copies[node]: value.dim() for node, value in shapes.items() if node in copies}
    folded = 0
    for node in list(graph.nodes):
        if node.target is not _aten.batch_norm.default:
            continue
        norm = arguments_of(node)
        layer = norm["input"]
        if norm["training"] or layer.target not in _LAYERS or len(layer.users) != 1:
            continue
        if layer.target is _aten.linear.default and ranks.get(layer) != 2:
            continue  # the channels of a BatchNorm are dim 1, those of a linear layer the last one
        if _fold_one(graph, tensors, origins, layer, norm):
            node.replace_all_uses_with(layer)
            graph.erase_node(node)
            folded += 1
    drop_unused(graph)
    used = {str(node.target) for node in graph.nodes if node.op == "get_attr"}
    return Program(graph, {name: tensors[name] for name in tensors if name in used}, origins), folded


def _number_padding(graph: fx.Graph, tensors: dict[str, Tensor]) -> None:
    """Write ``padding="same"`` and ``"valid"`` as numbers; padding that differs at the two ends is put around x."""
    for node in list(graph.nodes):
        if node.target not in _NAMED_PADDING:
            continue
        call = arguments_of(node)
        weight = tensors.get(str(call["weight"].target)) if call["weight"].op == "get_attr" else None
        if weight is None:
            continue
        dims = weight.dim() - 2
        dilation = list(call["dilation"]) * (dims if len(call["dilation"]) == 1 else 1)
        same = call["padding"] == "same"
        total = [d * (k - 1) if same else 0 for d, k in zip(dilation, weight.shape[2:], strict=True)]
        before, x = [each // 2 for each in total], call["input"]
        if any(each % 2 for each in total):
            around = [size for each in reversed(total) for size in (each // 2, each - each // 2)]
            with graph.inserting_before(node):
                x = graph.call_function(_aten.constant_pad_nd.default, (x, around))
            before = [0] * dims
        node.target = _NAMED_PADDING[node.target]
        node.args = (x, call["weight"], call["bias"], call["stride"], before, call["dilation"], call["groups"])
        node.kwargs = {}


def _fold_one(
    graph: fx.Graph, tensors: dict[str, Tensor], origins: dict[str, Origin], layer: fx.Node, norm: dict[str, Any]
) -> bool:
    """Give a layer the weight and bias that include a BatchNorm; False where they are not fixed tensors."""
    call = arguments_of(layer)
    parts = {"weight": call["weight"], "bias": call["bias"], "mean": norm["running_mean"], "var": norm["running_var"]}
    parts |= {"scale": norm["weight"], "shift": norm["bias"]}
    if not all(part is None or (isinstance(part, fx.Node) and part.op == "get_attr") for part in parts.values()):
        return False
    if parts["mean"] is None or parts["var"] is None:
        return False
    values = {key: tensors[str(part.target)] for key, part in parts.items() if part is not None}
    scale, shift = values.get("scale"), values.get("shift")
    factor, shift = scale_and_shift(values["mean"], values["var"], norm["eps"], scale, shift)
    name = str(parts["weight"].target)
    weight, bias = tensors[name], values.get("bias")
    new_weight = free_name(tensors, f"{name}_folded")
    origins[new_weight] = origins.get(name, Origin(name, (None,) * weight.dim()))
    tensors[new_weight] = (weight.double() * factor.reshape(-1, *[1] * (weight.dim() - 1))).to(weight.dtype)
    new_bias = free_name(tensors, name.removesuffix("weight") + "bias_folded")
    tensors[new_bias] = (shift if bias is None else bias.double() * factor + shift).to(weight.dtype)
    with graph.inserting_before(layer):
        fetch = graph.get_attr(new_weight), graph.get_attr(new_bias)
    layer.args = (layer.args[0], *fetch, *layer.args[3:])
    layer.kwargs = {key: value for key, value in layer.kwargs.items() if key not in ("weight", "bias")}
    return True

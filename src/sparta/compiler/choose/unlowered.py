"""Unlowered: layers that are pruned and that no sparse kernel runs, with the reason, for the report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from sparta.compiler.choose.layers import TOO_DENSE
from sparta.compiler.graph.program import Program
from sparta.compiler.lower.subgraph import SubGraph

__all__ = ["unlowered"]

_aten = torch.ops.aten
_KINDS: dict[Any, str] = {
    _aten.lstm.input: "LSTM",
    _aten.gru.input: "GRU",
    _aten.rnn_tanh.input: "RNN",
    _aten.rnn_relu.input: "RNN",
    _aten.conv_transpose1d.default: "transposed convolution",
    _aten.conv_transpose2d.input: "transposed convolution",
    _aten.conv_transpose3d.input: "transposed convolution",
    _aten.conv3d.default: "3-d convolution",
    _aten.embedding.default: "embedding",
    _aten.bilinear.default: "bilinear layer",
}
_LOWERED = {_aten.linear.default, _aten.addmm.default, _aten.conv1d.default, _aten.conv2d.default}


def unlowered(program: Program, subgraphs: Sequence[SubGraph]) -> Iterator[str]:
    """Yield a line on each call with pruned weights that is in no sub-graph."""
    taken = {node for subgraph in subgraphs for node in subgraph.nodes}
    told: set[str] = set()
    for node in program.graph.nodes:
        if node in taken or node.op != "call_function":
            continue
        for name, tensor in _pruned(program, node):
            reason = _reason(node, tensor)
            if reason and name not in told:
                told.add(name)
                yield f"{name} stays dense: {reason}"


def _pruned(program: Program, node: fx.Node) -> Iterator[tuple[str, Tensor]]:
    for used in node.all_input_nodes if node.target in _KINDS or node.target in _LOWERED else ():
        tensor = program.tensors.get(str(used.target)) if used.op == "get_attr" else None
        if tensor is not None and tensor.dim() >= 2 and tensor.numel():
            density = int(tensor.count_nonzero()) / tensor.numel()
            if density < TOO_DENSE:
                yield str(used.target), tensor


def _reason(node: fx.Node, tensor: Tensor) -> str:
    if node.target in _KINDS:
        return f"there is no sparse kernel for a weight of {_KINDS[node.target]}"
    if not tensor.is_floating_point():
        return f"its weight is of {tensor.dtype}"
    return "kernels take a fixed weight and activations of one dtype"

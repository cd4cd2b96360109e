"""Folding batch norms into the convolutions before them, in place.

A configuration asks for it with `fuse_bn`, so that pruning sees the weights that will be deployed. The model is traced
only to *find* the pairs; it stays the same object with the same classes, and each folded batch norm becomes an
identity.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

from sparta.errors import ValueRangeError, message

__all__ = ["fuse_batch_norms", "traced"]

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *_TRANSPOSED)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class _Tracer(fx.Tracer):
    """Looks into everything but `torch.nn` modules and the given classes."""

    def __init__(self, leaves: Sequence[type[nn.Module]]) -> None:
        super().__init__()
        self._leaves = tuple(leaves)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, self._leaves) or super().is_leaf_module(m, module_qualified_name)


def traced(model: nn.Module, leaves: Sequence[type[nn.Module]], why: str) -> fx.Graph:
    """Return the graph of `model`, or raise :class:`ValueRangeError` that says what to do when it cannot be traced."""
    try:
        return _Tracer(leaves).trace(model)
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueRangeError(
            message(
                f"the model cannot be traced, which {why} needs ({type(error).__name__}: {reason})",
                "models without Python control flow on tensors",
                "name the classes that trace badly in leaf_module, or switch it off",
            )
        ) from error


def fuse_batch_norms(model: nn.Module, leaves: Sequence[type[nn.Module]] = ()) -> list[tuple[str, str]]:
    """Fold each batch norm whose only input is a convolution that feeds nothing else; return the names of the pairs.

    >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    >>> fuse_batch_norms(model), type(model[1]).__name__
    ([('0', '1')], 'Identity')
    """
    graph = traced(model, leaves, "fuse_bn")
    modules = dict(model.named_modules())
    calls = [node for node in graph.nodes if node.op == "call_module"]
    uses = {target: sum(node.target == target for node in calls) for target in {node.target for node in calls}}
    pairs = []
    for node in calls:
        norm = modules[str(node.target)]
        before = node.args[0] if node.args else None
        if not isinstance(norm, _NORMS) or not isinstance(before, fx.Node) or before.op != "call_module":
            continue
        conv = modules[str(before.target)]
        alone = len(before.users) == 1 and uses[before.target] == uses[node.target] == 1
        if isinstance(conv, _CONVS) and alone and norm.running_mean is not None:
            _fold(conv, norm)
            parent, _, child = str(node.target).rpartition(".")
            setattr(model.get_submodule(parent), child, nn.Identity())
            pairs.append((str(before.target), str(node.target)))
    return pairs


@torch.no_grad()
def _fold(conv: Any, norm: Any) -> None:
    weight, bias = fuse_conv_bn_weights(
        conv.weight,
        conv.bias,
        norm.running_mean,
        norm.running_var,
        norm.eps,
        norm.weight,
        norm.bias,
        transpose=isinstance(conv, _TRANSPOSED),
    )
    conv.weight.copy_(weight)
    if conv.bias is None:
        conv.bias = bias
    else:
        conv.bias.copy_(bias)

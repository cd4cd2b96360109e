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

from sparta.batch_norms import folded, pairs_in_graph
from sparta.errors import ValueRangeError, message
from sparta.modules import replace_module

__all__ = ["fuse_batch_norms", "traced"]


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
    pairs = pairs_in_graph(traced(model, leaves, "fuse_bn"), dict(model.named_modules()))
    for conv_name, norm_name in pairs:
        conv: Any = model.get_submodule(conv_name)
        weight, bias = folded(conv, model.get_submodule(norm_name))
        with torch.no_grad():
            conv.weight.copy_(weight)
            if conv.bias is None:
                conv.bias = nn.Parameter(bias)
            else:
                conv.bias.copy_(bias)
        replace_module(model, norm_name, nn.Identity())
    return pairs

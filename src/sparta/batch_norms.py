"""Batch norms in evaluation: which convolution each follows, and how it becomes part of that convolution.

A batch norm that uses its running statistics is one factor and one shift per channel, so ``BN(conv(x))`` is a
convolution again, with scaled output channels and another bias. Every zero of the weight stays a zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

__all__ = ["CONVS", "NORMS", "TRANSPOSED", "fold_factor", "folded", "is_foldable", "pairs_in_graph", "scale_and_shift"]

TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *TRANSPOSED)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def pairs_in_graph(graph: fx.Graph, modules: Mapping[str, nn.Module]) -> list[tuple[str, str]]:
    """Return the names of each convolution and the batch norm that alone uses its output.

    Parameters
    ----------
    graph
        A graph that calls modules, as :class:`torch.fx.Tracer` makes it.
    modules
        The modules by the names that the graph uses.

    Examples
    --------
    >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    >>> pairs_in_graph(fx.Tracer().trace(model), dict(model.named_modules()))
    [('0', '1')]
    """
    calls = [node for node in graph.nodes if node.op == "call_module"]
    uses: dict[object, int] = {}
    for node in calls:
        uses[node.target] = uses.get(node.target, 0) + 1
    pairs = []
    for node in calls:
        before = node.args[0] if node.args else None
        if not isinstance(before, fx.Node) or before.op != "call_module":
            continue
        alone = len(before.users) == 1 and uses[before.target] == uses[node.target] == 1
        if alone and is_foldable(modules[str(before.target)], modules[str(node.target)]):
            pairs.append((str(before.target), str(node.target)))
    return pairs


def is_foldable(conv: nn.Module, norm: nn.Module) -> bool:
    """Whether these are a convolution and a batch norm with running statistics that can become part of it."""
    if not isinstance(conv, CONVS) or not isinstance(norm, NORMS) or norm.running_mean is None:
        return False
    # A grouped transposed convolution spreads its output channels over both axes of the weight.
    return not (isinstance(conv, TRANSPOSED) and conv.groups > 1)


def scale_and_shift(
    mean: Tensor,
    var: Tensor,
    eps: float,
    weight: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Return what a batch norm multiplies each channel by, and what it adds then.

    Parameters
    ----------
    mean, var, eps, weight, bias
        As :func:`torch.nn.functional.batch_norm` takes them; each tensor has one value per channel.
    dtype
        In which it is computed.

    Examples
    --------
    >>> scale_and_shift(torch.tensor([3.0]), torch.tensor([4.0]), 0.0, None, None)
    (tensor([0.5000], dtype=torch.float64), tensor([-1.5000], dtype=torch.float64))
    """
    scale = (var.detach().to(dtype) + eps).rsqrt()
    if weight is not None:
        scale = scale * weight.detach().to(dtype)
    shift = -mean.detach().to(dtype) * scale
    return scale, shift if bias is None else shift + bias.detach().to(dtype)


def fold_factor(conv: nn.Module, norm: Any, dims: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return what folding multiplies the output channels of a convolution's weight by, shaped to broadcast over it."""
    axis = 1 if isinstance(conv, TRANSPOSED) else 0
    return _of(norm, dtype)[0].reshape([-1 if dim == axis else 1 for dim in range(dims)])


@torch.no_grad()
def folded(conv: Any, norm: Any) -> tuple[Tensor, Tensor]:
    """Return the weight and the bias of a convolution with its batch norm in them, rounded once to the weight's dtype.

    >>> conv, norm = nn.Conv1d(2, 3, 1, bias=False), nn.BatchNorm1d(3).eval()
    >>> x = torch.randn(4, 2, 5)
    >>> torch.allclose(torch.conv1d(x, *folded(conv, norm)), norm(conv(x)), atol=1e-6)
    True
    """
    scale, shift = _of(norm, torch.float64)
    weight = conv.weight.double() * fold_factor(conv, norm, conv.weight.dim(), torch.float64)
    bias = shift if conv.bias is None else conv.bias.double() * scale + shift
    return weight.to(conv.weight.dtype), bias.to(conv.weight.dtype)


def _of(norm: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return scale_and_shift(norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias, dtype)

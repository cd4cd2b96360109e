"""Language models in fp8 on the GPU: weights of linear layers with a scale per output, inputs with one per token.

All linear layers take part, pruned or not, but the one that makes logits. A layer for which no kernel in fp8 wins keeps
its own weight. Kernels are compared with the same model in real numbers, rounded where they round.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparta.generation.layers import SparseLayer, is_linear, is_transposed, weight_of
from sparta.generation.model import shared_copy
from sparta.modules import replace_module
from sparta.specialize.cuda.device import HALF_FORMATS, capability
from sparta.specialize.scaled_linear.spec import FP8_IMPLEMENTS, rounded_rows, rounded_weight, scaled_weight
from sparta.tesa.attribute import TeSA

__all__ = ["fp8_obstacle", "put_back", "round_weights", "simulated"]

_CAPABILITY = (8, 9)


def fp8_obstacle(model: nn.Module) -> str:
    """Return why a language model cannot run in fp8 here; nothing where it can.

    >>> fp8_obstacle(nn.Linear(2, 2))
    'a model on cpu'
    """
    like = next(model.parameters())
    if like.device.type != "cuda":
        return f"a model on {like.device.type}"
    if capability(like.device) < _CAPABILITY:
        return f"a GPU of compute capability {'.'.join(map(str, capability(like.device)))}"
    return "" if like.dtype in HALF_FORMATS.values() else f"a model in {like.dtype}"


def round_weights(model: Any, tesas: Mapping[str, TeSA]) -> dict[str, TeSA]:
    """Put rounded weights in the places of those of linear layers; return what is then known of them, by layer.

    Parameters
    ----------
    tesas
        What is known of pruned weights (N, K).
    """
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    found = {}
    with torch.no_grad():
        for name, module in list(model.named_modules()):
            if not is_linear(module) or module is head:
                continue
            weight = weight_of(module)
            if not bool(weight.isfinite().all()):
                continue
            found[name] = tesa = scaled_weight(weight, tesas.get(name))
            rounded = rounded_weight(weight, tesa).to(weight.dtype)
            values = rounded.t().contiguous() if is_transposed(module) else rounded
            module.register_parameter("weight", nn.Parameter(values, requires_grad=False))
    return found


def put_back(model: nn.Module, base: nn.Module, names: list[str]) -> None:
    """Give layers the weights that they have in another model."""
    for name in names:
        weight = cast("nn.Parameter", base.get_submodule(name).weight)
        model.get_submodule(name).register_parameter("weight", weight)


class _Simulated(nn.Module):
    """A layer in real numbers, its input rounded where its kernel would round it."""

    def __init__(self, layer: SparseLayer) -> None:
        super().__init__()
        object.__setattr__(self, "layer", layer)

    layer: SparseLayer

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., N) for x (..., K)."""
        rounds = self.layer.kernel.choice_for(x).implement in FP8_IMPLEMENTS
        bias = cast("Tensor | None", self.layer.bias)
        return functional.linear(rounded_rows(x) if rounds else x, weight_of(self.layer), bias)


def simulated(model: nn.Module) -> nn.Module:
    """Return a compiled model with all its layers in real numbers, rounded as its kernels round."""
    copied: Any = shared_copy(model)
    copied._sparta.graph = None
    for name, module in list(copied.named_modules()):
        if isinstance(module, SparseLayer):
            replace_module(copied, name, _Simulated(module))
    return cast("nn.Module", copied)

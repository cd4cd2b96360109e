"""Which weights are pruned by default, and along which axis their input channels lie.

Weights of linear, convolution and attention layers are; in a captured graph, those that such calls read. An embedding
is not, nor is a head that shares its weight: what prunes the one would prune the other.
"""

from __future__ import annotations

import sys

from torch import Tensor, fx, nn

__all__ = ["embedded", "input_axis", "is_prunable", "prunable"]

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_PRUNABLE = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, *_TRANSPOSED, nn.MultiheadAttention)
_CALLS = frozenset(
    [
        "linear",
        "convolution",
        *(f"conv{dims}d" for dims in (1, 2, 3)),
        *(f"conv_transpose{dims}d" for dims in (1, 2, 3)),
    ]
)


def prunable(model: nn.Module) -> dict[str, int]:
    """Return the weights of a model that are pruned by default, each with the axis of its input channels.

    >>> prunable(nn.Sequential(nn.Linear(4, 2), nn.ConvTranspose1d(2, 3, 1), nn.LayerNorm(3)))
    {'0.weight': 1, '1.weight': 0}
    """
    shared = embedded(model)
    if isinstance(model, fx.GraphModule):
        return {name: axis for name, axis in _read_by_layers(model).items() if id(_tensor(model, name)) not in shared}
    return {
        name: input_axis(module)
        for path, module in model.named_modules()
        for name, parameter in module.named_parameters(path, recurse=False)
        if is_prunable(module, name, parameter) and id(parameter) not in shared
    }


def _read_by_layers(model: fx.GraphModule) -> dict[str, int]:
    """Return the parameters of a graph that its linear layers and convolutions take as weights, with their axes."""
    found: dict[str, int] = {}
    for node in model.graph.nodes:
        name = str(node.target).removeprefix("aten.").split(".")[0]
        if node.op == "call_function" and name in _CALLS and len(node.args) > 1:
            weight = node.args[1]
            if (
                isinstance(weight, fx.Node)
                and weight.op == "get_attr"
                and _tensor(model, str(weight.target)).dim() >= 2
            ):
                found[str(weight.target)] = 0 if "transpose" in name else 1
    return found


def _tensor(model: fx.GraphModule, name: str) -> Tensor:
    path, _, attribute = name.rpartition(".")
    found: Tensor = getattr(model.get_submodule(path), attribute)
    return found


def is_prunable(module: nn.Module, name: str, parameter: Tensor) -> bool:
    """Whether a parameter of `module` is a weight that is pruned by default, unless an embedding shares it."""
    known = isinstance(module, _PRUNABLE) or _is_transformers_conv1d(module)
    return known and name.endswith("weight") and parameter.dim() >= 2


def input_axis(module: nn.Module) -> int:
    """Return the axis of the input channels: 1, or 0 in a transposed convolution and in the linear layer of GPT-2."""
    return 0 if isinstance(module, _TRANSPOSED) or _is_transformers_conv1d(module) else 1


def embedded(model: nn.Module) -> set[int]:
    """Return the ids of all parameters of embeddings.

    >>> model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9, bias=False))
    >>> model[2].weight = model[0].weight
    >>> list(prunable(model)), len(embedded(model))
    (['1.weight'], 1)
    """
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return {id(p) for module in model.modules() if isinstance(module, kinds) for p in module.parameters(recurse=False)}


def _is_transformers_conv1d(module: nn.Module) -> bool:
    """Whether it is GPT-2's linear layer, whose weight is stored as (inputs, outputs)."""
    loaded = sys.modules.get("transformers.pytorch_utils")  # a model that has one has imported it
    return loaded is not None and isinstance(module, loaded.Conv1D)

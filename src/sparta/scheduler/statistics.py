"""Statistics of a model's layers: how much each computes and moves, and how deep in the network's strides it stands.

One forward pass on an example input tells. Multiply-adds are for one example, and what remains of them after pruning is
taken to go with the layer's density.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sparta.errors import ValueRangeError, message
from sparta.scheduler.prepared import PreparedLayer

__all__ = ["LayerStatistics", "example_input", "measure_layers"]

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *_TRANSPOSED)


@dataclass(frozen=True)
class LayerStatistics:
    """What one layer computes for one example.

    Parameters
    ----------
    macs
        Multiply-adds, dense.
    moved
        Elements of weight, input and output.
    group
        Stride group of a convolution, 0 nearest to the input; None for other layers.
    depthwise
        Whether it is a convolution with several groups.
    """

    macs: int
    moved: int
    group: int | None
    depthwise: bool


def example_input(shape: Sequence[int] | None, custom: Any, device: torch.device) -> tuple[Any, ...] | None:
    """Return the arguments of one forward pass: the custom input, noise of `shape`, or None when neither is given."""
    if custom is not None:
        return custom if isinstance(custom, tuple) else (custom,)
    if shape is None:
        return None
    if not shape or any(isinstance(s, bool) or not isinstance(s, int) or s < 1 for s in shape):
        raise ValueRangeError(message(f"default_input_shape is {shape!r}", "positive integers, the batch first"))
    # a generator of its own: the training's random numbers stay what they would have been
    return (torch.randn(tuple(shape), generator=torch.Generator().manual_seed(0)).to(device),)


def measure_layers(
    model: nn.Module, layers: Sequence[PreparedLayer], inputs: tuple[Any, ...] | None
) -> dict[str, LayerStatistics]:
    """Return the statistics of each layer by its weight's name; without inputs, as if run on one position."""
    seen: dict[nn.Module, tuple[Tensor, Tensor]] = {}
    if inputs is not None:
        _forward(model, {prepared.layer.module for prepared in layers}, inputs, seen)
    strides = {}
    largest = max((_extent(x, m) for m, (x, _) in seen.items() if isinstance(m, _CONVS)), default=1)
    for prepared in layers:
        module = prepared.layer.module
        if isinstance(module, _CONVS):
            size = _extent(seen[module][0], module) if module in seen else largest
            strides[prepared.name] = math.ceil(math.log2(largest / size)) if size else 0
    ranks = {stride: rank for rank, stride in enumerate(sorted(set(strides.values())))}
    return {
        prepared.name: _statistics(prepared, seen, ranks.get(strides.get(prepared.name, -1))) for prepared in layers
    }


def _forward(
    model: nn.Module, watched: set[nn.Module], inputs: tuple[Any, ...], seen: dict[nn.Module, tuple[Tensor, Tensor]]
) -> None:
    def hook(module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        first = result[0] if isinstance(result, tuple) else result
        if args and isinstance(args[0], Tensor) and isinstance(first, Tensor):
            seen.setdefault(module, (args[0], first))

    handles = [module.register_forward_hook(hook) for module in watched]
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            model(*inputs)
    except Exception as error:
        raise ValueRangeError(
            message(
                f"the model cannot run on the example input ({type(error).__name__}: {str(error).splitlines()[0]})",
                "a default_input_shape or default_input_custom that fits the model",
            )
        ) from error
    finally:
        for handle in handles:
            handle.remove()
        for module, was in training.items():
            module.training = was


def _extent(x: Tensor, module: nn.Module) -> int:
    """Return the length of the last axis of a convolution's input."""
    return int(x.shape[-1]) if isinstance(module, _CONVS) else 1


def _statistics(
    prepared: PreparedLayer, seen: Mapping[nn.Module, tuple[Tensor, Tensor]], group: int | None
) -> LayerStatistics:
    module, weight = prepared.layer.module, prepared.weight.numel()
    depthwise = isinstance(module, _CONVS) and int(module.groups) > 1
    if module not in seen:
        return LayerStatistics(weight, weight, group, depthwise)
    x, y = seen[module]
    if isinstance(module, _CONVS):
        spatial = prepared.weight.dim() - 2
        counted = x if isinstance(module, _TRANSPOSED) else y
        positions = math.prod(counted.shape[counted.dim() - spatial :])
        batch = x.shape[0] if x.dim() == spatial + 2 else 1
    else:
        batch = x.shape[0] if x.dim() > 1 else 1
        positions = max(1, math.prod(y.shape[:-1]) // max(1, batch))
    moved = weight + (x.numel() + y.numel()) // max(1, batch)
    return LayerStatistics(weight * positions, moved, group, depthwise)

"""What is left of a compiled model when nothing of its pruned layers is live: the time that no sparsity takes away.

The same graph runs in the same host, with the kernels that were chosen and no live weight in them: dense layers, norms
and attention as they are, and of the pruned layers what adding a bias and storing cost. What is copied only for live
weights to read is left out. With what the live weights need at as many times the rate of one core as there are cores,
measured in registers, it is a bound for kernels of this kind, and not one that they can reach.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from sparta.compiler.run.compiled_model import CompiledModel
from sparta.compiler.run.host import hosted
from sparta.compiler.run.kernel_module import KernelModule
from sparta.tesa.attribute import TeSA

sys.path.insert(0, str(Path(__file__).parents[1] / "cpu"))
from roofline import Roof

__all__ = ["emptied", "least_ms"]


def emptied(fast: CompiledModel) -> Callable[[Tensor], Any]:
    """Return a compiled model, in its host, without the live weights of its pruned layers."""
    graph = fx.GraphModule(fast.graph, copy.deepcopy(fast.graph.graph))
    for name, layer in _pruned(fast):
        none = TeSA.from_mask(torch.zeros(layer.fused.weight.shape, dtype=torch.bool))
        choices = {
            size: (replace(spec, operands={**spec.operands, "weight": none}), choice)
            for size, (spec, choice) in layer.choices.items()
        }
        graph.set_submodule(name, KernelModule(replace(layer.fused, weight=none), layer.live[:0], layer.bias, choices))
    return hosted(graph, fast.report.plan.whole.host)


def least_ms(fast: CompiledModel, roof: Roof, cores: int) -> float:
    """Return the milliseconds that the live weights of the pruned layers need, were nothing else to do."""
    operations = 0
    for _, layer in _pruned(fast):
        spec, _ = next(iter(layer.choices.values()))
        x, fused = torch.empty(spec["input"].shape, device="meta"), layer.fused
        operations += fused.lowering.flops(fused.weight, x, fused.attributes, live=True)
    return 1e3 * operations / 2 / (cores * roof.multiply_adds)


def _pruned(fast: CompiledModel) -> list[tuple[str, KernelModule]]:
    """Return the layers that run kernels for sparse weights, by their names in the graph."""
    layers = [(name, each) for name, each in fast.graph.named_modules() if isinstance(each, KernelModule)]
    return [(name, layer) for name, layer in layers if layer.fused.weight.density < 1 and not _dense(layer)]


def _dense(layer: KernelModule) -> bool:
    return all(choice.implement in ("dense", "cpu-dense") for _, choice in layer.choices.values())

"""Precision: which linear layers run in int8, on which grids, and what the model with rounded inputs computes.

The weights' grids come from the spec, those of the inputs from the caller or from the range that the example inputs
show. A layer without a usable grid is no error; it stays in real numbers and the report says why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from sparta.compiler.graph.program import Program
from sparta.compiler.lower import lowering_of
from sparta.compiler.lower.samples import SizeSample
from sparta.compiler.lower.subgraph import SubGraph
from sparta.compiler.run.combine import combined
from sparta.compiler.run.kernel_module import KernelModule
from sparta.errors import SpartaError, ValueRangeError, message
from sparta.specialize.int8_linear.quantization import Quantization
from sparta.specialize.int8_linear.quantized import INT8_IMPLEMENTS, OP, integers_of
from sparta.specialize.linear.spec import apply_epilogue
from sparta.tesa.attribute import TeSA

__all__ = ["Calibration", "rounding_kernels", "simulated"]


@dataclass(frozen=True)
class Calibration:
    """What is known of grids.

    Parameters
    ----------
    weights
        The spec of the model; int8 TeSAs with a scale are what counts here.
    inputs
        Grids of inputs by layer, ``"fc.input"``; see :meth:`Quantization.of`. Others are taken from the examples.
    note
        Called with what could not be used, and why.
    """

    weights: Mapping[str, TeSA]
    inputs: Mapping[str, Any]
    note: Callable[[str], None]

    def quantized(
        self, program: Program, subgraphs: Sequence[SubGraph], samples: Sequence[SizeSample]
    ) -> tuple[list[SubGraph], list[SizeSample]]:
        """Return the sub-graphs, those of int8 layers as such, and the samples with them."""
        changed = {subgraph: self._quantized(program, subgraph, samples) for subgraph in subgraphs}
        used = {f"{_layer(program, subgraph)}input" for subgraph in subgraphs if changed[subgraph].scales is not None}
        unused = sorted(set(self.inputs) - used)
        if unused:
            self.note(f"grids that no int8 layer uses: {', '.join(unused)}")
        moved = [
            SizeSample({changed[subgraph]: values for subgraph, values in sample.values.items()}) for sample in samples
        ]
        return list(changed.values()), moved

    def _quantized(self, program: Program, subgraph: SubGraph, samples: Sequence[SizeSample]) -> SubGraph:
        name = program.source(subgraph.anchor.weight)
        known = self.weights.get(name)
        if known is None or str(known.format) != "int8" or subgraph.lowering.op != "linear":
            return subgraph
        try:
            scales = _scales(program, subgraph, known)
            integers = integers_of(subgraph.weight, scales)
            grid = self._grid(f"{_layer(program, subgraph)}input", [sample.values[subgraph][0] for sample in samples])
        except SpartaError as error:
            self.note(f"{subgraph.name} stays in real numbers: {error}")
            return subgraph
        return replace(
            subgraph,
            lowering=lowering_of(OP),
            anchor=replace(subgraph.anchor, attributes=grid.to_dict()),
            weight=integers.float() * scales.float().unsqueeze(1),
            scales=scales,
        )

    def _grid(self, name: str, activations: Sequence[Tensor]) -> Quantization:
        if name in self.inputs:
            return Quantization.of(self.inputs[name])
        low, high = (float(min(x.min() for x in activations)), float(max(x.max() for x in activations)))
        if not abs(low) + abs(high) < float("inf"):
            raise ValueRangeError(message(f"example inputs of {name} from {low} to {high}", "finite numbers"))
        return Quantization.covering(low, high)


def _layer(program: Program, subgraph: SubGraph) -> str:
    """Return the prefix of a layer's names: ``"fc."``, or nothing for the model itself."""
    return program.source(subgraph.anchor.weight).removesuffix("weight")


def _scales(program: Program, subgraph: SubGraph, known: TeSA) -> Tensor:
    """Return the scales (N,) of a weight's rows as they are in the program, where channels may have been cut."""
    if subgraph.anchor.transposed or subgraph.weight.dtype != torch.float32 or subgraph.weight.device.type != "cpu":
        where = f"{subgraph.weight.dtype} on {subgraph.weight.device.type}"
        raise ValueRangeError(message(f"an int8 weight in {where}", "float32 on cpu, as (outputs, inputs)"))
    if not bool(known.scale.cells.isfinite().all()) or bool((known.zero_point.cells != 0).any()):
        raise ValueRangeError(message("an int8 weight without a scale, or with a zero point", "a symmetric grid"))
    origin = program.origins.get(subgraph.anchor.weight)
    scales = known.scale.dense() if origin is None else origin.take(known.scale.dense())
    if scales.shape != subgraph.weight.shape or bool((scales != scales[:, :1]).any()):
        raise ValueRangeError(message("an int8 weight with several scales in a row", "one scale per row, or one"))
    return scales[:, 0].contiguous()


def rounding_kernels(kernels: Mapping[SubGraph, KernelModule]) -> dict[SubGraph, KernelModule]:
    """Return the kernels that round their input at some size."""
    return {
        subgraph: module
        for subgraph, module in kernels.items()
        if any(choice.implement in INT8_IMPLEMENTS for _, choice in module.choices.values())
    }


def simulated(program: Program, kernels: Mapping[SubGraph, KernelModule]) -> Callable[..., Any]:
    """Return a program as a function of flat inputs, its int8 layers in real numbers with rounded inputs."""
    return combined(program, {subgraph: _Simulated(subgraph, module) for subgraph, module in kernels.items()}).forward


class _Simulated(nn.Module):
    """An int8 layer in float64, its input rounded where its kernel would round it."""

    def __init__(self, subgraph: SubGraph, kernel: KernelModule) -> None:
        super().__init__()
        self._subgraph, self._kernel = subgraph, [kernel]  # in a list: it is not a part of this module

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return ``activation(layer(rounded x) + bias) + residual``."""
        subgraph, attributes = self._subgraph, self._subgraph.anchor.attributes
        rounds = self._kernel[0].choice_for(x).implement in INT8_IMPLEMENTS
        given = subgraph.lowering.on_grid(x, attributes) if rounds else x
        wide = [None if t is None else t.to(torch.float64) for t in (subgraph.bias, residual)]
        exact = subgraph.lowering.dense(subgraph.weight.to(torch.float64), given.to(torch.float64), wide[0], attributes)
        return apply_epilogue(exact, subgraph.epilogue, wide[1]).to(x.dtype)

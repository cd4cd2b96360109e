"""Calibrate: which linear layers run in int8, on which grids, and what the model with rounded inputs computes.

The weights' grids come from the spec, those of the inputs from the caller or from the range that the example inputs
show. The one idea to know: a layer without a usable grid is no error; it stays in real numbers and the report says why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from sparta.compiler.choose import Point
from sparta.compiler.combine import combined
from sparta.compiler.int8 import INT8_IMPLEMENTS, OP, InputGrid, integers_of
from sparta.compiler.kernels import KernelModule
from sparta.compiler.lower import lowering_of
from sparta.compiler.partition import SubGraph
from sparta.compiler.program import Program
from sparta.errors import SpartaError, ValueRangeError, message
from sparta.specialize.linear import apply_epilogue
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
        Grids of inputs by layer, ``"fc.input"``; see :meth:`InputGrid.of`. Others are taken from the examples.
    note
        Called with what could not be used, and why.
    """

    weights: Mapping[str, TeSA]
    inputs: Mapping[str, Any]
    note: Callable[[str], None]

    def quantised(
        self, program: Program, groups: Sequence[SubGraph], points: Sequence[Point]
    ) -> tuple[list[SubGraph], list[Point]]:
        """Return the sub-graphs, those of int8 layers as such, and the points with them."""
        changed = {group: self._quantised(program, group, points) for group in groups}
        used = {f"{_layer(program, group)}input" for group in groups if changed[group].scales is not None}
        unused = sorted(set(self.inputs) - used)
        if unused:
            self.note(f"grids that no int8 layer uses: {', '.join(unused)}")
        moved = [Point({changed[group]: values for group, values in point.values.items()}) for point in points]
        return list(changed.values()), moved

    def _quantised(self, program: Program, group: SubGraph, points: Sequence[Point]) -> SubGraph:
        name = program.source(group.anchor.weight)
        known = self.weights.get(name)
        if known is None or str(known.format) != "int8" or group.lowering.op != "linear":
            return group
        try:
            scales = _scales(program, group, known)
            integers = integers_of(group.weight, scales)
            grid = self._grid(f"{_layer(program, group)}input", [point.values[group][0] for point in points])
        except SpartaError as error:
            self.note(f"{group.name} stays in real numbers: {error}")
            return group
        return replace(
            group,
            lowering=lowering_of(OP),
            anchor=replace(group.anchor, attributes=grid.to_dict()),
            weight=integers.float() * scales.float().unsqueeze(1),
            scales=scales,
        )

    def _grid(self, name: str, activations: Sequence[Tensor]) -> InputGrid:
        if name in self.inputs:
            return InputGrid.of(self.inputs[name])
        low, high = (float(min(x.min() for x in activations)), float(max(x.max() for x in activations)))
        if not abs(low) + abs(high) < float("inf"):
            raise ValueRangeError(message(f"example inputs of {name} from {low} to {high}", "finite numbers"))
        return InputGrid.covering(low, high)


def _layer(program: Program, group: SubGraph) -> str:
    """Return the prefix of a layer's names: ``"fc."``, or nothing for the model itself."""
    return program.source(group.anchor.weight).removesuffix("weight")


def _scales(program: Program, group: SubGraph, known: TeSA) -> Tensor:
    """Return the scales (N,) of a weight's rows as they are in the program, where channels may have been cut."""
    if group.anchor.transposed or group.weight.dtype != torch.float32 or group.weight.device.type != "cpu":
        where = f"{group.weight.dtype} on {group.weight.device.type}"
        raise ValueRangeError(message(f"an int8 weight in {where}", "float32 on cpu, as (outputs, inputs)"))
    if not bool(known.scale.cells.isfinite().all()) or bool((known.zero_point.cells != 0).any()):
        raise ValueRangeError(message("an int8 weight without a scale, or with a zero point", "a symmetric grid"))
    origin = program.origins.get(group.anchor.weight)
    scales = known.scale.dense() if origin is None else origin.take(known.scale.dense())
    if scales.shape != group.weight.shape or bool((scales != scales[:, :1]).any()):
        raise ValueRangeError(message("an int8 weight with several scales in a row", "one scale a row, or one"))
    return scales[:, 0].contiguous()


def rounding_kernels(kernels: Mapping[SubGraph, KernelModule]) -> dict[SubGraph, KernelModule]:
    """Return the kernels that round their input at some size."""
    return {
        group: module
        for group, module in kernels.items()
        if any(choice.implement in INT8_IMPLEMENTS for _, choice in module.choices.values())
    }


def simulated(program: Program, kernels: Mapping[SubGraph, KernelModule]) -> Callable[..., Any]:
    """Return a program as a function of flat inputs, its int8 layers in real numbers with rounded inputs."""
    return combined(program, {group: _Simulated(group, module) for group, module in kernels.items()}).forward


class _Simulated(nn.Module):
    """An int8 layer in float64, its input rounded where its kernel would round it."""

    def __init__(self, group: SubGraph, kernel: KernelModule) -> None:
        super().__init__()
        self._group, self._kernel = group, [kernel]  # in a list: it is not a part of this module

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return ``activation(layer(rounded x) + bias) + residual``."""
        group, attributes = self._group, self._group.anchor.attributes
        rounds = self._kernel[0].choice_for(x).implement in INT8_IMPLEMENTS
        given = group.lowering.on_grid(x, attributes) if rounds else x
        wide = [None if t is None else t.to(torch.float64) for t in (group.bias, residual)]
        exact = group.lowering.dense(group.weight.to(torch.float64), given.to(torch.float64), wide[0], attributes)
        return apply_epilogue(exact, group.epilogue, wide[1]).to(x.dtype)

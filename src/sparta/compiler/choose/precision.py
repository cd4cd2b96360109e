"""Precision: which layers run in int8, on which grids, and what the model with rounded inputs computes.

The weights' grids and patterns come from the spec, the grids of the inputs from the caller or from the range that the
example inputs show. Which weights are live is what the spec says, not which are zero after rounding. A layer without a
usable grid is no error; it stays in real numbers and the report says why.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from sparta.compiler.graph.program import Program
from sparta.compiler.lower import lowering_of
from sparta.compiler.lower.samples import SizeSample
from sparta.compiler.lower.subgraph import SubGraph
from sparta.compiler.run.combine import combined
from sparta.compiler.run.kernel_module import KernelModule
from sparta.errors import SpartaError, ValueRangeError, message
from sparta.precision.api import FoundGrids
from sparta.specialize.conv.int8 import CONV_OPS
from sparta.specialize.int8_linear.quantization import Quantization
from sparta.specialize.int8_linear.quantized import INT8_IMPLEMENTS, OP, integers_of
from sparta.specialize.linear.spec import apply_epilogue
from sparta.specialize.scaled_linear.spec import FP8, FP8_IMPLEMENTS
from sparta.specialize.scaled_linear.spec import OP as SCALED_OP
from sparta.tesa.attribute import TeSA

__all__ = ["Calibration", "rounding_kernels", "simulated"]

_OPERATIONS: Mapping[str, Mapping[str, str]] = {
    "int8": {"linear": OP, **CONV_OPS},
    FP8: {"linear": SCALED_OP},
}
"""The operation for a weight of these bits, by that in real numbers."""
ROUNDING_IMPLEMENTS = INT8_IMPLEMENTS | FP8_IMPLEMENTS
"""Those that round their inputs; others compute in real numbers."""
_ROOM = 1.25  # how much wider than what examples show the grid of a sum's part is


@dataclass(frozen=True)
class Calibration:
    """What is known of grids.

    Parameters
    ----------
    weights
        The spec of the model; int8 TeSAs with a scale are what counts here.
    inputs
        Grids of inputs by layer, ``"fc.input"``; see :meth:`Quantization.of`. Others are taken from the examples.
        Layers share grids only where these are :class:`FoundGrids`, or none are given.
    note
        Called with what could not be used, and why.
    tensors
        The model's own, by name.
    as_read
        Whether the spec is what the zeros of the weights say, and knows nothing more.
    """

    weights: Mapping[str, TeSA]
    inputs: Mapping[str, Any]
    note: Callable[[str], None]
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    as_read: bool = False

    def quantized(
        self, program: Program, subgraphs: Sequence[SubGraph], samples: Sequence[SizeSample]
    ) -> tuple[list[SubGraph], list[SizeSample]]:
        """Return the sub-graphs, those of int8 layers as such, and the samples with them."""
        changed = {
            subgraph: self._intended(program, self._quantized(program, subgraph, samples)) for subgraph in subgraphs
        }
        # Grids that were learnt, or given by the user, are as they are meant.
        if not self.inputs or isinstance(self.inputs, FoundGrids):
            changed = _sharing_grids(changed, samples)
        used = {self._input_of(program, subgraph) for subgraph in subgraphs if changed[subgraph].scales is not None}
        unused = sorted(set(self.inputs) - used)
        if unused:
            self.note(f"grids that no int8 layer uses: {', '.join(unused)}")
        moved = [
            SizeSample({changed[subgraph]: values for subgraph, values in sample.values.items()}) for sample in samples
        ]
        return list(changed.values()), moved

    def _intended(self, program: Program, subgraph: SubGraph) -> SubGraph:
        """Return a sub-graph with the pattern that the spec has for its weight."""
        name = _source(program, subgraph)
        known = self.weights.get(name)
        if self.as_read or known is None or name not in self.tensors:
            return subgraph
        live = _taken(program, subgraph, known.mask(subgraph.weight.device))
        before = _taken(program, subgraph, self.tensors[name].detach())
        if live.shape != subgraph.weight.shape:
            return subgraph
        live &= ~((subgraph.weight == 0) & (before != 0))  # what nobody sees was cut out of it
        same = torch.equal(live, subgraph.weight != 0)
        return subgraph if same else replace(subgraph, live=live)

    def _quantized(self, program: Program, subgraph: SubGraph, samples: Sequence[SizeSample]) -> SubGraph:
        known = self.weights.get(_source(program, subgraph))
        operations = {} if known is None else _OPERATIONS.get(str(known.format), {})
        if known is None or subgraph.lowering.op not in operations:
            return subgraph
        if str(known.format) == FP8:
            return self._in_fp8(program, subgraph, known)
        try:
            scales = self._scales(program, subgraph, known)
            integers = integers_of(subgraph.weight.flatten(1), scales).reshape(subgraph.weight.shape)
            grid = self._grid(self._input_of(program, subgraph), [sample.values[subgraph][0] for sample in samples])
        except SpartaError as error:
            self.note(f"{subgraph.name} stays in real numbers: {error}")
            return subgraph
        return replace(
            subgraph,
            lowering=lowering_of(operations[subgraph.lowering.op]),
            anchor=replace(subgraph.anchor, attributes={**subgraph.anchor.attributes, **grid.to_dict()}),
            weight=integers.float() * scales.float().reshape(-1, *[1] * (integers.dim() - 1)),
            scales=scales,
        )

    def _in_fp8(self, program: Program, subgraph: SubGraph, known: TeSA) -> SubGraph:
        """Return a sub-graph with a weight in fp8; kernels may round its inputs where a grid of them is given."""
        grid = self.inputs.get(self._input_of(program, subgraph))
        try:
            scales = self._scales(program, subgraph, known)
        except SpartaError as error:
            self.note(f"{subgraph.name} stays in {subgraph.weight.dtype}: {error}")
            return subgraph
        rounding = {"activations": None if grid is None else FP8, "input_scale": getattr(grid, "scale", None)}
        anchor = replace(subgraph.anchor, attributes={**subgraph.anchor.attributes, **rounding})
        return replace(subgraph, lowering=lowering_of(SCALED_OP), anchor=anchor, scales=scales, format=FP8)

    def _input_of(self, program: Program, subgraph: SubGraph) -> str:
        """Return the name of a layer's input, ``"fc.input"``; of tied weights, by the one that has a grid."""
        source = _source(program, subgraph)
        own, weight = _input_named(source), self.tensors.get(source)
        if own in self.inputs or weight is None or not weight.numel():
            return own
        same = (weight.data_ptr(), weight.shape)
        tied = (name for name, other in self.tensors.items() if (other.data_ptr(), other.shape) == same)
        return next((name for name in map(_input_named, tied) if name in self.inputs), own)

    def _grid(self, name: str, activations: Sequence[Tensor]) -> Quantization:
        if name in self.inputs:
            return Quantization.of(self.inputs[name])
        low, high = (float(min(x.min() for x in activations)), float(max(x.max() for x in activations)))
        if not abs(low) + abs(high) < float("inf"):
            raise ValueRangeError(message(f"example inputs of {name} from {low} to {high}", "finite numbers"))
        return Quantization.covering(low, high)

    def _scales(self, program: Program, subgraph: SubGraph, known: TeSA) -> Tensor:
        """Return the scales (N,) of a weight's channels as they are in the program: cut, and with norms folded in."""
        integers = str(known.format) == "int8"
        if integers and (subgraph.weight.dtype != torch.float32 or subgraph.weight.device.type != "cpu"):
            where = f"{subgraph.weight.dtype} on {subgraph.weight.device.type}"
            raise ValueRangeError(message(f"an int8 weight in {where}", "float32 on cpu"))
        if not bool(known.scale.cells.isfinite().all()) or bool((known.zero_point.cells != 0).any()):
            raise ValueRangeError(message("an int8 weight without a scale, or with a zero point", "a symmetric grid"))
        scales = _taken(program, subgraph, known.scale.dense(subgraph.weight.device)).flatten(1)
        if len(scales) != len(subgraph.weight) or bool((scales != scales[:, :1]).any()):
            raise ValueRangeError(message("an int8 weight with several scales in a row", "one scale per row, or one"))
        if subgraph.anchor.weight == _unfolded(subgraph.anchor.weight):
            return scales[:, 0].cpu()
        before = _taken(program, subgraph, self.tensors[_source(program, subgraph)].detach()).flatten(1).double()
        largest = before.abs().argmax(1, keepdim=True)
        factor = subgraph.weight.flatten(1).double().gather(1, largest) / before.gather(1, largest)
        factor = factor.abs().nan_to_num(1.0, 1.0, 1.0)
        return (scales[:, :1] * factor.where(factor > 0, 1.0)).squeeze(1).cpu()


def _sharing_grids(subgraphs: Mapping[SubGraph, SubGraph], samples: Sequence[SizeSample]) -> dict[SubGraph, SubGraph]:
    """Return int8 convolutions with one grid for all that read a tensor, which those that add it round it to as well.

    So a tensor is kept in 8 bits and in nothing else. Of several grids the widest is taken, which cuts off least. What
    an int8 convolution makes to be added and for nothing else, as the shortcuts of residual networks do, has a grid of
    its own.
    """
    grids: dict[fx.Node, list[Quantization]] = defaultdict(list)
    convolutions = [each for each in subgraphs.values() if each.lowering.op in CONV_OPS.values()]
    for each in convolutions:
        grids[each.anchor.x].append(Quantization.from_dict(each.anchor.attributes))
    shared = {x: max(of_x, key=lambda grid: grid.scale) for x, of_x in grids.items()}
    makers = {each.nodes[-1] for each in convolutions if len(each.nodes[-1].users) == 1}
    changed = dict(subgraphs)
    for given, each in subgraphs.items():
        if each not in convolutions:
            continue
        attributes = {**each.anchor.attributes, **shared[each.anchor.x].to_dict()}
        seen = [sample.values[given][1] for sample in samples] if each.residual in makers else []
        added = shared[each.residual] if each.residual in shared else _covering(seen)
        if added is not None:
            attributes |= added.to_dict("residual")
        changed[given] = replace(each, anchor=replace(each.anchor, attributes=attributes))
    return changed


def _covering(seen: Sequence[Tensor | None]) -> Quantization | None:
    """Return a grid for what was seen and a little more, because the examples are few; None where it has none."""
    values = [tensor for tensor in seen if tensor is not None and tensor.numel()]
    if not values:
        return None
    low, high = _ROOM * min(float(t.min()) for t in values), _ROOM * max(float(t.max()) for t in values)
    return Quantization.covering(low, high) if abs(low) + abs(high) < float("inf") else None


def _unfolded(name: str) -> str:
    """Return the name that a weight had before a norm was folded into it."""
    return name.partition("_folded")[0]


def _source(program: Program, subgraph: SubGraph) -> str:
    """Return the name of a sub-graph's weight in the model as given."""
    return program.source(_unfolded(subgraph.anchor.weight))


def _taken(program: Program, subgraph: SubGraph, tensor: Tensor) -> Tensor:
    """Return of a tensor of the model's weight's shape what is left in the program, as the operation takes it."""
    origin = program.origins.get(_unfolded(subgraph.anchor.weight))
    left = tensor if origin is None else origin.take(tensor)
    return left.t() if subgraph.anchor.transposed and left.dim() == 2 else left


def _input_named(weight: str) -> str:
    """Return the name of the input that a weight meets: ``"fc.input"``, or ``"input"`` for that of the model itself."""
    return f"{weight.removesuffix('weight')}input"


def rounding_kernels(kernels: Mapping[SubGraph, KernelModule]) -> dict[SubGraph, KernelModule]:
    """Return the kernels that round their input at some size."""
    return {
        subgraph: module
        for subgraph, module in kernels.items()
        if any(choice.implement in ROUNDING_IMPLEMENTS for _, choice in module.choices.values())
    }


def simulated(program: Program, kernels: Mapping[SubGraph, KernelModule]) -> fx.GraphModule:
    """Return a program as a graph of flat inputs, its int8 layers in real numbers with rounded inputs."""
    return combined(program, {subgraph: _Simulated(subgraph, module) for subgraph, module in kernels.items()})


class _Simulated(nn.Module):
    """An int8 layer in float64, its input rounded where its kernel would round it."""

    def __init__(self, subgraph: SubGraph, kernel: KernelModule) -> None:
        super().__init__()
        self._subgraph, self._kernel = subgraph, [kernel]  # in a list: it is not a part of this module

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return ``activation(layer(rounded x) + bias) + residual``."""
        subgraph, attributes = self._subgraph, self._subgraph.anchor.attributes
        rounds = self._kernel[0].choice_for(x).implement in ROUNDING_IMPLEMENTS
        given = subgraph.lowering.on_grid(x, attributes) if rounds else x
        residual = subgraph.lowering.residual_on_grid(residual, attributes) if rounds else residual
        wide = [None if t is None else t.to(torch.float64) for t in (subgraph.bias, residual)]
        exact = subgraph.lowering.dense(subgraph.weight.to(torch.float64), given.to(torch.float64), wide[0], attributes)
        return apply_epilogue(exact, subgraph.epilogue, wide[1]).to(x.dtype)

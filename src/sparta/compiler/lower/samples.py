"""Samples: the activations that the sub-graphs of a program see at one size of the model's inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from sparta.compiler.graph.program import Program
from sparta.compiler.lower.subgraph import SubGraph

__all__ = ["SizeSample", "size_samples"]


@dataclass(frozen=True)
class SizeSample:
    """The activations of every sub-graph at one size of the model's inputs: x, and the residual or None."""

    values: Mapping[SubGraph, tuple[Tensor, Tensor | None]]


def size_samples(program: Program, subgraphs: Sequence[SubGraph], sizes: Sequence[Sequence[Any]]) -> list[SizeSample]:
    """Run the program once for each list of flat inputs and keep what the sub-graphs see."""
    wanted: set[fx.Node] = {subgraph.anchor.x for subgraph in subgraphs}
    wanted |= {subgraph.residual for subgraph in subgraphs if subgraph.residual is not None}
    samples = []
    for inputs in sizes:
        seen = program.values(inputs, wanted)
        pairs = {g: (seen[g.anchor.x], None if g.residual is None else seen[g.residual]) for g in subgraphs}
        samples.append(SizeSample(pairs))
    return samples

"""The workshop: makes what competes (kernel modules, graphs, hosted graphs) once, and lets go of what lost.

What is made is known by what the plans say of the layers in it, so plans are values: another plan is another thing to
make, and nothing has to be cleared.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from sparta.compiler.choose.alignment import aligned
from sparta.compiler.choose.integers import in_integers
from sparta.compiler.clock import Call
from sparta.compiler.graph.program import Program
from sparta.compiler.lower.joined import JoinedSubGraph
from sparta.compiler.lower.samples import SizeSample
from sparta.compiler.lower.subgraph import SubGraph
from sparta.compiler.plan import LayerPlan
from sparta.compiler.run.combine import combined
from sparta.compiler.run.cuda_graph import Graphed, on_cuda
from sparta.compiler.run.given import GivenModel
from sparta.compiler.run.host import Host, hosted
from sparta.compiler.run.kernel_module import KernelModule
from sparta.compiler.run.stages import calls_to_compile
from sparta.compiler.variant import Base, Variant
from sparta.specialize.kernel_spec import KernelSpec
from sparta.specialize.linear.spec import apply_epilogue

__all__ = ["Workshop", "called", "sparse_names"]

_Layer = tuple[str, str]  # its name, and what runs it, as text
_Key = tuple[Base, frozenset[_Layer]]
Plans = Sequence[LayerPlan]


def sparse_names(plans: Plans) -> frozenset[str]:
    """Return the names of the layers that sparse kernels run, and of products of several layers."""
    return frozenset(plan.name for plan in plans if plan.sparse or plan.joined)


def called(run: Callable[..., Any], inputs: Sequence[Any]) -> Call:
    """Return a call with these inputs, without gradients."""

    def call() -> Any:
        with torch.no_grad():
            return run(*inputs)

    return call


@dataclass
class Workshop:
    """Everything that can run for one model.

    Parameters
    ----------
    original, reduced
        The two graphs.
    subgraphs
        Of `reduced`; plans are in their order.
    samples
        The activations of the sub-graphs at each size that is measured.
    given
        The model as the user gave it; None where that cannot run in a graph's place.
    replays
        Whether what is compiled will be replayed from CUDA graphs.
    """

    original: Program
    reduced: Program
    subgraphs: Sequence[SubGraph]
    samples: Sequence[SizeSample]
    given: GivenModel | None = None
    replays: bool = False
    _kernels: dict[_Layer, KernelModule] = field(default_factory=dict)
    _graphs: dict[_Key, fx.GraphModule] = field(default_factory=dict)
    _hosted: dict[tuple[_Key, Host], Callable[..., Any]] = field(default_factory=dict)

    def kernels(self, plans: Plans, names: frozenset[str] | None = None) -> dict[SubGraph, KernelModule]:
        """Return the kernel modules of the layers that run sparse: all, or those of these names.

        Layers that are part of a product among them have no kernel of their own.
        """
        wanted = sparse_names(plans) if names is None else names & sparse_names(plans)
        wanted -= {part for plan in plans if plan.name in wanted for part in plan.joined}
        found = {}
        for subgraph, plan in zip(self.subgraphs, plans, strict=True):
            if plan.name in wanted:
                key = _layer(plan)
                if key not in self._kernels:
                    self._kernels[key] = self._kernel(subgraph, plan)
                found[subgraph] = self._kernels[key]
        return found

    def try_kernel(self, plans: Plans, name: str) -> None:
        """Run a layer's kernel once for each size; raises what it raises."""
        for subgraph, module in self.kernels(plans, frozenset({name})).items():
            for sample in self.samples:
                x, residual = sample.values[subgraph]
                with torch.no_grad():
                    module(x, residual)

    def graph(self, variant: Variant, plans: Plans) -> fx.GraphModule:
        """Return a variant's graph; for the model as given, the original one stands for it."""
        key = _key(variant, plans)
        if key not in self._graphs:
            reduced = variant.base is Base.REDUCED
            self._graphs[key] = (
                combined(self.reduced, self.kernels(plans, variant.kernels)) if reduced else self.original.module()
            )
        return self._graphs[key]

    def run(self, variant: Variant, plans: Plans) -> Callable[..., Any]:
        """Return a variant as a function of flat inputs; made once, because compiling takes long."""
        if variant.base is Base.GIVEN and self.given is not None:
            return self.given
        key, host = _key(variant, plans), variant.host
        if (key, host) not in self._hosted:
            graph = self.graph(variant, plans)
            if host.graphed and on_cuda(graph):
                plain = Variant(variant.base, variant.kernels, host.plain)
                made: Callable[..., Any] = Graphed(self.run(plain, plans), quiet=True, module=graph)
            else:
                made = hosted(graph, host.plain, stages=self.replays)
            self._hosted[key, host] = made
        return self._hosted[key, host]

    def calls_to_compile(self, variant: Variant, plans: Plans) -> int:
        """Return how many calls Inductor would compile of a variant's graph."""
        graph = self.graph(variant, plans).graph
        if self.replays:
            return calls_to_compile(graph)
        return sum(node.op in ("call_function", "call_module") for node in graph.nodes)

    def forget(self, variant: Variant, plans: Plans) -> None:
        """Let go of a graph that will not run, under all hosts, and of the memory that its CUDA graph holds."""
        key = _key(variant, plans)
        self._graphs.pop(key, None)
        for made in [each for each in self._hosted if each[0] == key]:
            del self._hosted[made]

    def keep(self, variant: Variant, plans: Plans) -> None:
        """Let go of all that is not part of a variant."""
        key = _key(variant, plans)
        self._graphs = {each: graph for each, graph in self._graphs.items() if each == key}
        self._hosted = {each: run for each, run in self._hosted.items() if each == (key, variant.host)}
        running = {subgraph.name for subgraph in self.kernels(plans, variant.kernels)}
        layers = {_layer(plan) for plan in plans if plan.name in running}
        self._kernels = {each: kernel for each, kernel in self._kernels.items() if each in layers}

    def aligned(self, plans: Plans) -> tuple[LayerPlan, ...]:
        """Return the plans with tiles that let neighbours hand over panels."""
        first = self.samples[0].values
        pairs = zip(self.subgraphs, plans, strict=True)
        specs = {plan.name: subgraph.spec(first[subgraph][0]) for subgraph, plan in pairs if plan.sparse}
        return tuple(aligned(self.subgraphs, plans, specs))

    def in_integers(self, plans: Plans) -> tuple[LayerPlan, ...]:
        """Return the plans with kernels of integers wherever a quantised convolution has one."""
        specs = {subgraph.name: self._specs(subgraph) for subgraph in self.subgraphs}
        return in_integers(plans, specs)

    def layers_alone(self, plans: Plans) -> Call | None:
        """Return a call of the layers that could be sparse, dense and nothing else; None where there are none."""
        first = self.samples[0].values if self.samples else {}
        pairs = zip(self.subgraphs, plans, strict=True)
        single = [(subgraph, plan) for subgraph, plan in pairs if not isinstance(subgraph, JoinedSubGraph)]
        timed = [(subgraph, *first[subgraph]) for subgraph, plan in single if plan.first.entry is not None]
        if not timed:
            return None

        def call() -> Any:
            with torch.no_grad():
                for subgraph, x, residual in timed:
                    y = subgraph.lowering.dense(subgraph.weight, x, subgraph.bias, subgraph.anchor.attributes)
                    apply_epilogue(y, subgraph.epilogue, residual)

        return call

    def _specs(self, subgraph: SubGraph) -> dict[int, KernelSpec]:
        """Return the kernel specs of a sub-graph, by size."""
        specs: dict[int, KernelSpec] = {}
        for sample in self.samples:
            x, _ = sample.values[subgraph]
            specs.setdefault(subgraph.lowering.size(x), subgraph.spec(x))
        return specs

    def _kernel(self, subgraph: SubGraph, plan: LayerPlan) -> KernelModule:
        """Return the kernel module of a sub-graph by its plan."""
        specs = self._specs(subgraph)
        return KernelModule.of(subgraph, {size: (specs[size], choice) for size, choice in plan.choices.items()})


def _layer(plan: LayerPlan) -> _Layer:
    return plan.name, json.dumps([[size, choice.config] for size, choice in plan.choices.items()], sort_keys=True)


def _key(variant: Variant, plans: Plans) -> _Key:
    wanted = variant.kernels if variant.base is Base.REDUCED else frozenset()
    base = Base.ORIGINAL if variant.base is Base.GIVEN else variant.base
    return base, frozenset(_layer(plan) for plan in plans if plan.name in wanted & sparse_names(plans))

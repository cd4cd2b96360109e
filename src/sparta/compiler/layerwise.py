"""Layer by layer: a model whose kernels round their inputs is compared at every place where it rounds.

A number on the edge between two integers may fall to either side, and what is rounded after it does not stay close: a
number that fell otherwise moves others over their edges, until two runs that are both right differ by as much as
rounding costs at all. So the ends of two runs say little of a deep model. Here the graph runs with what its rounding
layers read among its results, and the simulated model goes on from these numbers at each of them: between two
roundings real numbers are compared with real numbers, and the tolerance is theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from sparta.compiler.choose.precision import rounding_kernels, simulated
from sparta.compiler.graph.program import Program, copied
from sparta.compiler.lower.subgraph import SubGraph
from sparta.compiler.run.chain.trace import attends_by_blocks
from sparta.compiler.run.combine import module_name
from sparta.compiler.run.host import Host, hosted
from sparta.compiler.run.kernel_module import KernelModule
from sparta.compiler.verify import Difference, compared, difference
from sparta.errors import CheckError, message
from sparta.specialize.int8_linear.quantization import RANGES, Quantization

__all__ = ["LayerByLayer"]

_NUDGES = (0, 1, 2)  # seeds of runs that differ by roundings of real numbers
_NUDGE = 4.0  # units in the last place
_SPREADS = 2.0  # how often the largest of so few may be exceeded by another
_WITH_TAPS = {host: Host.EAGER for host in Host if host.graphed or host.compiles}


class LayerByLayer:
    """Compares a graph whose kernels round with the simulated model, stretch by stretch.

    Parameters
    ----------
    program
        The graph in real numbers.
    graph
        The same with kernels.
    kernels
        Those that are in it; at least one rounds.
    host
        What runs the graph. One that takes long to prepare is compared as a whole, with the eager graph that was
        compared layer by layer: they may differ by what nudging the simulated model does to it.
    any_size
        Whether inputs of many sizes will come.
    """

    def __init__(
        self,
        program: Program,
        graph: fx.GraphModule,
        kernels: Mapping[SubGraph, KernelModule],
        host: Host,
        *,
        any_size: bool = False,
    ) -> None:
        rounding = rounding_kernels(kernels)
        self._simulated = simulated(program, rounding)
        there = {str(node.target): node for node in graph.graph.nodes if node.op == "call_module"}
        here = {str(node.target): node for node in self._simulated.graph.nodes if node.op == "call_module"}
        taps: dict[fx.Node, _Tap] = {}
        for subgraph in rounding:
            name = module_name(subgraph)
            attributes = subgraph.anchor.attributes
            read = [(there[name].args[0], here[name].args[0])]
            if "residual_format" in attributes:  # which is rounded too
                read.append((there[name].args[1], here[name].args[1]))
            for made, expected in read:
                if isinstance(made, fx.Node) and isinstance(expected, fx.Node) and made.op not in _GIVEN:
                    taps.setdefault(made, _Tap(expected, subgraph.name, attributes))
        in_bf16 = host is Host.CHAIN and attends_by_blocks()
        wide = _after_attention(self._simulated.graph, {tap.node for tap in taps.values()}) if in_bf16 else set()
        self._taps = {tap.node.name: (number, tap, tap.node in wide) for number, tap in enumerate(taps.values())}
        self._wide_end = any(node.op == "output" for node in wide)
        self._tapped = hosted(_with_taps(graph, list(taps)), _WITH_TAPS.get(host, host), any_size=any_size)

    def __call__(self, run: Callable[..., Any], leaves: Sequence[Any]) -> Difference:
        """Return how far a run on flat inputs is from the simulated model; raises :class:`CheckError` beyond bounds."""
        with torch.no_grad():
            made = list(self._tapped(*leaves))
            results, seen = made[: len(made) - len(self._taps)], made[len(made) - len(self._taps) :]
            following = _Following(self._simulated, self._taps, seen)
            expected = pytree.tree_leaves(following.run(*leaves))
            found = compared(expected, results, rounding=self._wide_end).joined(following.found)
            outputs = pytree.tree_leaves(run(*leaves))
            try:
                return compared(results, outputs).joined(found)
            except CheckError:
                return self._scattered(outputs, leaves).joined(found)

    def _scattered(self, outputs: Sequence[Any], leaves: Sequence[Any]) -> Difference:
        """Return how far outputs are from the simulated model, which scatters itself if it is nudged."""
        expected = pytree.tree_leaves(self._simulated(*leaves))
        spread = 0.0
        for seed in _NUDGES:
            nudged = pytree.tree_leaves(_Nudged(self._simulated, self._taps, seed).run(*leaves))
            spread = max(spread, _apart(expected, nudged))
        return compared(expected, outputs, rounding=True, least=_SPREADS * spread)


_GIVEN = ("placeholder", "get_attr")


@dataclass(frozen=True)
class _Tap:
    """What a rounding layer reads: its node in the simulated graph, the layer's name, and its grids."""

    node: fx.Node
    layer: str
    attributes: Mapping[str, Any]


_Taps = Mapping[str, tuple[int, _Tap, bool]]
"""By the node's name: the number among all, and whether the tolerance is that of attention in bf16."""


class _Following(fx.Interpreter):
    """The simulated model, which at every tap goes on from what was seen there, if that is what it has itself."""

    def __init__(self, module: fx.GraphModule, taps: _Taps, seen: Sequence[Any]) -> None:
        super().__init__(module)
        self._taps, self._seen = taps, seen
        self.found = Difference()

    def run_node(self, n: fx.Node) -> Any:
        """Run a node, and compare it where it is tapped."""
        own = super().run_node(n)
        if n.name not in self._taps:
            return own
        number, tap, wide = self._taps[n.name]
        seen = self._seen[number]
        try:
            if seen.is_floating_point() or not own.is_floating_point():
                self.found = self.found.joined(difference(own, seen, rounding=wide))
                return seen
            grid = Quantization.from_dict(tap.attributes)
            self.found = self.found.joined(difference(_nearest(own, seen, grid), own))
            return grid.real(seen, own.dtype)
        except CheckError as error:
            raise CheckError(message(f"what {tap.layer} reads: {error}")) from error


class _Nudged(fx.Interpreter):
    """The simulated model with what its layers round changed as little as real numbers can be."""

    def __init__(self, module: fx.GraphModule, taps: _Taps, seed: int) -> None:
        super().__init__(module)
        self._taps, self._generator = taps, torch.Generator().manual_seed(seed)

    def run_node(self, n: fx.Node) -> Any:
        """Run a node, and nudge it where it is tapped."""
        own = super().run_node(n)
        if n.name not in self._taps or not own.is_floating_point():
            return own
        noise = torch.randn(own.shape, generator=self._generator).to(own)
        return own + own * noise * (_NUDGE * torch.finfo(own.dtype).eps)


def _with_taps(graph: fx.GraphModule, nodes: Sequence[fx.Node]) -> fx.GraphModule:
    """Return a graph that returns these nodes after its results."""
    fresh, copies = copied(graph.graph)
    output = next(iter(reversed(fresh.nodes)))
    results = output.args[0] if isinstance(output.args[0], (list, tuple)) else [output.args[0]]
    output.args = ((*results, *(copies[node] for node in nodes)),)
    fresh.lint()
    return fx.GraphModule(graph, fresh, "Tapped")


def _after_attention(graph: fx.Graph, taps: set[fx.Node]) -> set[fx.Node]:
    """Return the taps, and the output, that attention reaches without another tap in between."""
    reached: set[fx.Node] = set()
    waiting = [n for n in graph.nodes if n.target is torch.ops.aten.scaled_dot_product_attention.default]
    while waiting:
        node = waiting.pop()
        if node not in reached:
            reached.add(node)
            waiting += [] if node in taps else list(node.users)
    return {node for node in reached if node in taps or node.op == "output"}


def _nearest(real: Tensor, integers: Tensor, grid: Quantization) -> Tensor:
    """Return the numbers closest to `real` for which a right layer may hand on these integers."""
    low, high = (grid.real(torch.tensor(float(end)), torch.float64) for end in RANGES[grid.format])
    there = grid.real(integers, torch.float64)
    half = 0.5 * grid.scale
    least = torch.where(there <= low, -torch.inf, there - half)
    most = torch.where(there >= high, torch.inf, there + half)
    wide = real.to(torch.float64)
    return torch.where(wide.isnan(), wide, torch.minimum(torch.maximum(wide, least), most)).to(real.dtype)


def _apart(expected: Sequence[Any], actual: Sequence[Any]) -> float:
    """Return the largest of the relative differences, and of those of single elements, between flat results."""
    found = 0.0
    for one, two in zip(expected, actual, strict=True):
        if isinstance(one, Tensor) and one.is_floating_point() and one.numel():
            gap, real = (two - one).double(), one.double()
            found = max(found, float(gap.norm() / real.norm().clamp_min(1e-30)))
    return found

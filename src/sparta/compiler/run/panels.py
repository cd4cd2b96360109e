"""Panels: neighbouring sparse linear layers hand their activations over in the layout that their kernels read.

A C++ kernel for many tokens packs its input into panels and unpacks its result; where one layer alone feeds the next,
both steps between them fall away. This is a way to run the same graph and the same kernels (a host, as Inductor is), so
the graph that is saved stays plain, and whether it pays is measured end to end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from sparta.compiler.graph.program import copied
from sparta.compiler.lower.subgraph import SubGraph
from sparta.compiler.plan import LayerPlan
from sparta.compiler.run.kernel_module import KernelModule
from sparta.modules import member
from sparta.specialize.cpu.panel import Panel
from sparta.specialize.cpu.tile import Tile
from sparta.specialize.implement import implement_named
from sparta.specialize.kernel_spec import KernelSpec
from sparta.specialize.linear.cpu import CpuLinear, CpuLinearKernel
from sparta.specialize.tuning.select import Choice

__all__ = ["PanelStep", "aligned", "panelled"]


class PanelStep(nn.Module):
    """A kernel module that takes a tensor or a panel and returns a tensor or a panel.

    Parameters
    ----------
    layer
        A linear layer that a C++ kernel of the form ``'panel'`` runs at every size.
    gives_panel
        Whether the result stays in panels.
    """

    def __init__(self, layer: KernelModule, *, gives_panel: bool) -> None:
        super().__init__()
        self.layer, self.gives_panel = layer, gives_panel

    def forward(self, x: Tensor | Panel, residual: Tensor | None = None, like: Tensor | None = None) -> Tensor | Panel:
        """Return what the layer makes of x: a panel, or a tensor with the leading dims of `like` (of x if None)."""
        layer = self.layer
        lowering = layer.fused.lowering
        rows = x if isinstance(x, Panel) else lowering.flat(x)
        kernel, packed = layer.kernel_for(rows.tokens if isinstance(rows, Panel) else rows.shape[0])
        panel_kernel = cast("CpuLinearKernel", kernel)
        if self.gives_panel:
            return panel_kernel.to_panel(packed, rows, layer.bias)
        y = panel_kernel.multiply(packed, rows, layer.bias, None if residual is None else lowering.flat(residual))
        return lowering.result(y, like if like is not None else cast("Tensor", x))


def panelled(module: fx.GraphModule) -> fx.GraphModule:
    """Return a graph module in which neighbouring layers that can hand over panels do so; the same one if none can.

    Like :func:`sparta.compiler.run.eager.with_fast_paths`, it holds what it calls as it is now.
    """
    links = [node for node in module.graph.nodes if _link(module, node)]
    if not links:
        return module
    graph, copies = copied(module.graph)
    linked = {copies[node] for node in links}
    parts: dict[str, Any] = {}
    shapes: dict[fx.Node, fx.Node] = {}  # for a node that gives a panel, the tensor whose leading dims the rows have
    for node in list(graph.nodes):
        x = node.args[0] if node.op == "call_module" else None
        if isinstance(x, fx.Node) and (node in linked or x in linked):
            like = shapes.get(x, x)
            shapes[node] = like
            step = PanelStep(cast("KernelModule", module.get_submodule(str(node.target))), gives_panel=node in linked)
            node.target = f"{node.target}_{len(parts)}"
            parts[node.target] = step
            node.args, node.kwargs = (*node.args,), {"like": like}
        elif node.op in ("get_attr", "call_module"):
            parts[str(node.target)] = member(module, str(node.target))
    return fx.GraphModule(parts, graph, "Panelled")


def aligned(subgraphs: Sequence[SubGraph], plans: Sequence[LayerPlan], specs: dict[str, KernelSpec]) -> list[LayerPlan]:
    """Return the plans with tiles of one width along each chain of layers that could hand over panels.

    The layer with the most live weights keeps its tile, and its neighbours take their best tile of that width; a layer
    that has none is left as it is. Where there is nothing to do, the plans are the same.

    Parameters
    ----------
    subgraphs, plans
        The sub-graphs and what runs them.
    specs
        The kernel spec of each layer at its first size, by name.
    """
    found = {subgraph: plan for subgraph, plan in zip(subgraphs, plans, strict=True) if _panel_tile(plan) is not None}
    last = {subgraph.nodes[-1]: subgraph for subgraph in found}
    before = {
        subgraph: last[subgraph.anchor.x]
        for subgraph in found
        if subgraph.anchor.x in last
        and len(subgraph.anchor.x.users) == 1
        and not last[subgraph.anchor.x].epilogue.residual
    }
    changed: dict[str, LayerPlan] = {}
    for chain in _chains(before):
        widest = max((found[subgraph] for subgraph in chain), key=lambda plan: plan.live_flops)
        width = cast("Tile", _panel_tile(widest)).mv
        for subgraph in chain:
            plan = found[subgraph]
            if cast("Tile", _panel_tile(plan)).mv != width:
                changed[plan.name] = _with_width(plan, specs[plan.name], width)
    return [changed.get(plan.name, plan) for plan in plans]


def _chains(before: dict[SubGraph, SubGraph]) -> list[list[SubGraph]]:
    """Return runs of layers, each the only input of the next, from what comes before each."""
    after = {first: second for second, first in before.items()}
    chains = []
    for start in after:
        if start not in before:
            chain = [start]
            while chain[-1] in after:
                chain.append(after[chain[-1]])
            chains.append(chain)
    return chains


def _panel_tile(plan: LayerPlan) -> Tile | None:
    """Return the tile of a linear layer that one C++ kernel of the form ``'panel'`` runs; None for any other."""
    if plan.op != "linear" or len(plan.choices) != 1 or plan.first.implement != CpuLinear.name:
        return None
    tile = Tile.parse(str(plan.first.params["tile"]))
    return tile if tile.form == "panel" else None


def _with_width(plan: LayerPlan, spec: KernelSpec, width: int) -> LayerPlan:
    """Return a plan whose tile has another width: the first of the search space with the same block."""
    now = cast("Tile", _panel_tile(plan))
    space = implement_named(plan.first.implement, plan.op).space(spec)["tile"]._value
    tiles = [Tile.parse(text) for text in cast("list[str]", space)]
    same = [tile for tile in tiles if tile.form == "panel" and tile.mv == width and tile.block == now.block]
    if not same:
        return plan
    size, choice = next(iter(plan.choices.items()))
    reason = f"{choice.reason}; in tiles as wide as its neighbour's"
    moved = Choice(choice.implement, {**choice.params, "tile": str(same[0])}, reason, choice.entry, choice.refused)
    return replace(plan, choices={size: moved})


def _link(module: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a node's result may stay in panels: one kernel makes it, one other reads it, in tiles of one width."""
    if node.op != "call_module" or len(node.users) != 1:
        return False
    reader = next(iter(node.users))
    if reader.op != "call_module" or reader.args[0] is not node or node in reader.args[1:]:
        return False
    first, second = (_widths(module.get_submodule(str(n.target))) for n in (node, reader))
    residual = len(node.args) > 1
    return first is not None and first == second and not residual


def _widths(layer: nn.Module) -> dict[int, int] | None:
    """Return the tokens in a tile at each size, for a layer whose kernels all work on panels."""
    if not isinstance(layer, KernelModule) or layer.fused.op != "linear" or layer.live.dtype != torch.float32:
        return None
    widths = {}
    for size in layer.choices:
        kernel, _ = layer.built(size)
        width = kernel.panel_width if isinstance(kernel, CpuLinearKernel) else None
        if width is None:
            return None
        widths[size] = width
    return widths

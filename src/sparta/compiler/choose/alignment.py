"""Alignment: tiles of one width along a chain of layers, so that neighbours can hand over panels.

It only proposes other tiles for layers whose kernels were chosen one by one; whether that pays is measured end to end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from sparta.compiler.lower.subgraph import SubGraph
from sparta.compiler.plan import LayerPlan
from sparta.specialize.cpu.tile import Tile
from sparta.specialize.implement import implement_named
from sparta.specialize.kernel_spec import KernelSpec
from sparta.specialize.linear.cpu import CpuLinear
from sparta.specialize.tuning.select import Choice

__all__ = ["aligned"]


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

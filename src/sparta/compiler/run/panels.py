"""Panels: neighbouring sparse linear layers hand their activations over in the layout that their kernels read.

A C++ kernel for many tokens packs its input into panels and unpacks its result; where one layer alone feeds the next,
both steps between them fall away. This is a way to run the same graph and the same kernels (a host, as Inductor is), so
the graph that is saved stays plain, and whether it pays is measured end to end.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from sparta.compiler.graph.program import copied
from sparta.compiler.run.kernel_module import KernelModule
from sparta.modules import member
from sparta.specialize.cpu.panel import Panel
from sparta.specialize.linear.cpu import CpuLinearKernel

__all__ = ["PanelStep", "panelled"]


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

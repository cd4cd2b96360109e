"""Seams: a gather before a layer, or a scatter after it, where the layer needs less than its neighbours carry.

A residual stream keeps a channel alive that one of its layers neither reads nor writes; that layer can still be small
if it picks what it reads and places what it writes. Moving an element costs about as much as dozens of multiply-adds,
so a seam is made only where it saves more than that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from sparta.aten import argument_of, set_argument
from sparta.propagation.axes import Blocks
from sparta.propagation.slices import whole_blocks

__all__ = ["Seams"]

_aten = torch.ops.aten
_LINEAR = _aten.linear.default
_CONVOLUTIONS = (_aten.conv1d.default, _aten.conv2d.default, _aten.conv3d.default)


@dataclass
class Seams:
    """Makes seams in the graph of a compact model that is being built.

    Parameters
    ----------
    tensors
        The tensors of the compact model by name.
    worth
        Multiply-adds that a seam must save for each element that it moves.
    round_to
        Sizes of what is left are multiples of this.
    blocks
        Sizes of blocks along each dim, by name: of these tensors, whole blocks are left.
    cut
        Called with a tensor's name, a dim and the positions that stay.
    literal
        Called with an index; returns the name of the tensor that holds it.
    """

    tensors: dict[str, Tensor]
    worth: float
    round_to: int
    blocks: Blocks
    cut: Callable[[str, int, Tensor], None]
    literal: Callable[[Tensor], str]

    def sew(self, graph: fx.Graph) -> None:
        """Make every seam that pays."""
        for node in list(graph.nodes):
            if node.target is _LINEAR or (node.target in _CONVOLUTIONS and argument_of(node, "groups") == 1):
                self._layer(node)

    def _layer(self, node: fx.Node) -> None:
        weight = node.args[1]
        if not isinstance(weight, fx.Node) or weight.op != "get_attr" or len(weight.users) != 1:
            return
        name = str(weight.target)
        values = self.tensors.get(name)
        if values is None or values.is_meta or not values.is_floating_point() or 0 in values.shape:
            return
        taps = math.prod(values.shape[2:])
        stride = math.prod(argument_of(node, "stride")) if node.target is not _LINEAR else 1
        self._columns(node, name, taps / stride)
        self._rows(node, name, taps)

    def _columns(self, node: fx.Node, name: str, taps: float) -> None:
        """Gather what the layer reads."""
        values = self.tensors[name]
        live = self._rounded(name, 1, _slices(values, 1))
        count, rows = int(live.sum()), values.shape[0]
        saved = taps * rows * (values.shape[1] - count)
        if count == values.shape[1] or saved < self.worth * count:
            return
        index = live.nonzero().flatten()
        with node.graph.inserting_before(node):
            where = node.graph.get_attr(self.literal(index))
            picked = node.graph.call_function(_aten.index_select.default, (node.args[0], _channel(node), where))
        node.update_arg(0, picked)
        self.cut(name, 1, index)

    def _rows(self, node: fx.Node, name: str, taps: float) -> None:
        """Scatter what the layer writes: zeros come from one row of zeros that is kept, the bias is added after it."""
        values = self.tensors[name]
        live = _slices(values, 0)
        if bool(live.all()):
            return
        live[(~live).nonzero()[0]] = True
        zero = int((live & ~_slices(values, 0)).nonzero()[0])
        live = self._rounded(name, 0, live)
        count, total = int(live.sum()), values.shape[0]
        saved = taps * values.shape[1] * (total - count)
        if count == total or saved < self.worth * total:
            return
        index = live.nonzero().flatten()
        positions = torch.where(_slices(values, 0), live.cumsum(0) - 1, int(live[:zero].sum()))
        bias = argument_of(node, "bias")
        if bias is not None:
            set_argument(node, "bias", None)
        with node.graph.inserting_after(node):
            where = node.graph.get_attr(self.literal(positions))
        with node.graph.inserting_after(where):
            placed = node.graph.call_function(_aten.index_select.default, (node, _channel(node), where))
        node.replace_all_uses_with(placed, delete_user_cb=lambda user: user is not placed)
        if bias is not None:
            self._add(placed, bias, spatial=0 if node.target is _LINEAR else values.dim() - 2)
        self.cut(name, 0, index)

    @staticmethod
    def _add(node: fx.Node, bias: fx.Node, *, spatial: int) -> None:
        """Add a bias to what a layer wrote."""
        graph = node.graph
        with graph.inserting_after(node):
            shaped = graph.call_function(_aten.reshape.default, (bias, [-1, *(1 for _ in range(spatial))]))
        with graph.inserting_after(shaped):
            total = graph.call_function(_aten.add.Tensor, (node, shaped))
        node.replace_all_uses_with(total, delete_user_cb=lambda user: user is not total)

    def _rounded(self, name: str, dim: int, live: Tensor) -> Tensor:
        """Keep a few more, so that their number is a multiple, at least one, and blocks are whole."""
        count = int(live.sum())
        wanted = min(len(live), max(1, math.ceil(count / self.round_to) * self.round_to))
        live = live.clone()
        live[(~live).nonzero().flatten()[: wanted - count]] = True
        return whole_blocks(live, self.blocks[name][dim]) if name in self.blocks else live


def _slices(values: Tensor, dim: int) -> Tensor:
    """Return which slices along a dim are not all zero: bool on the CPU."""
    others = [d for d in range(values.dim()) if d != dim]
    return (values != 0).any(dim=others).cpu()


def _channel(node: fx.Node) -> int:
    """Return the dim of the channels of a layer's input and output."""
    return -1 if node.target is _LINEAR else -1 - _CONVOLUTIONS.index(node.target) - 1

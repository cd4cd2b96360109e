"""Edit: how a rewriting rule changes one op of the graph once the cut is decided.

Rules see the original graph and its facts; an :class:`Edit` translates every change to the copy that becomes the
compact model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from sparta.aten import set_argument
from sparta.propagation.axes import Axes
from sparta.propagation.slices import constant_of_slice

__all__ = ["Edit"]


@dataclass
class Edit:
    """Changes to the copy of a graph.

    Parameters
    ----------
    axes
        The solved cut of the original graph.
    copies
        The node of the copy for each node of the original.
    biases
        New or changed biases: name, the bias it replaces or None, the weight it goes with, what is added to it.
    literals
        New constant tensors of the copy, such as an index that is counted in kept positions.
    """

    axes: Axes
    copies: Mapping[fx.Node, fx.Node]
    biases: dict[str, tuple[fx.Node | None, fx.Node, Tensor]] = field(default_factory=dict)
    literals: dict[str, Tensor] = field(default_factory=dict)

    def kept(self, node: fx.Node, dim: int) -> Tensor:
        """Return the kept indices of a dim, ascending."""
        return self.axes.kept(node, dim).nonzero().flatten()

    def size(self, node: fx.Node, dim: int) -> int:
        """Return the size of a dim after the cut."""
        return int(self.axes.kept(node, dim).sum())

    def cut_values(self, node: fx.Node, dim: int) -> Tensor:
        """Return for each index of a dim the constant that was cut there: float64, 0 where nothing was."""
        constant = constant_of_slice(self.axes.facts, node, dim)
        return torch.where(self.axes.kept(node, dim), 0.0, constant)

    def set(self, node: fx.Node, name: str, value: Any) -> None:
        """Set an argument of an op by its schema name."""
        set_argument(self.copies[node], name, value)

    def replace(self, node: fx.Node, target: Any, args: tuple[Any, ...]) -> None:
        """Replace an op by another one; the arguments are in terms of the original graph."""
        copy = self.copies[node]
        copy.target = target
        copy.args = fx.map_arg(args, lambda n: self.copies.get(n, n))
        copy.kwargs = {}

    def after(self, node: fx.Node, target: Any, value: Any) -> None:
        """Insert ``target(node, value)`` between a node and all its users."""
        copy = self.copies[node]
        with copy.graph.inserting_after(copy):
            new = copy.graph.call_function(target, (copy, value))
        copy.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)

    def set_bias(self, node: fx.Node, argument: str, weight: fx.Node, bias: fx.Node | None, shift: Tensor) -> None:
        """Give an op a bias: the old one (if any) plus `shift`, one value for each output channel that is kept."""
        name = str(bias.target) if bias is not None and len(bias.users) == 1 else self._new_name(weight)
        self.biases[name] = bias, weight, shift
        copy = self.copies[node]
        with copy.graph.inserting_before(copy):
            fetch = copy.graph.get_attr(name)
        self.set(node, argument, fetch)

    def positions(self, source: tuple[fx.Node, int], index: Tensor) -> Tensor:
        """Return where indices of a tensor's dim, all of them kept, are after the cut."""
        return (self.axes.kept(*source).cumsum(0) - 1)[index]

    def literal(self, node: fx.Node, value: Tensor) -> fx.Node:
        """Return a node of the copy that holds a constant tensor, to be used by the copy of `node`."""
        name = f"_literal_{len(self.literals)}"
        self.literals[name] = value
        copy = self.copies[node]
        with copy.graph.inserting_before(copy):
            return copy.graph.get_attr(name)

    def _new_name(self, weight: fx.Node) -> str:
        path, _, _ = str(weight.target).rpartition(".")
        base = f"{path}.bias" if path else "bias"
        taken = set(self.axes.facts.tensors) | set(self.biases)
        name, number = base, 1
        while name in taken:
            number += 1
            name = f"{base}_{number}"
        return name

    def is_cut_along(self, node: fx.Node, dim: int) -> bool:
        """Whether anything is cut out of a dim."""
        return not bool(self.axes.kept(node, dim).all())

    def is_cut(self, node: fx.Node) -> bool:
        """Whether anything is cut out of a tensor."""
        return self.axes.is_cut(node)

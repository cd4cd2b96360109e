"""Recurrent networks: LSTM, GRU and plain ones, of several layers, in one or both directions.

A hidden unit is 0 at every step if it starts at 0 and nothing ever moves it: the rows of its candidate (the gate that
adds something new) meet only zeros. Such units can go, and so can inputs that are 0. All layers and directions share
one initial state, so they lose the same units.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from sparta.propagation.axes import Axes
from sparta.propagation.constants import Known, any_over
from sparta.propagation.op import Op, shape_of
from sparta.propagation.registry import pieces_of, rule, ruled_by_pieces
from sparta.tesa.grid import Grid

__all__: list[str] = []

_aten = torch.ops.aten
_GATES: dict[Any, int] = {_aten.lstm.input: 4, _aten.gru.input: 3, _aten.rnn_tanh.input: 1, _aten.rnn_relu.input: 1}
_CANDIDATE = {4: 2, 3: 2, 1: 0}
"""Which gate adds something new: LSTM has (input, forget, candidate, output), GRU (reset, update, candidate)."""

_NETWORKS = ruled_by_pieces(*_GATES)
_PIECES = tuple(pieces_of(op) for op in _NETWORKS)


@dataclass(frozen=True)
class _Cell:
    """One layer in one direction: its tensors, and what it reads of the layer before."""

    of_input: fx.Node
    of_hidden: fx.Node
    biases: tuple[fx.Node, ...]


class _Network:
    """A recurrent network of the graph."""

    def __init__(self, op: Op) -> None:
        self.op = op
        self.source: fx.Node = op["input"]
        self.gates = _GATES[op.node.target]
        hx = op["hx"]
        self.states: list[fx.Node] = list(hx) if isinstance(hx, list | tuple) else [hx]
        self.directions = 2 if op["bidirectional"] else 1
        params = list(op["params"])
        size = 4 if op["has_biases"] else 2
        # A projected LSTM has one more tensor per cell; it is left as it is.
        self.plain = len(params) == size * self.directions * op["num_layers"]
        self.cells = [
            _Cell(params[i], params[i + 1], tuple(params[i + 2 : i + size])) for i in range(0, len(params), size)
        ] if self.plain else []  # fmt: skip
        self.hidden = shape_of(self.states[0])[-1]

    def zeros(self) -> Tensor:
        """Return which units of each cell are 0 at every step: bool of shape (cells, units)."""
        found = torch.zeros(len(self.cells), self.hidden, dtype=torch.bool)
        if not self.op.facts.assume_finite:
            return found
        still = torch.ones(len(self.cells), self.hidden, dtype=torch.bool)
        for state in self.states:
            zero = self.op.known(state).zero()
            batch = len(zero.shape) - 2
            moved = any_over(Grid(zero.shape, zero.block, ~zero.cells), [batch])
            still &= ~moved.dense().reshape(-1, self.hidden).expand(len(self.cells), -1)
        while True:
            more = torch.stack([self._unmoved(number, found) for number in range(len(self.cells))]) & still
            if torch.equal(more, found):
                return found
            found = more

    def _unmoved(self, number: int, zero: Tensor) -> Tensor:
        """Return which units of a cell nothing moves, if the units in `zero` are 0."""
        cell = self.cells[number]
        first = _CANDIDATE[self.gates] * self.hidden
        rows = slice(first, first + self.hidden)
        moved = (self._weights(cell.of_input)[rows] & ~self.inputs(number, zero)).any(1)
        moved |= (self._weights(cell.of_hidden)[rows] & ~zero[number]).any(1)
        for bias in cell.biases:
            moved |= self._weights(bias)[rows]
        return ~moved

    def _weights(self, node: fx.Node) -> Tensor:
        """Return which elements of a tensor are not the constant 0."""
        return ~self.op.known(node).zero().dense()

    def inputs(self, number: int, zero: Tensor) -> Tensor:
        """Return which inputs of a cell are 0 at every step."""
        layer = number // self.directions
        if layer:
            return zero[(layer - 1) * self.directions : layer * self.directions].reshape(-1)
        known = self.op.known(self.source).zero()
        live = any_over(Grid(known.shape, known.block, ~known.cells), range(len(known.shape) - 1))
        return ~live.dense().reshape(-1)

    def last(self, zero: Tensor) -> Tensor:
        """Return which features of the output are 0."""
        return zero[len(self.cells) - self.directions :].reshape(-1)


def _owner(op: Op) -> tuple[_Network, Any]:
    """Return the network that a result is of, and which result it is."""
    made: Any = op.node.args[0]
    return _Network(Op(made, op.facts)), op.node.args[1]


@rule("constants", *_PIECES)
def result(op: Op) -> Known | None:
    """Know the units that nothing moves, in the output (0) and in the last states."""
    network, number = _owner(op)
    if not network.plain:
        return None
    zero = network.zeros()
    if number == 0:
        line = network.last(zero).reshape((*(1,) * (len(op.shape) - 1), -1))
    else:
        line = zero.reshape((len(zero), *(1,) * (len(op.shape) - 2), -1))
    const = Grid.from_dense(line).broadcast_to(op.shape)
    return Known(const, Grid.uniform(op.shape, 0.0, torch.float64))


@rule("observed", *_PIECES)
def result_observed(op: Op, seen: Grid) -> list[tuple[fx.Node, Grid]]:
    """Observe all but what meets only zeros."""
    del seen
    network, _ = _owner(op)
    made = network.op.node
    found = {n: Grid.uniform(shape_of(n), 1, torch.bool) for n in made.all_input_nodes}
    if not network.plain or not op.facts.assume_finite:
        return list(found.items())
    zero = network.zeros()
    for number, cell in enumerate(network.cells):
        for node, columns in ((cell.of_input, network.inputs(number, zero)), (cell.of_hidden, zero[number])):
            found[node] = Grid.from_dense(~columns[None]).broadcast_to(shape_of(node))
    read = torch.zeros(shape_of(network.source)[-1], dtype=torch.bool)
    for cell in network.cells[: network.directions]:
        read |= network._weights(cell.of_input).any(0)
    line = (read | network.inputs(0, zero)).reshape((*(1,) * (len(shape_of(network.source)) - 1), -1))
    found[network.source] = Grid.from_dense(line).broadcast_to(shape_of(network.source))
    return list(found.items())


@rule("axes", *_NETWORKS)
def network_axes(op: Op, axes: Axes) -> None:
    """Cut units in all cells together, and inputs with their columns."""
    network = _Network(op)
    results: dict[Any, fx.Node] = {user.args[1]: user for user in op.node.users}
    if not network.plain:
        for node in (*op.node.all_input_nodes, *results.values()):
            axes.keep_all(node, "a recurrent network of another kind")
        return
    unit, gates = axes.of(network.states[0], -1), axes.free(network.gates)
    axes.keep(gates, "the gates of a cell")
    if not axes.shapes_only:
        axes.keep(unit, "units that move", ~network.zeros().all(0))
    _tie_cells(network, axes, unit, gates)
    axes.absorb(network.source, len(shape_of(network.source)) - 1, op.node, fold=False)
    for number, node in results.items():
        if number == 0:
            axes.concat(axes.of(node, -1), [unit] * network.directions, op.node)
        else:
            axes.equal(axes.of(node, -1), unit)
    for node in network.states:
        axes.equal(axes.of(node, -1), unit)
    for node in (network.source, *network.states, *results.values()):
        for dim in range(len(shape_of(node)) - 1):
            axes.keep(axes.of(node, dim), "steps, samples and layers")


def _tie_cells(network: _Network, axes: Axes, unit: int, gates: int) -> None:
    """Tie rows and columns of every cell to the units, and to the inputs of the first layer."""
    node = network.op.node
    for number, cell in enumerate(network.cells):
        for tensor in (cell.of_input, cell.of_hidden, *cell.biases):
            axes.product(axes.of(tensor, 0), [gates, unit], node)
        axes.equal(axes.of(cell.of_hidden, 1), unit)
        if number < network.directions:
            axes.equal(axes.of(cell.of_input, 1), axes.of(network.source, -1))
        else:
            axes.concat(axes.of(cell.of_input, 1), [unit] * network.directions, node)


@rule("axes", *_PIECES)
def result_axes(op: Op, axes: Axes) -> None:
    """Leave it to the network."""
    del op, axes

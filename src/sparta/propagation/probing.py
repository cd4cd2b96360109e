"""Probing: what an op does, found out by running it on random inputs ("tensor scrambling").

For ops that no rule knows, and only when asked for: randomise what is live and see which outputs never move; randomise
one slice of an input and see whether anything that is observed moves; cut a dim and see whether the output is cut
alike. This is likely and not proven, so it is never done unasked, and each such op is named.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from sparta.propagation.constants import Known
from sparta.propagation.op import Op, dtype_of, is_tensor, shape_of
from sparta.tesa.grid import Grid

if TYPE_CHECKING:
    from sparta.propagation.axes import Axes

__all__ = ["axes", "constants", "is_pure", "observed"]

_RUNS = 6
_MOST_SLICES = 4096
_NOTE = "probed with random inputs: likely, not proven"


def is_pure(target: Any) -> bool:
    """Whether an op writes to nothing and draws no random numbers."""
    return not target._schema.is_mutable and torch.Tag.nondeterministic_seeded not in target.tags


class _Draws:
    """Random inputs for an op: numbers of several sizes, so that no one branch of it is taken for the whole."""

    def __init__(self, op: Op) -> None:
        self.op = op
        self.generator = torch.Generator().manual_seed(0)

    def possible(self) -> bool:
        """Whether all inputs are tensors of real numbers, and the output is one tensor."""
        nodes = self.op.node.all_input_nodes
        return all(is_tensor(n) and dtype_of(n).is_floating_point for n in nodes) and bool(nodes)

    def tensor(self, node: fx.Node, known: Known | None = None) -> Tensor:
        """Return random numbers with the constants of `known` in their places."""
        scale = 8 * torch.rand((), generator=self.generator) + 0.1
        drawn = torch.randn(shape_of(node), generator=self.generator) * scale
        if known is not None:
            drawn = torch.where(known.const.dense(), known.value.dense(), drawn.to(torch.float64))
        return drawn.to(dtype_of(node))

    def run(self, given: Mapping[fx.Node, Tensor]) -> Tensor:
        """Return the output for given inputs."""
        args = fx.map_arg(self.op.node.args, lambda n: given[n])
        kwargs = fx.map_arg(dict(self.op.node.kwargs), lambda n: given[n])
        with torch.no_grad():
            result: Tensor = self.op.node.target(*args, **kwargs)  # type: ignore[operator]
        return result


def _same(first: Tensor, second: Tensor) -> Tensor:
    return (first == second) | (first.isnan() & second.isnan())


def constants(op: Op) -> Known | None:
    """Know the outputs that never move while all that is live does."""
    draws = _Draws(op)
    if not draws.possible():
        return None
    nodes = op.inputs
    runs = [draws.run({n: draws.tensor(n, op.known(n)) for n in nodes}) for _ in range(_RUNS)]
    op.facts.note(op.node, _NOTE)
    still = torch.stack([_same(runs[0], other) for other in runs[1:]]).all(0)
    value = torch.where(still, runs[0].to(torch.float64), 0.0)
    return Known(Grid.from_dense(still), Grid.from_dense(value))


def observed(op: Op, seen: Grid) -> list[tuple[fx.Node, Grid]]:
    """Observe the slices of each input that move something that is observed.

    While an input is probed, constants count in the inputs before it only: of two zeros that hide each other, one is
    kept for the other.
    """
    draws = _Draws(op)
    if not draws.possible() or sum(s for n in op.inputs for s in shape_of(n)) > _MOST_SLICES:
        return []
    watched = seen.dense()
    found = []
    for position, node in enumerate(op.inputs):
        grid = Grid.uniform(shape_of(node), 1, torch.bool)
        for dim in range(len(shape_of(node))):
            flags = _moving(op, draws, (position, dim), watched)
            line = [-1 if d == dim else 1 for d in range(len(shape_of(node)))]
            along = Grid.from_dense(flags.reshape(line)).broadcast_to(shape_of(node))
            grid = Grid.combine(torch.logical_and, grid, along)
        found.append((node, grid))
    return found


def _moving(op: Op, draws: _Draws, at: tuple[int, int], watched: Tensor) -> Tensor:
    """Return for each index of a dim of one input whether it moves something that is watched."""
    position, dim = at
    node = op.inputs[position]
    flags = torch.zeros(shape_of(node)[dim], dtype=torch.bool)
    for _ in range(_RUNS):
        given = {n: draws.tensor(n, op.known(n) if i < position else None) for i, n in enumerate(op.inputs)}
        before, other = draws.run(given), draws.tensor(node)
        for index in (~flags).nonzero().flatten().tolist():
            changed = given[node].clone()
            changed.select(dim, index).copy_(other.select(dim, index))
            moved = ~_same(before, draws.run({**given, node: changed}))
            flags[index] = bool((moved & watched).any())
    return flags


def axes(op: Op, ties: Axes) -> None:
    """Cut a dim of the output with the same dim of the inputs, if the op then gives the cut output."""
    draws = _Draws(op)
    for dim in range(len(op.shape)):
        carriers = [(n, d) for n in op.inputs if (d := _carries(op, n, dim)) is not None]
        if carriers and draws.possible() and _commutes(op, draws, carriers, dim):
            for node, own in carriers:
                ties.equal(ties.of(node, own), ties.of(op.node, dim))
        else:
            ties.keep(ties.of(op.node, dim), "an op that was probed mixes it")
            for node, own in carriers:
                ties.keep(ties.of(node, own), "an op that was probed mixes it")
    tied = {(n, d) for dim in range(len(op.shape)) for n in op.inputs if (d := _carries(op, n, dim)) is not None}
    for node in op.inputs:
        for own in range(len(shape_of(node))):
            if (node, own) not in tied:
                ties.keep(ties.of(node, own), "an op that was probed mixes it")


def _carries(op: Op, node: fx.Node, dim: int) -> int | None:
    """Return the dim of an input that may be a dim of the output: at the same place, or the only one."""
    shape = shape_of(node)
    if len(shape) == len(op.shape) and shape[dim] == op.shape[dim]:
        return dim
    return 0 if len(shape) == 1 and shape[0] == op.shape[dim] and op.shape.count(shape[0]) == 1 else None


def _commutes(op: Op, draws: _Draws, carriers: list[tuple[fx.Node, int]], dim: int) -> bool:
    """Whether cutting the inputs cuts the output."""
    size = op.shape[dim]
    for _ in range(_RUNS):
        given = {n: draws.tensor(n) for n in op.inputs}
        kept = (torch.rand(size, generator=draws.generator) < 0.5).nonzero().flatten()
        whole = draws.run(given).index_select(dim, kept)
        small = {**given, **{n: given[n].index_select(d, kept) for n, d in carriers}}
        try:
            cut = draws.run(small)
        except (RuntimeError, ValueError, IndexError):
            return False  # sizes that belong together were torn apart: the dim cannot be cut
        if cut.shape != whole.shape or not bool(torch.isclose(cut, whole, equal_nan=True).all()):
            return False
    return True

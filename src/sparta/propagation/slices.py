"""Slices: what is known of everything at one index of a dim, and which indices share a block.

Cutting works on whole slices, so what the facts say of single elements is reduced to one answer per index here.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, fx

from sparta.propagation.constants import any_over
from sparta.propagation.engine import Facts
from sparta.tesa.grid import Grid

__all__ = ["constant_of_slice", "slice_flags", "slice_values", "whole_blocks"]


def whole_blocks(flags: Tensor, size: int) -> Tensor:
    """Return which indices lie in a block with any that is flagged; the last block may be short.

    >>> whole_blocks(torch.tensor([False, True, False, False, False]), 2).int().tolist()
    [1, 1, 0, 0, 0]
    """
    padded = torch.nn.functional.pad(flags, (0, -len(flags) % size))
    return padded.reshape(-1, size).any(dim=1).repeat_interleave(size)[: len(flags)]


def slice_values(facts: Facts, node: fx.Node, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return for each index of a dim: some observed constant is not 0; all are one finite number; something is live.

    Returns
    -------
    tuple
        Three bool tensors of shape ``(size,)``.
    """
    nonzero, low, high, live = _extremes(facts, node, dim)
    return nonzero, (low == high) & low.isfinite(), live


def constant_of_slice(facts: Facts, node: fx.Node, dim: int) -> Tensor:
    """Return the constant of each index of a dim whose observed elements are one number, and 0 elsewhere."""
    nonzero, low, high, live = _extremes(facts, node, dim)
    return torch.where(nonzero & (low == high) & ~live, low, 0.0)


def _extremes(facts: Facts, node: fx.Node, dim: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tesa = facts.tesa(node) if node.op != "get_attr" else None
    if tesa is None:
        # A parameter's own numbers are known; here it stands for a value like any other.
        known, seen = facts.known_of(node), facts.observed_of(node)
        state = Grid.combine(lambda c, s: torch.where(s, torch.where(c, 1, 0), 2).to(torch.uint8), known.const, seen)
        value = Grid.combine(lambda s, v: torch.where(s == 1, v, 0.0), state, known.value)
    else:
        state, value = tesa.state, tesa.value
    nonzero = Grid.combine(lambda s, v: (s == 1) & (v != 0), state, value)
    lowest = Grid.combine(lambda s, v: torch.where(s == 1, v, math.inf), state, value)
    highest = Grid.combine(lambda s, v: torch.where(s == 1, v, -math.inf), state, value)
    live = Grid(state.shape, state.block, state.cells == 0)
    low = -_line(Grid(lowest.shape, lowest.block, -lowest.cells), dim)
    return slice_flags(nonzero, dim), low, _line(highest, dim), slice_flags(live, dim)


def slice_flags(grid: Grid, dim: int) -> Tensor:
    """Return for each index of a dim whether any element there holds."""
    others = [d for d in range(len(grid.shape)) if d != dim]
    return any_over(grid, others).dense().reshape(-1)


def _line(grid: Grid, dim: int) -> Tensor:
    """Return for each index of a dim the largest value there."""
    cells = grid.cells
    for other in range(len(grid.shape)):
        if other != dim:
            cells = cells.amax(other, keepdim=True)
    return Grid((grid.shape[dim],), (grid.block[dim],), cells.reshape(-1)).dense()

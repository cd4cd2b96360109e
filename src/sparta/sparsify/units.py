"""Units: what a pattern keeps or prunes as one, and the score of each.

Allocation compares *units* across layers (elements, blocks, channels), so that a budget means the same for every
pattern. The score of a unit is the mean of its elements' scores, as the patterns have it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from sparta.errors import ShapeError, message
from sparta.sparsify.shards import Shards
from sparta.tesa.patterns import Block, Channel, Pattern
from sparta.tesa.patterns.base import resolve_axis
from sparta.tesa.patterns.groups import reduce_groups, sum_scores

__all__ = ["check_sharding", "unit_count", "unit_scores"]


def unit_count(pattern: Pattern, shape: Sequence[int]) -> int:
    """Return how many units `pattern` has on a tensor of `shape`.

    >>> unit_count(Block(4, 4), (8, 10)), unit_count(Channel(0), (8, 10))
    (6, 8)
    """
    if isinstance(pattern, Channel):
        return shape[resolve_axis(pattern.axis, shape, pattern)]
    if isinstance(pattern, Block):
        sizes = list(shape)
        for axis, size in zip(pattern.axes, (pattern.h, pattern.w), strict=True):
            sizes[axis] = -(-sizes[axis] // size)
        return math.prod(sizes)
    return math.prod(shape)


def unit_scores(pattern: Pattern, score: Tensor) -> Tensor:
    """Return the score of each unit, 1-D, in the order in which the pattern counts its units.

    Parameters
    ----------
    score
        Real tensor of the shape of the weight, or of the rows of it that are here.

    Examples
    --------
    >>> unit_scores(Channel(1), torch.tensor([[1.0, 2.0], [3.0, 6.0]]))
    tensor([2., 4.])
    """
    if score.numel() == 0:
        return score.flatten()
    if isinstance(pattern, Channel):
        axis = resolve_axis(pattern.axis, score.shape, pattern)
        others = [dim for dim in range(score.dim()) if dim != axis]
        return score.float().mean(others) if others else score
    if not isinstance(pattern, Block):
        return score.flatten()
    means = score.float()
    for axis, size in zip(pattern.axes, (pattern.h, pattern.w), strict=True):
        counts = reduce_groups(torch.ones(score.shape[axis], device=score.device), 0, size, sum_scores)
        sums = reduce_groups(means, axis % score.dim(), size, sum_scores)
        means = sums / counts.view([-1 if dim == axis % score.dim() else 1 for dim in range(score.dim())])
    return means.flatten()


def check_sharding(pattern: Pattern, shape: Sequence[int], rows: int, shards: Shards) -> None:
    """Raise :class:`ShapeError` when a unit of `pattern` would lie across two processes.

    Parameters
    ----------
    rows
        How many rows of the tensor of `shape` this process holds.
    """
    if shards.is_whole:
        return
    crossing = False
    if isinstance(pattern, Channel):
        crossing = resolve_axis(pattern.axis, shape, pattern) != 0
    elif isinstance(pattern, Block):
        rows_in_unit = {
            axis % len(shape): size for axis, size in zip(pattern.axes, (pattern.h, pattern.w), strict=True)
        }
        crossing = bool(rows % rows_in_unit.get(0, 1)) and shards.rank + 1 < shards.size
    elif hasattr(pattern, "axis"):
        crossing = resolve_axis(pattern.axis, shape, pattern) == 0
        crossing |= bool(rows % getattr(pattern, "v", 1)) and shards.rank + 1 < shards.size
    if crossing:
        raise ShapeError(
            message(
                f"{pattern} on a weight of shape {tuple(shape)} whose rows are cut over {shards.size} processes",
                "units that lie in one process",
                "use a pattern that does not cross rows, or leave the layer unsharded",
            )
        )

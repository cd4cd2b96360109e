"""Runs of consecutive elements along an axis: reduce them, spread them, and keep the best of each.

Blocks, N:M groups and V:N:M tiles are all cut out of a tensor by such runs, and all share the same treatment of a
ragged tail: the last run is shorter, never padded and never merged. It rests on :class:`GroupQuota`,
the common half of N:M and V:N:M: the full mask first, then pruning less (gradual) or more than it on request.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor

from sparta.errors import ValueRangeError, message
from sparta.tesa.patterns.base import Pattern, check_size, resolve_axis
from sparta.tesa.select import lowest, lowest_per_row, pruned_count

__all__ = [
    "GroupQuota",
    "any_live",
    "keep_highest",
    "live_count",
    "reduce_groups",
    "refuse_nan",
    "spread_groups",
    "sum_scores",
]


def reduce_groups(x: Tensor, axis: int, size: int, reduce: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Reduce each run of `size` elements along `axis` to one; the last run may be shorter.

    `reduce(x, dim)` removes the axis `dim`. The result has ``ceil(x.shape[axis] / size)`` elements along `axis`.

    >>> reduce_groups(torch.arange(5.0), 0, 2, torch.sum)
    tensor([1., 5., 4.])
    """
    length = x.shape[axis]
    whole = length - length % size
    parts = []
    if whole:
        parts.append(reduce(torch.unflatten(x.narrow(axis, 0, whole), axis, (-1, size)), axis + 1))
    if whole < length:
        parts.append(reduce(x.narrow(axis, whole, length - whole), axis).unsqueeze(axis))
    return torch.cat(parts, axis) if len(parts) > 1 else parts[0]


def spread_groups(groups: Tensor, axis: int, size: int, length: int) -> Tensor:
    """Repeat each element of `groups` over its run of `size` along `axis`, cut to `length`.

    >>> spread_groups(torch.tensor([1, 2]), 0, 3, 5)
    tensor([1, 1, 1, 2, 2])
    """
    return groups.repeat_interleave(size, axis).narrow(axis, 0, length)


def keep_highest(
    score: Tensor, n: int, m: int, axis: int, among: Tensor | None = None, among_per_group: int | None = None
) -> Tensor:
    """Return the mask that keeps the `n` highest scores of each run of `m` elements along `axis`.

    Parameters
    ----------
    score
        Comparable tensor, not empty.
    n, m, axis
        How many to keep of how many along which axis. A shorter last run of t elements keeps ``min(n, t)``.
    among, among_per_group
        Optional bool tensor of the shape of `score`: only these may be kept. Each run must have exactly
        `among_per_group` of them, a shorter run of t elements ``min(among_per_group, t)``.

    Examples
    --------
    >>> keep_highest(torch.tensor([[3, 1, 2, 5, 4]]), 1, 3, 1)
    tensor([[ True, False, False,  True, False]])
    """
    lines = score.movedim(axis, -1)
    allowed = None if among is None else among.movedim(axis, -1)
    length = lines.shape[-1]
    tail = length % m
    parts = []
    for start, stop, width in ((0, length - tail, m), (length - tail, length, tail)):
        if start == stop:
            continue
        groups = lines[..., start:stop].reshape(-1, width)
        candidates = None if allowed is None else allowed[..., start:stop].reshape(-1, width)
        available = width if among_per_group is None else min(among_per_group, width)
        kept = lowest_per_row(groups, max(available - n, 0), candidates).logical_not_()
        if candidates is not None:
            kept &= candidates
        parts.append(kept.view(*lines.shape[:-1], stop - start))
    return torch.cat(parts, -1).movedim(-1, axis).contiguous()


def live_count(mask: Tensor, dim: int) -> Tensor:
    """Count the True along `dim` of a bool tensor, in the narrowest type that holds the count."""
    if mask.shape[dim] < 256:  # summing bytes as bytes is several times faster than widening them
        return mask.view(torch.uint8).sum(dim, dtype=torch.uint8)
    return mask.sum(dim, dtype=torch.int32)


def any_live(mask: Tensor, dim: int) -> Tensor:
    """Tell whether any element along `dim` of a bool tensor is True."""
    return mask.any(dim)


def sum_scores(score: Tensor, dim: int) -> Tensor:
    """Sum a comparable score along `dim`: float32 in float32, everything else exactly enough in float64."""
    return score.sum(dim, dtype=torch.float32 if score.dtype == torch.float32 else torch.float64)


def refuse_nan(unit_score: Tensor, unit: str) -> Tensor:
    """Return the summed scores of units, or raise `ValueRangeError` where infinities of both signs met in one."""
    undefined = int(torch.count_nonzero(unit_score.isnan()))
    if undefined:
        raise ValueRangeError(
            message(
                f"{undefined} {unit}s of the score hold both +inf and -inf, so their sum is undefined",
                f"infinities of one sign in a {unit}",
                "clamp the score to finite numbers",
            )
        )
    return unit_score


class GroupQuota(Pattern):
    """Patterns with a quota of kept elements in each group of `m` along `axis`: N:M and V:N:M.

    They have a sparsity of their own, that of the *full* mask. A lower sparsity prunes only the lowest-scored of
    what the full mask prunes (gradual N:M); a higher one prunes the lowest-scored of what it keeps as well. So the
    masks of one score are nested as the sparsity rises. The fields are those of the subclasses, in their order.
    """

    n: int
    m: int
    axis: int

    def capacity(self, shape: Sequence[int]) -> float:
        """Return the density of the full mask of this shape: n / m, or less or more with a ragged tail.

        An empty tensor has capacity 1.
        """
        self.check_shape(shape)
        return self._full_count(shape) / prod(shape) if prod(shape) else 1.0

    def check_shape(self, shape: Sequence[int]) -> None:
        """Raise `ShapeError` when a tensor of this shape has no such axis."""
        resolve_axis(self.axis, shape, self)

    @abstractmethod
    def _full_mask(self, score: Tensor) -> Tensor:
        """Return the mask of the pattern's own sparsity."""

    def _full_count(self, shape: Sequence[int]) -> int:
        """Return how many elements the full mask keeps."""
        length = shape[resolve_axis(self.axis, shape, self)]
        kept_in_line = length // self.m * self.n + min(self.n, length % self.m)
        return prod(shape) // length * kept_in_line

    def own_sparsity(self, shape: Sequence[int] | None = None) -> float:
        """Return 1 - n / m, or the sparsity of the full mask of this shape, which a ragged tail may change."""
        return 1 - self.n / self.m if shape is None else 1 - self.capacity(shape)

    def along(self, axis: int) -> Pattern:
        """Return the pattern turned to `axis`, unless it was given another one than the usual 1."""
        return type(self)(**{**self.params, "axis": axis}) if self.axis == 1 else self

    def rows_per_unit(self, shape: Sequence[int]) -> int | None:
        """Return 1, or None when groups run along the rows."""
        return 1 if resolve_axis(self.axis, shape, self) else None

    def _project(self, score: Tensor, sparsity: float | None) -> Tensor:
        full = self._full_mask(score)
        if sparsity is None:
            return full
        more = pruned_count(score.numel(), sparsity) - (score.numel() - self._full_count(score.shape))
        if more >= 0:
            return full.logical_and_(lowest(score, more, among=full).logical_not_())
        # what is pruned less than fully is the lowest of what the full mask prunes
        pruned = full.logical_not_()
        return lowest(score, pruned_count(score.numel(), sparsity), among=pruned).logical_not_()

    def _check_fields(self) -> None:
        """Check the fields and store them as plain integers."""
        object.__setattr__(self, "m", check_size("m", self.m))
        object.__setattr__(self, "n", check_size("n", self.n))
        object.__setattr__(self, "axis", check_size("axis", self.axis, least=None))

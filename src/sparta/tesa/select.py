"""Exact selection: the elements with the smallest score, exactly as many as asked for.

Every pattern prunes through this module, so the number of zeros is exact and ties are always broken the same way.
The one idea to know is the *pruning order*: smaller score first and, among equal scores, lower row-major index
first. Nothing here depends on strides, device or thread count, and only rows of many elements are ever sorted.
"""

from __future__ import annotations

from numbers import Real

import numpy as np
import torch
from torch import Tensor

from sparta.errors import ShapeError, ValueRangeError, message

__all__ = ["check_sparsity", "comparable", "lowest", "lowest_per_row", "pruned_count"]

# How every score type is compared: exactly, and in a type that torch and numpy both order quickly.
_COMPARED_AS = {
    torch.float64: torch.float64,
    torch.float32: torch.float32,
    torch.int64: torch.int64,
    torch.int32: torch.int32,
    torch.int16: torch.int16,
    torch.int8: torch.int16,
    torch.uint8: torch.int16,
    torch.bool: torch.int16,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.uint64: torch.int64,
}
_FEW_COLUMNS = 8  # up to here, comparing whole columns beats sorting tiny rows
_BLOCK = (1 << 15) - 1  # elements of rows handled at once on a CPU
_SAMPLE = 1 << 16  # elements sampled to bracket an order statistic
_MARGIN = 512  # sample ranks on each side: four standard deviations of a sampled median


def check_sparsity(sparsity: object) -> float:
    """Return `sparsity` as a float, or raise `ValueRangeError` when it is not a real number in [0, 1].

    >>> check_sparsity(1)
    1.0
    """
    # NaN fails the comparison; bool is a Real in Python, but `True` as a sparsity is a mistake
    if not isinstance(sparsity, bool) and isinstance(sparsity, Real) and 0 <= float(sparsity) <= 1:
        return float(sparsity)
    raise ValueRangeError(
        message(f"sparsity is {sparsity!r}", "a real number in [0, 1]", "pass 0.5 to prune half the elements")
    )


def pruned_count(numel: int, sparsity: float) -> int:
    """Return how many of `numel` elements are pruned at `sparsity`: the nearest integer, halves to even.

    >>> pruned_count(10, 0.25), pruned_count(4096, 0.9)
    (2, 3686)
    """
    return round(check_sparsity(sparsity) * numel)


def comparable(score: Tensor) -> Tensor:
    """Return `score` checked and ready to compare: contiguous, detached, in a type ordered everywhere.

    Parameters
    ----------
    score
        Real tensor of any shape, stride and device. NaN is refused; infinities are ordered as usual.

    Returns
    -------
    Tensor
        The same values in float32, float64, int16, int32 or int64.

    Examples
    --------
    >>> comparable(torch.tensor([1.5, -2.0], dtype=torch.bfloat16))
    tensor([ 1.5000, -2.0000])
    """
    if score.layout != torch.strided or not (score.is_floating_point() or score.dtype in _COMPARED_AS):
        raise ValueRangeError(
            message(
                f"the score is a {score.layout} tensor of {score.dtype}",
                "a strided tensor of floats, integers or bools",
                "pass for instance weight.abs()",
            )
        )
    values = score.detach().to(_COMPARED_AS.get(score.dtype, torch.float32)).contiguous()
    if values.numel() == 0:
        return values
    if score.dtype == torch.uint64 and bool(values.min() < 0):
        raise ValueRangeError(message("the uint64 score exceeds 2**63 - 1", "smaller integers", "rescale it"))
    # the extremes of a tensor with a NaN are NaN: one cheap pass instead of a mask
    if values.is_floating_point() and bool(values.aminmax().max.isnan()):
        count = int(torch.count_nonzero(values.isnan()))
        raise ValueRangeError(
            message(
                f"the score has {count} NaN among {values.numel()} elements",
                "numbers and infinities",
                "find where they come from, or replace them with torch.nan_to_num",
            )
        )
    return values


def lowest(score: Tensor, count: int, among: Tensor | None = None) -> Tensor:
    """Return a mask of exactly `count` elements: the first in pruning order.

    Parameters
    ----------
    score
        Real tensor of any shape, stride and device, without NaN.
    count
        How many elements to choose, from 0 to the number of candidates.
    among
        Optional bool tensor of the same shape: the candidates. All elements by default.

    Returns
    -------
    Tensor
        Bool tensor of the shape of `score`, contiguous, on its device; True at the chosen elements.

    Examples
    --------
    >>> lowest(torch.tensor([3.0, 1.0, 2.0, 1.0, 1.0]), 2)
    tensor([False,  True, False,  True, False])
    """
    values = comparable(score)
    if among is not None and (among.shape != score.shape or among.dtype != torch.bool):
        raise ShapeError(
            message(
                f"`among` is {among.dtype} of shape {tuple(among.shape)}",
                f"torch.bool of the score's shape {tuple(score.shape)}",
            )
        )
    candidates = score.numel() if among is None else int(torch.count_nonzero(among))
    if not 0 <= count <= candidates:
        raise ValueRangeError(message(f"count is {count}", f"0 to {candidates}, the number of candidates"))
    rows = None if among is None else among.reshape(1, -1)
    return lowest_per_row(values.reshape(1, -1), count, rows).reshape(score.shape)


def lowest_per_row(values: Tensor, count: int, among: Tensor | None = None) -> Tensor:
    """Return a mask of exactly `count` elements in each row: the first of the row in pruning order.

    Parameters
    ----------
    values
        Shape (rows, columns), as :func:`comparable` returns it.
    count
        How many elements to choose in each row.
    among
        Optional bool tensor of the same shape with at least `count` True in each row: the candidates.

    Returns
    -------
    Tensor
        Bool tensor, shape (rows, columns).

    Examples
    --------
    >>> lowest_per_row(torch.tensor([[4, 3, 2, 1], [5, 5, 5, 5]]), 2)
    tensor([[False, False,  True,  True],
            [ True,  True, False, False]])
    """
    if values.numel() == 0 or count == 0:
        return torch.zeros_like(values, dtype=torch.bool)
    if values.device.type != "cpu" or values.shape[0] == 1:
        return _lowest_in_block(values, count, among)
    # many short rows on a CPU: a block of them at a time stays in cache and below torch's threshold for threads
    height = max(1, _BLOCK // values.shape[1])
    chosen = torch.empty_like(values, dtype=torch.bool)
    for start in range(0, values.shape[0], height):
        block = slice(start, start + height)
        chosen[block] = _lowest_in_block(values[block], count, None if among is None else among[block])
    return chosen


def _lowest_in_block(values: Tensor, count: int, among: Tensor | None) -> Tensor:
    """Do what :func:`lowest_per_row` says for rows that are handled at once; `count` is 1 or more."""
    if among is not None:
        # the largest value sorts last: it is the edge only where real candidates tie with it
        top = torch.inf if values.is_floating_point() else torch.iinfo(values.dtype).max
        values = torch.where(among, values, torch.tensor(top, dtype=values.dtype, device=values.device))
    edge = _kth_smallest(values, count)
    chosen = values <= edge
    if among is not None:
        chosen &= among
    # each row has `count` elements or more up to its edge; it has more only where elements tie with the edge
    surplus = int(torch.count_nonzero(chosen)) - count * values.shape[0]
    if surplus > 0:
        tied = (values == edge).logical_and_(chosen)
        if values.shape[0] == 1:
            early = _prefix_length(tied[0], int(torch.count_nonzero(tied)) - surplus)
            chosen[0, early:] &= ~tied[0, early:]
        else:
            _drop_late_ties(chosen, tied, count)
    return chosen


def _drop_late_ties(chosen: Tensor, tied: Tensor, count: int) -> None:
    """Clear the last `tied` elements of each row of `chosen`, in place, until the row has `count` left."""
    narrow = torch.uint8 if chosen.shape[1] < 256 else torch.int32
    rank = tied.cumsum(1, dtype=narrow)
    early = rank[:, -1:] - (chosen.sum(1, keepdim=True, dtype=narrow) - count)
    chosen &= (rank <= early).logical_or_(~tied)


def _prefix_length(flags: Tensor, count: int) -> int:
    """Return the length of the shortest prefix of the 1-D bool `flags` that holds `count` True, 1 or more."""
    low, high = 0, flags.numel()
    while high - low > 1:
        middle = (low + high) // 2
        found = int(torch.count_nonzero(flags[low:middle]))
        if found >= count:
            high = middle
        else:
            low, count = middle, count - found
    return high


def _kth_smallest(rows: Tensor, k: int) -> Tensor:
    """Return the `k`-th smallest value of each row (from 1), shape (rows, 1)."""
    height, width = rows.shape
    if height == 1:
        return _kth_of_many(rows[0], k).reshape(1, 1)
    if width <= _FEW_COLUMNS:
        return _kth_of_few(rows, k).unsqueeze(1)
    if rows.device.type == "cpu":  # numpy sorts short rows some ten times faster than torch does
        return torch.from_numpy(np.sort(rows.numpy(), axis=1)[:, k - 1 : k])
    return rows.sort(dim=1).values[:, k - 1 : k]


def _kth_of_few(rows: Tensor, k: int) -> Tensor:
    """Return the `k`-th smallest value of each row by insertion into the few best columns so far."""
    width = rows.shape[1]
    first, second = torch.minimum, torch.maximum
    if k > width // 2 + 1:  # shorter from the other end
        first, second, k = second, first, width - k + 1
    best: list[Tensor] = []
    for column in rows.unbind(1):
        carried = column
        for place, held in enumerate(best):
            best[place], carried = first(held, carried), second(held, carried)
        if len(best) < k:
            best.append(carried)
    return best[-1]


def _kth_of_many(values: Tensor, k: int) -> Tensor:
    """Return the `k`-th smallest of a 1-D tensor by narrowing a bracket taken from a sample.

    Two pivots near the wanted rank are read off a fixed-seed sample; counting against them leaves the few percent
    of the elements between them. A misleading sample costs another round, never exactness: each round drops the
    pivots themselves at least, and heavily tied values are found as a pivot.
    """
    generator = torch.Generator().manual_seed(0)
    while values.numel() > 2 * _SAMPLE:
        positions = torch.randint(values.numel(), (_SAMPLE,), generator=generator).to(values.device)
        sample = values[positions].sort().values
        centre = k * _SAMPLE // values.numel()
        low = sample[max(centre - _MARGIN, 0)]
        high = sample[min(centre + _MARGIN, _SAMPLE - 1)]
        upto_low = values <= low
        count_upto = int(torch.count_nonzero(upto_low))
        if k <= count_upto:
            below_low = values < low
            if k > int(torch.count_nonzero(below_low)):
                return low
            values = values[below_low]
            continue
        between = (values < high).logical_and_(~upto_low)
        count_between = int(torch.count_nonzero(between))
        k -= count_upto
        if k <= count_between:
            values = values[between]
            continue
        upto_high = values <= high
        count_high = int(torch.count_nonzero(upto_high)) - count_upto - count_between
        k -= count_between
        if k <= count_high:
            return high
        values, k = values[~upto_high], k - count_high
    return values.sort().values[k - 1]

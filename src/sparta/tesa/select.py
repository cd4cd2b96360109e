"""Exact selection: the elements with the smallest score, exactly as many as asked for.

Every pattern prunes through this module, so the number of zeros is exact and ties are always broken the same way.
All of it rests on the *pruning order*: smaller score first and, among equal scores, lower row-major index
first. Nothing here depends on strides, device or thread count. The core is written once for two array libraries:
numpy on a CPU, where it is several times faster at this than torch, and torch on any other device.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from functools import reduce
from numbers import Real
from types import ModuleType
from typing import Any, TypeAlias

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
_BLOCK = 1 << 16  # elements handled at once on a CPU, so that temporaries stay in cache
_SAMPLE = 1 << 16  # elements sampled to bracket an order statistic

_Array: TypeAlias = Any  # np.ndarray or Tensor: whatever the library `xp` of the core computes with


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
    values = score.detach().to(_COMPARED_AS.get(score.dtype, torch.float32)).contiguous().resolve_neg()
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
    if among is not None:
        among = among.reshape(1, -1)
    return lowest_per_row(values.reshape(1, -1), count, among).reshape(score.shape)


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
    height, width = values.shape
    if values.numel() == 0 or count == 0:
        return torch.zeros_like(values, dtype=torch.bool)
    choose = _chosen_in_row if height == 1 else _chosen_in_rows
    if values.device.type != "cpu":
        on_device: Tensor = choose(torch, values, count, among)
        return on_device
    rows, allowed = values.numpy(), None if among is None else among.numpy()
    if height == 1:
        return torch.from_numpy(choose(np, rows, count, allowed))
    chosen = np.empty(rows.shape, dtype=np.bool_)
    for block in _slices(height, max(1, _BLOCK // width)):
        chosen[block] = choose(np, rows[block], count, None if allowed is None else allowed[block])
    return torch.from_numpy(chosen)


def _slices(length: int, size: int) -> Iterator[slice]:
    """Yield the slices of `size` that cover `length`."""
    return (slice(start, start + size) for start in range(0, length, size))


def _only(xp: ModuleType, values: _Array, among: _Array | None) -> _Array:
    """Return `values` with those outside `among` replaced by the largest there is.

    The largest sorts last, so it is the edge of a selection only where real candidates tie with it.
    """
    if among is None:
        return values
    largest = xp.inf if "float" in str(values.dtype) else xp.iinfo(values.dtype).max
    return xp.where(among, values, largest)


def _chosen_in_row(xp: ModuleType, row: _Array, count: int, among: _Array | None) -> _Array:
    """Do what :func:`lowest_per_row` says for a single row of any length; `count` is 1 or more."""
    edge = _kth_of_many(xp, row[0], None if among is None else among[0], count)
    chosen = row <= edge
    if among is not None:
        chosen &= among
    surplus = int(xp.count_nonzero(chosen)) - count
    if surplus:
        tied = (row[0] == edge) & chosen[0]
        early = _prefix_length(xp, tied, int(xp.count_nonzero(tied)) - surplus)
        chosen[0, early:] &= ~tied[early:]
    return chosen


def _chosen_in_rows(xp: ModuleType, rows: _Array, count: int, among: _Array | None) -> _Array:
    """Do what :func:`lowest_per_row` says for many rows at once; `count` is 1 or more."""
    values = _only(xp, rows, among)
    if rows.shape[1] <= _FEW_COLUMNS:
        return _chosen_in_columns(xp, values, count, among)
    edge = _sorted(xp, values)[:, count - 1, None]
    chosen = values <= edge
    if among is not None:
        chosen &= among
    # a row never has less than `count` up to its edge, and more only through ties with the edge
    if int(xp.count_nonzero(chosen)) > count * len(rows):
        tied = (values == edge) & chosen
        rank = xp.cumsum(tied, 1, dtype=xp.int32)
        early = rank[:, -1:] - (xp.sum(chosen, 1, dtype=xp.int32)[:, None] - count)
        chosen &= (rank <= early) | ~tied
    return chosen


def _chosen_in_columns(xp: ModuleType, values: _Array, count: int, among: _Array | None) -> _Array:
    """Do the same for rows of few elements, a whole column at a time."""
    columns = [values[:, place] for place in range(values.shape[1])]
    edge = _kth_of_few(xp, columns, count)
    chosen = [column <= edge for column in columns]
    if among is not None:
        chosen = [column & among[:, place] for place, column in enumerate(chosen)]
    if sum(int(xp.count_nonzero(column)) for column in chosen) > count * len(values):
        surplus = sum(column.view(xp.int8) for column in chosen) - count
        for place in reversed(range(len(columns))):
            dropped = chosen[place] & (columns[place] == edge) & (surplus > 0)
            chosen[place] ^= dropped
            surplus -= dropped.view(xp.int8)
    return xp.stack(chosen, 1)


def _prefix_length(xp: ModuleType, flags: _Array, count: int) -> int:
    """Return the length of the shortest prefix of the 1-D bool `flags` that holds `count` True, 1 or more."""
    low, high = 0, len(flags)
    while high - low > 1:
        middle = (low + high) // 2
        found = int(xp.count_nonzero(flags[low:middle]))
        if found >= count:
            high = middle
        else:
            low, count = middle, count - found
    return high


def _sorted(xp: ModuleType, values: _Array) -> _Array:
    """Return `values` sorted along the last axis."""
    ordered = xp.sort(values, -1)
    return ordered if xp is np else ordered.values


def _kth_of_few(xp: ModuleType, columns: list[_Array], k: int) -> _Array:
    """Return the `k`-th smallest value of each row (from 1), by insertion into the best few columns so far."""
    first, second = xp.minimum, xp.maximum
    if k > len(columns) // 2 + 1:  # shorter from the other end
        first, second, k = second, first, len(columns) - k + 1
    best: list[_Array] = []
    for column in columns:
        carried = column
        for place, held in enumerate(best):
            best[place], carried = first(held, carried), second(held, carried)
        if len(best) < k:
            best.append(carried)
    return best[-1]


def _kth_of_many(xp: ModuleType, values: _Array, among: _Array | None, k: int) -> _Array:
    """Return the `k`-th smallest (from 1) of a 1-D array, or of its elements in `among`.

    Two pivots near the wanted rank are read off a fixed-seed sample; what is strictly between them is a few percent
    of the elements. A misleading sample costs another round, never exactness: each round drops at least the pivots
    themselves, and a value that many elements share is found as a pivot.
    """
    generator = np.random.default_rng(0)
    while len(values) > 2 * _SAMPLE:
        picked = generator.integers(len(values), size=_SAMPLE)
        sample = _sorted(xp, values[picked] if among is None else values[picked][among[picked]])
        if 16 * len(sample) < _SAMPLE:  # few candidates: no rank to read off
            values, among = _strictly_between(xp, values, among, None, None), None
            continue
        candidates = len(values) if among is None else int(xp.count_nonzero(among))
        # four standard deviations of a sampled median
        centre, margin = k * len(sample) // candidates, 2 * math.isqrt(len(sample))
        low, high = sample[max(centre - margin, 0)], sample[min(centre + margin, len(sample) - 1)]
        upto_low = candidates - sum(int(xp.count_nonzero(above)) for _, above in _parts(values, among, low, None))
        if k <= upto_low:
            values, among = _strictly_between(xp, values, among, None, low), None
            if k > len(values):
                return low
            continue
        k -= upto_low
        between = _strictly_between(xp, values, among, low, high)
        if k <= len(between):
            values, among = between, None
            continue
        above_high = _strictly_between(xp, values, among, high, None)
        k -= candidates - upto_low - len(above_high)
        if k <= 0:
            return high
        values, among = above_high, None
    return _sorted(xp, values if among is None else values[among])[k - 1]


def _strictly_between(
    xp: ModuleType, values: _Array, among: _Array | None, low: _Array | None, high: _Array | None
) -> _Array:
    """Return the elements above `low`, below `high` and in `among`; None is no limit, but one must be given."""
    return xp.concatenate([part[inside] for part, inside in _parts(values, among, low, high)])


def _parts(
    values: _Array, among: _Array | None, low: _Array | None, high: _Array | None
) -> Iterator[tuple[_Array, _Array]]:
    """Yield parts of a 1-D array with the mask of what is above `low`, below `high` and in `among`.

    On a CPU the parts are small enough to stay in cache; elsewhere there is one part.
    """
    for place in _slices(len(values), _BLOCK if isinstance(values, np.ndarray) else len(values)):
        part = values[place]
        tests = [] if among is None else [among[place]]
        if low is not None:
            tests.append(part > low)
        if high is not None:
            tests.append(part < high)
        yield part, reduce(operator.and_, tests)

"""V:N:M sparsity (VENOM): blocks of v rows agree on 2n columns of every m, and each row keeps n of those.

It lets hardware that only knows N:2N (2:4) run at sparsities above one half: the agreed columns are gathered, and
inside them the block is plain N:2N. Two levels, first columns by summed score over the v rows, then elements by their
own score, so the full mask has exactly the zeros of the N:M with the same n and m.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from sparta.errors import ShapeError, ValueRangeError, message
from sparta.tesa.patterns.base import check_size, register, resolve_axis
from sparta.tesa.patterns.groups import (
    GroupQuota,
    any_live,
    keep_highest,
    live_count,
    reduce_groups,
    refuse_nan,
    spread_groups,
    sum_scores,
)

__all__ = ["VNM"]


@register("vnm")
@dataclass(frozen=True)
class VNM(GroupQuota):
    """In each block of `v` rows and `m` columns at most 2 `n` columns are kept, and `n` elements in each row.

    Parameters
    ----------
    v
        Rows that share their columns; the last block of rows may be shorter.
    n, m
        Kept elements of each `m` in a row, ``m >= 2 n``.
    axis
        The axis the columns run along. The rows run along axis 0, or along axis 1 when `axis` is 0.

    Examples
    --------
    >>> import torch
    >>> VNM(2, 1, 4).project(torch.tensor([[9, 1, 2, 3], [8, 1, 4, 9]]))  # columns 0 and 3 are agreed on
    tensor([[ True, False, False, False],
            [False, False, False,  True]])
    """

    v: int
    n: int
    m: int
    axis: int = 1
    unit: ClassVar[str] = "block"
    spelling: ClassVar[str] = r"(?P<v>\d+):(?P<n>\d+):(?P<m>\d+)(?: axis (?P<axis>-?\d+))?"
    example: ClassVar[str] = "64:2:8"

    def __post_init__(self) -> None:
        object.__setattr__(self, "v", check_size("v", self.v))
        self._check_fields()
        if self.m < 2 * self.n:
            raise ValueRangeError(
                message(
                    f"n is {self.n} and m is {self.m}",
                    "m >= 2 n: 2 n columns of each m are agreed on",
                    f"use NM({self.n}, {self.m}) when rows need not agree",
                )
            )

    def __str__(self) -> str:
        return f"{self.v}:{self.n}:{self.m}" + ("" if self.axis == 1 else f" axis {self.axis}")

    def check_shape(self, shape: Sequence[int]) -> None:
        """Raise `ShapeError` when a tensor of this shape lacks the axis of the columns or of the rows."""
        super().check_shape(shape)
        if len(shape) < 2:
            raise ShapeError(
                message(f"{self} needs rows and columns, but the shape is {tuple(shape)}", "2 axes or more")
            )

    def rows_per_unit(self, shape: Sequence[int]) -> int | None:
        """Return v, or None when groups run along the rows."""
        return self.v if self._axes(shape)[1] else None

    @property
    def _rule(self) -> str:
        return (
            f"in each block of {self.v} rows and {self.m} columns at most {2 * self.n} columns with kept elements, "
            f"and at most {self.n} kept in each row"
        )

    def _axes(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return the axes of the rows and of the columns, counted from the front."""
        self.check_shape(shape)
        axis = resolve_axis(self.axis, shape, self)
        return (0 if axis else 1), axis

    def _full_mask(self, score: Tensor) -> Tensor:
        row_axis, axis = self._axes(score.shape)
        column_score = refuse_nan(reduce_groups(score, row_axis, self.v, sum_scores), "column")
        kept_columns = keep_highest(column_score, 2 * self.n, self.m, axis)
        allowed = spread_groups(kept_columns, row_axis, self.v, score.shape[row_axis])
        return keep_highest(score, self.n, self.m, axis, among=allowed, among_per_group=2 * self.n)

    def _broken_units(self, mask: Tensor) -> Tensor:
        row_axis, axis = self._axes(mask.shape)
        if mask.numel() == 0:
            return mask
        overfull_rows = reduce_groups(mask, axis, self.m, live_count) > self.n
        live_columns = reduce_groups(mask, row_axis, self.v, any_live)
        overfull_blocks = reduce_groups(live_columns, axis, self.m, live_count) > 2 * self.n
        return reduce_groups(overfull_rows, row_axis, self.v, any_live) | overfull_blocks

    def _unit_steps(self, ndim: int) -> list[int]:
        steps = [1] * ndim
        row_axis, axis = self._axes((1,) * ndim)
        steps[row_axis], steps[axis] = self.v, self.m
        return steps

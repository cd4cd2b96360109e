"""N:M sparsity: n kept of every m consecutive elements along one axis.

2:4 is what sparse tensor cores run; any other pair is allowed. Groups run along the input channels (axis 1 of a Linear
or Conv weight; give axis 0 for a transposed convolution) and never cross a row, so a row that is no multiple of m ends
in a shorter group that keeps at most n.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from sparta.errors import ValueRangeError, message
from sparta.tesa.patterns.base import register, resolve_axis
from sparta.tesa.patterns.groups import GroupQuota, keep_highest, live_count, reduce_groups

__all__ = ["NM"]


@register("nm")
@dataclass(frozen=True)
class NM(GroupQuota):
    """At most `n` kept of each `m` consecutive elements along `axis`.

    Parameters
    ----------
    n, m
        How many are kept of how many, ``1 <= n <= m``; ``n == m`` is dense.
    axis
        The axis the groups run along: the input channels of a Linear (N, K) or Conv (O, I, ...) weight by default.

    Examples
    --------
    >>> import torch
    >>> score = torch.tensor([[1.0, 4.0, 2.0, 3.0, 5.0, 6.0]])
    >>> NM(2, 4).project(score)  # the tail of two is kept whole
    tensor([[False,  True, False,  True,  True,  True]])
    >>> NM(2, 4).project(score, sparsity=1 / 6)  # gradual: on the way to the full pattern
    tensor([[False,  True,  True,  True,  True,  True]])
    """

    n: int
    m: int
    axis: int = 1
    unit: ClassVar[str] = "group"
    spelling: ClassVar[str] = r"(?P<n>\d+):(?P<m>\d+)(?: axis (?P<axis>-?\d+))?"
    example: ClassVar[str] = "2:4"

    def __post_init__(self) -> None:
        self._check_fields()
        if self.n > self.m:
            raise ValueRangeError(
                message(f"n is {self.n} and m is {self.m}", "1 <= n <= m, n kept of m", f"try NM({self.m}, {self.n})")
            )

    def __str__(self) -> str:
        return f"{self.n}:{self.m}" + ("" if self.axis == 1 else f" axis {self.axis}")

    @property
    def _rule(self) -> str:
        return f"at most {self.n} kept of each {self.m} consecutive elements along axis {self.axis}"

    def _full_mask(self, score: Tensor) -> Tensor:
        return keep_highest(score, self.n, self.m, resolve_axis(self.axis, score.shape, self))

    def _broken_units(self, mask: Tensor) -> Tensor:
        axis = resolve_axis(self.axis, mask.shape, self)
        if mask.numel() == 0:
            return mask
        return reduce_groups(mask, axis, self.m, live_count) > self.n

    def _unit_steps(self, ndim: int) -> list[int]:
        return [self.m if dim == self.axis % ndim else 1 for dim in range(ndim)]

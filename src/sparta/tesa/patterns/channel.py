"""Channel sparsity: zeros come as whole slices along one axis.

Output channels of a weight are axis 0, input channels axis 1; channel patterns are the ones that can shrink a model
with ordinary dense layers. A slice is everything at one position of the axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sparta.tesa.patterns.base import Pattern, check_size, register, resolve_axis
from sparta.tesa.patterns.groups import refuse_nan

__all__ = ["Channel"]


@register("channel")
@dataclass(frozen=True)
class Channel(Pattern):
    """Whole slices along `axis` are kept or pruned; the score of a slice is the mean of its elements.

    Examples
    --------
    >>> import torch
    >>> Channel(1).project(torch.tensor([[1.0, 2.0, 3.0], [3.0, 1.0, 5.0]]), 1 / 3)
    tensor([[ True, False,  True],
            [ True, False,  True]])
    """

    axis: int = 0
    unit: ClassVar[str] = "slice"
    spelling: ClassVar[str] = r"channel(?:(?::| axis )(?P<axis>-?\d+))?"
    example: ClassVar[str] = "channel:0"

    def __post_init__(self) -> None:
        object.__setattr__(self, "axis", check_size("axis", self.axis, least=None))

    def __str__(self) -> str:
        return f"channel axis {self.axis}"

    def check_shape(self, shape: Sequence[int]) -> None:
        """Raise `ShapeError` when a tensor of this shape has no such axis."""
        resolve_axis(self.axis, shape, self)

    @property
    def _rule(self) -> str:
        return f"slices along axis {self.axis} that are kept whole or pruned whole"

    def _others(self, shape: Sequence[int]) -> list[int]:
        """Return the axes that lie inside a slice."""
        axis = resolve_axis(self.axis, shape, self)
        return [dim for dim in range(len(shape)) if dim != axis]

    def unit_count(self, shape: Sequence[int]) -> int:
        """Return the size of the axis."""
        return shape[resolve_axis(self.axis, shape, self)]

    def spread(self, kept: Tensor, shape: Sequence[int]) -> Tensor:
        """Return the mask of a tensor of this shape from one bool per slice."""
        axis = resolve_axis(self.axis, shape, self)
        return kept.view([-1 if dim == axis else 1 for dim in range(len(shape))]).expand(tuple(shape)).contiguous()

    def rows_per_unit(self, shape: Sequence[int]) -> int | None:
        """Return 1 when slices are rows, else None."""
        return None if resolve_axis(self.axis, shape, self) else 1

    def _unit_means(self, score: Tensor) -> Tensor:
        others = self._others(score.shape)
        if not others:  # torch reads an empty list of axes as all axes
            return score
        dtype = torch.float32 if score.dtype == torch.float32 else torch.float64
        return refuse_nan(score.mean(others, dtype=dtype), self.unit)

    def _broken_units(self, mask: Tensor) -> Tensor:
        others = self._others(mask.shape)
        if not others or mask.numel() == 0:
            return torch.zeros_like(mask)
        return mask.any(others, keepdim=True) ^ mask.all(others, keepdim=True)

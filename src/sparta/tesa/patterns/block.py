"""Block sparsity: zeros come as whole h × w blocks over two axes.

It is the pattern most kernels like, for weights (blocks over output and input channels, separately for each kernel
position of a convolution) and for attention masks (blocks over the last two axes). Blocks tile the tensor from its
origin, and those at a ragged edge are smaller blocks that count like any other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sparta.errors import ShapeError, ValueRangeError, message
from sparta.tesa.patterns.base import Pattern, check_size, register, resolve_axis
from sparta.tesa.patterns.groups import any_live, reduce_groups, refuse_nan, spread_groups, sum_scores

__all__ = ["Block"]


@register("block")
@dataclass(frozen=True)
class Block(Pattern):
    """Whole blocks of `h` × `w` are kept or pruned; the score of a block is the mean of its elements.

    Parameters
    ----------
    h, w
        Size of a block along the first and the second of `axes`.
    axes
        The two axes the blocks lie in; each position along other axes has blocks of its own.

    Examples
    --------
    >>> import torch
    >>> Block(1, 2).project(torch.tensor([[1, 2, 5, 6], [7, 8, 3, 4]]), 0.5)
    tensor([[False, False,  True,  True],
            [ True,  True, False, False]])
    """

    h: int
    w: int
    axes: tuple[int, int] = (0, 1)
    unit: ClassVar[str] = "block"
    spelling: ClassVar[str] = r"(?:block[: ])?(?P<h>\d+)x(?P<w>\d+)(?: axes (?P<axes>-?\d+,-?\d+))?"
    example: ClassVar[str] = "block:4x4"

    def __post_init__(self) -> None:
        object.__setattr__(self, "h", check_size("h", self.h))
        object.__setattr__(self, "w", check_size("w", self.w))
        if not isinstance(self.axes, Sequence) or isinstance(self.axes, str) or len(self.axes) != 2:
            raise ValueRangeError(message(f"axes is {self.axes!r}", "two axes, for instance (0, 1)"))
        axes = tuple(check_size("an axis", axis, least=None) for axis in self.axes)
        if axes[0] == axes[1]:
            raise ValueRangeError(message(f"axes is {axes}", "two different axes", "use Channel for one axis"))
        object.__setattr__(self, "axes", axes)

    def __str__(self) -> str:
        where = "" if self.axes == (0, 1) else f" axes {self.axes[0]},{self.axes[1]}"
        return f"block {self.h}×{self.w}{where}"

    def check_shape(self, shape: Sequence[int]) -> None:
        """Raise `ShapeError` when the axes are missing or the same, or a block is larger than the tensor."""
        first, second = (resolve_axis(axis, shape, self) for axis in self.axes)
        if first == second:
            raise ShapeError(message(f"axes {self.axes} are one and the same in shape {tuple(shape)}", "two axes"))
        if 0 not in shape and (self.h > shape[first] or self.w > shape[second]):
            raise ShapeError(
                message(
                    f"{self} is larger than the tensor of shape {tuple(shape)}",
                    f"h up to {shape[first]}, w up to {shape[second]}",
                    "take a smaller block",
                )
            )

    def along(self, axis: int) -> Pattern:
        """Return the block for a weight whose input channels lie along `axis`: the other way round where it is 0."""
        return Block(self.w, self.h) if axis == 0 and self.axes == (0, 1) else self

    @property
    def _rule(self) -> str:
        return "blocks that are kept whole or pruned whole"

    def _sides(self, shape: Sequence[int]) -> list[tuple[int, int]]:
        """Check the shape; return (axis counted from the front, block size along it), for both axes."""
        self.check_shape(shape)
        return [(axis % len(shape), size) for axis, size in zip(self.axes, (self.h, self.w), strict=True)]

    def unit_count(self, shape: Sequence[int]) -> int:
        """Return how many blocks there are, those at ragged edges counted."""
        return math.prod(self._counts(shape))

    def spread(self, kept: Tensor, shape: Sequence[int]) -> Tensor:
        """Return the mask of a tensor of this shape from one bool per block."""
        if 0 in shape:
            return kept.new_zeros(tuple(shape))
        kept = kept.view(self._counts(shape))
        for axis, size in self._sides(shape):
            kept = spread_groups(kept, axis, size, shape[axis])
        return kept.contiguous()

    def rows_per_unit(self, shape: Sequence[int]) -> int | None:
        """Return the height of a block along the first axis, 1 where blocks lie in other axes."""
        return dict(self._sides(shape)).get(0, 1)

    def _counts(self, shape: Sequence[int]) -> list[int]:
        """Return how many blocks there are along each axis."""
        sides = {axis % len(shape): size for axis, size in zip(self.axes, (self.h, self.w), strict=True)}
        return [-(-size // sides.get(axis, 1)) for axis, size in enumerate(shape)]

    def _unit_means(self, score: Tensor) -> Tensor:
        means = score
        for axis, size in self._sides(score.shape):
            means = reduce_groups(means, axis, size, sum_scores)
        for axis, size in self._sides(score.shape):
            starts = torch.arange(0, score.shape[axis], size, device=score.device)
            sizes = (score.shape[axis] - starts).clamp(max=size)  # smaller at a ragged edge
            means = means / sizes.view([-1 if dim == axis else 1 for dim in range(score.ndim)])
        return refuse_nan(means, self.unit)

    def _broken_units(self, mask: Tensor) -> Tensor:
        sides = self._sides(mask.shape)
        if mask.numel() == 0:
            return mask
        any_kept, all_kept = mask, mask
        for axis, size in sides:
            any_kept = reduce_groups(any_kept, axis, size, any_live)
            all_kept = reduce_groups(all_kept, axis, size, torch.all)
        return any_kept ^ all_kept

    def _unit_steps(self, ndim: int) -> list[int]:
        steps = [1] * ndim
        for axis, size in zip(self.axes, (self.h, self.w), strict=True):
            steps[axis] = size
        return steps

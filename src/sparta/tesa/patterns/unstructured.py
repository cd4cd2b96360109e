"""The pattern without structure: any element may be zero.

It is the loosest pattern, and what a mask is said to have when nothing more regular holds. Its units are single
elements, so its count of zeros is the exact rounding of sparsity times elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from sparta.tesa.patterns.base import Pattern, register

__all__ = ["Unstructured"]


@register("unstructured")
@dataclass(frozen=True)
class Unstructured(Pattern):
    """Any element may be zero.

    Examples
    --------
    >>> import torch
    >>> Unstructured().project(torch.tensor([0.3, 0.1, 0.2, 0.4]), 0.5)
    tensor([ True, False, False,  True])
    """

    unit: ClassVar[str] = "element"
    spelling: ClassVar[str] = "unstructured"
    example: ClassVar[str] = "unstructured"

    def __str__(self) -> str:
        return "unstructured"

    def check_shape(self, shape: Sequence[int]) -> None:
        """Accept every shape."""

    @property
    def _rule(self) -> str:
        return "any mask"

    def _broken_units(self, mask: Tensor) -> Tensor:
        return mask.new_zeros((1,) * mask.ndim)

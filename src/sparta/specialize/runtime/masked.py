"""A weight with its TeSA applied, again and again: on a GPU the mask is moved there once and stays."""

from __future__ import annotations

import torch
from torch import Tensor

from sparta.tesa.attribute import TeSA

__all__ = ["Masked"]


class Masked:
    """Returns weights with zeros, or other constants, in their places.

    Moving a mask to a GPU takes longer than the product that it is for, and training needs it in every step; on the
    CPU it is made when it is needed, and takes no memory in between.

    Examples
    --------
    >>> Masked(TeSA.from_mask(torch.tensor([[True, False]])))(torch.tensor([[3.0, 4.0]]))
    tensor([[3., 0.]])
    """

    def __init__(self, weight: TeSA) -> None:
        self._weight = weight
        self._plain = weight.value.is_uniform and not weight.value.value()
        self._masks: dict[torch.device, Tensor] = {}

    def __call__(self, weight: Tensor) -> Tensor:
        """Return a tensor of the TeSA's shape with constants in their places."""
        if not weight.is_cuda or not self._plain or weight.shape != self._weight.shape:
            return self._weight.apply(weight)
        mask = self._masks.get(weight.device)
        if mask is None:
            mask = self._masks[weight.device] = self._weight.mask(weight.device)
        return torch.where(mask, weight, torch.zeros((), dtype=weight.dtype, device=weight.device))

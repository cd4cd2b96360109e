"""Masks as users pass them: bool, or numbers that are all 0 or 1."""

from __future__ import annotations

import torch
from torch import Tensor

from sparta.errors import ValueRangeError, message

__all__ = ["as_mask"]


def as_mask(mask: Tensor) -> Tensor:
    """Return `mask` as bool; refuses numbers other than 0 and 1, which mean that weights were passed by mistake."""
    if mask.is_meta:
        raise ValueRangeError(message("a mask on the device 'meta'", "a mask with values", "make it on the CPU"))
    if mask.dtype is torch.bool:
        return mask
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueRangeError(
            message("a mask with values other than 0 and 1", "bool or 0/1", "for a weight use `TeSA.from_zeros`")
        )
    return mask != 0

"""Masks at one bit per element: eight columns to a byte, lowest column first, rows padded to whole bytes.

Used by the bitmap format and wherever a mask is kept or saved. Column c of a row is bit ``c % 8`` of byte ``c // 8``,
and the padding bits are zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["pack_bits", "unpack_bits"]


def pack_bits(mask: Tensor) -> Tensor:
    """Pack a bool tensor of shape ``(*rows, cols)`` into uint8 of shape ``(*rows, ceil(cols / 8))``.

    >>> pack_bits(torch.tensor([[True, False, True, False, False, False, False, False, True]]))
    tensor([[5, 1]], dtype=torch.uint8)
    """
    cols = mask.shape[-1]
    width = -(-cols // 8)
    padded = torch.nn.functional.pad(mask, (0, 8 * width - cols)) if cols % 8 else mask
    planes = torch.unflatten(padded.view(torch.uint8), -1, (width, 8))
    packed = planes[..., 0].clone(memory_format=torch.contiguous_format)
    for bit in range(1, 8):
        packed |= planes[..., bit] << bit
    return packed


def unpack_bits(packed: Tensor, cols: int) -> Tensor:
    """Undo :func:`pack_bits`: uint8 of shape ``(*rows, ceil(cols / 8))`` to bool of shape ``(*rows, cols)``.

    >>> unpack_bits(torch.tensor([[5]], dtype=torch.uint8), 3)
    tensor([[ True, False,  True]])
    """
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    bits = (packed.unsqueeze(-1) >> shifts) & 1
    return bits.view(torch.bool).flatten(-2)[..., :cols]

"""How a 2:4 weight is stored for many tokens: as Hopper's sparse matrix instruction wants it in shared memory.

The weight is cut into slabs of 64 outputs and steps of 128 bytes of a token (128 input channels in 8 bits, 64 in 16
bits). What a step needs of a slab stands side by side, so that one copy fetches it: two panels of values, one for each
multiplication, and then the places of the live values among every four, in the order in which threads hand them over.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from sparta.errors import ShapeError, message
from sparta.specialize.cuda.device import triton_here
from sparta.specialize.linear.cuda_24_layout import live_pairs
from sparta.tesa.attribute import TeSA
from sparta.tesa.formats.blocks import pad_matrix

__all__ = ["LINE", "MatrixLayout"]

LINE = 512
"""Bytes of the packed weight that the copy engine takes as a line."""

_SLAB = 64  # outputs
_SLABS = 4  # that a cluster of blocks may compute at once: there are always whole ones
_STEP = 128  # bytes of a token
_PLACES, _LIVE = torch.tensor([0, 2]), torch.tensor([4, 5])  # bits of an element of the index
_HALF = 16  # bytes; the halves of a panel's rows are exchanged in every other four rows


class _Index(NamedTuple):
    """The tensors of a layout on one device."""

    places: Tensor  # uint8 (rows, groups): two bits for each of two places, then a bit for each that is live
    selectors: Tensor  # uint8 (slabs, steps, ...): the places as the instruction takes them


@dataclass(frozen=True, eq=False)
class MatrixLayout:
    """How a weight (N, K) of at most 2 live elements in every 4 is packed.

    Parameters
    ----------
    itemsize
        Bytes of an element, 1 or 2.

    Examples
    --------
    >>> mask = torch.tensor([True, False, True, False]).repeat(64, 64)
    >>> layout = MatrixLayout(TeSA.from_mask(mask), 2)
    >>> packed = layout.pack(torch.ones(64, 256, dtype=torch.bfloat16))
    >>> tuple(packed.shape)
    (4, 4, 4608)
    >>> torch.equal(layout.unpack(packed, torch.bfloat16), mask.bfloat16())
    True
    """

    weight: TeSA
    itemsize: int
    _on: dict[torch.device, _Index] = field(default_factory=dict, init=False, repr=False)

    @property
    def grid(self) -> tuple[int, int]:
        """Number of slabs and of steps."""
        n, k = self.weight.shape
        return max(1, -(-n // (_SLAB * _SLABS))) * _SLABS, max(1, -(-k * self.itemsize // _STEP))

    @property
    def lines(self) -> int:
        """Number of lines of a step of a slab, values and places."""
        return (_SLAB * _STEP // 2 + 1024 // self.itemsize) // LINE

    @property
    def _padded(self) -> tuple[int, int]:
        slabs, steps = self.grid
        return slabs * _SLAB, steps * _STEP // self.itemsize

    def pack(self, weight: Tensor) -> Tensor:
        """Return the weight as bytes (slabs, steps, 4096 + those of the places)."""
        if tuple(weight.shape) != tuple(self.weight.shape) or weight.element_size() != self.itemsize:
            given = f"a weight of shape {tuple(weight.shape)} in {weight.dtype}"
            raise ShapeError(message(given, f"{tuple(self.weight.shape)}, {self.itemsize} bytes an element, as built"))
        index = self._index(weight.device)
        words = weight.detach().view(torch.uint8 if self.itemsize == 1 else torch.int16)
        if weight.is_cuda and triton_here():
            from sparta.specialize.linear.cuda_24_pack import pack_on_gpu

            return pack_on_gpu(words, *index)
        kept, live = (index.places[..., None] >> bits.to(weight.device) for bits in (_PLACES, _LIVE))
        groups = torch.unflatten(pad_matrix(words, self._padded), 1, (-1, 4))
        values = groups.gather(2, (kept & 3).long()).masked_fill_(live & 1 == 0, 0).flatten(1).view(torch.uint8)
        return torch.cat([self._panels(values).flatten(2), index.selectors], 2)

    def pack_with_transpose(self, other: MatrixLayout, weight: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the weight and its transpose, packed by one kernel; None where there is none for it.

        Parameters
        ----------
        other
            The layout of the transposed weight.
        """
        n, k = self.weight.shape
        fits = weight.is_contiguous() and weight.data_ptr() % 8 == 0 and not (n % 4 or k % 4)
        if self.itemsize != 2 or tuple(other.weight.shape) != (k, n) or not (weight.is_cuda and triton_here() and fits):
            return None
        from sparta.specialize.linear.cuda_24_pack import pack_both_on_gpu

        words = weight.detach().view(torch.int16)
        return pack_both_on_gpu(words, self._index(weight.device), other._index(weight.device))

    def unpack(self, packed: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the weight (N, K) that :meth:`pack` packed."""
        kept = (self._index(packed.device).places[..., None] >> _PLACES.to(packed.device) & 3).long()
        slabs, steps = self.grid
        panels = packed[..., : _SLAB * _STEP // 2].reshape(slabs, steps, 2, _SLAB, 2, _HALF)
        rows = _exchanged(panels).permute(0, 3, 1, 2, 4, 5).reshape(slabs * _SLAB, -1).contiguous()
        values = torch.unflatten(rows.view(torch.uint8 if self.itemsize == 1 else torch.int16), 1, (-1, 2))
        dense = values.new_zeros(*values.shape[:2], 4).scatter_(2, kept, values).flatten(1)
        n, k = self.weight.shape
        return dense[:n, :k].contiguous().view(dtype)

    def _panels(self, values: Tensor) -> Tensor:
        """Return bytes (rows, steps * 64) as (slabs, steps, 2, 64, 2, 16), the halves of some rows exchanged."""
        slabs, steps = self.grid
        apart = values.view(slabs, _SLAB, steps, 2, 2, _HALF).permute(0, 2, 3, 1, 4, 5)
        return _exchanged(apart)

    def _index(self, device: torch.device) -> _Index:
        if device not in self._on:
            mask = torch.unflatten(pad_matrix(self.weight.mask(device), self._padded), 1, (-1, 4))
            kept, live = live_pairs(mask)
            nibbles = kept[..., 0] | kept[..., 1] << 2
            places = nibbles | live[..., 0].long() << 4 | live[..., 1].long() << 5
            self._on[device] = _Index(places.to(torch.uint8), self._selectors(nibbles))
        return self._on[device]

    def _selectors(self, nibbles: Tensor) -> Tensor:
        """Return the places of the groups (rows, K / 4), four bits each, as bytes (slabs, steps, ...)."""
        slabs, steps = self.grid
        in_word = 8 if self.itemsize == 1 else 4
        shifts = torch.arange(in_word, device=nibbles.device) * 4
        # slab, warp, upper or lower 8 rows, row | step, multiplication, half of it
        words = (torch.unflatten(nibbles, 1, (-1, in_word)) << shifts).sum(-1).view(slabs, 4, 2, 8, steps, 2, 2)
        if self.itemsize == 1:  # a thread has a word of each multiplication
            ordered = words.permute(0, 4, 1, 3, 6, 2, 5)
        else:  # a thread has both rows, of one multiplication
            ordered = (words[:, :, 0] | words[:, :, 1] << 16).permute(0, 3, 1, 2, 4, 5)
        signed = torch.where(ordered >= 1 << 31, ordered - (1 << 32), ordered).to(torch.int32)
        return signed.reshape(slabs, steps, -1).view(torch.uint8)


def _exchanged(panels: Tensor) -> Tensor:
    """Return panels (..., 64, 2, 16) with both halves exchanged in rows 4 to 7 of every 8: its own inverse."""
    eights = torch.unflatten(panels, -3, (8, 2, 4))
    return torch.stack([eights[..., 0, :, :, :], eights[..., 1, :, :, :].flip(-2)], -4).flatten(-5, -3)

"""How a 2:4 weight is stored for few tokens: in the order in which the sparse matrix unit takes it.

A :class:`StreamLayout` is made once from a mask; weights are packed through it again and again. The weight is cut into
slabs of 16 outputs and chunks of 128 input channels, and within a chunk every one of a warp's 32 lanes finds its own
values side by side, so that a warp reads whole lines of memory and no value moves again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from sparta.errors import PatternError, ShapeError, message
from sparta.tesa.attribute import TeSA
from sparta.tesa.formats.blocks import pad_matrix

__all__ = ["CHUNK", "SLAB", "StreamLayout", "live_pairs"]

SLAB = 16
"""Outputs that are multiplied at once."""
CHUNK = 128
"""Input channels of a chunk: four multiplications of 32."""


class _Index(NamedTuple):
    """The tensors of a layout on one device: where kept values are in their groups of four, also as hardware bits."""

    kept: Tensor  # int64 (rows, groups, 2): the two positions, ascending
    live: Tensor  # bool (rows, groups, 2): whether they are live
    selectors: Tensor  # int32 (slabs, chunks, 32, 2)


@dataclass(frozen=True, eq=False)
class StreamLayout:
    """How a weight (N, K) of at most 2 live elements in every 4 is packed.

    Examples
    --------
    >>> mask = torch.tensor([True, False, True, False]).repeat(32, 64)
    >>> layout = StreamLayout(TeSA.from_mask(mask))
    >>> values, selectors = layout.pack(torch.ones(32, 256))
    >>> tuple(values.shape), tuple(selectors.shape)
    ((2, 2, 4, 32, 8), (2, 2, 32, 2))
    >>> torch.equal(layout.unpack(values), mask.float())
    True
    """

    weight: TeSA
    _on: dict[torch.device, _Index] = field(default_factory=dict, init=False, repr=False)

    @property
    def grid(self) -> tuple[int, int]:
        """Number of slabs and of chunks."""
        n, k = self.weight.shape
        return max(1, -(-n // SLAB)), max(1, -(-k // CHUNK))

    def pack(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the values, (slabs, chunks, 4, 32, 8), and the selectors, int32 (slabs, chunks, 32, 2).

        Of the eight values of a lane, 2 each belong to outputs g, g + 8, g, g + 8 with g = lane // 4, and to the
        groups of four t, t, t + 4, t + 4 with t = lane % 4.
        """
        if tuple(weight.shape) != tuple(self.weight.shape):
            given = f"a weight of shape {tuple(weight.shape)}"
            raise ShapeError(message(given, f"{tuple(self.weight.shape)}, as when built"))
        index, (slabs, chunks) = self._index(weight.device), self.grid
        padded = torch.unflatten(pad_matrix(weight.detach(), (slabs * SLAB, chunks * CHUNK)), 1, (-1, 4))
        values = padded.gather(2, index.kept).masked_fill_(~index.live, 0)
        # slab, half, g | chunk, multiply, quad half, t | 2  ->  slab, chunk, multiply, g, t, quad half, half, 2
        apart = values.view(slabs, 2, 8, chunks, 4, 2, 4, 2).permute(0, 3, 4, 2, 6, 5, 1, 7)
        return apart.reshape(slabs, chunks, 4, 32, 8).contiguous(), index.selectors

    def unpack(self, values: Tensor) -> Tensor:
        """Return the weight (N, K) that :meth:`pack` packed."""
        index, (slabs, chunks) = self._index(values.device), self.grid
        together = values.view(slabs, chunks, 4, 8, 4, 2, 2, 2).permute(0, 6, 3, 1, 2, 5, 4, 7)
        groups = together.reshape(slabs * SLAB, chunks * CHUNK // 4, 2)
        dense = groups.new_zeros(*groups.shape[:2], 4).scatter_(2, index.kept, groups).flatten(1)
        return dense[: self.weight.shape[0], : self.weight.shape[1]]

    def _index(self, device: torch.device) -> _Index:
        if device not in self._on:
            self._on[device] = self._make_index(device)
        return self._on[device]

    def _make_index(self, device: torch.device) -> _Index:
        slabs, chunks = self.grid
        mask = torch.unflatten(pad_matrix(self.weight.mask(device), (slabs * SLAB, chunks * CHUNK)), 1, (-1, 4))
        kept, live = live_pairs(mask)
        nibbles = kept[..., 0] | kept[..., 1] << 2
        # slab, half, g | chunk, pair, which of the pair, quad half, t
        apart = nibbles.view(slabs, 2, 8, chunks, 2, 2, 2, 4)
        shifts = torch.arange(4, device=device) * 4
        rows = (apart << shifts).sum(-1)  # slab, half, g, chunk, pair, which, quad half
        words = rows[:, 0] | rows[:, 1] << 16
        selectors = words.permute(0, 2, 1, 4, 5, 3).reshape(slabs, chunks, 32, 2)
        signed = torch.where(selectors >= 1 << 31, selectors - (1 << 32), selectors).to(torch.int32)
        return _Index(kept, live, signed.contiguous())


def live_pairs(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return two places in each group of four, ascending as the matrix unit wants them, and whether they are live.

    Parameters
    ----------
    mask
        bool (rows, groups, 4).

    Examples
    --------
    >>> places, live = live_pairs(torch.tensor([[[False, True, False, True], [False, False, True, False]]]))
    >>> places.tolist(), live.tolist()
    ([[[1, 3], [0, 2]]], [[[True, True], [False, True]]])
    """
    if bool((mask.sum(2) > 2).any()):
        raise PatternError(message("a mask with 3 or 4 live elements in a group of 4", "2:4 along the inputs"))
    # Live elements first, then the leftmost others.
    ranked = torch.argsort((~mask).to(torch.uint8), dim=2, stable=True)[..., :2]
    places = ranked.sort(2).values
    return places, mask.gather(2, places)

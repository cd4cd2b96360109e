"""How an unstructured weight is stored for few tokens: which elements are live, as bits, and the live values.

A :class:`BitmapLayout` is made once from a mask; weights are packed through it again and again. The weight is cut into
records of 16 outputs by 128 inputs, and bits and values stand in the order in which the 32 lanes of a warp take them
into the registers of the matrix unit, so that a lane finds its first value by counting bits and the others by going on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from sparta.errors import ShapeError, ValueRangeError, message
from sparta.tesa.attribute import TeSA
from sparta.tesa.formats.blocks import pad_matrix

__all__ = ["CHUNK", "GROUPS", "RUNS", "SLAB", "BitmapLayout", "largest_record", "record_head"]

SLAB = 16
"""Outputs of a record: what is multiplied at once."""
CHUNK = 128
"""Inputs of a record."""
GROUPS, RUNS = (1, 2), (4, 8)
"""Neighbouring inputs that one bit stands for; bits that a lane takes one after the other."""
_LANES, _PIECE = 32, 16  # bytes that are copied at once
_largest: WeakKeyDictionary[TeSA, dict[int, int]] = WeakKeyDictionary()  # of every mask in use, by group


class _Index(NamedTuple):
    """The tensors of a layout on one device."""

    plan: Tensor  # int32, one for two bytes: the element of the weight that stands there, or the complement of the bits
    offsets: Tensor  # int32 (slabs * chunks + 1,): where records begin, in pieces of 16 bytes


@dataclass(frozen=True, eq=False)
class BitmapLayout:
    """How a weight (N, K) with any mask is packed.

    Parameters
    ----------
    weight
        TeSA of the weight.
    group
        1: a bit per element. 2: a bit for two neighbouring inputs, stored both if one of them is live; fewer bits and
        fewer steps, for weights of which little is live.
    run
        Bits that a lane takes one after the other, 4 or 8.

    Notes
    -----
    A record holds, in this order: words of 32 bits, (cells / 4, run, 4); for each word where its first value is, as
    uint16 bytes from the begin of the record; the values. A cell is what 32 lanes with `run` bits each make.

    Examples
    --------
    >>> mask = torch.rand(32, 256) < 0.3
    >>> layout = BitmapLayout(TeSA.from_mask(mask))
    >>> weight = torch.randn(32, 256).bfloat16()
    >>> records, offsets = layout.pack(weight)
    >>> records.dtype, len(offsets)
    (torch.int16, 5)
    >>> torch.equal(layout.unpack(records), torch.where(mask, weight, 0))
    True
    """

    weight: TeSA
    group: int = 1
    run: int = 8
    _on: dict[torch.device, _Index] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.group not in GROUPS or self.run not in RUNS:
            given = f"a bitmap with group={self.group} and run={self.run}"
            raise ValueRangeError(message(given, "groups of 1 or 2, runs of 4 or 8"))

    @property
    def grid(self) -> tuple[int, int]:
        """Number of slabs and of chunks."""
        n, k = self.weight.shape
        return max(1, -(-n // SLAB)), max(1, -(-k // CHUNK))

    def pack(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the records, int16 (size,), and where they begin, int32 (slabs * chunks + 1,) in units of 16 bytes."""
        if tuple(weight.shape) != tuple(self.weight.shape) or weight.element_size() != 2:
            given = f"a weight of shape {tuple(weight.shape)} in {weight.dtype}"
            raise ShapeError(message(given, f"{tuple(self.weight.shape)} in a dtype of 16 bits"))
        index = self._index(weight.device)
        elements = weight.detach().contiguous().view(torch.int16).flatten()
        values = elements.index_select(0, index.plan.clamp(min=0))
        return torch.where(index.plan < 0, (~index.plan).to(torch.int16), values), index.offsets

    def unpack(self, records: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Return the weight (N, K) that :meth:`pack` packed."""
        plan = self._index(records.device).plan
        dense = records.new_zeros(self.weight.shape).flatten()
        kept = plan >= 0
        dense[plan[kept].long()] = records[kept]
        return dense.view(self.weight.shape).view(dtype)

    @property
    def largest(self) -> int:
        """Bytes of the largest record."""
        return largest_record(self.weight, self.group)

    def _index(self, device: torch.device) -> _Index:
        if device not in self._on:
            self._on[device] = self._make_index(device)
        return self._on[device]

    def _make_index(self, device: torch.device) -> _Index:
        k, (slabs, chunks) = self.weight.shape[1], self.grid
        mask = self._in_lanes(pad_matrix(self.weight.mask(device), (slabs * SLAB, chunks * CHUNK)))
        live = mask.view(*mask.shape[:-1], -1, self.group).any(-1)  # record, cell, lane, bit
        words = live.flatten(2).view(slabs * chunks, -1, self.run, _LANES)
        counts = words.sum(-1, dtype=torch.int32)  # record, cell, word
        head, size = record_head(self.group), 2 * self.group
        upto = counts.flatten(1).cumsum(1, dtype=torch.int32)
        starts = head + size * (upto.view_as(counts) - counts)
        lengths = (head + size * upto[:, -1] + _PIECE - 1) // _PIECE
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0, dtype=torch.int32)])
        # Everything is counted in units of two bytes from here on.
        plan = torch.full((int(offsets[-1]) * (_PIECE // 2),), -1, dtype=torch.int32, device=device)
        begins = offsets[:-1].long() * (_PIECE // 2)
        fields = torch.cat([_halves(_fours(_as_integers(words))), _fours(starts).flatten(1)], 1)
        plan[begins[:, None] + torch.arange(head // 2, device=device)] = ~fields.to(torch.int32)
        records, cells, lanes, bits = live.nonzero(as_tuple=True)
        rank = torch.arange(len(records), device=device) - (upto[:, -1].long().cumsum(0) - upto[:, -1])[records]
        first = begins[records] + head // 2 + rank * self.group
        for each in range(self.group):
            element = bits * self.group + each
            row, column = self._position(records, cells * self.run * self.group + element, lanes)
            kept = mask[records, cells, lanes, element]
            plan[first[kept] + each] = (row * k + column)[kept].to(torch.int32)
        return _Index(plan, offsets)

    def _in_lanes(self, padded: Tensor) -> Tensor:
        """Return a padded matrix as (records, cells, 32, run * group): elements by the lane that owns them."""
        slabs, chunks = self.grid
        # slab, half, g | chunk, j, t, i, quad half, 2  ->  slab, chunk, g, t, multiply 2 j + i, quad half, half, 2
        apart = padded.view(slabs, 2, 8, chunks, 4, 4, 2, 2, 2).permute(0, 3, 2, 5, 4, 6, 7, 1, 8)
        return apart.reshape(slabs * chunks, _LANES, -1, self.run * self.group).transpose(1, 2)

    def _position(self, record: Tensor, element: Tensor, lane: Tensor) -> tuple[Tensor, Tensor]:
        """Return row and column of a lane's element, of 64 in a record."""
        chunks = self.grid[1]
        row = record // chunks * SLAB + lane // 4 + 8 * (element // 2 % 2)
        # Of every 32 inputs a lane owns 8 in a row, four for each of two multiplications, so that x needs no moving.
        column = record % chunks * CHUNK + element // 16 * 32 + 8 * (lane % 4) + element // 4 % 4 * 2 + element % 2
        return row, column


def record_head(group: int) -> int:
    """Return the bytes of a record's bits and starts.

    >>> record_head(1), record_head(2)
    (384, 192)
    """
    bits = SLAB * CHUNK // group
    return bits // 8 + bits // 32 * 2


def largest_record(weight: TeSA, group: int) -> int:
    """Return the bytes of the largest record of a weight (N, K).

    >>> largest_record(TeSA.dense((16, 128)), 1)
    4480
    """
    known = _largest.setdefault(weight, {})
    if group not in known:
        n, k = weight.shape
        padded = pad_matrix(weight.mask(), (max(1, -(-n // SLAB)) * SLAB, max(1, -(-k // CHUNK)) * CHUNK))
        eights = padded.contiguous().view(torch.int64)  # a byte per element; one multiplication adds up eight of them
        if group == 2:
            eights = (eights | eights >> 8) & 0x0001000100010001
        counts = (eights * 0x0101010101010101) >> 56
        most = int(counts.view(padded.shape[0] // SLAB, SLAB, -1, CHUNK // 8).sum((1, 3)).max())
        known[group] = -(-(record_head(group) + most * 2 * group) // _PIECE) * _PIECE
    return known[group]


def _as_integers(bits: Tensor) -> Tensor:
    """Return bits (..., 32) as int64 (...), the first one lowest."""
    return (bits.to(torch.int64) << torch.arange(_LANES, device=bits.device)).sum(-1)


def _fours(by_cell: Tensor) -> Tensor:
    """Return (records, cells, run) as (records, cells / 4, run, 4), as one load of a lane takes it."""
    return torch.unflatten(by_cell, 1, (-1, 4)).transpose(2, 3)


def _halves(words: Tensor) -> Tensor:
    """Return words (records, ...) as their lower and upper 16 bits, (records, 2 * size)."""
    return torch.stack([words & 0xFFFF, words >> 16], -1).flatten(1)

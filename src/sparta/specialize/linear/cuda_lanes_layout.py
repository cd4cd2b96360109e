"""How an unstructured weight is stored so that every lane walks through live values of its own: bits, rows and marks.

A warp owns a part of the inputs and multiplies a few slabs of 16 outputs by it, one after the other; what it reads is a
stream. Of every 16 outputs and 16 inputs a lane owns 8 elements, as the registers of the matrix unit want them, and one
bit of each says whether it is live. Live values stand in rows of 32 words, a word for each lane, in the order in which
lanes come to them; so what a lane reads is always in its own bank of shared memory, however far it is. With a bit per
element a word has two walks, of even inputs in the lower half and of odd ones in the upper half; with a bit for two
neighbours it has both of them.

Lanes are not equally far at the end of a chunk of inputs. The kernel keeps a ring of rows, so for each chunk there is a
mark: the rows that must have come before it, and those that no lane needs after it. Where these two are too far apart,
lanes that are late leave out what is between, and all go on in the same row: then both numbers of the mark are equal.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from sparta.errors import ShapeError, ValueRangeError, message
from sparta.tesa.attribute import TeSA
from sparta.tesa.formats.blocks import pad_matrix

__all__ = ["COPIED", "LANES", "SLAB", "LanesLayout"]

SLAB = 16
"""Outputs that are multiplied at once."""
LANES = 32
"""Of a warp; words of a row."""
COPIED = 8
"""Rows that are copied at once."""
_STEP = 32  # inputs that stand side by side in the registers of a lane


class _Index(NamedTuple):
    """The tensors of a layout on one device."""

    plan: Tensor  # int32 (rows * 64,): the element of the weight that stands there, or -1
    bits: Tensor  # int32 (streams, chunks, 32)
    marks: Tensor  # int32 (streams, chunks, 2)
    firsts: Tensor  # int32 (streams + 1,)


@dataclass(frozen=True, eq=False)
class LanesLayout:
    """How a weight (N, K) with any mask is packed.

    Parameters
    ----------
    weight
        TeSA of the weight.
    group
        1: a bit per element. 2: a bit for two neighbouring inputs, stored both if one of them is live; fewer bits and
        fewer steps, for weights of which little is live.
    span
        Inputs that a warp owns.
    slabs
        Slabs of 16 outputs that a warp multiplies.
    beside
        Warps of a block that have slabs of their own.
    ring
        Rows that the kernel keeps of each warp.
    apart
        Rows that lanes may be apart when a chunk ends, where the ring has room for that.
    along
        Warps, of all blocks that share outputs, which share them: `span` times this is not less than K. By default as
        many as are needed.

    Examples
    --------
    >>> mask = torch.rand(32, 256) < 0.3
    >>> layout = LanesLayout(TeSA.from_mask(mask))
    >>> weight = torch.randn(32, 256).bfloat16()
    >>> rows, bits, marks, firsts = layout.pack(weight)
    >>> torch.equal(layout.unpack(rows), torch.where(mask, weight, 0))
    True
    """

    weight: TeSA
    group: int = 1
    span: int = 256
    slabs: int = 2
    beside: int = 1
    ring: int = 80
    apart: int = 48
    along: int = 0
    _on: dict[torch.device, _Index] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        least = 2 * COPIED + SLAB * self.group
        fits = self.group in (1, 2) and self.span > 0 and self.span % (64 * self.group) == 0
        covers = self.parts * self.span >= self.weight.shape[1]
        if not fits or not covers or min(self.slabs, self.beside) < 1 or self.ring < least:
            given = (
                f"group={self.group}, span={self.span}, slabs={self.slabs}, beside={self.beside}, ring={self.ring}, "
                f"along={self.along}"
            )
            allowed = f"a group of 1 or 2, a span of whole chunks, all inputs, a ring of {least} rows or more"
            raise ValueRangeError(message(given, allowed))

    @property
    def chunk(self) -> int:
        """Inputs for which a lane has a word of bits."""
        return 2 * _STEP * self.group

    @property
    def parts(self) -> int:
        """Warps that share outputs."""
        return self.along or max(1, -(-self.weight.shape[1] // self.span))

    @property
    def grid(self) -> tuple[int, int]:
        """Number of streams, in the order of blocks, parts and warps beside each other; chunks of a stream."""
        blocks = max(1, -(-self.weight.shape[0] // (SLAB * self.slabs * self.beside)))
        return blocks * self.parts * self.beside, self.slabs * self.span // self.chunk

    def pack(self, weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return rows, int16 (rows, 64), bits (streams, chunks, 32), marks (streams, chunks, 2) and first rows.

        First rows, int32 (streams + 1,), are those of each stream, and the end.
        """
        if tuple(weight.shape) != tuple(self.weight.shape) or weight.element_size() != 2:
            given = f"a weight of shape {tuple(weight.shape)} in {weight.dtype}"
            raise ShapeError(message(given, f"{tuple(self.weight.shape)} in a dtype of 16 bits"))
        index = self._index(weight.device)
        elements = weight.detach().contiguous().view(torch.int16).flatten()
        rows = elements.index_select(0, index.plan.clamp(min=0)).masked_fill_(index.plan < 0, 0)
        return rows.view(-1, 2 * LANES), index.bits, index.marks, index.firsts

    def unpack(self, rows: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Return the weight (N, K) that :meth:`pack` packed."""
        plan = self._index(rows.device).plan
        dense = rows.new_zeros(self.weight.shape).flatten()
        kept = plan >= 0
        dense[plan[kept].long()] = rows.flatten()[kept]
        return dense.view(self.weight.shape).view(dtype)

    def _index(self, device: torch.device) -> _Index:
        if device not in self._on:
            self._on[device] = self._make_index(device)
        return self._on[device]

    def _make_index(self, device: torch.device) -> _Index:
        owned = self._owned(device)
        # stream, chunk, lane, even or odd, then the elements of a walk in their order
        live = owned if self.group == 1 else owned.any(3, keepdim=True)
        counts = live.sum(4).flatten(2)  # stream, chunk, walk
        starts, marks, lengths = self._walk(counts)
        ends = lengths.cumsum(0)
        firsts = torch.cat([ends.new_zeros(1), ends])
        plan = torch.full((max(1, int(ends[-1])) * 2 * LANES,), -1, dtype=torch.int32, device=device)
        before = counts.flatten().cumsum(0) - counts.flatten()  # live values of all walks before
        first = (starts + firsts[:-1, None, None]).flatten()
        flat = live.flatten().nonzero()[:, 0]
        each = live.shape[-1]
        walk = flat // each
        row = first[walk] + torch.arange(len(flat), device=device) - before[walk]
        for half in range(2) if self.group == 2 else (None,):
            side = walk % 2 if half is None else half
            lane = walk // 2 % LANES if half is None else walk % LANES
            element, kept = self._element(walk // (2 * LANES if half is None else LANES), lane, side, flat % each)
            if half is not None:
                kept &= owned.view(-1, 2, each)[walk, half, flat % each]
            place = row * (2 * LANES) + lane * 2 + side
            plan[place[kept]] = element[kept].to(torch.int32)
        return _Index(plan, self._bits(live), marks.to(torch.int32), firsts.to(torch.int32))

    def _owned(self, device: torch.device) -> Tensor:
        """Return the mask as (streams, chunks, 32 lanes, 2, elements): by who owns an element, in order."""
        (streams, chunks), beside, slabs, parts = self.grid, self.beside, self.slabs, self.parts
        blocks = streams // (parts * beside)
        padded = pad_matrix(self.weight.mask(device), (blocks * beside * slabs * SLAB, parts * self.span))
        # block, beside, slab, row half, g | part, chunk, step of 32, t, multiply, quad half, odd
        sizes = (blocks, beside, slabs, 2, 8, parts, self.span // self.chunk, self.chunk // _STEP, 4, 2, 2, 2)
        # -> block, part, beside, slab, chunk, g, t, odd, step, multiply, quad half, row half
        apart = padded.reshape(sizes).permute(0, 5, 1, 2, 6, 4, 8, 11, 7, 9, 10, 3)
        return apart.reshape(streams, chunks, LANES, 2, self.chunk // 4)

    def _element(self, place: Tensor, lane: Tensor, odd: Tensor | int, number: Tensor) -> tuple[Tensor, Tensor]:
        """Return the element of the weight that a lane owns, and whether there is one.

        Parameters
        ----------
        place
            Stream and chunk, as one number.
        number
            Of the element among those of its walk and chunk.
        """
        (n, k), each = self.weight.shape, self.span // self.chunk
        chunk, slab, rest = place % each, place // each % self.slabs, place // each // self.slabs
        beside, part, block = rest % self.beside, rest // self.beside % self.parts, rest // self.beside // self.parts
        first = ((block * self.beside + beside) * self.slabs + slab) * SLAB
        row = first + number % 2 * 8 + lane // 4
        column = part * self.span + chunk * self.chunk + number // 8 * _STEP + lane % 4 * 8 + number // 2 % 4 * 2 + odd
        return row * k + column, (row < n) & (column < k)

    def _bits(self, live: Tensor) -> Tensor:
        """Return words of bits (streams, chunks, 32), the bits of a step in the order of registers and halves."""
        bits = live.transpose(3, 4).flatten(3)  # elements, odd
        words = (bits.to(torch.int64) << torch.arange(LANES, device=bits.device)).sum(-1)
        return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)

    def _walk(self, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return where walks begin in each chunk, marks, and the rows of each stream.

        Parameters
        ----------
        counts
            (streams, chunks, walks) of live values.
        """
        streams, chunks, walks = counts.shape
        apart = min(self.apart, self.ring - 2 * COPIED - int(counts.max()))
        starts, marks = torch.zeros_like(counts), counts.new_zeros(streams, chunks, 2)
        at, need = counts.new_zeros(streams, walks), counts.new_zeros(streams)
        for chunk in range(chunks):
            starts[:, chunk] = at
            at = at + counts[:, chunk]
            need = torch.maximum(need, at.amax(1))
            done = at.amin(1)
            together = need - done > apart
            done = torch.where(together, need, done)
            at = torch.where(together[:, None], need[:, None], at)
            marks[:, chunk] = torch.stack([need, done], 1)
        return starts, marks, need

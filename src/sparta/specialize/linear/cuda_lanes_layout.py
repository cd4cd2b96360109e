"""How an unstructured weight is stored so that every lane walks through live values of its own: bits, rows and marks.

The outputs are cut into groups of a few slabs of 16, the inputs into parts; a warp multiplies one group by one part. Of
every 16 outputs and 32 inputs a lane owns 16 elements, as the registers of the matrix unit want them, and one bit of
each says whether it is live. Live values stand in rows of 32 words, a word for each lane, in the order in which lanes
come to them; so what a lane reads is always in its own bank of shared memory, however far it is. With a bit per element
a word has two walks, of even inputs in the lower half and of odd ones in the upper half; with a bit for two neighbours
it has both of them.

Lanes are not equally far at the end of a chunk of inputs. The kernel keeps a ring of rows, so for each chunk there is a
mark: the rows that must have come before it, and those that no lane needs after it. Where these two are too far apart,
lanes that are late leave out what is between, and all go on in the same row: then both numbers of the mark are equal.
"""

from __future__ import annotations

import itertools
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
_STEP = 32  # inputs that are multiplied at once


class _Index(NamedTuple):
    """The tensors of a layout on one device."""

    plan: Tensor  # int32 (rows * 64,): the element of the weight that stands there, or -1
    bits: Tensor  # int32 (groups, chunks, slabs, 32)
    marks: Tensor  # int32 (groups, chunks, 2)
    firsts: Tensor  # int32 (groups * parts + 1,)


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
    slabs
        Slabs of 16 outputs that a warp multiplies.
    beside
        Groups of slabs of a block; their number is a multiple of it.
    parts
        Parts of the inputs.
    ring
        Rows that the kernel keeps of each warp.
    apart
        Rows that lanes may be apart when a chunk ends, where the ring has room for that.

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
    slabs: int = 2
    beside: int = 4
    parts: int = 4
    ring: int = 96
    apart: int = 48
    _on: dict[torch.device, _Index] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        least = 2 * COPIED + SLAB * self.slabs * self.group
        if self.group not in (1, 2) or min(self.slabs, self.beside, self.parts) < 1 or self.ring < least:
            given = (
                f"group={self.group}, slabs={self.slabs}, beside={self.beside}, parts={self.parts}, ring={self.ring}"
            )
            raise ValueRangeError(
                message(given, f"a group of 1 or 2, positive numbers, a ring of {least} rows or more")
            )

    @property
    def chunk(self) -> int:
        """Inputs for which a lane has a word of bits."""
        return 2 * _STEP * self.group

    @property
    def grid(self) -> tuple[int, int]:
        """Number of groups of slabs and of chunks."""
        n, k = self.weight.shape
        blocks = max(1, -(-n // (SLAB * self.slabs * self.beside)))
        return blocks * self.beside, max(1, -(-k // self.chunk))

    def pack(self, weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return rows, int16 (rows, 64), bits (groups, chunks, slabs, 32), marks (groups, chunks, 2) and first rows.

        First rows, int32 (groups * parts + 1,), are those of each group and part, and the end.
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
        groups, _ = self.grid
        owned = self._owned(device)
        # group, chunk, lane, even or odd, then the elements of a walk in their order
        live = owned if self.group == 1 else owned.any(3, keepdim=True)
        counts = live.flatten(4).sum(4).flatten(2)  # group, chunk, walk
        starts, marks, lengths = self._walk(counts)
        ends = lengths.flatten().cumsum(0)
        firsts = torch.cat([ends.new_zeros(1), ends])
        plan = torch.full((max(1, int(ends[-1])) * 2 * LANES,), -1, dtype=torch.int32, device=device)
        before = counts.flatten().cumsum(0) - counts.flatten()  # live values of all walks before
        first = (starts + self._of_part(firsts[:-1].view(groups, -1))[..., None]).flatten()
        flat = live.flatten().nonzero()[:, 0]
        each = live[0, 0, 0, 0].numel()
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
        """Return the mask as (groups, chunks, 32 lanes, 2, steps, slabs, 2, 2, 2): by who owns an element, in order."""
        (groups, chunks), slabs, steps = self.grid, self.slabs, self.chunk // _STEP
        padded = pad_matrix(self.weight.mask(device), (groups * slabs * SLAB, chunks * self.chunk))
        # group, slab, row half, g | chunk, step, t, multiply, quad half, odd
        apart = padded.reshape(groups, slabs, 2, 8, chunks, steps, 4, 2, 2, 2).permute(0, 4, 3, 6, 9, 5, 1, 7, 8, 2)
        return apart.reshape(groups, chunks, LANES, 2, steps, slabs, 2, 2, 2)

    def _element(self, place: Tensor, lane: Tensor, odd: Tensor | int, number: Tensor) -> tuple[Tensor, Tensor]:
        """Return the element of the weight that a lane owns, and whether there is one.

        Parameters
        ----------
        place
            Group and chunk, as one number.
        number
            Of the element among those of its walk and chunk.
        """
        (n, k), (_, chunks), slabs = self.weight.shape, self.grid, self.slabs
        step, slab = number // (8 * slabs), number // 8 % slabs
        row = (place // chunks * slabs + slab) * SLAB + number % 2 * 8 + lane // 4
        column = place % chunks * self.chunk + step * _STEP + lane % 4 * 8 + number // 2 % 4 * 2 + odd
        return row * k + column, (row < n) & (column < k)

    def _bits(self, live: Tensor) -> Tensor:
        """Return words of bits (groups, chunks, slabs, 32), the bits of a step in the order of registers and halves."""
        # group, chunk, lane, odd, step, slab, elements  ->  group, chunk, slab, lane, step, elements, odd
        bits = live.flatten(6).permute(0, 1, 5, 2, 4, 6, 3).flatten(4)
        words = (bits.to(torch.int64) << torch.arange(LANES, device=bits.device)).sum(-1)
        return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)

    def _begins(self) -> list[int]:
        """Return the first chunk of each part, and the end."""
        return [self.grid[1] * part // self.parts for part in range(self.parts + 1)]

    def _of_part(self, values: Tensor) -> Tensor:
        """Return values (groups, parts) of the part that each chunk belongs to, (groups, chunks)."""
        begins = self._begins()
        lengths = torch.tensor([end - begin for begin, end in itertools.pairwise(begins)])
        return values.repeat_interleave(lengths.to(values.device), 1)

    def _walk(self, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return where walks begin in each chunk, marks, and the rows of each group and part.

        Parameters
        ----------
        counts
            (groups, chunks, walks) of live values.
        """
        groups, chunks, walks = counts.shape
        most = int(counts.max())
        apart = min(self.apart, self.ring - 2 * COPIED - most)
        begins = self._begins()
        starts, marks = torch.zeros_like(counts), counts.new_zeros(groups, chunks, 2)
        at, need = counts.new_zeros(groups, self.parts, walks), counts.new_zeros(groups, self.parts)
        for number in range(max(end - begin for begin, end in itertools.pairwise(begins))):
            parts = [p for p in range(self.parts) if begins[p] + number < begins[p + 1]]
            which = [begins[p] + number for p in parts]
            here = at[:, parts]
            starts[:, which] = here
            here = here + counts[:, which]
            needed = torch.maximum(need[:, parts], here.amax(2))
            done = here.amin(2)
            together = needed - done > apart
            done = torch.where(together, needed, done)
            at[:, parts] = torch.where(together[..., None], needed[..., None], here)
            need[:, parts] = needed
            marks[:, which] = torch.stack([needed, done], 2)
        return starts, marks, need

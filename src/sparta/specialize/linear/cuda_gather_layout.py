"""How an unstructured weight of which little is live is stored for very few tokens: live values and distances.

A :class:`GatherLayout` is made once from a mask; weights are packed through it again and again. An output's live values
stand in the order of their inputs, each with the distance from the input before; a distance that does not fit is walked
in several steps, over values of 0. The kernel keeps x in a ring of :func:`ring_of` places, and outputs that are walked
side by side begin in different parts of it, each going around once: so they look into different banks of shared memory.
Outputs are put in the order of their numbers of live values, so that those that are walked together end together.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from sparta.errors import ShapeError, ValueRangeError, message
from sparta.tesa.attribute import TeSA

__all__ = ["BANKS", "GatherLayout", "ring_of", "spread_of"]

BANKS = 32
"""Of shared memory, each of words of 4 bytes."""
_WORD = 4


def spread_of(inputs: int) -> int:
    """Return how many inputs stand in one bank, next to each other in the ring.

    >>> spread_of(4096)
    136
    """
    return 8 * (-(-inputs // 8) // 32 + 1)


def ring_of(inputs: int) -> int:
    """Return how many places the ring has: those of all banks but the last one.

    >>> ring_of(4096)
    4351
    """
    return BANKS * spread_of(inputs) - 1


class _Index(NamedTuple):
    """The tensors of a layout on one device."""

    plan: Tensor  # int32 (steps, rows, step): the element of the weight that stands there, or -1
    distances: Tensor  # uint8 (steps, rows, step), or half of them with two to a byte
    places: Tensor  # int32: first steps of blocks, outputs of blocks, first places of shares


@dataclass(frozen=True, eq=False)
class GatherLayout:
    """How a weight (N, K) with any mask is packed.

    Parameters
    ----------
    weight
        TeSA of the weight.
    rows
        Outputs that a block of threads computes.
    parts
        Lanes that share an output.
    nibbles
        Whether distances take half a byte each, and a lane 16 live values at once; else a byte each, and 8.

    Examples
    --------
    >>> mask = torch.rand(40, 900) < 0.1
    >>> layout = GatherLayout(TeSA.from_mask(mask), rows=32, parts=4)
    >>> weight = torch.randn(40, 900).bfloat16()
    >>> values, distances, index = layout.pack(weight)
    >>> torch.equal(layout.unpack(values), torch.where(mask, weight, 0))
    True
    """

    weight: TeSA
    rows: int = 32
    parts: int = 8
    nibbles: bool = False
    _on: dict[torch.device, _Index] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.rows < 1 or (BANKS % self.rows and self.rows % BANKS) or self.parts < 1:
            allowed = f"rows that divide {BANKS} or are a multiple of it, and 1 part or more"
            raise ValueRangeError(message(f"rows={self.rows} and parts={self.parts}", allowed))

    @property
    def step(self) -> int:
        """Live values that a lane takes at once."""
        return 16 if self.nibbles else 8

    @property
    def farthest(self) -> int:
        """The longest distance of two values; the kernel goes once around the ring at most."""
        return min(15 if self.nibbles else 255, spread_of(self.weight.shape[1]) - 1)

    @property
    def grid(self) -> tuple[int, int]:
        """Number of blocks, twice: what the kernel takes as its last number."""
        blocks = max(1, -(-self.weight.shape[0] // self.rows))
        return blocks, blocks

    def pack(self, weight: Tensor) -> tuple[Tensor, ...]:
        """Return what the kernel reads of a weight (N, K).

        Of elements of 16 bits: values (steps, rows, 8), distances likewise, and the index. Of 8 bits: distances and
        values in one array (steps, rows, 2, 8) of bytes, an empty one, and the index; with two distances to a byte,
        values (steps, rows, 16), distances (steps, rows, 8) and the index.
        """
        if tuple(weight.shape) != tuple(self.weight.shape) or weight.element_size() > (1 if self.nibbles else 2):
            given = f"a weight of shape {tuple(weight.shape)} in {weight.dtype}"
            allowed = "8 bits" if self.nibbles else "16 or 8 bits"
            raise ShapeError(message(given, f"{tuple(self.weight.shape)} in a dtype of {allowed}"))
        found, wide = self._index(weight.device), weight.element_size() == 2
        elements = weight.detach().contiguous().view(torch.int16 if wide else torch.uint8).flatten()
        values = elements.index_select(0, found.plan.flatten().clamp(min=0)).view(found.plan.shape)
        values = values.masked_fill_(found.plan < 0, 0)
        if wide:
            return values.view(weight.dtype), found.distances, found.places
        if self.nibbles:
            return values, found.distances, found.places
        return torch.stack([found.distances, values], 2), found.distances.new_empty(1), found.places

    def unpack(self, values: Tensor) -> Tensor:
        """Return the weight (N, K) of 16 bits that :meth:`pack` packed."""
        plan = self._index(values.device).plan
        dense = values.new_zeros(self.weight.shape).flatten()
        kept = plan >= 0
        dense[plan[kept].long()] = values[kept]
        return dense.view(self.weight.shape)

    def _index(self, device: torch.device) -> _Index:
        if device not in self._on:
            self._on[device] = self._make_index(device)
        return self._on[device]

    def _make_index(self, device: torch.device) -> _Index:
        (outputs, inputs), (blocks, _), rows, step = self.weight.shape, self.grid, self.rows, self.step
        row, column = self.weight.mask(device).nonzero(as_tuple=True)
        live = torch.bincount(row, minlength=outputs)
        order = torch.argsort(live, descending=True, stable=True)
        rank = torch.empty_like(order)
        rank[order] = torch.arange(outputs, device=device)
        begin = rank % min(rows, BANKS) * spread_of(inputs)  # the place at which an output's walk begins
        row, walked = self._turned(row, column, live, begin)
        same = torch.zeros_like(row, dtype=torch.bool)
        same[1:] = row[1:] == row[:-1]
        gap = walked - torch.where(same, walked.roll(1), 0)
        fillers = (gap - 1).clamp(min=0) // self.farthest
        last = (fillers + 1).cumsum(0) - 1  # where an element stands among all entries, fillers in front of it
        count = int(last[-1]) + 1 if len(last) else 0
        distance = torch.full((count,), self.farthest, dtype=torch.int64, device=device)
        distance[last] = gap - fillers * self.farthest
        source = torch.full((count,), -1, dtype=torch.int64, device=device)
        source[last] = row * inputs + (walked + begin[row]) % ring_of(inputs)
        of = row.repeat_interleave(fillers + 1)  # the output of each entry
        lengths = torch.bincount(of, minlength=outputs)
        firsts = lengths.cumsum(0) - lengths
        longest = torch.nn.functional.pad(lengths[order], (0, blocks * rows - outputs)).view(blocks, rows).amax(1)
        ends = (-(-longest // step)).cumsum(0)
        offsets = torch.cat([ends.new_zeros(1), ends])
        total = max(1, int(offsets[-1]))
        entry = torch.arange(count, device=device) - firsts[of]
        place = ((offsets[rank[of] // rows] + entry // step) * rows + rank[of] % rows) * step + entry % step
        plan = torch.full((total * rows * step,), -1, dtype=torch.int32, device=device)
        distances = torch.zeros(total * rows * step, dtype=torch.uint8, device=device)
        plan[place], distances[place] = source.to(torch.int32), distance.to(torch.uint8)
        outputs_of = torch.nn.functional.pad(order, (0, blocks * rows - outputs), value=-1)
        starts = self._starts(offsets, outputs_of, (firsts, lengths, begin), distance)
        index = torch.cat([offsets, outputs_of, starts.flatten()]).to(torch.int32)
        if self.nibbles:
            distances = distances[0::2] | distances[1::2] << 4
        return _Index(plan.view(total, rows, step), distances.view(total, rows, -1), index)

    def _turned(self, row: Tensor, column: Tensor, live: Tensor, begin: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs of live elements and how far each is from where its output begins, nearest first."""
        before = torch.bincount(row[column < begin[row]], minlength=len(live))  # those that come last
        first = live.cumsum(0) - live
        number = torch.arange(len(row), device=row.device) - first[row]
        to = first[row] + (number - before[row]) % live[row].clamp(min=1)
        walked = torch.empty_like(column)
        walked[to] = (column - begin[row]) % ring_of(self.weight.shape[1])
        return row, walked

    def _starts(
        self, offsets: Tensor, outputs_of: Tensor, of: tuple[Tensor, Tensor, Tensor], distance: Tensor
    ) -> Tensor:
        """Return where in the ring, in bytes, each share (blocks, parts, rows) of an output begins to walk.

        Parameters
        ----------
        of
            Of each output: its first entry, how many it has, and the place at which it begins.
        """
        (firsts, lengths, begins), blocks = of, len(offsets) - 1
        steps, inputs = offsets.diff(), self.weight.shape[1]
        part = torch.arange(self.parts, device=offsets.device)
        begin = self.step * (steps[:, None] * part // self.parts)[:, :, None]  # entry of each share
        output = outputs_of.view(blocks, 1, self.rows).clamp(min=0)
        begin = begin.minimum(lengths[output])
        walked = torch.nn.functional.pad(distance.cumsum(0), (1, 0))
        place = begins[output] + walked[firsts[output] + begin] - walked[firsts[output]]
        return place % ring_of(inputs) * BANKS * _WORD % (ring_of(inputs) * _WORD)

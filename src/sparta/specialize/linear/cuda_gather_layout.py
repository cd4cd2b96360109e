"""How an unstructured weight of which little is live is stored for very few tokens: live values and distances.

A :class:`GatherLayout` is made once from a mask; weights are packed through it again and again. An output's live values
stand in the order of their inputs, each with the distance from the input before in one byte; a distance that does not
fit is walked in several steps, over values of 0. Outputs are put in the order of their numbers of live values, so that
those that are walked together end together.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from sparta.errors import ShapeError, ValueRangeError, message
from sparta.tesa.attribute import TeSA

__all__ = ["STEP", "GatherLayout"]

STEP = 8
"""Live values that a lane takes at once."""
_FARTHEST = 255


class _Index(NamedTuple):
    """The tensors of a layout on one device."""

    plan: Tensor  # int32 (steps, rows, 8): the element of the weight that stands there, or -1
    distances: Tensor  # uint8 (steps, rows, 8)
    places: Tensor  # int32: first steps of blocks, outputs of blocks, first inputs of shares


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

    Examples
    --------
    >>> mask = torch.rand(40, 900) < 0.1
    >>> layout = GatherLayout(TeSA.from_mask(mask), rows=16, parts=4)
    >>> weight = torch.randn(40, 900).bfloat16()
    >>> values, distances, index = layout.pack(weight)
    >>> torch.equal(layout.unpack(values), torch.where(mask, weight, 0))
    True
    """

    weight: TeSA
    rows: int = 16
    parts: int = 16
    _on: dict[torch.device, _Index] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.rows < 1 or self.parts < 1:
            raise ValueRangeError(message(f"rows={self.rows} and parts={self.parts}", "1 or more of each"))

    @property
    def grid(self) -> tuple[int, int]:
        """Number of blocks, twice: what the kernel takes as its last number."""
        blocks = max(1, -(-self.weight.shape[0] // self.rows))
        return blocks, blocks

    def pack(self, weight: Tensor) -> tuple[Tensor, ...]:
        """Return what the kernel reads of a weight (N, K).

        Of elements of 16 bits: values (steps, rows, 8), distances likewise, and the index. Of 8 bits: distances and
        values in one array (steps, rows, 2, 8) of bytes, an empty one, and the index.
        """
        if tuple(weight.shape) != tuple(self.weight.shape) or weight.element_size() > 2:
            given = f"a weight of shape {tuple(weight.shape)} in {weight.dtype}"
            raise ShapeError(message(given, f"{tuple(self.weight.shape)} in a dtype of 16 or 8 bits"))
        found, wide = self._index(weight.device), weight.element_size() == 2
        elements = weight.detach().contiguous().view(torch.int16 if wide else torch.uint8).flatten()
        values = elements.index_select(0, found.plan.flatten().clamp(min=0)).view(found.plan.shape)
        values = values.masked_fill_(found.plan < 0, 0)
        if wide:
            return values.view(weight.dtype), found.distances, found.places
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
        (outputs, inputs), (blocks, _), rows = self.weight.shape, self.grid, self.rows
        row, column = self.weight.mask(device).nonzero(as_tuple=True)
        same = torch.zeros_like(row, dtype=torch.bool)
        same[1:] = row[1:] == row[:-1]
        gap = column - torch.where(same, column.roll(1), 0)
        fillers = (gap - 1).clamp(min=0) // _FARTHEST
        last = (fillers + 1).cumsum(0) - 1  # where an element stands among all entries, fillers in front of it
        count = int(last[-1]) + 1 if len(last) else 0
        distance = torch.full((count,), _FARTHEST, dtype=torch.int64, device=device)
        distance[last] = gap - fillers * _FARTHEST
        source = torch.full((count,), -1, dtype=torch.int64, device=device)
        source[last] = row * inputs + column
        of = row.repeat_interleave(fillers + 1)  # the output of each entry
        lengths = torch.bincount(of, minlength=outputs)
        firsts = lengths.cumsum(0) - lengths
        order = torch.argsort(lengths, descending=True, stable=True)
        rank = torch.empty_like(order)
        rank[order] = torch.arange(outputs, device=device)
        longest = torch.nn.functional.pad(lengths[order], (0, blocks * rows - outputs)).view(blocks, rows).amax(1)
        ends = (-(-longest // STEP)).cumsum(0)
        offsets = torch.cat([ends.new_zeros(1), ends])
        total = max(1, int(offsets[-1]))
        entry = torch.arange(count, device=device) - firsts[of]
        place = ((offsets[rank[of] // rows] + entry // STEP) * rows + rank[of] % rows) * STEP + entry % STEP
        plan = torch.full((total * rows * STEP,), -1, dtype=torch.int32, device=device)
        distances = torch.zeros(total * rows * STEP, dtype=torch.uint8, device=device)
        plan[place], distances[place] = source.to(torch.int32), distance.to(torch.uint8)
        outputs_of = torch.nn.functional.pad(order, (0, blocks * rows - outputs), value=-1)
        starts = self._starts(offsets, outputs_of, firsts, lengths, distance)
        index = torch.cat([offsets, outputs_of, starts.flatten()]).to(torch.int32)
        shape = (total, rows, STEP)
        return _Index(plan.view(shape), distances.view(shape), index)

    def _starts(self, offsets: Tensor, outputs_of: Tensor, firsts: Tensor, lengths: Tensor, distance: Tensor) -> Tensor:
        """Return the input (blocks, parts, rows) at which each share of an output begins to walk."""
        blocks = len(offsets) - 1
        steps = offsets.diff()
        part = torch.arange(self.parts, device=offsets.device)
        begin = STEP * (steps[:, None] * part // self.parts)[:, :, None]  # entry of each share
        output = outputs_of.view(blocks, 1, self.rows).clamp(min=0)
        begin = begin.minimum(lengths[output])
        walked = torch.nn.functional.pad(distance.cumsum(0), (1, 0))
        return walked[firsts[output] + begin] - walked[firsts[output]]

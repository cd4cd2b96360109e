"""How an unstructured weight is stored so that no two lanes look into the same bank: strips, tasks and pieces.

The inputs are cut into segments, each into 32 runs of neighbours, as many as shared memory has banks. A strip is what
is live of one output in one run; lane ``b`` of a warp multiplies strips of run ``b`` only. A block of threads owns
`rows` outputs; for each run their strips are sorted by length, and those of the same rank make a task of one warp,
filled up to the longest with values of 0. So the lanes of a warp end together though their outputs are different ones.

A lane reads its strip in pieces: a word that says where the inputs are, and the live values. With nibbles, a piece has
8 values and the word 8 distances, each from the input before (the first from the begin of the run); one that does not
fit is walked in several steps, over values of 0. Otherwise a piece has 4 values and the word 4 positions in the run.
The pieces of the 32 lanes stand side by side, those of a task and the tasks of a warp one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from sparta.errors import ShapeError, ValueRangeError, message
from sparta.tesa.attribute import TeSA

__all__ = ["BANKS", "BanksLayout", "run_of", "segments_of"]

BANKS = 32
"""Of shared memory, each of words of 4 bytes; lanes of a warp."""
_MOST_STRIPS, _LONGEST_RUN, _FARTHEST = 256, 256, 15


def segments_of(inputs: int) -> int:
    """Return into how many segments the inputs are cut, so that a position in a run is a byte.

    >>> segments_of(8192), segments_of(8193)
    (1, 2)
    """
    return max(1, -(-inputs // (BANKS * _LONGEST_RUN)))


def run_of(inputs: int) -> int:
    """Return how many neighbouring inputs stand in one bank, a multiple of 8.

    >>> run_of(4096), run_of(4097), run_of(14336)
    (128, 136, 224)
    """
    return max(8, 8 * -(-inputs // (BANKS * 8 * segments_of(inputs))))


class _Index(NamedTuple):
    """The tensors of a layout on one device."""

    plan: Tensor  # int32 (pieces, 32, step): the element of the weight that stands there, or -1
    positions: Tensor  # uint8 (pieces, 32, 4)
    places: Tensor  # int32: first pieces of warps, ends of tasks in the pieces of their warp, outputs of blocks
    owners: Tensor  # uint8 (blocks, warps, turns, 32): the strip of each lane, output * segments + segment


class _Strips(NamedTuple):
    """The entries of all strips, in the order of strips."""

    strip: Tensor  # of each entry: ((block * rows + slot) * segments + segment) * 32 + run
    source: Tensor  # of each entry: the element of the weight, or -1
    position: Tensor  # of each entry: in the run, or the distance from the entry before
    lengths: Tensor  # of each strip


@dataclass(frozen=True, eq=False)
class BanksLayout:
    """How a weight (N, K) with any mask is packed.

    Parameters
    ----------
    weight
        TeSA of the weight.
    warps
        Of a block of threads.
    tasks
        Outputs of a block for each of its warps.
    nibbles
        Whether an input takes half a byte, as the distance from the one before; else a byte.

    Examples
    --------
    >>> mask = torch.rand(40, 900) < 0.3
    >>> layout = BanksLayout(TeSA.from_mask(mask), warps=4, tasks=2)
    >>> weight = torch.randn(40, 900).bfloat16()
    >>> pieces, places, owners = layout.pack(weight)
    >>> torch.equal(layout.unpack(pieces, torch.bfloat16), torch.where(mask, weight, 0))
    True
    """

    weight: TeSA
    warps: int = 8
    tasks: int = 4
    nibbles: bool = True
    _on: dict[torch.device, _Index] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        strips = self.rows * segments_of(self.weight.shape[1])
        if not 1 <= self.warps <= 32 or self.tasks < 1 or strips > _MOST_STRIPS or self.turns > BANKS:
            allowed = f"1 to 32 warps, 1 task or more, at most {_MOST_STRIPS} strips of a run in a block"
            raise ValueRangeError(message(f"warps={self.warps} and tasks={self.tasks}", allowed))

    @property
    def rows(self) -> int:
        """Outputs of a block."""
        return self.warps * self.tasks

    @property
    def turns(self) -> int:
        """Tasks of a warp."""
        return self.tasks * segments_of(self.weight.shape[1])

    @property
    def step(self) -> int:
        """Live values of a piece."""
        return 8 if self.nibbles else 4

    @property
    def grid(self) -> tuple[int, int]:
        """Number of blocks, twice: what the kernel takes as its last number."""
        blocks = max(1, -(-self.weight.shape[0] // self.rows))
        return blocks, blocks

    def pack(self, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return what the kernel reads of a weight (N, K) of 16 or 8 bits: pieces as bytes, places and owners."""
        if tuple(weight.shape) != tuple(self.weight.shape) or weight.element_size() > 2:
            given = f"a weight of shape {tuple(weight.shape)} in {weight.dtype}"
            raise ShapeError(message(given, f"{tuple(self.weight.shape)} in a dtype of 16 or 8 bits"))
        found, wide = self._index(weight.device), weight.element_size() == 2
        elements = weight.detach().contiguous().view(torch.int16 if wide else torch.uint8).flatten()
        values = elements.index_select(0, found.plan.flatten().clamp(min=0)).view(found.plan.shape)
        values = values.masked_fill_(found.plan < 0, 0).view(torch.uint8)
        if self._interleaved(wide=wide):
            pieces = torch.cat([found.positions, values], 2)
        else:
            pieces = torch.cat([found.positions.flatten(1), values.flatten(1)], 1)
        return pieces.flatten(), found.places, found.owners

    def unpack(self, pieces: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the weight (N, K) of a dtype that :meth:`pack` packed."""
        plan, size = self._index(pieces.device).plan, dtype.itemsize
        if self._interleaved(wide=size == 2):
            values = pieces.view(len(plan), BANKS, -1)[:, :, 4:]
        else:
            values = pieces.view(len(plan), -1)[:, 4 * BANKS :]
        values = values.reshape(plan.shape[0], BANKS, -1).view(torch.int16 if size == 2 else torch.uint8)
        dense = values.new_zeros(self.weight.shape).flatten()
        kept = plan >= 0
        dense[plan[kept].long()] = values[kept]
        return dense.view(self.weight.shape).view(dtype)

    def _interleaved(self, *, wide: bool) -> bool:
        """Whether a lane loads positions and values at once."""
        return not self.nibbles and not wide

    def _index(self, device: torch.device) -> _Index:
        if device not in self._on:
            self._on[device] = self._make_index(device)
        return self._on[device]

    def _make_index(self, device: torch.device) -> _Index:
        (blocks, _), strips = self.grid, self.rows * segments_of(self.weight.shape[1])
        slots, outputs = self._slots(device)
        found = self._strips(slots, device)
        lengths = found.lengths.view(blocks, strips, BANKS)
        order = torch.argsort(lengths, dim=1, descending=True, stable=True)  # block, rank, run: strip
        longest = lengths.gather(1, order).amax(2)  # block, rank
        needed = (-(-longest // self.step)).clamp(min=1)
        dealt = self._deal(needed)
        counts = longest.new_zeros(blocks, self.warps, self.turns)
        counts[dealt] = needed
        ends = counts.cumsum(2)  # in the pieces of the warp
        upto = ends[..., -1].flatten().cumsum(0).view(blocks, self.warps)
        pieces, begins_of_warps = int(upto[-1, -1]), upto - ends[..., -1]
        firsts = begins_of_warps[..., None] + ends - counts
        owners = order.new_zeros(blocks, self.warps, self.turns, BANKS)
        owners[dealt] = order
        rank = torch.empty_like(order).scatter_(
            1, order, torch.arange(strips, device=device)[None, :, None].expand_as(order)
        )
        first = firsts[dealt].gather(1, rank.flatten(1)).flatten()[found.strip]  # piece, of each entry
        begins = found.lengths.cumsum(0) - found.lengths
        entry = torch.arange(len(found.strip), device=device) - begins[found.strip]
        place = ((first + entry // self.step) * BANKS + found.strip % BANKS) * self.step + entry % self.step
        plan = torch.full((pieces * BANKS * self.step,), -1, dtype=torch.int32, device=device)
        positions = torch.zeros(pieces * BANKS * self.step, dtype=torch.uint8, device=device)
        plan[place], positions[place] = found.source.to(torch.int32), found.position.to(torch.uint8)
        if self.nibbles:
            positions = positions[0::2] | positions[1::2] << 4
        places = torch.cat([begins_of_warps.flatten(), ends.flatten(), outputs]).to(torch.int32)
        return _Index(
            plan.view(pieces, BANKS, self.step), positions.view(pieces, BANKS, 4), places, owners.to(torch.uint8)
        )

    def _slots(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return for each output its place in all blocks, and for each place its output or -1.

        Outputs are dealt to blocks by their numbers of live values, back and forth, so that blocks have equal work.
        """
        outputs, (blocks, _) = self.weight.shape[0], self.grid
        live = self.weight.mask(device).sum(1)
        order = torch.argsort(live, descending=True, stable=True)
        rank = torch.arange(outputs, device=device)
        round_, column = rank // blocks, rank % blocks
        slot = torch.where(round_ % 2 == 0, column, blocks - 1 - column) * self.rows + round_
        slots = torch.empty_like(order)
        slots[order] = slot
        owner = torch.full((blocks * self.rows,), -1, dtype=torch.int64, device=device)
        owner[slot] = order
        return slots, owner

    def _deal(self, needed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return block, warp and turn of tasks (blocks, ranks) that need so many pieces, the longest first.

        In each turn, the warp that has least so far gets the longest task that is left, so that warps have equal work.
        """
        totals, turns = needed.new_zeros(len(needed), self.warps), []
        for turn in torch.split(needed, self.warps, dim=1):
            turns.append(torch.argsort(totals, dim=1, stable=True))
            totals.scatter_add_(1, turns[-1], turn)
        block = torch.arange(len(needed), device=needed.device)[:, None]
        rank = torch.arange(needed.shape[1], device=needed.device)[None]
        return block, torch.cat(turns, 1), rank // self.warps

    def _strips(self, slots: Tensor, device: torch.device) -> _Strips:
        inputs, (blocks, _) = self.weight.shape[1], self.grid
        segments, run = segments_of(inputs), run_of(inputs)
        by_slot, outputs = torch.sort(slots)
        row, column = self.weight.mask(device)[outputs].nonzero(as_tuple=True)
        segment, within = column // (BANKS * run), column % (BANKS * run)
        strip = (by_slot[row] * segments + segment) * BANKS + within // run  # ascending, as rows and columns are
        position, source = within % run, outputs[row] * inputs + column
        count = blocks * self.rows * segments * BANKS
        if self.nibbles:
            same = torch.zeros_like(strip, dtype=torch.bool)
            same[1:] = strip[1:] == strip[:-1]
            gap = position - torch.where(same, position.roll(1), 0)
            fillers = (gap - 1).clamp(min=0) // _FARTHEST
            last = (fillers + 1).cumsum(0) - 1  # where an element stands among all entries, fillers in front of it
            total = int(last[-1]) + 1 if len(last) else 0
            distance = torch.full((total,), _FARTHEST, dtype=torch.int64, device=device)
            distance[last] = gap - fillers * _FARTHEST
            sources = torch.full((total,), -1, dtype=torch.int64, device=device)
            sources[last] = source
            strip, position, source = strip.repeat_interleave(fillers + 1), distance, sources
        return _Strips(strip, source, position, torch.bincount(strip, minlength=count))

"""How an unstructured weight is stored as the sum of two 2:4 weights, in the order of the sparse matrix unit.

Of the four inputs of a group the first weight has the first two live ones; what is left is the second weight's, and
always stands in the last two places. A record has 16 outputs by 128 inputs: where values of the first weight are, as
the matrix unit wants it; a bit for each value of the second weight, or for both of a group; the first weight with its
zeros, or bits and live values as well; and the live values of each lane, one behind the other. Records have different
sizes and stand in the order in which a warp reads them: slabs within chunks of inputs within groups of slabs.

Inputs are grouped such that what a lane needs of x are 8 neighbours: of every 32 inputs, group 2 i + h has the inputs
16 h + 2 i, the one after it, and those two 8 further.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from sparta.errors import ShapeError, ValueRangeError, message
from sparta.tesa.attribute import TeSA
from sparta.tesa.formats.blocks import pad_matrix

__all__ = ["CHUNK", "SLAB", "TwiceLayout", "record_bytes"]

SLAB = 16
"""Outputs that are multiplied at once."""
CHUNK = 128
"""Input channels of a record: four multiplications of 32."""
_LANES, _MULTIPLIES, _REGISTERS = 32, 4, 4
_PLACES = 256  # bytes of a record that say where values of the first weight are
_WHOLE = 2 * SLAB * CHUNK // 2  # bytes of the first weight with its zeros
_PIECE = 16  # bytes that records are multiples of


def record_bytes(values: int, unit: int, *, whole: bool) -> int:
    """Return the bytes of a record.

    Parameters
    ----------
    values
        Pairs or single values that are stored without zeros.
    unit
        Values that a bit stands for.
    whole
        Whether the first weight is stored with its zeros.

    Examples
    --------
    >>> record_bytes(100, 1, whole=True)
    2640
    """
    bits = _LANES * 4 // unit
    fixed = _PLACES + bits + (_WHOLE if whole else bits)
    return -(-(fixed + 2 * unit * values) // _PIECE) * _PIECE


class _Index(NamedTuple):
    """The tensors of a layout on one device."""

    template: Tensor  # int16 (all records): all that is not a value of the weight
    plan: Tensor  # int32 (all records): the element of the weight that stands there, or -1
    offsets: Tensor  # int32 (records + 1,) in pieces of 16 bytes


@dataclass(frozen=True, eq=False)
class TwiceLayout:
    """How a weight (N, K) with any mask is packed.

    Parameters
    ----------
    weight
        TeSA of the weight.
    unit
        1: a bit for each value of the second weight. 2: a bit for both of a group, stored both if one of them is live.
    whole
        Whether the first weight is stored with its zeros; else like the second one.
    slabs
        Slabs of 16 outputs that a warp multiplies.
    beside
        Groups of slabs of a block; their number is a multiple of it.

    Examples
    --------
    >>> mask = torch.rand(32, 256) < 0.5
    >>> layout = TwiceLayout(TeSA.from_mask(mask))
    >>> weight = torch.randn(32, 256).bfloat16()
    >>> records, offsets = layout.pack(weight)
    >>> torch.equal(layout.unpack(records), torch.where(mask, weight, 0))
    True
    """

    weight: TeSA
    unit: int = 1
    whole: bool = True
    slabs: int = 1
    beside: int = 1
    _on: dict[torch.device, _Index] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.unit not in (1, 2) or min(self.slabs, self.beside) < 1:
            given = f"unit={self.unit}, slabs={self.slabs}, beside={self.beside}"
            raise ValueRangeError(message(given, "a unit of 1 or 2 values, positive numbers"))

    @property
    def grid(self) -> tuple[int, int]:
        """Number of groups of slabs and of chunks."""
        n, k = self.weight.shape
        blocks = max(1, -(-n // (SLAB * self.slabs * self.beside)))
        return blocks * self.beside, max(1, -(-k // CHUNK))

    def largest(self, device: torch.device) -> int:
        """Return the bytes of the largest record.

        Parameters
        ----------
        device
            Where weights are packed.
        """
        return int(self._index(device).offsets.diff().max()) * _PIECE

    def pack(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return all records, int16 (bytes / 2,), and where they begin in pieces of 16 bytes, int32 (records + 1,)."""
        if tuple(weight.shape) != tuple(self.weight.shape) or weight.element_size() != 2:
            given = f"a weight of shape {tuple(weight.shape)} in {weight.dtype}"
            raise ShapeError(message(given, f"{tuple(self.weight.shape)} in a dtype of 16 bits"))
        index = self._index(weight.device)
        elements = weight.detach().contiguous().view(torch.int16).flatten()
        records = elements.index_select(0, index.plan.clamp(min=0))
        return torch.where(index.plan < 0, index.template, records), index.offsets

    def unpack(self, records: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Return the weight (N, K) that :meth:`pack` packed."""
        plan = self._index(records.device).plan
        dense = records.new_zeros(self.weight.shape).flatten()
        kept = plan >= 0
        dense[plan[kept].long()] = records[kept]
        return dense.view(self.weight.shape).view(dtype)

    def _index(self, device: torch.device) -> _Index:
        if device not in self._on:
            self._on[device] = self._make_index(device)
        return self._on[device]

    def _make_index(self, device: torch.device) -> _Index:
        codes = self._codes(device)
        first, rest = _first_two(device)[codes.long()], codes >> 2 & _left_over(device)[codes.long()]
        places = _places_of(first)
        flags = torch.stack([rest & 1, rest >> 1], -1).bool()
        sources = self._elements(torch.tensor([2, 3], device=device).expand_as(flags), flags)
        own = torch.stack([first >> 4 & 1, first >> 5 & 1], -1).bool()
        own_sources = self._elements(torch.stack([first & 3, first >> 2 & 3], -1), own)
        bits = [self._bits(flags)]
        if not self.whole:
            # record, lane, multiply, weight, register, value
            flags, sources = torch.stack([own, flags], 3), torch.stack([own_sources, sources], 3)
            bits.insert(0, self._bits(own))
        parts = [places, *bits]
        fixed = torch.cat([part.flatten(1) for part in parts], 1)
        whole = own_sources.transpose(1, 2).flatten(1) if self.whole else None
        return _assembled(fixed, whole, flags.flatten(1), sources.flatten(1), self.unit)

    def _codes(self, device: torch.device) -> Tensor:
        """Return which inputs of a group are live, four bits: uint8 (records, 32 lanes, 4 multiplies, 4 registers)."""
        (groups, chunks), slabs = self.grid, self.slabs
        padded = pad_matrix(self.weight.mask(device), (groups * slabs * SLAB, chunks * CHUNK))
        # row | chunk, multiply, half of the quad's lanes, second pair, i, odd
        apart = padded.view(-1, chunks, _MULTIPLIES, 2, 2, 4, 2)
        weights = torch.tensor([[1, 2], [4, 8]], dtype=torch.uint8, device=device)
        codes = (apart * weights[:, None, :]).sum((4, 6), dtype=torch.uint8)
        # group, slab, row half, g | chunk, multiply, h, (quad half, i within)  ->  group 2 i + h is 4 quad half + t
        codes = codes.transpose(3, 4).reshape(groups, slabs, 2, 8, chunks, _MULTIPLIES, 2, 4)
        return codes.permute(0, 4, 1, 3, 7, 5, 6, 2).reshape(-1, _LANES, _MULTIPLIES, _REGISTERS)

    def _elements(self, positions: Tensor, live: Tensor) -> Tensor:
        """Return the elements of the weight at places of groups (records, 32, 4, 4, 2), -1 where they are not live."""
        k, chunks, slabs, device = self.weight.shape[1], self.grid[1], self.slabs, positions.device
        record = torch.arange(len(positions), device=device).view(-1, 1, 1, 1)
        lane = torch.arange(_LANES, device=device).view(-1, 1, 1)
        multiply, register = torch.arange(4, device=device).view(-1, 1), torch.arange(4, device=device)
        slab = record // (slabs * chunks) * slabs + record % slabs
        group = register // 2 * 4 + lane % 4
        row = slab * SLAB + register % 2 * 8 + lane // 4
        column = record // slabs % chunks * CHUNK + multiply * 32 + group % 2 * 16 + group // 2 * 2
        column = column[..., None] + positions // 2 * 8 + positions % 2
        return torch.where(live, row[..., None] * k + column, -1).to(torch.int32)

    def _bits(self, flags: Tensor) -> Tensor:
        """Return bits (records, 32 lanes) as int16 words, those of a lane together."""
        which = flags.flatten(2) if self.unit == 1 else flags.any(-1).flatten(2)
        return _words(which)


def _words(bits: Tensor) -> Tensor:
    """Return bits (..., 16 n) as int16 (..., n)."""
    shifts = torch.arange(16, device=bits.device)
    words = (torch.unflatten(bits, -1, (-1, 16)).to(torch.int32) << shifts).sum(-1)
    return torch.where(words >= 1 << 15, words - (1 << 16), words).to(torch.int16)


def _first_two(device: torch.device) -> Tensor:
    """Return for 16 masks of a group the places of its first two live inputs, and two bits that say which are live.

    Places are ascending, as the matrix unit wants them.

    >>> [int(_first_two(torch.device("cpu"))[code]) for code in (0b1010, 0b0100)] == [0b111101, 0b101000]
    True
    """
    found = []
    for code in range(16):
        live = [place for place in range(4) if code >> place & 1][:2]
        places = sorted([*live, *(place for place in range(4) if place not in live)][:2])
        found.append(places[0] | places[1] << 2 | (places[0] in live) << 4 | (places[1] in live) << 5)
    return torch.tensor(found, dtype=torch.int32, device=device)


def _left_over(device: torch.device) -> Tensor:
    """Return for 16 masks of a group which of the last two places belong to the second weight."""
    found = []
    for code in range(16):
        left = [place for place in range(4) if code >> place & 1][2:]
        found.append(sum(1 << place - 2 for place in left))
    return torch.tensor(found, dtype=torch.int32, device=device)


def _places_of(first: Tensor) -> Tensor:
    """Return where the first weight's values are, (records, 32 lanes, 4) int16: words as the matrix unit takes them."""
    # lane: g, t; register: quad half, row half
    nibbles = torch.unflatten(torch.unflatten(first & 15, 1, (8, 4)), -1, (2, 2))
    shifts = (torch.arange(4, device=first.device) * 4).view(4, 1, 1, 1)
    rows = (nibbles << shifts).sum(2)  # record, g, multiply, quad half, row half
    rows = torch.where(rows >= 1 << 15, rows - (1 << 16), rows).to(torch.int16)
    # record, g, pair, which, quad half, row half  ->  lane (g, which, quad half), pair, row half
    return torch.unflatten(rows, 2, (2, 2)).permute(0, 1, 3, 4, 2, 5).reshape(len(first), _LANES, 4)


def _assembled(fixed: Tensor, whole: Tensor | None, flags: Tensor, sources: Tensor, unit: int) -> _Index:
    """Return records of parts.

    Parameters
    ----------
    fixed
        int16 (records, elements): what records begin with.
    whole
        int32 (records, elements): which elements of the weight follow, -1 for zeros; or None.
    flags, sources
        (records, values): what is live of the values that are stored without zeros, and which elements they are.
    """
    device = fixed.device
    stored = flags if unit == 1 else torch.unflatten(flags, 1, (-1, 2)).any(2)
    counts = stored.sum(1)
    head = fixed.shape[1] + (0 if whole is None else whole.shape[1])
    pieces = -(-(head + unit * counts) * 2 // _PIECE)
    offsets = torch.cat([pieces.new_zeros(1), pieces.cumsum(0)])
    begin = offsets[:-1] * (_PIECE // 2)
    size = int(offsets[-1]) * (_PIECE // 2)
    template = torch.zeros(size, dtype=torch.int16, device=device)
    template[begin[:, None] + torch.arange(fixed.shape[1], device=device)] = fixed
    plan = torch.full((size,), -1, dtype=torch.int32, device=device)
    if whole is not None:
        plan[begin[:, None] + torch.arange(fixed.shape[1], head, device=device)] = whole
    which = stored.flatten().nonzero()[:, 0]
    record = which // stored.shape[1]
    before = counts.cumsum(0) - counts
    at = begin[record] + head + unit * (torch.arange(len(which), device=device) - before[record])
    for value in range(unit):
        plan[at + value] = sources.flatten()[which * unit + value]
    return _Index(template, plan, offsets.to(torch.int32))

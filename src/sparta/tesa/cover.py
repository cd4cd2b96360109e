"""Weighted block cover: write an irregular mask as a sum of block-regular ones, at the least cost.

A kernel runs blocks of one size; a mask rarely fits one. :func:`block_cover` covers the live elements with blocks of
several sizes, each with its measured cost, by the greedy rule for weighted set cover: always take the block with the
least cost per newly covered element. A block that beats every block it overlaps will be taken whatever happens
elsewhere, so all such blocks are taken at once, and the result is still exactly the greedy one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from sparta.errors import ShapeError, ValueRangeError, message
from sparta.tables import table
from sparta.tesa.attribute import TeSA
from sparta.tesa.grid import cells_shape
from sparta.tesa.mask import as_mask

__all__ = ["Cover", "CoverPart", "block_cover"]

BlockSize = tuple[int, int]

# Work on about this many elements at a time: enough to hide the cost of a call, few enough to fit the caches.
_ELEMENTS_AT_ONCE = 1 << 20


@dataclass(frozen=True, eq=False)
class CoverPart:
    """The blocks of one size in a cover.

    Parameters
    ----------
    block
        Size (h, w) of the blocks; those at the lower and right edge of the matrix may be cut off.
    block_cost
        Cost of executing one block, cut off or not.
    kept_blocks
        bool of shape ``ceil(shape / block)``: which blocks are executed.
    owned
        bool of the mask's shape: the live elements assigned to this part, all inside its blocks.
    tesa
        The block-regular TeSA of this part: live in all of its blocks, 0 elsewhere.
    """

    block: BlockSize
    block_cost: float
    kept_blocks: Tensor
    owned: Tensor
    tesa: TeSA

    @property
    def count(self) -> int:
        """How many blocks are executed."""
        return int(self.kept_blocks.sum())

    @property
    def cost(self) -> float:
        """Cost of all blocks of this part."""
        return self.count * self.block_cost


@dataclass(frozen=True, eq=False)
class Cover:
    """A mask as a sum of block-regular parts, with the cost of executing them; made by :func:`block_cover`.

    Parameters
    ----------
    shape
        Shape (M, K) of the mask.
    parts
        One part for each block size in use, largest area first (then larger height).

    Examples
    --------
    >>> mask = torch.zeros(64, 64, dtype=torch.bool)
    >>> mask[:32, :32] = mask[40, 50] = True
    >>> cover = block_cover(mask, {(32, 32): 6.25, (1, 1): 0.0064})
    >>> print(cover)
    cover of 64×64: cost 6.256, 0.0% of the covered elements are not live
    block  blocks    of  cost each    cost  owned   fill
    -----  ------  ----  ---------  ------  -----  -----
    32×32       1     4       6.25    6.25   1024  1.000
    1×1         1  4096     0.0064  0.0064      1  1.000
    """

    shape: tuple[int, int]
    parts: tuple[CoverPart, ...]

    @property
    def cost(self) -> float:
        """Cost of all blocks of all parts."""
        return sum((part.cost for part in self.parts), 0.0)

    @property
    def waste(self) -> float:
        """Fraction of the covered elements that are not live (0.0 where nothing is covered)."""
        if not self.parts:
            return 0.0
        covered = torch.stack([_spread(part.kept_blocks, self.shape, part.block) for part in self.parts]).any(0)
        live = sum(int(part.owned.sum()) for part in self.parts)
        return 1.0 - live / int(covered.sum())

    def split(self, dense: Tensor) -> tuple[Tensor, ...]:
        """Return one tensor a part, each obeying its TeSA; their sum is exactly ``where(mask, dense, 0)``.

        Every live element stands in exactly one of the tensors, so no rounding takes place.

        Parameters
        ----------
        dense
            Tensor of shape (M, K), of any dtype, stride and device.

        Examples
        --------
        >>> mask = torch.tensor([[True, True, False, False], [True, True, False, True]])
        >>> cover = block_cover(mask, {(2, 2): 3.0, (1, 1): 1.0})
        >>> square, rest = cover.split(torch.arange(8.0).reshape(2, 4))
        >>> square
        tensor([[0., 1., 0., 0.],
                [4., 5., 0., 0.]])
        >>> rest
        tensor([[0., 0., 0., 0.],
                [0., 0., 0., 7.]])
        """
        if tuple(dense.shape) != self.shape:
            raise ShapeError(
                message(
                    f"a tensor of shape {tuple(dense.shape)} for a cover of {self.shape}",
                    f"shape {self.shape}",
                )
            )
        zero = torch.zeros((), dtype=dense.dtype, device=dense.device)
        return tuple(torch.where(part.owned.to(dense.device), dense, zero) for part in self.parts)

    def to_dict(self) -> dict[str, Any]:
        """Return the summary as plain numbers, ready for JSON."""
        return {
            "shape": list(self.shape),
            "cost": self.cost,
            "waste": self.waste,
            "parts": [
                {
                    "block": list(part.block),
                    "blocks": part.count,
                    "grid": list(part.kept_blocks.shape),
                    "block_cost": part.block_cost,
                    "cost": part.cost,
                    "owned": int(part.owned.sum()),
                }
                for part in self.parts
            ],
        }

    def __str__(self) -> str:
        rows = []
        for part in self.parts:
            owned = int(part.owned.sum())
            size = "×".join(map(str, part.block))
            fill = f"{owned / max(1, part.tesa.count()):.3f}"
            rows.append([size, part.count, part.kept_blocks.numel(), part.block_cost, part.cost, owned, fill])
        title = f"cover of {'×'.join(map(str, self.shape))}: cost {self.cost:.4g}, "
        title += f"{self.waste:.1%} of the covered elements are not live"
        return table(["block", "blocks", "of", "cost each", "cost", "owned", "fill"], rows, title)


def block_cover(mask: Tensor | TeSA, costs: Mapping[BlockSize, float], *, prune_redundant: bool = True) -> Cover:
    """Cover the live elements of a matrix with grid-aligned blocks, by greedy weighted set cover.

    The block with the least cost per newly covered live element is taken, again and again, until all are
    covered; of blocks that tie, the one with the larger area, then the larger height, then the smaller
    position. Runs on the mask's device, and is deterministic.

    Parameters
    ----------
    mask
        bool (or 0/1) tensor of shape (M, K), or a 2-D TeSA whose live elements share one bit format, which
        the parts keep, with its scales. Constants other than 0 are not covered: they are the caller's to add.
    costs
        Cost of executing one block of each size (h, w); (1, 1) stands for fine-grained execution. A block cut
        off by the edge of the matrix costs as much as any other. No size may be larger than the matrix.
    prune_redundant
        Afterwards drop the blocks whose live elements are all covered by others as well, the most expensive
        first. It never raises the cost, and leaves a cover in which every block is needed.

    Examples
    --------
    >>> mask = torch.zeros(4, 8, dtype=torch.bool)
    >>> mask[:, :4] = mask[0, 6] = True
    >>> cover = block_cover(mask, {(4, 4): 4.0, (2, 2): 1.5, (1, 1): 1.0})
    >>> [(part.block, part.count) for part in cover.parts], cover.cost
    ([((4, 4), 1), ((1, 1), 1)], 5.0)
    """
    source = mask if isinstance(mask, TeSA) else None
    live = mask.mask() if isinstance(mask, TeSA) else as_mask(mask)
    if live.dim() != 2:
        raise ShapeError(message(f"a mask of shape {tuple(live.shape)}", "a matrix", "reshape it to 2-D first"))
    if source is not None and source.format is None:
        given = f"a TeSA of several bit formats ({source.describe_bits()})"
        raise ValueRangeError(message(given, "one bit format", "take it apart with `split_bits` first"))
    shape = (live.shape[0], live.shape[1])
    checked = _checked_costs(costs, shape)
    if not bool(live.any()):
        return Cover(shape, ())
    rows = _rows_at_once(shape, list(checked))
    bands = [_cover_band(band, checked, prune_redundant=prune_redundant) for band in torch.split(live, rows)]
    parts = []
    for position, size in enumerate(checked):
        kept_blocks = torch.cat([kept[position] for kept, _ in bands])
        if bool(kept_blocks.any()):
            owned = torch.cat([owner == position for _, owner in bands])
            tesa = _part_tesa(kept_blocks, shape, size, source)
            parts.append(CoverPart(size, checked[size], kept_blocks, owned, tesa))
    return Cover(shape, tuple(parts))


# ---------------------------------------------------------------------- arguments


def _checked_costs(costs: Mapping[BlockSize, float], shape: tuple[int, int]) -> dict[BlockSize, float]:
    """Return the costs in the order of the tie rule: largest area first, then larger height."""
    if not costs:
        raise ValueRangeError(message("no block sizes to cover with", "at least one", "pass {(1, 1): 1.0, ...}"))
    for block, cost in costs.items():
        if not isinstance(block, tuple) or len(block) != 2:
            raise ShapeError(message(f"block {block!r}", "a tuple (h, w)"))
        if any(isinstance(side, bool) or not isinstance(side, int) or side < 1 for side in block):
            raise ValueRangeError(message(f"block {block}", "integers of at least 1"))
        if any(side > max(1, size) for side, size in zip(block, shape, strict=True)):
            given = f"block {block} for a matrix of shape {shape}"
            raise ShapeError(message(given, "blocks no larger than the matrix", "leave this size out"))
        if not _is_number(cost) or not (math.isfinite(cost) and cost > 0):
            raise ValueRangeError(message(f"cost {cost!r} for block {block}", "finite numbers > 0"))
    order = sorted(costs, key=lambda block: (block[0] * block[1], block[0]), reverse=True)
    return {block: float(costs[block]) for block in order}


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _rows_at_once(shape: tuple[int, int], sizes: Sequence[BlockSize]) -> int:
    """Return how many rows to work on at a time; no block crosses from one such band of rows to the next."""
    step = math.lcm(*(h for h, _ in sizes))
    return min(shape[0], step * max(1, _ELEMENTS_AT_ONCE // (step * shape[1])))


def _part_tesa(kept_blocks: Tensor, shape: tuple[int, int], block: BlockSize, source: TeSA | None) -> TeSA:
    """Return the block-regular TeSA of one part, with the bit format and scales of `source`."""
    regular = TeSA.from_block_mask(kept_blocks, shape, block)
    if source is None or source.format is None:
        return regular
    formatted = regular.with_format(source.format)
    return replace(formatted, scale=source.scale, zero_point=source.zero_point)


def _spread(kept_blocks: Tensor, shape: tuple[int, int], block: BlockSize) -> Tensor:
    """Return the bool matrix of the elements inside the kept blocks."""
    spread = kept_blocks.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return spread[: shape[0], : shape[1]]


# ---------------------------------------------------------------------- the greedy rule


@dataclass(frozen=True)
class _Atoms:
    """The live elements of a matrix, gathered into atoms: rectangles that no block larger than (1, 1) cuts.

    The blocks of all sizes are numbered together, one size after the other. The (1, 1) blocks of one atom are
    always taken together, so they have one number between them.

    Parameters
    ----------
    live
        int64, one an atom: its number of live elements; atoms without any are left out.
    place
        int64, one an atom: its place in the flattened grid of atoms.
    blocks
        int32 of shape (sizes, atoms): the number of the block of each size that the atom lies in.
    first
        For each size the number of its first block; one more entry for the end.
    row_of, column_of
        int64: the row or column of the grid of atoms that each row or column of the matrix lies in.
    """

    live: Tensor
    place: Tensor
    blocks: Tensor
    first: list[int]
    row_of: Tensor
    column_of: Tensor

    @staticmethod
    def of(mask: Tensor, sizes: Sequence[BlockSize]) -> _Atoms:
        """Gather the live elements of `mask`."""
        cutting = [size for size in sizes if size != (1, 1)]
        row_of, row_start = _segments(mask.shape[0], [h for h, _ in cutting], mask.device)
        column_of, column_start = _segments(mask.shape[1], [w for _, w in cutting], mask.device)
        counts = _summed(_summed(mask.to(torch.int32), row_of, len(row_start)).T, column_of, len(column_start)).T
        row, column = counts.nonzero(as_tuple=True)
        numbers, first = [], [0]
        for h, w in sizes:
            if (h, w) == (1, 1):
                numbers.append(first[-1] + torch.arange(len(row), device=mask.device))
                first.append(first[-1] + len(row))
            else:
                height, width = cells_shape(mask.shape, (h, w))
                numbers.append((first[-1] + row_start // h * width)[row] + (column_start // w)[column])
                first.append(first[-1] + height * width)
        place = row * len(column_start) + column
        return _Atoms(counts[row, column].long(), place, torch.stack(numbers).int(), first, row_of, column_of)

    def spread(self, values: Tensor, fill: int) -> Tensor:
        """Return the matrix that holds, at each element, the value of its atom; `fill` outside all atoms."""
        grid = (int(self.row_of[-1]) + 1, int(self.column_of[-1]) + 1)
        flat = torch.full((math.prod(grid),), fill, dtype=values.dtype, device=values.device)
        flat[self.place] = values
        return flat.view(grid)[self.row_of][:, self.column_of]


def _segments(size: int, steps: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Cut a dim at the multiples of every step; return each index's segment and each segment's start."""
    starts = torch.zeros(size, dtype=torch.bool, device=device)
    starts[0] = True
    for step in set(steps):
        starts[::step] = True
    return starts.cumsum(0) - 1, starts.nonzero().squeeze(1)


def _summed(values: Tensor, segment_of: Tensor, segments: int) -> Tensor:
    """Add up the rows of each segment."""
    if segments == len(values):
        return values
    return values.new_zeros((segments, values.shape[1])).index_add_(0, segment_of, values)


def _cover_band(
    mask: Tensor, costs: Mapping[BlockSize, float], *, prune_redundant: bool
) -> tuple[list[Tensor], Tensor]:
    """Return which blocks of each size are kept, and for each element the position in `costs` of its owner.

    The owner is the largest block that covers the element; it is -1 where the mask is false.
    """
    atoms = _Atoms.of(mask, list(costs))
    kept = _greedy(atoms, costs)
    if prune_redundant:
        _drop_redundant(atoms, kept, costs)
    grids = []
    owner = torch.full_like(atoms.live, -1, dtype=torch.int16)
    for position, size in reversed(list(enumerate(costs))):
        covering = kept[atoms.blocks[position]]
        owner = torch.where(covering, position, owner)
        if size == (1, 1):
            grids.append(mask & atoms.spread(covering, fill=False))
        else:
            of_size = kept[atoms.first[position] : atoms.first[position + 1]]
            grids.append(of_size.view(cells_shape(mask.shape, size)))
    return grids[::-1], torch.where(mask, atoms.spread(owner, fill=-1), -1)


def _greedy(atoms: _Atoms, costs: Mapping[BlockSize, float]) -> Tensor:
    """Return, for each block by number, whether the greedy rule takes it.

    Covering elements only makes the blocks that are left worse. So a block that is better than all the blocks
    with which it shares uncovered elements stays so until it is taken, and nothing taken before it changes
    what it covers: each round takes all such blocks at once. Blocks of one size share nothing, so they never
    compete.
    """
    device, total = atoms.live.device, atoms.first[-1]
    cost = torch.empty(total, dtype=torch.float64, device=device)
    for position, block_cost in enumerate(costs.values()):
        cost[atoms.first[position] : atoms.first[position + 1]] = block_cost
    live, blocks = atoms.live, atoms.blocks
    uncovered = torch.zeros(total, dtype=torch.long, device=device)
    for numbers in blocks:
        uncovered.index_add_(0, numbers, live)
    kept = torch.zeros(total, dtype=torch.bool, device=device)
    while live.numel():
        cost_per_element = cost / uncovered
        if (1, 1) in costs:
            cost_per_element[atoms.first[-2] :] = costs[1, 1]
        best = blocks[0]
        least = cost_per_element[best]
        for numbers in blocks[1:]:
            other = cost_per_element[numbers]
            # Sizes come in the order of the tie rule: a later one must be strictly better.
            best = torch.where(other < least, numbers, best)
            least = torch.minimum(other, least)
        agreeing = torch.zeros_like(uncovered).index_add_(0, best, live)
        taken = (agreeing == uncovered) & (uncovered > 0)
        kept |= taken
        covered = taken[best]
        gone, left = covered.nonzero().squeeze(1), (~covered).nonzero().squeeze(1)
        newly = live[gone]
        for numbers in blocks:
            uncovered.index_add_(0, numbers[gone], newly, alpha=-1)
        live, blocks = live[left], blocks.index_select(1, left)
    return kept


def _drop_redundant(atoms: _Atoms, kept: Tensor, costs: Mapping[BlockSize, float]) -> None:
    """Take out of `kept` the blocks whose atoms are all covered by others too, the most expensive size first.

    Blocks of one size share no elements, so those of one size can be judged, and dropped, all at once.
    """
    times = sum((kept[numbers].int() for numbers in atoms.blocks), torch.zeros_like(atoms.live, dtype=torch.int32))
    prices = list(costs.values())
    for position in sorted(range(len(prices)), key=lambda p: -prices[p]):
        numbers = atoms.blocks[position]
        covering = kept[numbers]
        needed = torch.zeros_like(kept)
        needed[numbers[covering & (times == 1)]] = True
        dropped = covering & ~needed[numbers]
        kept[numbers[dropped]] = False
        times -= dropped.int()

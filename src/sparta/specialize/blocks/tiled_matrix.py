"""A sparse matrix as it comes and goes, whole or compressed, and as block rows see it.

Compressed values are the kept blocks of one block index, flat: ``(..., kept * h * w)``, as
:func:`~sparta.tesa.formats.functions.get_bcs_function` makes them. Masks that differ by head share the index of all
blocks that any of them keeps, so values have one shape for all heads, and 0 where one prunes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from sparta.specialize.blocks.batches import Batches
from sparta.specialize.blocks.block_moves import pick, place
from sparta.specialize.blocks.block_rows import BlockRows
from sparta.tesa.formats.block_index import BlockIndex
from sparta.tesa.grid import Grid

__all__ = ["TiledMatrix", "any_group", "block_places", "own_block", "to_values", "to_whole"]


def any_group(mask: Tensor) -> Tensor:
    """Return (rows, cols): what any of the masks (..., rows, cols) keeps.

    >>> any_group(torch.tensor([[[True, False]], [[False, False]]]))
    tensor([[ True, False]])
    """
    return mask.flatten(0, -3).any(0) if mask.dim() > 2 else mask


def own_block(mask: Tensor) -> tuple[int, int]:
    """Return (h, w): the largest blocks that the masks (..., rows, cols) together are made of.

    >>> own_block(torch.ones(2, 2, dtype=torch.bool).repeat_interleave(3, 0).tril())
    (1, 1)
    >>> own_block(torch.tensor([[1, 1, 0, 0]]) > 0)
    (1, 2)
    """
    h, w = Grid.from_dense(any_group(mask)).block
    return h, w


def block_places(mask: Tensor, block: tuple[int, int]) -> Tensor:
    """Return (3, kept): 0, row and column of the kept blocks that compressed values are made of.

    >>> block_places(torch.tensor([[False, True]]), (1, 1)).flatten().tolist()
    [0, 0, 1]
    """
    rows, cols = BlockIndex.from_mask(any_group(mask), block).coordinates("csr")
    return torch.stack([torch.zeros_like(rows), rows, cols]).long()


def to_whole(values: Tensor, places: Tensor, shape: Sequence[int], block: tuple[int, int]) -> Tensor:
    """Return the matrix (..., rows, cols) of compressed values (..., kept * h * w).

    >>> to_whole(torch.tensor([5.0]), torch.tensor([[0], [0], [1]]), (1, 2), (1, 1)).tolist()
    [[0.0, 5.0]]
    """
    lead = values.shape[:-1]
    tiles = values.reshape(math.prod(lead), places.shape[1], *block)
    return place(tiles, places, (1, shape[0], shape[1])).reshape(*lead, *shape)


def to_values(whole: Tensor, places: Tensor, block: tuple[int, int]) -> Tensor:
    """Undo :func:`to_whole`.

    >>> to_values(torch.tensor([[0.0, 5.0]]), torch.tensor([[0], [0], [1]]), (1, 1)).tolist()
    [5.0]
    """
    lead = whole.shape[:-2]
    tiles = pick(whole.reshape(math.prod(lead), 1, *whole.shape[-2:]), places, block)
    return tiles.reshape(*lead, math.prod(tiles.shape[1:]))


class TiledMatrix:
    """The block rows of a sparse matrix that is stored whole or compressed.

    Parameters
    ----------
    mask
        (..., rows, cols), of the matrix as it is stored.
    block
        (h, w) of compressed values; None for a matrix that is stored whole.
    tile
        (h, w) to compute in, of the matrix as it is stored.
    transpose
        Whether the block rows are those of the transposed matrix.

    Examples
    --------
    >>> matrix = TiledMatrix(torch.eye(4, dtype=torch.bool), (2, 2), (2, 2))
    >>> packed, values = matrix.tensors("cpu"), torch.arange(8.0)
    >>> bands = matrix.bands(packed, values, Batches((), ()))
    >>> matrix.stored(packed, bands, Batches((), ())).tolist()
    [0.0, 0.0, 0.0, 3.0, 4.0, 0.0, 0.0, 7.0]
    """

    def __init__(
        self, mask: Tensor, block: tuple[int, int] | None, tile: tuple[int, int], *, transpose: bool = False
    ) -> None:
        self.mask_lead, self.shape = tuple(mask.shape[:-2]), (mask.shape[-2], mask.shape[-1])
        self._block, self._transpose = block, transpose
        self._places = torch.zeros(3, 0, dtype=torch.long) if block is None else block_places(mask, block)
        groups = Batches(self.mask_lead, self.mask_lead).fold(mask)[0]
        # Values whose blocks are the tiles are used as they come; others go through the whole matrix.
        self._direct = tile == block
        listing = self._listing(len(groups), tile) if self._direct else None
        turned = (groups.mT, tile[::-1]) if transpose else (groups, tile)
        self.rows = BlockRows.from_mask(*turned, listing)

    def _listing(self, groups: int, block: tuple[int, int]) -> Tensor:
        """Return where each block of each group is among the compressed values of all groups."""
        kept = self.kept
        grid = torch.full((-(-self.shape[0] // block[0]), -(-self.shape[1] // block[1])), -1)
        grid[self._places[1], self._places[2]] = torch.arange(kept)
        listing = torch.where(grid < 0, -1, grid + kept * torch.arange(groups)[:, None, None])
        return listing.mT if self._transpose else listing

    @property
    def kept(self) -> int:
        """Number of blocks of compressed values."""
        return self._places.shape[1]

    def tensors(self, device: torch.device | str) -> tuple[Tensor, ...]:
        """Return what the methods below take as `packed`; `packed[1:]` is what :attr:`rows` takes."""
        return tuple(t.to(device) for t in (self._places, *self.rows.tensors))

    def bands(self, packed: Sequence[Tensor], stored: Tensor, batches: Batches) -> list[Tensor]:
        """Return a stored matrix as rows of tiles, see :meth:`BlockRows.spread`; pruned elements are 0."""
        if self._direct:
            assert self._block is not None  # noqa: S101 - what direct means
            values = batches.fold(torch.unflatten(stored, -1, (self.kept, math.prod(self._block))))
            tiles = values.reshape(values.shape[0], values.shape[1] * values.shape[2], *self._block)
            return self.rows.spread(packed[1:], tiles.mT if self._transpose else tiles)
        if self._block is not None:
            stored = to_whole(stored, packed[0], self.shape, self._block)
        whole = batches.fold(stored)
        tiles = pick(whole.mT if self._transpose else whole, packed[1], self.rows.tile)
        return self.rows.spread(packed[1:], tiles)

    def stored(self, packed: Sequence[Tensor], bands: Sequence[Tensor], batches: Batches) -> Tensor:
        """Undo :meth:`bands`: return the matrix as it is stored, 0 where it is pruned."""
        tiles = self.rows.collect(packed[1:], bands)
        tiles = tiles.mT if self._transpose and self._direct else tiles
        if self._direct:
            assert self._block is not None  # noqa: S101 - what direct means
            values = tiles.reshape(tiles.shape[0], self.rows.groups, self.kept, math.prod(self._block))
            return batches.unfold(values).flatten(-2)
        whole = place(tiles, packed[1], (self.rows.groups, *self.rows.shape))
        whole = batches.unfold(whole.mT if self._transpose else whole)
        return whole if self._block is None else to_values(whole, packed[0], self._block)

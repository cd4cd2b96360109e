"""Block rows: the kept blocks of a mask, laid out so that plain batched products run over them.

Each row of blocks gets its kept blocks side by side, so one batched product, and one softmax along the last dim, serve
many rows at once; the torch implements of products, softmax and attention all stand on this. Rows that keep about
equally many blocks form a *band* and are padded to the longest of it; a padded place repeats one of the row's own
blocks and is masked, so padding never brings a foreign NaN in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparta.specialize.blocks.block_moves import gather, pad_to_tiles
from sparta.tesa.attribute import TeSA

__all__ = ["Band", "BlockRows", "tile_candidates", "tile_guess"]

_BANDS = 12  # with more different lengths of rows than this, alike ones share a band
_BAND_RATIO = 1.4  # where the longest row keeps at most so many times the blocks of the shortest
_TILES = (16, 32, 64, 128)


@dataclass(frozen=True)
class Band:
    """Rows of blocks that are computed together.

    Attributes
    ----------
    rows
        How many rows of blocks.
    width
        How many blocks each has, padding included.
    full
        Whether every element is live, so that nothing needs to be masked.
    covered
        Whether every row of elements has a live one.
    """

    rows: int
    width: int
    full: bool
    covered: bool


@dataclass(frozen=True, eq=False)
class BlockRows:
    """The layout of the kept tiles of masks (groups, P, Q); make one with :meth:`from_mask`.

    The methods take the layout's tensors as `packed`, so that a module can keep them in buffers and move them; S is the
    number of problems that share the masks.

    Attributes
    ----------
    groups, shape, tile
        How many masks, their (P, Q), and the tile (h, w).
    bands
        The bands, those of long rows first.
    listed
        Length of the list that tiles are taken from and collected to.
    in_order
        Whether the list is exactly the kept tiles in the order of the bands, so that nothing has to be moved.
    tensors
        (3, kept) group, row and column of each kept tile; (kept,) its place in the list; (kept,) its place in the
        bands; (all rows,) the rows of the bands; then for each band its columns, its tiles (both (rows * width,)) and
        its live elements (rows, h, width * w).

    Examples
    --------
    >>> layout = BlockRows.from_mask(torch.eye(4, dtype=torch.bool)[None], (2, 2))
    >>> layout.bands
    (Band(rows=2, width=1, full=False, covered=True),)
    >>> from sparta.specialize.blocks.block_moves import pick
    >>> dense = torch.arange(16.0).reshape(1, 1, 4, 4)
    >>> layout.spread(layout.tensors, pick(dense, layout.tensors[0], (2, 2)))[0].tolist()
    [[[[0.0, 0.0], [0.0, 5.0]], [[10.0, 0.0], [0.0, 15.0]]]]
    """

    groups: int
    shape: tuple[int, int]
    tile: tuple[int, int]
    bands: tuple[Band, ...]
    listed: int
    in_order: bool
    tensors: tuple[Tensor, ...]

    @staticmethod
    def from_mask(mask: Tensor, tile: tuple[int, int], listing: Tensor | None = None) -> BlockRows:
        """Lay out the tiles that hold a live element.

        Parameters
        ----------
        mask
            Bool, (groups, P, Q).
        tile
            (h, w); tiles at the edges may be partly outside.
        listing
            (groups, grid rows, grid cols): the place of each tile in the list it is taken from, which has
            ``listing.max() + 1`` tiles; None numbers the kept tiles row by row.
        """
        groups, rows, cols = mask.shape
        tiles = _tiles(pad_to_tiles(mask[None], tile), tile)[0]
        kept = tiles.any(-1).any(-1)
        places = kept.nonzero().t().contiguous()
        numbering = (kept.flatten().cumsum(0) - 1).reshape(kept.shape)
        listed = places.shape[1] if listing is None else int(listing.max()) + 1 if listing.numel() else 0
        listing = numbering if listing is None else listing

        per_row = kept.flatten(0, 1)
        bands, tensors, slots, first = [], [], torch.zeros_like(places[0]), 0
        for band_rows, width in _bands(per_row.sum(1)):
            columns, valid = _padded_columns(per_row[band_rows], width)
            at = (band_rows[:, None] // kept.shape[1], band_rows[:, None] % kept.shape[1], columns)
            inside = (tiles[at] & valid[..., None, None]).transpose(1, 2).flatten(2)  # (rows, h, width * w)
            slot = torch.arange(first, first + columns.numel()).reshape(columns.shape)
            slots[numbering[at][valid]] = slot[valid]
            bands.append(Band(len(band_rows), width, bool(inside.all()), bool(inside.any(-1).all())))
            tensors += [(at[0] * kept.shape[2] + columns).flatten(), listing[at].flatten(), inside.contiguous()]
            first += columns.numel()
        order = listing[tuple(places)]
        all_rows = torch.cat([band_rows for band_rows, _ in _bands(per_row.sum(1))])
        in_order = len(bands) == 1 and listed == first and torch.equal(order, slots)
        return BlockRows(
            groups, (rows, cols), tile, tuple(bands), listed, in_order, (places, order, slots, all_rows, *tensors)
        )

    # ------------------------------------------------------------------ the sparse matrix

    def spread(self, packed: Sequence[Tensor], tiles: Tensor) -> list[Tensor]:
        """Return the listed tiles (S, listed, h, w) as rows: for each band (S, rows, h, width * w), 0 where pruned."""
        (h, w), spread = self.tile, []
        indices = [packed[4 + 3 * number + 1] for number in range(len(self.bands))]
        for band, inside, taken in zip(
            self.bands, self.insides(packed), [tiles] if self.in_order else gather(tiles, indices), strict=True
        ):
            row = torch.unflatten(taken, 1, (band.rows, band.width)).transpose(2, 3)
            row = row.reshape(taken.shape[0], band.rows, h, band.width * w)
            spread.append(row if inside is None else torch.where(inside, row, 0.0))
        return spread

    def collect(self, packed: Sequence[Tensor], rows: Sequence[Tensor]) -> Tensor:
        """Undo :meth:`spread`: return the tiles (S, listed, h, w); listed tiles that are not kept are 0."""
        (h, w), tiles = self.tile, []
        for band, inside, row in zip(self.bands, self.insides(packed), rows, strict=True):
            live = row if inside is None else torch.where(inside, row, 0.0)
            tiles.append(torch.unflatten(live, 3, (band.width, w)).transpose(2, 3).flatten(1, 2))
        if self.in_order:
            return tiles[0]
        kept = gather(torch.cat(tiles, 1), [packed[2]])[0]
        return kept.new_zeros(kept.shape[0], self.listed, h, w).index_copy(1, packed[1], kept)

    def insides(self, packed: Sequence[Tensor]) -> list[Tensor | None]:
        """Return for each band its live elements (rows, h, width * w), or None where all are."""
        return [None if band.full else packed[4 + 3 * number + 2] for number, band in enumerate(self.bands)]

    # ------------------------------------------------------------------ dense matrices beside it

    def columns_of(self, packed: Sequence[Tensor], x: Tensor) -> list[Tensor]:
        """Return for each band the rows of `x` (S, groups, Q, F) that face its columns: (S, rows, width * w, F)."""
        w, (shared, *_, features) = self.tile[1], x.shape
        taken = gather(_cut(x, w), [packed[4 + 3 * number] for number in range(len(self.bands))])
        bands = zip(self.bands, taken, strict=True)
        return [t.reshape(shared, band.rows, band.width * w, features) for band, t in bands]

    def rows_of(self, packed: Sequence[Tensor], x: Tensor) -> list[Tensor]:
        """Return for each band its own rows of `x` (S, groups, P, F): (S, rows, h, F)."""
        blocks = _cut(x, self.tile[0])
        if self._all_rows:
            return [blocks]
        return gather(blocks, torch.split(packed[3], [band.rows for band in self.bands]))

    def join(self, packed: Sequence[Tensor], rows: Sequence[Tensor]) -> Tensor:
        """Undo :meth:`rows_of`: return (S, groups, P, F), 0 in rows without a kept tile."""
        h, grid_rows = self.tile[0], -(-self.shape[0] // self.tile[0])
        joined = rows[0]
        if not self._all_rows:
            joined = joined.new_zeros(joined.shape[0], self.groups * grid_rows, *joined.shape[2:])
            for places, row in zip(torch.split(packed[3], [band.rows for band in self.bands]), rows, strict=True):
                joined = joined.index_copy_(1, places, row)
        whole = joined.reshape(joined.shape[0], self.groups, grid_rows * h, joined.shape[-1])
        return whole[:, :, : self.shape[0]]

    @property
    def _all_rows(self) -> bool:
        return len(self.bands) == 1 and self.bands[0].rows == self.groups * -(-self.shape[0] // self.tile[0])


def _tiles(padded: Tensor, tile: tuple[int, int]) -> Tensor:
    """View (S, groups, P, Q) as (S, groups, grid rows, grid cols, h, w)."""
    (rows, cols), (h, w) = padded.shape[2:], tile
    return torch.unflatten(torch.unflatten(padded, 3, (cols // w, w)), 2, (rows // h, h)).transpose(3, 4)


def _cut(x: Tensor, step: int) -> Tensor:
    """Return (S, groups, size, F) as blocks of `step` rows: (S, groups * ceil(size / step), step, F)."""
    padded = pad_to_tiles(x, (step, 1))
    return padded.reshape(x.shape[0], x.shape[1] * (padded.shape[2] // step), step, x.shape[3])


# ---------------------------------------------------------------------- making the layout


def _bands(counts: Tensor) -> list[tuple[Tensor, int]]:
    """Group rows that keep about equally many blocks: (their numbers, the most that one keeps), long rows first.

    There is always one band at least, if only an empty one, so that results stay connected to their inputs.
    """
    lengths = torch.unique(counts)
    if lengths.numel() <= _BANDS:
        exact = [((counts == length).nonzero().flatten(), int(length)) for length in lengths.flip(0) if length]
        return exact or [(counts.new_zeros(0), 1)]
    bands: list[tuple[Tensor, int]] = []
    left = counts
    while left.numel() and (longest := int(left.max())):
        chosen = left * _BAND_RATIO > longest
        bands.append((chosen.nonzero().flatten(), longest))
        left = torch.where(chosen, 0, left)
    return bands or [(counts.new_zeros(0), 1)]


def _padded_columns(kept: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return for each row of a block mask the columns it keeps, padded with its last one, and which are not padding."""
    counts = kept.sum(1, keepdim=True)
    columns = torch.argsort(kept.logical_not().to(torch.uint8), dim=1, stable=True)
    position = torch.arange(width)[None].expand(len(kept), width)
    return columns.gather(1, position.minimum(counts - 1)), position < counts


# ---------------------------------------------------------------------- choosing the tile


def tile_candidates(mask: TeSA, own: tuple[int, int]) -> list[tuple[int, int]]:
    """Return the tiles worth timing for a mask (..., rows, cols) of blocks `own`: square ones, and its own.

    >>> tile_candidates(TeSA.dense((100, 40)), (1, 1))
    [(16, 16), (32, 32), (64, 40)]
    """
    rows, cols = (max(1, size) for size in mask.shape[-2:])
    squares = {(min(size, rows), min(size, cols)) for size in _TILES if size < 2 * min(rows, cols) or size == _TILES[0]}
    fits = all(_TILES[0] // 2 <= b <= 2 * _TILES[-1] for b in own)
    return sorted(squares | ({own} if fits else set()))


def tile_guess(mask: TeSA, own: tuple[int, int]) -> tuple[int, int]:
    """Return the candidate that is probably the fastest.

    Small tiles compute less of the matrix, but each of their products is less efficient.

    >>> tile_guess(TeSA.from_mask(torch.eye(64, dtype=torch.bool)), (1, 1))
    (16, 16)
    """

    def cost(tile: tuple[int, int]) -> float:
        kept = mask.kept_blocks((*[1] * (mask.ndim - 2), *tile))
        return float(kept.float().mean()) * (1.0 + 32.0 / math.sqrt(tile[0] * tile[1]))

    return min(tile_candidates(mask, own), key=cost)

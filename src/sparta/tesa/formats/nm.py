"""N:M storage: of every m neighbours in a row, n values and where in the group they stood.

For masks of the pattern NM(n, m), groups along the last axis (input channels), never crossing a row. Every group stores
exactly n values at n distinct ascending positions; a group with fewer live elements is filled up with zeros at its
lowest free positions, so kernels need no counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sparta.errors import PatternError, ShapeError, ValueRangeError, message
from sparta.tesa.formats.base import Packed, register_format
from sparta.tesa.formats.blocks import pad_matrix
from sparta.tesa.formats.dtypes import as_movable
from sparta.tesa.formats.live import MaskLike, check_matrix, live_mask, true_positions
from sparta.tesa.formats.state import JSON, StateReader
from sparta.tesa.formats.sums import check_axis, slab_sum, sum_dims

__all__ = ["NMPacked"]

_LARGEST_GROUP = 256


@register_format
@dataclass(frozen=True, eq=False, repr=False)
class NMPacked(Packed):
    """n values of every m, and their positions in the group.

    Attributes
    ----------
    values
        Shape ``(*batch, rows, groups, n)``, groups = ceil(cols / m).
    positions
        Shape (rows, groups, n), uint8: where in its group each value stands, 0 to m - 1, ascending. The last
        group of a row that m does not divide may name positions beyond the last column; their values are 0.
    m
        Group size, at most 256.
    cols
        Number of columns.

    >>> dense = torch.tensor([[5.0, 0, 0, 7, 8, 0]])
    >>> packed = NMPacked.pack(dense, dense != 0, n=2, m=4)
    >>> packed.values.tolist(), packed.positions.tolist()
    ([[[5.0, 7.0], [8.0, 0.0]]], [[[0, 3], [0, 1]]])
    """

    format_name: ClassVar[str] = "nm"

    positions: Tensor
    m: int
    cols: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.positions.ndim != 3 or self.positions.shape[1] != -(-self.cols // self.m):
            raise ShapeError(
                message(
                    f"positions have shape {tuple(self.positions.shape)}",
                    f"(rows, {-(-self.cols // self.m)}, n) for {self.cols} columns in groups of {self.m}",
                )
            )

    @classmethod
    def pack(cls, dense: Tensor, tesa: MaskLike, *, n: int, m: int) -> NMPacked:
        """Pack a matrix whose live elements are at most n of every m in a row.

        Parameters
        ----------
        dense
            Shape ``(*batch, rows, cols)``.
        tesa
            TeSA or bool mask of shape (rows, cols).
        n, m
            n kept of m, 1 <= n <= m <= 256.

        Raises
        ------
        PatternError
            If a group has more than n live elements.

        >>> NMPacked.pack(torch.ones(1, 4), torch.tensor([[False, True, False, False]]), n=2, m=4).positions
        tensor([[[0, 1]]], dtype=torch.uint8)
        """
        _check_nm(n, m)
        rows, cols = check_matrix(dense, tesa)
        groups = -(-cols // m)
        mask = pad_matrix(live_mask(tesa, dense.device), (rows, groups * m))
        live = torch.unflatten(mask, -1, (groups, m))
        chosen, filled = _choose(live, n, cols)
        flat = true_positions(chosen)
        group_starts = torch.arange(rows * groups, device=dense.device).unsqueeze(-1) * m
        positions = (flat.view(-1, n) - group_starts).to(torch.uint8).view(rows, groups, n)
        padded = pad_matrix(as_movable(dense), (rows, groups * m))
        values = torch.unflatten(padded.flatten(-2).index_select(-1, flat), -1, (rows, groups, n))
        if filled:
            values = values.masked_fill_(~live.flatten().index_select(0, flat).view(rows, groups, n), 0)
        values = values if values.dtype == dense.dtype else values.view(dense.dtype)
        return cls(values, positions, m, cols)

    @property
    def n(self) -> int:
        """Values stored of every m."""
        return self.positions.shape[-1]

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """(rows, cols) of the matrix that is packed."""
        return self.positions.shape[0], self.cols

    @property
    def value_shape(self) -> tuple[int, ...]:
        """(rows, groups, n)."""
        return tuple(self.positions.shape)

    def index_tensors(self) -> dict[str, Tensor]:
        """Return ``positions``."""
        return {"positions": self.positions}

    def index_meta(self) -> dict[str, JSON]:
        """Return the shape of the matrix, n and m."""
        return {"shape": list(self.matrix_shape), "n": self.n, "m": self.m}

    @classmethod
    def read_state(cls, reader: StateReader) -> NMPacked:
        """Make an N:M matrix from a checked file."""
        rows, cols = reader.pair("shape", minimum=0)
        n, m = reader.integer("n", minimum=1), reader.integer("m", minimum=1)
        reader.require(holds=n <= m <= _LARGEST_GROUP, problem=f"{n}:{m} is not an N:M pattern")
        groups = -(-cols // m)
        positions = reader.index("positions", torch.uint8, (rows, groups, n))
        # uint8 holds no number above 255, and for m = 256 all of them are positions.
        in_range = m == _LARGEST_GROUP or bool((positions < m).all())
        reader.require(holds=in_range, problem=f"positions are outside 0 to {m - 1}")
        rising = bool((positions[..., 1:] > positions[..., :-1]).all())
        reader.require(holds=rising, problem="positions of a group are not ascending, or repeat")
        values = reader.values((rows, groups, n))
        packed = cls(values, positions, m, cols)
        packed.check_edge(reader)
        return packed

    def check_edge(self, reader: StateReader) -> None:
        """Raise FileFormatError if a value other than 0 stands beyond the last column."""
        outside = self.columns()[:, -1:] >= self.cols
        lost = outside & as_movable(self.values)[..., -1:, :].ne(0)
        reader.require(holds=not bool(lost.any()), problem="values other than 0 stand beyond the last column")

    def columns(self) -> Tensor:
        """Return the column of each stored value: int64, shape (rows, groups, n).

        >>> NMPacked.pack(torch.ones(1, 4), torch.tensor([[0, 1, 1, 0]]), n=1, m=2).columns()
        tensor([[[1],
                 [2]]])
        """
        groups = self.positions.shape[1]
        starts = torch.arange(groups, device=self.device).unsqueeze(-1) * self.m
        return self.positions + starts

    def unpack(self) -> Tensor:
        """Return the dense tensor, shape ``(*batch, rows, cols)``."""
        return self._unpack_rows(0, self.matrix_shape[0])

    def stored_mask(self) -> Tensor:
        """Return which elements are stored, those filled up with zeros included: bool, shape (rows, cols)."""
        rows, groups, _ = self.positions.shape
        mask = torch.zeros((rows, groups, self.m), dtype=torch.bool, device=self.device)
        return mask.scatter_(-1, self.positions.long(), value=True).flatten(-2)[:, : self.cols].contiguous()

    def sum(self, axis: int) -> Tensor:
        """Return row sums (axis -1, shape ``(*batch, rows)``) or column sums (axis -2, shape ``(*batch, cols)``)."""
        check_axis(axis)
        if axis == -1:
            return sum_dims(self.values, (-1, -2))
        return slab_sum(self._unpack_rows, self.shape, self.dtype, self.device)

    def _unpack_rows(self, start: int, stop: int) -> Tensor:
        """Return rows `start` to `stop` of the dense tensor."""
        values = as_movable(self.values)[..., start:stop, :, :]
        places = self.positions[start:stop].long().expand(values.shape)
        groups = values.new_zeros((*values.shape[:-1], self.m)).scatter(-1, places, values)
        dense = groups.flatten(-2)[..., : self.cols].contiguous()
        return dense if dense.dtype == self.dtype else dense.view(self.dtype)


def _check_nm(n: int, m: int) -> None:
    """Raise unless 1 <= n <= m <= 256."""
    if not 1 <= n <= m <= _LARGEST_GROUP:
        raise ValueRangeError(message(f"n is {n} and m is {m}", f"1 <= n <= m <= {_LARGEST_GROUP}, n kept of every m"))


def _choose(live: Tensor, n: int, cols: int) -> tuple[Tensor, bool]:
    """Extend `live`, (rows, groups, m), to exactly n True in every group; say whether any had to be added."""
    counts = live.sum(-1, dtype=torch.int16)
    fewest, most = (int(c) for c in counts.aminmax()) if counts.numel() else (n, n)
    if most > n:
        _, groups, m = live.shape
        row, group = divmod(int(true_positions(counts > n)[0]), groups)
        last = min(cols, group * m + m) - 1
        raise PatternError(
            message(
                f"row {row} keeps {int(counts[row, group])} of columns {group * m} to {last}",
                f"at most {n} of every {m}",
                f"project the mask to NM({n}, {m}) first, or pack it as a bitmap",
            )
        )
    if fewest == n:
        return live, False
    free_rank = (~live).cumsum(-1, dtype=torch.int16)
    return live | (free_rank <= (n - counts).unsqueeze(-1)), True

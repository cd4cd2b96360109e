"""2:4 storage as the hardware likes it: two values of every four and two bits for the place of each.

NMPacked(2, 4) with its positions packed: an eighth of a byte per dense column instead of half a byte. The layout: a
group's nibble is ``first | second << 2``, first < second; byte b of a row holds
group 2b in its low nibble and group 2b + 1 in its high nibble, 0 where the row has no such group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sparta.errors import PatternError, ShapeError, message
from sparta.tesa.formats.base import Packed, register_format
from sparta.tesa.formats.live import MaskLike
from sparta.tesa.formats.nm import NMPacked
from sparta.tesa.formats.state import JSON, StateReader

__all__ = ["Packed24"]


@register_format
@dataclass(frozen=True, eq=False, repr=False)
class Packed24(Packed):
    """2:4 values with 2-bit positions.

    Attributes
    ----------
    values
        Shape ``(*batch, rows, 2 * groups)``, groups = ceil(cols / 4): the two values of each group, in column
        order.
    metadata
        Shape (rows, ceil(groups / 2)), uint8: four bits a group, layout as the module says.
    cols
        Number of columns.

    >>> dense = torch.tensor([[1.0, 0, 0, 2, 0, 3, 4, 0]])
    >>> packed = Packed24.pack(dense, dense != 0)
    >>> packed.values.tolist(), [f"{byte:08b}" for byte in packed.metadata[0].tolist()]
    ([[1.0, 2.0, 3.0, 4.0]], ['10011100'])
    """

    format_name: ClassVar[str] = "packed24"

    metadata: Tensor
    cols: int

    def __post_init__(self) -> None:
        super().__post_init__()
        width = -(-self.groups // 2)
        if self.metadata.ndim != 2 or self.metadata.shape[1] != width:
            raise ShapeError(
                message(
                    f"metadata has shape {tuple(self.metadata.shape)}",
                    f"(rows, {width}) for {self.cols} columns",
                )
            )

    @classmethod
    def pack(cls, dense: Tensor, tesa: MaskLike) -> Packed24:
        """Pack a matrix, ``(*batch, rows, cols)``, whose live elements are at most 2 of every 4 in a row.

        >>> Packed24.pack(torch.ones(1, 4), torch.tensor([[False, True, False, True]])).values
        tensor([[1., 1.]])
        """
        return cls.from_nm(NMPacked.pack(dense, tesa, n=2, m=4))

    @classmethod
    def from_nm(cls, packed: NMPacked) -> Packed24:
        """Return the same matrix with packed positions; the values are shared.

        >>> Packed24.from_nm(NMPacked.pack(torch.ones(1, 4), torch.tensor([[1, 0, 0, 1]]), n=2, m=4)).metadata
        tensor([[12]], dtype=torch.uint8)
        """
        if (packed.n, packed.m) != (2, 4):
            raise PatternError(message(f"the matrix is packed {packed.n}:{packed.m}", "2:4", "pack it with n=2, m=4"))
        nibbles = packed.positions[..., 0] | packed.positions[..., 1] << 2
        if nibbles.shape[1] % 2:
            nibbles = torch.nn.functional.pad(nibbles, (0, 1))
        metadata = nibbles[:, 0::2] | nibbles[:, 1::2] << 4
        return cls(packed.values.flatten(-2), metadata, packed.cols)

    def to_nm(self) -> NMPacked:
        """Return the same matrix with one byte a position; the values are shared.

        >>> Packed24.pack(torch.ones(1, 4), torch.tensor([[1, 0, 0, 1]])).to_nm().positions
        tensor([[[0, 3]]], dtype=torch.uint8)
        """
        nibbles = torch.stack([self.metadata & 15, self.metadata >> 4], -1).flatten(-2)[:, : self.groups]
        positions = torch.stack([nibbles & 3, nibbles >> 2], -1)
        return NMPacked(torch.unflatten(self.values, -1, (self.groups, 2)), positions, 4, self.cols)

    @property
    def groups(self) -> int:
        """Groups of four in a row, the last of them possibly cut off."""
        return -(-self.cols // 4)

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """(rows, cols) of the matrix that is packed."""
        return self.metadata.shape[0], self.cols

    @property
    def value_shape(self) -> tuple[int, ...]:
        """(rows, 2 * groups)."""
        return (self.metadata.shape[0], 2 * self.groups)

    def index_tensors(self) -> dict[str, Tensor]:
        """Return ``metadata``."""
        return {"metadata": self.metadata}

    def index_meta(self) -> dict[str, JSON]:
        """Return the shape of the matrix."""
        return {"shape": list(self.matrix_shape)}

    @classmethod
    def read_state(cls, reader: StateReader) -> Packed24:
        """Make a 2:4 matrix from a checked file."""
        rows, cols = reader.pair("shape", minimum=0)
        groups = -(-cols // 4)
        metadata = reader.index("metadata", torch.uint8, (rows, -(-groups // 2)))
        packed = cls(reader.values((rows, 2 * groups)), metadata, cols)
        nm = packed.to_nm()
        rising = bool((nm.positions[..., 1] > nm.positions[..., 0]).all())
        reader.require(holds=rising, problem="the two positions of a group are not ascending")
        clean = torch.equal(cls.from_nm(nm).metadata, metadata)
        reader.require(holds=clean, problem="metadata bits are set beyond the last group")
        nm.check_edge(reader)
        return packed

    def unpack(self) -> Tensor:
        """Return the dense tensor, shape ``(*batch, rows, cols)``."""
        return self.to_nm().unpack()

    def stored_mask(self) -> Tensor:
        """Return which elements are stored, those filled up with zeros included: bool, shape (rows, cols)."""
        return self.to_nm().stored_mask()

    def sum(self, axis: int) -> Tensor:
        """Return row sums (axis -1, shape ``(*batch, rows)``) or column sums (axis -2, shape ``(*batch, cols)``)."""
        return self.to_nm().sum(axis)

"""Specs of models larger than memory: one bit per weight, unpacked for the layer that is asked for.

A TeSA holds a byte or more for each weight of an irregular mask, which for a model that does not fit into memory would
be a good part of it. Here masks stay packed; a TeSA is made whenever it is read, and is not kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from sparta.tesa.attribute import TeSA
from sparta.tesa.formats.mask_bits import unpack_bits
from sparta.tesa.spec import Spec

__all__ = ["PackedSpec"]


class PackedSpec(Spec):
    """A spec whose masks are packed.

    Parameters
    ----------
    masks
        By layer: the packed mask, the size of its last dim, and the dtype of the weight.
    """

    def __init__(self, masks: Mapping[str, tuple[Tensor, int, torch.dtype]]) -> None:
        super().__init__()
        self._tesas = _Unpacking(masks)  # type: ignore[assignment]


class _Unpacking(Mapping[str, TeSA]):
    """Packed masks as a mapping of TeSAs."""

    def __init__(self, masks: Mapping[str, tuple[Tensor, int, torch.dtype]]) -> None:
        self._masks = dict(masks)

    def __getitem__(self, name: str) -> TeSA:
        packed, columns, dtype = self._masks[name]
        return TeSA.from_mask(unpack_bits(packed, columns), format=dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._masks)

    def __len__(self) -> int:
        return len(self._masks)

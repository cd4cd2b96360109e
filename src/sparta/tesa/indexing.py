"""Indexing a TeSA with brackets, as one indexes the tensor: a walk over the items that calls `take` and `unsqueeze`."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from sparta.errors import ShapeError, message

if TYPE_CHECKING:
    from sparta.tesa.bundle import GridBundle

__all__ = ["index_tesa"]

_B = TypeVar("_B", bound="GridBundle")


def index_tesa(tesa: _B, index: object) -> _B:
    """Return the TeSA of ``tensor[index]`` for ints, slices, None, Ellipsis and 1-D index tensors.

    Several index tensors at once would mean something else to torch (they pair up), so only one is taken.
    """
    items = index if isinstance(index, tuple) else (index,)
    spare = tesa.ndim - sum(1 for i in items if i is not None and i is not Ellipsis)
    if spare < 0 or sum(1 for i in items if i is Ellipsis) > 1:
        raise ShapeError(message(f"index {index!r} for shape {tesa.shape}", f"at most {tesa.ndim} indices and one ..."))
    if sum(1 for i in items if isinstance(i, Tensor)) > 1:
        raise ShapeError(message("several index tensors", "one at a time", "index one dim after the other"))
    dim = 0
    for item in items:
        if item is Ellipsis:
            dim += spare
        elif item is None:
            tesa, dim = tesa.unsqueeze(dim), dim + 1
        elif isinstance(item, slice):
            tesa, dim = tesa.take(dim, range(*item.indices(tesa.shape[dim]))), dim + 1
        elif isinstance(item, Tensor) and item.dim() == 1:
            tesa, dim = tesa.take(dim, _positions(item, tesa.shape[dim])), dim + 1
        elif isinstance(item, int) and not isinstance(item, bool):
            tesa = tesa.take(dim, [item]).squeeze(dim)
        else:
            raise ShapeError(message(f"index {item!r}", "ints, slices, None, ... and one 1-D index tensor"))
    return tesa


def _positions(index: Tensor, size: int) -> Tensor:
    """Return the positions that an index tensor means: itself, or where it is true."""
    if index.dtype is not torch.bool:
        return index
    if index.numel() != size:
        raise ShapeError(message(f"a bool index of {index.numel()} elements for a dim of {size}", f"{size} elements"))
    return index.nonzero().flatten()

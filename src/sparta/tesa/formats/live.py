"""Where packing learns which elements are live: from a TeSA, or from a mask tensor.

Every ``pack`` takes either through the functions below, so the formats never ask which one they were given. A TeSA is
recognised by what it can do (:class:`LiveSource`), so this package needs nothing above it.
"""

from __future__ import annotations

from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from sparta.errors import ShapeError, ValueRangeError, message
from sparta.tesa.mask import as_mask

__all__ = ["LiveSource", "MaskLike", "check_matrix", "live_blocks", "live_mask", "true_positions"]


@runtime_checkable
class LiveSource(Protocol):
    """What packing needs of a TeSA: its shape, its mask, and which blocks hold a live element."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor that is described."""
        ...

    def mask(self, device: torch.device | None = None) -> Tensor:
        """Bool tensor of `shape`, True where live."""
        ...

    def kept_blocks(self, block: tuple[int, ...]) -> Tensor:
        """Bool tensor of ceil(shape / block), True where a block has any live element."""
        ...


MaskLike: TypeAlias = Tensor | LiveSource


def live_mask(tesa: MaskLike, device: torch.device | str | None = None) -> Tensor:
    """Return the live elements of a matrix as a 2-D bool tensor on `device`.

    Parameters
    ----------
    tesa
        A TeSA, or a mask of shape (rows, cols): bool, or numbers that are all 0 or 1.
    device
        Where the mask is wanted; None leaves it where it is.

    >>> live_mask(torch.tensor([[1, 0], [0, 1]]))
    tensor([[ True, False],
            [False,  True]])
    """
    _check_source(tesa)
    target = None if device is None else torch.device(device)
    if isinstance(tesa, Tensor):
        return as_mask(tesa if target is None else tesa.to(target))
    mask = tesa.mask(target)
    return mask if target is None else mask.to(target)


def live_blocks(tesa: MaskLike, block: tuple[int, int], device: torch.device | str | None = None) -> Tensor:
    """Return which blocks hold a live element: a bool tensor of ceil(shape / block).

    A TeSA answers from its grid; a mask is reduced block by block, edge blocks being the smaller ones they
    are.

    >>> live_blocks(torch.eye(3, dtype=torch.bool), (2, 2))
    tensor([[ True, False],
            [False,  True]])
    """
    _check_source(tesa)
    if not isinstance(tesa, Tensor):
        kept = tesa.kept_blocks(block)
        return kept if device is None else kept.to(device)
    mask = live_mask(tesa, device)
    rows, cols = mask.shape
    h, w = block
    grid_rows, grid_cols = -(-rows // h), -(-cols // w)
    padded = mask
    if (rows, cols) != (grid_rows * h, grid_cols * w):
        padded = torch.nn.functional.pad(mask, (0, grid_cols * w - cols, 0, grid_rows * h - rows))
    # A maximum over bytes is several times faster on CPU than a logical any.
    tiles = torch.unflatten(torch.unflatten(padded.view(torch.uint8), 1, (grid_cols, w)), 0, (grid_rows, h))
    return tiles.amax(1).amax(2).view(torch.bool)


def check_matrix(dense: Tensor, tesa: MaskLike) -> tuple[int, int]:
    """Return (rows, cols) of `dense`, ``(*batch, rows, cols)``, or raise if `tesa` does not describe that matrix.

    >>> check_matrix(torch.zeros(5, 2, 3), torch.ones(2, 3, dtype=torch.bool))
    (2, 3)
    """
    _check_source(tesa)
    if dense.ndim < 2 or tuple(dense.shape[-2:]) != tuple(tesa.shape):
        raise ShapeError(
            message(
                f"the tensor has shape {tuple(dense.shape)} and its mask {tuple(tesa.shape)}",
                "a mask of the tensor's last two dimensions",
                "reshape the tensor to (*batch, rows, cols) or build the mask for that matrix",
            )
        )
    return dense.shape[-2], dense.shape[-1]


def true_positions(mask: Tensor) -> Tensor:
    """Return the flat positions of True in `mask`, ascending, as int64.

    >>> true_positions(torch.tensor([[True, False], [False, True]]))
    tensor([0, 3])
    """
    if mask.device.type == "cpu":
        # NumPy finds them several times faster than torch.nonzero does on CPU.
        return torch.from_numpy(np.flatnonzero(mask.numpy()))
    return mask.flatten().nonzero().flatten()


def _check_source(tesa: MaskLike) -> None:
    """Raise unless `tesa` is a 2-D TeSA or a 2-D tensor."""
    if not isinstance(tesa, (Tensor, LiveSource)):
        raise ValueRangeError(
            message(
                f"the mask is of type {type(tesa).__name__}",
                "a TeSA or a bool tensor",
                "make one with torch.as_tensor(mask) or TeSA.from_mask(mask)",
            )
        )
    if len(tesa.shape) != 2:
        raise ShapeError(
            message(
                f"the mask has shape {tuple(tesa.shape)}",
                "two dimensions, (rows, cols)",
                "pack one matrix at a time; leading dimensions of the values are batch",
            )
        )

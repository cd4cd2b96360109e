"""Leading dims: how masks that differ by batch or head meet tensors with any number of batch dims.

Masks broadcast from the right, as everywhere in PyTorch. Batch dims are split into those along which the mask differs
(its *groups*) and those that share it, so kernels see plain (shared, groups, rows, cols).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sparta.errors import ShapeError, message

__all__ = ["Batches", "broadcast"]


def broadcast(**leads: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape that the leading dims of several tensors broadcast to.

    >>> broadcast(A=(2, 1), mask=(3,))
    (2, 3)
    """
    try:
        return tuple(torch.broadcast_shapes(*leads.values()))  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        given = ", ".join(f"{name} {tuple(lead)}" for name, lead in leads.items())
        raise ShapeError(message(f"leading dims that do not fit: {given}", "dims that broadcast")) from error


@dataclass(frozen=True)
class Batches:
    """How batch dims fold into (shared, groups).

    Attributes
    ----------
    shape
        The batch dims.
    mask_lead
        The leading dims of the mask; those of size 1 are shared.

    Examples
    --------
    >>> batches = Batches((2, 5, 3), (5, 1))
    >>> batches.fold(torch.zeros(2, 5, 3, 8, 4)).shape
    torch.Size([6, 5, 8, 4])
    """

    shape: tuple[int, ...]
    mask_lead: tuple[int, ...]

    @property
    def _order(self) -> tuple[list[int], list[int]]:
        missing = len(self.shape) - len(self.mask_lead)
        own = [missing + d for d, size in enumerate(self.mask_lead) if size != 1]
        return [d for d in range(len(self.shape)) if d not in own], own

    def fold(self, x: Tensor) -> Tensor:
        """Return x (..., rows, cols), broadcast to all batch dims, as (shared, groups, rows, cols)."""
        shared, own = self._order
        last = len(self.shape)
        x = x.expand(*self.shape, *x.shape[-2:]).permute(*shared, *own, last, last + 1)
        sizes = [math.prod([self.shape[d] for d in dims]) for dims in (shared, own)]
        return x.reshape(*sizes, *x.shape[-2:])

    def unfold(self, x: Tensor) -> Tensor:
        """Undo :meth:`fold`: return (shared, groups, rows, cols) as (..., rows, cols)."""
        shared, own = self._order
        last = len(self.shape)
        x = x.reshape(*[self.shape[d] for d in (*shared, *own)], *x.shape[-2:])
        back = [(*shared, *own).index(d) for d in range(last)]
        return x.permute(*back, last, last + 1)

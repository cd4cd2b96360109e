"""Values of a graph at one size, without their numbers: shapes, strides, and whose memory each one lies in.

Graphs are walked on the device "meta", so a view is found by its storage, whatever operation makes it: it costs nothing
at run time, and only what writes memory of its own becomes a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

__all__ = ["Constant", "Made", "NotChained", "Slot", "Source", "Storages", "Value", "mapped", "meta_like", "rows_of"]


class NotChained(Exception):  # noqa: N818 - no error: the graph runs another way
    """Part of a graph cannot be followed, so no chain is made of it."""


@dataclass(frozen=True, eq=False)
class Constant:
    """A tensor that is the same in every call."""

    tensor: Tensor


@dataclass(frozen=True, eq=False)
class Slot:
    """A tensor that Python holds during a call: an input, or the result of a Python call."""

    number: int


@dataclass(eq=False)
class Made:
    """Memory that a step writes.

    Attributes
    ----------
    nbytes
        Its size.
    first, last
        The items of the program between which it must not be written by others.
    slot
        Where Python holds it, for memory that Python reads too or that is returned; None for memory of the arena.
    offset
        Into the arena.
    """

    nbytes: int
    first: int = -1
    last: int = -1
    slot: int | None = None
    offset: int = 0

    def used_at(self, item: int) -> None:
        """Keep it for an item, and from the first one that it is kept for."""
        self.first = item if self.first < 0 else min(self.first, item)
        self.last = max(self.last, item)


Source = Constant | Slot | Made


@dataclass(frozen=True, eq=False)
class Value:
    """A tensor of the graph: whose memory it lies in, and how."""

    meta: Tensor
    source: Source

    @property
    def offset(self) -> int:
        """Bytes from the start of the source."""
        return int(self.meta.storage_offset()) * self.meta.element_size()


def meta_like(tensor: Tensor) -> Tensor:
    """Return a tensor on the device "meta" with the sizes and strides of another, and a storage of its own."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def rows_of(meta: Tensor, width: int) -> tuple[int, int] | None:
    """Return (..., width) as the number of rows and their stride; None where rows are not equally far apart.

    >>> rows_of(torch.empty(2, 3, 8), 8), rows_of(torch.empty(2, 3, 8)[:, 0], 8), rows_of(torch.empty(8, 2).t(), 8)
    ((6, 8), (2, 24), None)
    """
    if not meta.dim() or meta.shape[-1] != width or (meta.stride(-1) != 1 and width > 1):
        return None
    dims = [(size, step) for size, step in zip(meta.shape[:-1], meta.stride()[:-1], strict=True) if size != 1]
    if not dims:
        return 1, width
    for (_, outer), (size, inner) in pairwise(dims):
        if outer != size * inner:
            return None
    return meta.shape[:-1].numel(), dims[-1][1]


@dataclass
class Storages:
    """Whose memory each storage on the device "meta" stands for."""

    _known: dict[int, tuple[Source, Tensor]] = field(default_factory=dict)  # the tensor keeps the storage alive

    def put(self, meta: Tensor, source: Source) -> Value:
        """Say whose memory a new tensor is, and return it as a value."""
        self._known[_storage(meta)] = (source, meta)
        return Value(meta, source)

    def find(self, meta: Tensor) -> Value | None:
        """Return a tensor as a value where it lies in known memory."""
        found = self._known.get(_storage(meta))
        return None if found is None else Value(meta, found[0])


def _storage(meta: Tensor) -> int:
    return int(meta.untyped_storage()._cdata)


def mapped(tree: Any, change: Callable[[Any], Any]) -> Any:
    """Return arguments of a call with a function applied to all that is not a list, tuple, dict or slice."""
    if isinstance(tree, (list, tuple)):
        return type(tree)(mapped(each, change) for each in tree)
    if isinstance(tree, dict):
        return {name: mapped(each, change) for name, each in tree.items()}
    if isinstance(tree, slice):
        return slice(*(mapped(each, change) for each in (tree.start, tree.stop, tree.step)))
    return change(tree)

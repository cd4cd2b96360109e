"""The grids of one tensor, and what shape operations make of them.

A bundle holds one grid for each kind of fact about the elements of a tensor, all of one shape. Shape operations
(`reshape`, `permute`, indexing ...) return the bundle of the tensor that the same operation would return, exactly.
:class:`~sparta.tesa.attribute.TeSA` is the bundle that says what the facts mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from sparta.errors import ShapeError, message
from sparta.tesa.grid import Grid, reshape_groups, solved_shape
from sparta.tesa.indexing import index_tesa

__all__ = ["GridBundle"]


@dataclass(frozen=True, eq=False, repr=False)
class GridBundle:
    """The grids of a tensor; see :class:`~sparta.tesa.attribute.TeSA` for what each of them says."""

    state: Grid
    value: Grid
    code: Grid
    scale: Grid
    zero_point: Grid
    dynamic: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        shapes = {g.shape for g in self._grids()}
        if len(shapes) != 1:
            raise ShapeError(message(f"grids of shapes {sorted(shapes)}", "one shape for all"))
        bad = [d for d in sorted(self.dynamic) if not 0 <= d < self.ndim]
        if bad:
            raise ShapeError(message(f"dynamic dims {bad} of a tensor of shape {self.shape}", f"0 to {self.ndim - 1}"))
        for dim in sorted(self.dynamic):
            if any(g.varies_along(dim) for g in self._grids()):
                raise ShapeError(
                    message(
                        f"dim {dim} of shape {self.shape} is dynamic, but the attribute differs along it",
                        "attributes that are uniform along dynamic dims",
                        "drop the dim from `dynamic`, or the knowledge along it",
                    )
                )

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor; the size of a dynamic dim is that of the example."""
        return self.state.shape

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    @property
    def numel(self) -> int:
        """Number of elements of the tensor."""
        return math.prod(self.shape)

    # ------------------------------------------------------------------ shape operations, all exact

    def __getitem__(self, index: object) -> Self:
        """Return the TeSA of ``tensor[index]`` for ints, slices, None, Ellipsis and one 1-D index tensor per dim."""
        return index_tesa(self, index)

    def take(self, dim: int, index: Sequence[int] | Tensor) -> Self:
        """Return the TeSA of ``tensor.index_select(dim, index)`` (negative indices count from the end)."""
        dim = self._dim(dim)
        positions = torch.as_tensor(index if isinstance(index, Tensor) else list(index), dtype=torch.long)
        size = self.shape[dim]
        if positions.numel() and (int(positions.min()) < -size or int(positions.max()) >= size):
            raise ShapeError(message(f"an index outside dim {dim} of shape {self.shape}", f"{-size} to {size - 1}"))
        positions = torch.where(positions < 0, positions + size, positions)
        return self._map(lambda g: g.take(dim, positions), self.dynamic)

    def permute(self, *dims: int) -> Self:
        """Return the TeSA of ``tensor.permute(*dims)``."""
        order = [self._dim(d) for d in dims]
        if sorted(order) != list(range(self.ndim)):
            raise ShapeError(message(f"dims {dims} for shape {self.shape}", "each dim exactly once"))
        return self._map(lambda g: g.permute(order), {new for new, old in enumerate(order) if old in self.dynamic})

    def transpose(self, first: int, second: int) -> Self:
        """Return the TeSA of ``tensor.transpose(first, second)``."""
        order = list(range(self.ndim))
        a, b = self._dim(first), self._dim(second)
        order[a], order[b] = order[b], order[a]
        return self.permute(*order)

    def reshape(self, *shape: int) -> Self:
        """Return the TeSA of ``tensor.reshape(*shape)``; one size may be -1.

        A dim made from a dynamic dim is dynamic; where that would need knowledge that varies along it, this is an
        error rather than a guess.
        """
        sizes = solved_shape(shape, self.shape)
        dynamic: set[int] = set()
        if self.dynamic and self.numel:
            for old, new in reshape_groups(self.shape, sizes):
                if self.dynamic.intersection(range(old.start, old.stop)):
                    dynamic.update(range(new.start, new.stop))
        return self._map(lambda g: g.reshape(sizes), dynamic)

    def unsqueeze(self, dim: int) -> Self:
        """Return the TeSA of ``tensor.unsqueeze(dim)``."""
        dim = dim + self.ndim + 1 if dim < 0 else dim
        if not 0 <= dim <= self.ndim:
            raise ShapeError(message(f"dim {dim} for shape {self.shape}", f"{-self.ndim - 1} to {self.ndim}"))
        shape = (*self.shape[:dim], 1, *self.shape[dim:])
        return self._map(lambda g: g.reshape(shape), {d + (d >= dim) for d in self.dynamic})

    def squeeze(self, dim: int) -> Self:
        """Return the TeSA of ``tensor.squeeze(dim)`` for a dim of size 1."""
        dim = self._dim(dim)
        if self.shape[dim] != 1:
            raise ShapeError(message(f"dim {dim} of shape {self.shape} has size {self.shape[dim]}", "a size of 1"))
        shape = (*self.shape[:dim], *self.shape[dim + 1 :])
        return self._map(lambda g: g.reshape(shape), {d - (d > dim) for d in self.dynamic if d != dim})

    def broadcast_to(self, *shape: int) -> Self:
        """Return the TeSA of ``tensor.broadcast_to(shape)``; it costs nothing."""
        lead = len(shape) - self.ndim
        if lead < 0 or any(o not in (1, n) for o, n in zip(self.shape, shape[lead:], strict=True)):
            raise ShapeError(message(f"shape {self.shape} to broadcast to {shape}", "sizes that are equal or 1"))
        return self._map(lambda g: g.broadcast_to(shape), {d + lead for d in self.dynamic})

    @classmethod
    def cat(cls, tesas: Sequence[Self], dim: int = 0) -> Self:
        """Return the TeSA of ``torch.cat(tensors, dim)``."""
        if not tesas:
            raise ShapeError(message("no tensors to concatenate", "at least one"))
        first = tesas[0]
        dim = first._dim(dim)
        for other in tesas[1:]:
            if other.ndim != first.ndim or any(
                a != b for d, (a, b) in enumerate(zip(first.shape, other.shape, strict=True)) if d != dim
            ):
                raise ShapeError(
                    message(f"shapes {[t.shape for t in tesas]} along dim {dim}", "shapes equal in all other dims")
                )
        dynamic = frozenset().union(*(t.dynamic for t in tesas))
        columns = zip(*(t._grids() for t in tesas), strict=True)
        return cls._of_grids([Grid.cat(column, dim) for column in columns], dynamic)

    # ------------------------------------------------------------------ inside

    def _grids(self) -> tuple[Grid, Grid, Grid, Grid, Grid]:
        return self.state, self.value, self.code, self.scale, self.zero_point

    @classmethod
    def _of_grids(cls, grids: Sequence[Grid], dynamic: Iterable[int]) -> Self:
        state, value, code, scale, zero_point = grids
        return cls(state, value, code, scale, zero_point, frozenset(dynamic))

    def _map(self, change: Callable[[Grid], Grid], dynamic: Iterable[int]) -> Self:
        return self._of_grids([change(g) for g in self._grids()], dynamic)

    def _dim(self, dim: int) -> int:
        if not -self.ndim <= dim < self.ndim:
            raise ShapeError(message(f"dim {dim} of shape {self.shape}", f"{-self.ndim} to {self.ndim - 1}"))
        return dim % self.ndim

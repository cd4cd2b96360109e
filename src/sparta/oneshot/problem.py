"""The problem of one layer: a weight, the Gram matrix of its inputs, a pattern and how many units to prune.

Every method gets a :class:`Problem` and returns a :class:`Solution`; none of them knows which kind of layer it came
from. Weights are matrices here, ``(groups, rows, columns)`` with one row per output and the input channels as the
innermost columns, so that a linear layer, a convolution and a grouped convolution are solved by the same lines.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from sparta.errors import ShapeError, message
from sparta.tesa.patterns import NM, VNM, Block, Channel, Pattern, Unstructured

__all__ = ["Layout", "Problem", "Solution", "Units"]

_T = TypeVar("_T")

DAMPING = 0.01  # of the mean of the Gram matrix's diagonal, added to it
DEAD = 1e-8  # the same for inputs that are always zero


@dataclass(frozen=True)
class Layout:
    """How a weight of shape ``(outputs, inputs / groups, *kernel)`` becomes matrices, and back.

    >>> layout = Layout((4, 3, 2, 2))
    >>> weight = torch.randn(4, 3, 2, 2)
    >>> layout.to_matrix(weight).shape
    torch.Size([1, 4, 12])
    >>> torch.equal(layout.to_weight(layout.to_matrix(weight)), weight)
    True
    """

    shape: tuple[int, ...]
    groups: int = 1

    @property
    def inputs(self) -> int:
        """Input channels of one group: the columns of one kernel position."""
        return self.shape[1]

    @property
    def columns(self) -> int:
        """Columns of a matrix: input channels times kernel positions."""
        return math.prod(self.shape[1:])

    def to_matrix(self, weight: Tensor) -> Tensor:
        """Return ``(groups, rows, columns)``."""
        return weight.movedim(1, -1).reshape(self.groups, self.shape[0] // self.groups, self.columns)

    def to_weight(self, matrix: Tensor) -> Tensor:
        """Return the tensor of the weight's shape."""
        return matrix.reshape(self.shape[0], *self.shape[2:], self.inputs).movedim(-1, 1).contiguous()


@dataclass(frozen=True)
class Units:
    """The units of a pattern as bands of rows times sets of columns, where a pattern is of that kind.

    Parameters
    ----------
    height
        Rows that share one choice.
    column_unit
        The unit of each column, counted from 0.
    column_group
        The group of each column, and `quota` how many columns of a group stay; None where there is no quota.
    """

    height: int
    column_unit: Tensor
    column_group: Tensor | None = None
    quota: int = 0

    @property
    def count(self) -> int:
        """Number of units of one band."""
        return int(self.column_unit[-1]) + 1


@dataclass(frozen=True, eq=False)
class Solution:
    """What a method returns: which weights stay, and their values (zero elsewhere)."""

    mask: Tensor
    weight: Tensor


@dataclass(frozen=True, eq=False)
class Problem:
    """One layer to prune.

    Parameters
    ----------
    weight
        ``(groups, rows, columns)``.
    gram
        ``(groups, columns, columns)``: inputs times inputs, summed over all tokens. None: there is no data.
    pattern
        As it lies on a weight of the layout's shape.
    count
        Units to prune; None is the pattern's own number (N:M).
    shared
        What methods computed from the Gram matrix alone, by name; layers with one matrix share it.
    """

    weight: Tensor
    gram: Tensor | None
    pattern: Pattern
    count: int | None
    layout: Layout
    shared: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls, weight: Tensor, gram: Tensor | None, pattern: Pattern, sparsity: float | None = None, groups: int = 1
    ) -> Problem:
        """Make the problem of a plain weight, ``(outputs, inputs / groups, *kernel)``.

        >>> Problem.of(torch.eye(4), torch.eye(4), Unstructured(), 0.75).count
        12
        """
        layout = Layout(tuple(weight.shape), groups)
        count = None if sparsity is None else round(sparsity * pattern.unit_count(layout.shape))
        grams = gram.unsqueeze(0) if gram is not None and gram.dim() == 2 else gram
        return cls(layout.to_matrix(weight.detach()), grams, pattern, count, layout)

    def select(self, score: Tensor) -> Tensor:
        """Return the mask that keeps the highest scores (a matrix) under the pattern, exactly `count` units pruned."""
        seen = self.layout.to_weight(score)
        if self.count is None:
            return self.layout.to_matrix(self.pattern.project(seen))
        units = self.pattern.unit_count(self.layout.shape)
        return self.layout.to_matrix(self.pattern.project(seen, self.count / units if units else 0.0))

    def select_per_row(self, score: Tensor) -> Tensor:
        """Return the mask with the same number of units pruned in each row of units (one more in the first ones)."""
        seen = self.layout.to_weight(score)
        rows = self.pattern.rows_per_unit(self.layout.shape)
        units = self.pattern.unit_count(self.layout.shape)
        bands = -(-self.layout.shape[0] // rows) if rows else 1
        if self.count is None or bands == 1 or units <= bands or units % bands:
            return self.select(score)
        ranks = self.pattern.unit_scores(seen).reshape(bands, -1).argsort(dim=1, stable=True).argsort(dim=1)
        order = ranks.flatten().argsort(stable=True)
        kept = torch.ones(units, dtype=torch.bool, device=score.device)
        kept[order[: self.count]] = False
        return self.layout.to_matrix(self.pattern.spread(kept, self.layout.shape))

    @property
    def norms(self) -> Tensor:
        """The norm of each column's input, ``(groups, 1, columns)``."""
        return self._known.diagonal(dim1=1, dim2=2).clamp(min=0).sqrt().to(self.weight.dtype).unsqueeze(1)

    def once(self, name: str, make: Callable[[], _T]) -> _T:
        """Return what depends on the Gram matrix alone, computed by the first problem that asks for it."""
        if name not in self.shared:
            self.shared[name] = make()
        found: _T = self.shared[name]
        return found

    @property
    def hessian(self) -> Tensor:
        """The Gram matrix in float64, damped so that it can be inverted.

        An input that is always zero gets next to nothing, so that its weights cost least and go first.
        """
        return self.once("hessian", self._damped)

    def _damped(self) -> Tensor:
        gram = self._known.double()
        diagonal = gram.diagonal(dim1=1, dim2=2)
        mean = diagonal.mean(1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        return gram + torch.diag_embed(torch.where(diagonal > 0, DAMPING, DEAD) * mean)

    def loss(self, weight: Tensor) -> float:
        """Return ``‖X Wᵀ - X W'ᵀ‖²`` of other weights (of ``‖W - W'‖²`` without data)."""
        change = (weight - self.weight).double()
        return _quadratic(change, self.gram)

    def relative_error(self, weight: Tensor) -> float:
        """Return ``‖X Wᵀ - X W'ᵀ‖ / ‖X Wᵀ‖``; 0 where the layer's output is zero."""
        return math.sqrt(max(0.0, self.loss(weight)) / self._whole) if self._whole > 0 else 0.0

    @cached_property
    def _whole(self) -> float:
        return _quadratic(self.weight.double(), self.gram)

    @cached_property
    def units(self) -> Units | None:
        """The pattern as bands times columns; None for a pattern of another kind."""
        columns = torch.arange(self.layout.columns, device=self.weight.device)
        position, channel = columns // self.layout.inputs, columns % self.layout.inputs
        pattern, rows = self.pattern, self.weight.shape[1]
        if isinstance(pattern, Unstructured):
            return Units(1, columns)
        if isinstance(pattern, NM) and pattern.axis == 1:
            groups = position * -(-self.layout.inputs // pattern.m) + channel // pattern.m
            return Units(1, columns, groups, pattern.n)
        if isinstance(pattern, Block) and pattern.axes == (0, 1) and self._fits(pattern.h, rows):
            return Units(pattern.h, position * -(-self.layout.inputs // pattern.w) + channel // pattern.w)
        if isinstance(pattern, Channel) and pattern.axis == 1 and self.layout.groups == 1 and self._is_flat:
            return Units(rows, columns)
        return None

    def steps(self, width: int = 128) -> list[list[tuple[int, int]]] | None:
        """Return blocks of columns, each a list of steps that a sweep chooses at once; None: choose all at first."""
        pattern, inputs = self.pattern, self.layout.inputs
        if isinstance(pattern, NM | VNM) and pattern.axis == 1:
            step = pattern.m
        elif isinstance(pattern, Unstructured):
            step = width
        elif isinstance(pattern, Block) and pattern.axes == (0, 1):
            step = max(width // pattern.w, 1) * pattern.w
        else:
            return None
        ends = [
            (start + first, start + min(first + step, inputs))
            for start in range(0, self.layout.columns, inputs)
            for first in range(0, inputs, step)
        ]
        per_block = max(1, width // step)
        return [ends[first : first + per_block] for first in range(0, len(ends), per_block)]

    @property
    def _known(self) -> Tensor:
        if self.gram is None:
            raise ShapeError(message("a method that reads inputs, without data", fix="pass `data`"))
        return self.gram

    @property
    def _is_flat(self) -> bool:
        return self.layout.columns == self.layout.inputs

    def _fits(self, height: int, rows: int) -> bool:
        return self.layout.groups == 1 or rows % height == 0


def _quadratic(matrix: Tensor, gram: Tensor | None) -> float:
    if gram is None:
        return float(matrix.square().sum())
    return float(((matrix @ gram.double()) * matrix).sum())

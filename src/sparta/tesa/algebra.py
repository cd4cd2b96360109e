"""The algebra of TeSAs: joining and meeting what is known of the same tensor.

Knowledge of one element is ordered ``live < constant c < dead``: a dead element may be taken for any constant, and a
constant may be treated as if it were live. `join` is the least upper bound (all that either knows: union of the pruned,
minimum of the bits), `meet` the greatest lower bound. Both are commutative, associative, idempotent and monotone, and
they absorb each other: a lattice. Two *different* constants join to dead, because no run of the program can observe
such an element; ask :func:`conflicts` first where that would be a mistake.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparta.errors import ShapeError, message
from sparta.tesa.grid import Grid

if TYPE_CHECKING:
    from sparta.tesa.attribute import TeSA

__all__ = ["CONSTANT", "DEAD", "LIVE", "conflicts", "join", "meet"]

LIVE, CONSTANT, DEAD = 0, 1, 2


def join(first: TeSA, second: TeSA) -> TeSA:
    """Return all that is known by either of two TeSAs of one tensor."""
    return _merged(first, second, join=True)


def meet(first: TeSA, second: TeSA) -> TeSA:
    """Return what two TeSAs of one tensor agree on."""
    return _merged(first, second, join=False)


def conflicts(first: TeSA, second: TeSA) -> int:
    """Return for how many elements two TeSAs claim different constants or different quantisation parameters."""
    _check_same_tensor(first, second)
    constants = Grid.combine(
        lambda s1, v1, s2, v2: (s1 == CONSTANT) & (s2 == CONSTANT) & ~_equal(v1, v2),
        *(first.state, first.value, second.state, second.value),
    )
    scales = Grid.combine(
        lambda c1, s1, z1, c2, s2, z2: (c1 == c2) & s1.isfinite() & s2.isfinite() & ((s1 != s2) | (z1 != z2)),
        *(first.code, first.scale, first.zero_point, second.code, second.scale, second.zero_point),
    )
    return Grid.combine(torch.logical_or, constants, scales).count()


def _merged(first: TeSA, second: TeSA, *, join: bool) -> TeSA:
    _check_same_tensor(first, second)
    if _no_constant_but_zero(first) and _no_constant_but_zero(second):  # the common case, without a float per element
        state = Grid.combine(torch.maximum if join else torch.minimum, first.state, second.state)
        value = first.value
    else:
        states_values = (first.state, first.value, second.state, second.value)
        state = Grid.combine(_joined_state if join else _met_state, *states_values)
        value = Grid.combine(_joined_value if join else _met_value, *states_values)

    # Formats compare as the triple (format, scale, zero point): its smaller one joins, its larger one meets.
    one = (first.code, first.scale, first.zero_point)
    two = (second.code, second.scale, second.zero_point)
    first_is_less = Grid.combine(_less_or_equal, *one, *two)
    code, scale, zero_point = (
        Grid.combine(lambda less, a, b: torch.where(less if join else ~less, a, b), first_is_less, a, b)
        for a, b in zip(one, two, strict=True)
    )
    return type(first)(state, value, code, scale, zero_point, first.dynamic)


def _no_constant_but_zero(tesa: TeSA) -> bool:
    """Whether 0 is the only constant, so that no two constants can differ."""
    return tesa.value.is_uniform and not bool(tesa.value.cells.any())


def _joined_state(s1: Tensor, v1: Tensor, s2: Tensor, v2: Tensor) -> Tensor:
    clash = (s1 == CONSTANT) & (s2 == CONSTANT) & ~_equal(v1, v2)
    return torch.where(clash, DEAD, torch.maximum(s1, s2)).to(torch.uint8)


def _met_state(s1: Tensor, v1: Tensor, s2: Tensor, v2: Tensor) -> Tensor:
    clash = (s1 == CONSTANT) & (s2 == CONSTANT) & ~_equal(v1, v2)
    return torch.where(clash, LIVE, torch.minimum(s1, s2)).to(torch.uint8)


def _joined_value(s1: Tensor, v1: Tensor, s2: Tensor, v2: Tensor) -> Tensor:
    value = torch.where(s1 == CONSTANT, v1, v2)
    return torch.where(_joined_state(s1, v1, s2, v2) == CONSTANT, value, 0.0)


def _met_value(s1: Tensor, v1: Tensor, s2: Tensor, v2: Tensor) -> Tensor:
    value = torch.where(s1 == CONSTANT, v1, v2)
    return torch.where(_met_state(s1, v1, s2, v2) == CONSTANT, value, 0.0)


def _less_or_equal(c1: Tensor, s1: Tensor, z1: Tensor, c2: Tensor, s2: Tensor, z2: Tensor) -> Tensor:
    """Compare (format, scale, zero point) triples in lexicographic order."""
    return (c1 < c2) | ((c1 == c2) & ((s1 < s2) | ((s1 == s2) & (z1 <= z2))))


def _equal(a: Tensor, b: Tensor) -> Tensor:
    """Element-wise equality with NaN equal to NaN."""
    return (a == b) | (a.isnan() & b.isnan())


def _check_same_tensor(first: TeSA, second: TeSA) -> None:
    if first.shape != second.shape:
        raise ShapeError(
            message(
                f"TeSAs of shapes {first.shape} and {second.shape}",
                "two TeSAs of one tensor",
                "use `broadcast_to` or `reshape` first",
            )
        )
    if first.dynamic != second.dynamic:
        raise ShapeError(
            message(
                f"dynamic dims {sorted(first.dynamic)} and {sorted(second.dynamic)}",
                "the same dims dynamic in both, as they are part of the shape",
                "use `with_dynamic`",
            )
        )

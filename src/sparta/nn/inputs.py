"""Inputs and masks of sparse modules, checked: what does not fit is an error that says what would.

Modules take example inputs as a tensor or a tuple of tensors, as one call has them, and masks as bool or 0/1 tensors or
as TeSAs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from sparta.errors import ShapeError, ValueRangeError, message
from sparta.tesa.attribute import TeSA
from sparta.tesa.mask import as_mask

__all__ = [
    "ExampleInputs",
    "as_inputs",
    "as_optional_inputs",
    "checked_mask",
    "demand",
    "finite",
    "need_operand",
    "need_tensors",
    "rows_to_check",
    "weight_mask_of",
]

ExampleInputs = Sequence[Tensor | None] | Tensor
"""What `tune` and `build` take: the inputs of one call, as they will be in use."""


def need_tensors(**inputs: object) -> None:
    """Raise unless all inputs of a call, by name, are tensors.

    >>> need_tensors(x=[1.0])
    Traceback (most recent call last):
    sparta.errors.ValueRangeError: x of type list; allowed: a torch.Tensor.
    """
    for name, value in inputs.items():
        if not isinstance(value, Tensor):
            raise ValueRangeError(message(f"{name} of type {type(value).__name__}", "a torch.Tensor"))


def need_operand(x: Tensor, weight: Tensor) -> None:
    """Raise for an input that no implement takes: complex, or on another device than the weight.

    >>> need_operand(torch.zeros(2, device="meta"), torch.zeros(2))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    sparta.errors.ValueRangeError: an input of torch.float32 on meta; allowed: real numbers on cpu; ...
    """
    if x.device != weight.device or x.is_complex():
        given = f"an input of {x.dtype} on {x.device}"
        raise ValueRangeError(message(given, f"real numbers on {weight.device}", "move it with .to(device)"))


def as_inputs(inputs: ExampleInputs, count: int) -> tuple[Tensor, ...]:
    """Return example inputs as a tuple; ``(A)`` is a tensor and not a tuple, and means the same."""
    return cast("tuple[Tensor, ...]", as_optional_inputs(inputs, count, 0))


def as_optional_inputs(inputs: ExampleInputs, count: int, optional: int) -> tuple[Tensor | None, ...]:
    """Return `count` tensors and `optional` more that may be None or left out."""
    if not isinstance(inputs, (Tensor, Sequence)):
        raise ValueRangeError(message(f"example inputs of type {type(inputs).__name__}", "a tensor or a tuple of them"))
    given_inputs = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    right = count <= len(given_inputs) <= count + optional and all(isinstance(t, Tensor) for t in given_inputs[:count])
    if not right or not all(t is None or isinstance(t, Tensor) for t in given_inputs):
        allowed = f"a tuple of {count} tensors" + (f" and up to {optional} more" if optional else "")
        raise ValueRangeError(message(f"{len(given_inputs)} example inputs", allowed, "example_inputs=(x,)"))
    return (*given_inputs, *[None] * (count + optional - len(given_inputs)))


def finite(inputs: ExampleInputs) -> ExampleInputs:
    """Return example inputs with 0 in the place of values that are not finite.

    >>> finite(torch.tensor([1.0, float("nan")])).tolist()
    [1.0, 0.0]
    """
    if isinstance(inputs, Tensor):
        return torch.nan_to_num(inputs, 0.0, 0.0, 0.0) if inputs.is_floating_point() else inputs
    return [finite(x) if isinstance(x, Tensor) else x for x in inputs] if isinstance(inputs, Sequence) else inputs  # type: ignore[misc]


def rows_to_check(x: Tensor, most: int = 256) -> tuple[Tensor | None, Tensor]:
    """Return which rows of an input have their results compared with float64, and those rows.

    None stands for all; of more than `most`, so many are taken, both ends among them.

    >>> checked, rows = rows_to_check(torch.arange(1000), most=3)
    >>> rows.tolist(), rows_to_check(torch.arange(3))[0]
    ([0, 499, 999], None)
    """
    if len(x) <= most:
        return None, x
    checked = torch.linspace(0, len(x) - 1, most, dtype=torch.float64).long().to(x.device)
    return checked, x[checked]


def demand(holds: Tensor, numbers: Tensor, what: str) -> None:
    """Raise unless a condition on the values of an input holds everywhere.

    On a GPU nothing waits for the answer: the device itself stops, so that a kernel never reads what is not there. A
    compiled graph cannot stop to look at numbers, and does not.

    >>> demand(torch.tensor([True]), torch.tensor([1]), "it must be 1")
    """
    if torch.compiler.is_compiling():
        return
    if numbers.is_cuda:
        torch._assert_async(holds.all(), what)
    elif not bool(holds.all()):
        raise ValueRangeError(message(f"{what}, not from {int(numbers.min())} to {int(numbers.max())}"))


def checked_mask(mask: Tensor | TeSA, name: str) -> Tensor:
    """Return a copy of a mask of shape (..., rows, cols) as bool; raises for what is no such mask."""
    if not isinstance(mask, (Tensor, TeSA)):
        raise ValueRangeError(message(f"{name} of type {type(mask).__name__}", "a bool tensor or a TeSA"))
    kept = mask.mask() if isinstance(mask, TeSA) else as_mask(mask.detach()).clone()
    if kept.dim() < 2:
        raise ShapeError(message(f"{name} of shape {tuple(kept.shape)}", "(..., rows, cols)"))
    return kept.contiguous()


def weight_mask_of(mask: Tensor | TeSA | None, weight: Tensor) -> Tensor:
    """Return a copy of the mask of a weight as bool, on its device; None stands for the zeros of the weight.

    >>> weight_mask_of(None, torch.tensor([[0.0, 2.0]])).tolist()
    [[False, True]]
    """
    if mask is None:
        return weight.detach() != 0
    kept = mask.mask(weight.device) if isinstance(mask, TeSA) else as_mask(mask).to(weight.device, copy=True)
    if kept.shape != weight.shape:
        given = f"weight_mask of shape {tuple(kept.shape)}"
        raise ShapeError(message(given, f"shape {tuple(weight.shape)}, that of the weight"))
    return kept

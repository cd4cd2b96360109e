"""Calibration data: batches as the model takes them, read once and checked before anything is computed with them.

A batch is what `example_inputs` is: a tensor, a tuple of arguments or a dict of keyword arguments. What is wrong with
the data is said at the data, not at the layer where it would show.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sparta.errors import ArgumentError, SpartaError, ValueRangeError, message

__all__ = ["MOST_BATCHES", "call", "checked_batches", "float_leaves"]

MOST_BATCHES = 128
"""How many batches are read; more tell nothing new about a range."""


def checked_batches(data: Any, example: Any = None) -> list[Any]:
    """Return the batches of calibration data as a list; raises where they are none that a model could be measured by.

    Parameters
    ----------
    data
        An iterable of batches.
    example
        The example inputs, where there are any: batches must have their structure.

    Examples
    --------
    >>> import torch
    >>> len(checked_batches([torch.rand(2, 3), torch.rand(2, 3)], torch.rand(2, 3)))
    2
    """
    if isinstance(data, Tensor | Mapping | str) or not isinstance(data, Iterable):
        raise ArgumentError(
            message(
                f"calibration is a {type(data).__name__}",
                "an iterable of batches: tensors, tuples of arguments, or dicts of keyword arguments",
                "put one batch into a list: calibration=[batch]",
            )
        )
    read = itertools.islice(data, MOST_BATCHES)
    batches = [dict(batch) if isinstance(batch, Mapping) else batch for batch in read]
    if not batches:
        raise ValueRangeError(
            message("calibration has no batch", "one batch or more", "a generator that was used before is empty")
        )
    for index, batch in enumerate(batches):
        if example is not None:
            _check_structure(batch, example, index)
        _check_numbers(batch, index)
    if _constant(batches):
        raise ValueRangeError(
            message(
                "calibration inputs that are all one number, a range of zero width",
                "data as the model will see it",
                "pass real batches as calibration",
            )
        )
    return batches


def call(model: nn.Module, batch: Any, index: int = 0) -> Any:
    """Return what a model makes of a batch.

    >>> call(nn.Identity(), (3,))
    3
    """
    try:
        if isinstance(batch, Mapping):
            return model(**batch)
        return model(*batch) if isinstance(batch, tuple | list) else model(batch)
    except SpartaError:
        raise
    except (TypeError, ValueError, RuntimeError, IndexError, AttributeError, KeyError) as error:
        raise ValueRangeError(
            message(
                f"the model cannot run calibration batch {index} ({_described(batch)}): {error}",
                "what the model takes: a tensor, a tuple of arguments, or a dict of keyword arguments",
                "leave labels out of the batches: [x for x, _ in loader]",
            )
        ) from error


def float_leaves(outputs: Any) -> list[Tensor]:
    """Return the tensors of real numbers in what a model returned, objects with fields looked into as well.

    >>> import torch
    >>> [tuple(leaf.shape) for leaf in float_leaves({"a": torch.ones(2), "b": torch.tensor(1)})]
    [(2,)]
    """
    if isinstance(outputs, Tensor):
        return [outputs] if outputs.is_floating_point() else []
    if isinstance(outputs, Mapping):
        return [leaf for value in outputs.values() for leaf in float_leaves(value)]
    if isinstance(outputs, tuple | list):
        return [leaf for value in outputs for leaf in float_leaves(value)]
    fields = getattr(outputs, "__dataclass_fields__", ())
    return [leaf for name in fields for leaf in float_leaves(getattr(outputs, name))]


def _check_structure(batch: Any, example: Any, index: int) -> None:
    given, wanted = _shape_of(batch), _shape_of(example)
    if given != wanted:
        raise ValueRangeError(
            message(
                f"calibration batch {index} is {_described(batch)}",
                f"the structure of the example inputs, {_described(example)}",
                "leave labels out of the batches: [x for x, _ in loader]",
            )
        )


def _shape_of(batch: Any) -> list[tuple[str, str, int]]:
    """Return what batches of one structure share: for each argument its name, its type, its number of dims."""
    if isinstance(batch, Mapping):
        named: list[tuple[str, Any]] = sorted((str(key), value) for key, value in batch.items())
    else:
        several = batch if isinstance(batch, tuple | list) else (batch,)
        named = [(str(place), value) for place, value in enumerate(several)]
    return [
        (name, "tensor" if isinstance(value, Tensor) else type(value).__name__, value.dim())
        if isinstance(value, Tensor)
        else (name, type(value).__name__, 0)
        for name, value in named
    ]


def _check_numbers(batch: Any, index: int) -> None:
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and not bool(leaf.isfinite().all()):
            raise ValueRangeError(
                message(f"calibration batch {index} holds NaN or infinity", "finite numbers", "look at the data")
            )


def _constant(batches: Iterable[Any]) -> bool:
    """Whether all inputs are real numbers, and all of them the same one."""
    leaves = [leaf for batch in batches for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
    real = [leaf for leaf in leaves if leaf.is_floating_point() and leaf.numel() > 1]
    if not real or len(real) != len(leaves):
        return False
    low = min(float(leaf.min()) for leaf in real)
    return low == max(float(leaf.max()) for leaf in real)


def _described(batch: Any) -> str:
    def one(value: Any) -> str:
        if isinstance(value, Tensor):
            kind = str(value.dtype).removeprefix("torch.")
            return f"a tensor of {'x'.join(map(str, value.shape)) or 'one number'} in {kind}"
        return f"a {type(value).__name__}"

    if isinstance(batch, Mapping):
        return "{" + ", ".join(f"{key}: {one(value)}" for key, value in batch.items()) + "}"
    if isinstance(batch, tuple | list):
        return "(" + ", ".join(one(value) for value in batch) + ")"
    return one(batch)

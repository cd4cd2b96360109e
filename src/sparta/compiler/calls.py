"""Calls: example inputs as people give them, and what they mean to the model.

One call or several; a tensor, a tuple of positional arguments, a dict of keyword arguments, or the one argument that
the model takes, itself a dict or a list. What it means is found by calling the model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from sparta.errors import ValueRangeError, message
from sparta.propagation.capture import call_arguments

__all__ = ["register_records", "runnable", "several"]


def several(example_inputs: Any, more: Sequence[Any] = ()) -> list[Any]:
    """Return the calls that example inputs stand for: a list of tuples or of dicts is several, all else is one.

    >>> len(several([{"x": 1}, {"x": 2}])), len(several([1, 2])), len(several((1, 2)))
    (2, 1, 1)
    """
    calls = isinstance(example_inputs, list) and bool(example_inputs)
    calls = calls and any(all(isinstance(one, kind) for one in example_inputs) for kind in (tuple, Mapping))
    return [*(example_inputs if calls else [example_inputs]), *more]


def runnable(model: nn.Module, example: Any) -> Any:
    """Return an example as a tuple of positional or a dict of keyword arguments with which the model runs.

    Raises :class:`ValueRangeError` where it does not run. A dict or list that is the model's one argument is taken for
    that if the model does not run with its items as arguments.
    """
    lazy = [name for name, tensor in model.named_parameters() if is_lazy(tensor)]
    if lazy:
        given = f"{lazy[0]} has no shape yet"
        raise ValueRangeError(message(given, "a model whose tensors are made", "call it once before compiling it"))
    args, kwargs = call_arguments(example)
    one_argument = isinstance(example, (Mapping, Sequence)) and not isinstance(example, (str, tuple))
    attempts = [(args, kwargs), ((example,), {})] if one_argument else [(args, kwargs)]
    errors: list[Exception] = []
    for positional, named in attempts:
        register_records((positional, named))
        try:
            with torch.no_grad():
                register_records(model(*positional, **named))
        except Exception as error:  # noqa: BLE001 - whatever the model raises is told below
            errors.append(error)
        else:
            return named or positional
    why = errors[0]
    text = (str(why).strip().splitlines() or [""])[0]
    raise ValueRangeError(
        message(
            f"{type(model).__name__} does not run on the example inputs ({type(why).__name__}: {text})",
            "a tensor, a tuple of positional arguments, or a dict of keyword arguments",
            "call model(*example_inputs) or model(**example_inputs) yourself; wrap one argument that is itself a dict "
            "or a list in a tuple",
        )
    ) from why


def register_records(value: Any) -> None:
    """Let torch see into the data classes in a value, which it takes for leaves otherwise."""
    for record in _records(value):
        kind = type(record)
        if kind not in pytree.SUPPORTED_NODES:
            _register(kind)
        register_records([getattr(record, field.name) for field in dataclasses.fields(record)])


def _records(value: Any) -> Iterator[Any]:
    for leaf in pytree.tree_leaves(value):
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield leaf


def _register(kind: type[Any]) -> None:
    names = [field.name for field in dataclasses.fields(kind) if field.init]

    def flatten(record: Any) -> tuple[list[Any], list[str]]:
        return [getattr(record, name) for name in names], names

    def with_keys(record: Any) -> tuple[list[tuple[Any, Any]], list[str]]:
        return [(pytree.GetAttrKey(name), getattr(record, name)) for name in names], names

    def unflatten(values: Any, context: Any) -> Any:
        return kind(**dict(zip(context, values, strict=True)))

    pytree.register_pytree_node(
        kind,
        flatten,
        unflatten,
        serialized_type_name=f"{kind.__module__}.{kind.__qualname__}",
        flatten_with_keys_fn=with_keys,
    )

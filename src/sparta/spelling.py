"""Older spellings of arguments: those that the documents use keep working, and mean what the present ones do.

A function has one name for each of its arguments; :func:`also` says which other names a caller may use for them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from sparta.errors import ValueRangeError, message

__all__ = ["also", "present_name"]

P = ParamSpec("P")
R = TypeVar("R")


def also(**older: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let a function take arguments by older names too; each is given with the present name.

    >>> @also(sample_inputs="example_inputs")
    ... def rows(example_inputs):
    ...     return len(example_inputs)
    >>> rows(sample_inputs=[1, 2]), rows(example_inputs=[1, 2]), rows([1, 2])
    (2, 2, 2)
    >>> rows(sample_inputs=[1], example_inputs=[1])
    Traceback (most recent call last):
    sparta.errors.ValueRangeError: both example_inputs and sample_inputs, which are one argument; allowed: one of them.
    """

    def accepting(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in older.keys() & kwargs.keys():
                present = older[name]
                if present in kwargs:
                    given = f"both {present} and {name}, which are one argument"
                    raise ValueRangeError(message(given, "one of them"))
                kwargs[present] = kwargs.pop(name)
            return function(*args, **kwargs)

        call.older_names = dict(older)  # type: ignore[attr-defined]
        return call

    return accepting


def present_name(function: Callable[..., object], name: str) -> str:
    """Return the present name of an argument of `function`, from that or an older one.

    >>> @also(iters="iterations")
    ... def run(iterations): ...
    >>> present_name(run, "iters"), present_name(run, "iterations")
    ('iterations', 'iterations')
    """
    older: dict[str, str] = getattr(function, "older_names", {})
    return older.get(name, name)

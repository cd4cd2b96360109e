"""The registry of methods: a method is a function from a problem to a solution, registered under its name.

A new method is one file with one ``@method("name")`` function, imported in the package's ``__init__``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sparta.errors import NameNotFoundError, did_you_mean
from sparta.oneshot.problem import Problem, Solution

__all__ = ["Method", "find_method", "method", "method_names"]

Solver = Callable[[Problem], Solution]


@dataclass(frozen=True)
class Method:
    """A registered method."""

    name: str
    solve: Solver
    needs_data: bool


_METHODS: dict[str, Method] = {}


def method(name: str, *, needs_data: bool = True) -> Callable[[Solver], Solver]:
    """Make a function from :class:`Problem` to :class:`Solution` known under `name`: a decorator."""

    def add(solve: Solver) -> Solver:
        _METHODS[name] = Method(name, solve, needs_data)
        return solve

    return add


def find_method(name: str) -> Method:
    """Return the method of this name."""
    if name not in _METHODS:
        raise NameNotFoundError(did_you_mean(name, [*_METHODS, "auto"], "method"))
    return _METHODS[name]


def method_names() -> list[str]:
    """Return the names of all methods."""
    return sorted(_METHODS)

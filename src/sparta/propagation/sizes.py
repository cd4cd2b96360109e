"""Sizes: which dims of a model's inputs may change, found by tracing, and the check that a call keeps to the others.

A trace is first tried with every dim free. Torch then fixes those that the model itself fixes (the channels of the
first convolution, the places of a learned position table) and relates those that depend on each other; where that
cannot be traced, the first dim alone is tried, and then no dim at all. What is left fixed is checked on every call, and
the error names the input, the dim and the size.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from sparta.errors import ShapeError, message

__all__ = ["AUTO", "Sizes", "all_sizes", "free_dims", "input_sizes", "pinned"]

AUTO = "auto"
"""As `dynamic_shapes`: find the dims that may change."""


def free_dims(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """Yield dynamic shapes to try, the most general first: all dims, the first dim of each input, none (None)."""
    leaves = [t for t in pytree.tree_leaves((args, dict(kwargs))) if isinstance(t, Tensor) and t.dim()]
    for most in (max((t.dim() for t in leaves), default=0), 1):
        shapes = torch.export.ShapesCollection()  # type: ignore[no-untyped-call]
        for tensor in leaves:
            shapes[tensor] = dict.fromkeys(range(min(most, tensor.dim())), torch.export.Dim.AUTO)
        if leaves and most:
            yield shapes.dynamic_shapes(model, args, dict(kwargs))  # type: ignore[no-untyped-call]
    yield None


@contextmanager
def all_sizes() -> Iterator[None]:
    """Trace so that a dim of size 1 in the example may have another size in a call."""
    from torch.fx.experimental import _config

    loggers = [logging.getLogger(name) for name in ("torch._export", "torch.fx.experimental.symbolic_shapes")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        with _config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@dataclass(frozen=True)
class _Guard:
    """A relation of sizes that the trace relied on, such as ``Eq(Mod(s0, 4), 0)``."""

    expression: Any
    text: str


class Sizes(nn.Module):
    """Checks the sizes of a call; a module, so that it stands in the graph before everything else.

    Parameters
    ----------
    shapes
        For each input of the graph its name and sizes: a number, or what it is in terms of free sizes; None for an
        input that is no tensor.
    guards
        Relations that the free sizes must satisfy.
    """

    def __init__(self, shapes: list[tuple[str, tuple[Any, ...] | None]], guards: list[_Guard]) -> None:
        super().__init__()
        self.shapes, self.guards = shapes, guards
        self._seen: set[tuple[Any, ...]] = set()

    def forward(self, *inputs: Any) -> None:
        """Raise :class:`~sparta.errors.ShapeError` for sizes that the model was not traced for."""
        given = tuple(tuple(x.shape) if isinstance(x, Tensor) else None for x in inputs)
        if any(not isinstance(size, int) for shape in given for size in shape or ()):
            return  # being traced itself: the sizes are symbols
        if given not in self._seen:
            self._check(given)
            self._seen.add(given)

    def _check(self, given: tuple[tuple[int, ...] | None, ...]) -> None:
        free: dict[Any, int] = {}
        derived: list[tuple[Any, int, str]] = []
        for (name, wanted), shape in zip(self.shapes, given, strict=True):
            if wanted is not None and shape is not None:
                if len(wanted) != len(shape):
                    raise ShapeError(message(f"{name} with {len(shape)} dims", f"{len(wanted)} dims"))
                for dim, pair in enumerate(zip(wanted, shape, strict=True)):
                    _check_size(*pair, f"a size of {pair[1]} in dim {dim} of {name}", (free, derived))
        for size, actual, where in derived:
            if size.free_symbols <= free.keys() and not _holds(size - actual, free, zero=True):
                raise _wrong(
                    where, f"{size}, with " + ", ".join(f"{name} = {free[name]}" for name in size.free_symbols)
                )
        for guard in self.guards:
            if guard.expression.free_symbols <= free.keys() and not _holds(guard.expression, free):
                told = ", ".join(f"{symbol} = {value}" for symbol, value in sorted(free.items(), key=str))
                raise _wrong(f"sizes {told}", f"sizes with {guard.text}")

    def extra_repr(self) -> str:
        """Return the sizes for people."""
        return ", ".join(f"{name}: {' × '.join(map(str, sizes))}" for name, sizes in self.shapes if sizes is not None)


def _check_size(size: Any, actual: int, where: str, found: tuple[dict[Any, int], list[tuple[Any, int, str]]]) -> None:
    """Compare one size, and note what it says of the free ones."""
    free, derived = found
    if isinstance(size, int):
        if size != actual:
            raise _wrong(where, f"{size}, which the model or its example fixes")
    elif size.is_symbol:
        if free.setdefault(size, actual) != actual:
            raise _wrong(where, f"{free[size]}, as in the other inputs")
    else:
        derived.append((size, actual, where))


def _wrong(given: str, allowed: str) -> ShapeError:
    return ShapeError(message(given, allowed, "capture the model with an example of that size"))


def input_sizes(graph: fx.Graph) -> Sizes:
    """Return the check of what a traced graph knows of its inputs' sizes."""
    shapes: list[tuple[str, tuple[Any, ...] | None]] = []
    environment = None
    for node in graph.nodes:
        if node.op != "placeholder":
            continue
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            shapes.append((node.name, None))
            continue
        given: tuple[Any, ...] = tuple(value.shape)
        expressions = [s if isinstance(s, int) else s.node.expr for s in given]
        shapes.append((node.name, tuple(int(s) if isinstance(s, int) or s.is_number else s for s in expressions)))
        environment = next((s.node.shape_env for s in given if not isinstance(s, int)), environment)
    return Sizes(shapes, _guards(environment) if environment is not None else [])


def pinned(graph: fx.Graph) -> bool:
    """Whether free sizes of a traced graph must give a certain number together, and so are hardly free.

    A linear layer after Flatten asks for that: height times width. As numbers they tell propagation more.
    """
    return any(
        getattr(guard.expression, "rel_op", "") == "=="
        and any(side.is_number and side > 1 for side in guard.expression.args)
        for guard in input_sizes(graph).guards
    )


def _only_of_one(expression: Any) -> bool:
    """Whether a relation only says that sizes are not 0 or 1.

    Traces rely on that everywhere (a dim of 1 might be repeated), and compute the same for a dim of 1, as torch holds.
    """
    if not getattr(expression, "is_Relational", False):
        return False
    small = any(side.is_number and side <= 2 for side in expression.args)
    symbols = list(expression.free_symbols)
    samples = ([size + step for step in range(len(symbols))] for size in (2, 3, 5, 8, 1021, 2**20))
    return small and all(_holds(expression, dict(zip(symbols, sizes, strict=True))) for sizes in samples)


def _holds(expression: Any, sizes: Mapping[Any, int], *, zero: bool = False) -> bool:
    """Whether a relation holds for sizes, or (`zero`) an expression is 0; one that has no value there does not.

    Torch's terms have none where they divide by 0, or take the remainder of a number below 0.
    """
    try:
        value = expression.subs(sizes)
        return bool(value == 0) if zero else bool(value)
    except (ArithmeticError, AssertionError, TypeError):
        return False


def _simple(environment: Any, expression: Any) -> Any:
    try:
        return environment.simplify(expression)
    except (ArithmeticError, AssertionError):
        return expression


def _guards(environment: Any) -> list[_Guard]:
    """Return the relations that a trace relied on, those of ranges included."""
    found: dict[str, Any] = {}
    for guard in environment.guards:
        expression = _simple(environment, guard.expr)
        if expression.free_symbols and not _only_of_one(expression):
            found[str(expression)] = expression
    for symbol, bounds in environment.var_to_range.items():
        if symbol in environment.replacements:
            continue
        if bounds.lower.is_number and bounds.lower > 2 and bounds.lower.is_finite:
            found[f"{symbol} >= {bounds.lower}"] = symbol >= bounds.lower
        if bounds.upper.is_number and bounds.upper.is_finite and bounds.upper < 2**31:
            found[f"{symbol} <= {bounds.upper}"] = symbol <= bounds.upper
    return [_Guard(expression, text) for text, expression in found.items()]

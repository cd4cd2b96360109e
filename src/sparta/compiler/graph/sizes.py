"""Sizes: which sizes of its inputs a captured graph takes, as data that is checked at a call and kept in files.

`torch.export` names the dims that may change by symbols and keeps the conditions under which it has traced. Here they
are terms: a number, the name of a symbol, or an operation on terms. A term is read from a file as what it is, and
evaluated by a walk over it, never as source.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

from torch import SymInt, Tensor, fx

from sparta.compiler.numbers import a_whole_number
from sparta.errors import FileFormatError, message

__all__ = ["Sizes", "Term", "evaluated"]

Term = Any
"""A number, the name of a symbol, or a list of an operation's name and its terms."""
Shapes = tuple[tuple[int, ...] | None, ...]

_DEEPEST, _MOST_TERMS = 64, 10_000
_MOST = 1 << 62


def _joined(function: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    return lambda *terms: reduce(function, terms)


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "add": _joined(operator.add),
    "mul": _joined(operator.mul),
    "floordiv": operator.floordiv,
    "truediv": operator.truediv,
    "mod": operator.mod,
    "max": max,
    "min": min,
    "ceil": math.ceil,
    "floor": math.floor,
    "trunc": math.trunc,
    "float": float,
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "and": lambda *terms: all(terms),
    "or": lambda *terms: any(terms),
    "not": operator.not_,
}
_OF_SYMPY = {
    "Add": "add",
    "Mul": "mul",
    "FloorDiv": "floordiv",
    "CleanDiv": "floordiv",
    "IntTrueDiv": "truediv",
    "FloatTrueDiv": "truediv",
    "Mod": "mod",
    "PythonMod": "mod",
    "Max": "max",
    "Min": "min",
    "CeilToInt": "ceil",
    "ceiling": "ceil",
    "FloorToInt": "floor",
    "floor": "floor",
    "TruncToInt": "trunc",
    "ToFloat": "float",
    "Equality": "eq",
    "Unequality": "ne",
    "StrictLessThan": "lt",
    "LessThan": "le",
    "StrictGreaterThan": "gt",
    "GreaterThan": "ge",
    "And": "and",
    "Or": "or",
    "Not": "not",
}


@dataclass(frozen=True)
class Sizes:
    """The sizes that a graph takes.

    Parameters
    ----------
    example
        The shape of each flat input of the example, None for one that is no tensor.
    dims
        For each flat input a term per dim; None as above.
    ranges
        For each symbol the least and the largest size; None for no limit.
    guards
        Terms that hold for the sizes that the graph was traced for.

    Examples
    --------
    >>> sizes = Sizes(((2, 8),), (("batch", 8),), {"batch": (1, None)}, (["le", "batch", 64],))
    >>> sizes.problem(((32, 8),)), sizes.problem(((65, 8),))
    ('', 'batch <= 64 does not hold')
    """

    example: Shapes
    dims: tuple[tuple[Term, ...] | None, ...]
    ranges: Mapping[str, tuple[int, int | None]]
    guards: tuple[Term, ...] = ()

    @property
    def dynamic(self) -> bool:
        """Whether any dim may change its size."""
        return any(not isinstance(dim, int) for dims in self.dims for dim in dims or ())

    @classmethod
    def of(cls, places: Sequence[fx.Node], leaves: Sequence[Any]) -> Sizes:
        """Return the sizes that a captured graph takes; raises :class:`ValueError` for a condition that is no term.

        Parameters
        ----------
        places
            Its placeholders.
        leaves
            The flat inputs of the example.
        """
        example = tuple(tuple(leaf.shape) if isinstance(leaf, Tensor) else None for leaf in leaves)
        dims: list[tuple[Term, ...] | None] = []
        environment = None
        for node, shape in zip(places, example, strict=True):
            value = node.meta.get("val")
            if shape is None or not isinstance(value, Tensor):
                dims.append(None)
                continue
            sizes: Sequence[Any] = value.shape
            environment = next((s.node.shape_env for s in sizes if isinstance(s, SymInt)), environment)
            dims.append(tuple(_dim(size) for size in value.shape))
        if environment is None:
            return cls(example, tuple(dims), {})
        bound = {dim for each in dims for dim in each or () if isinstance(dim, str)}
        guards = []
        for guard in environment.guards:
            term = _term(_replaced(environment, guard.expr))
            if term is not True and _symbols(term) <= bound and term not in guards:
                guards.append(term)
        ranges = {}
        for symbol, limits in environment.var_to_range.items():
            if str(symbol) in bound:
                ranges[str(symbol)] = (_least(limits.lower), _largest(limits.upper))
        return cls(example, tuple(dims), ranges, tuple(guards))

    def bound(self, shapes: Shapes) -> dict[str, int]:
        """Return the size of each symbol in these shapes."""
        found: dict[str, int] = {}
        for terms, shape in zip(self.dims, shapes, strict=True):
            for term, size in zip(terms or (), shape or (), strict=False):
                if isinstance(term, str):
                    found.setdefault(term, size)
        return found

    def problem(self, shapes: Shapes) -> str:
        """Return why the graph does not take inputs of these shapes; empty where it does."""
        known = self.bound(shapes)
        for terms, example, shape in zip(self.dims, self.example, shapes, strict=True):
            if terms is None or shape is None:
                continue
            if len(terms) != len(shape):
                return f"{len(shape)} dims where the graph has {len(terms)}"
            for term, size, before in zip(terms, shape, example or shape, strict=True):
                wanted = evaluated(term, known) if _symbols(term) <= known.keys() else before
                if size != wanted:
                    return f"a size of {size} where the graph has {wanted}"
        for name, size in known.items():
            least, largest = self.ranges.get(name, (0, None))
            if size < least or (largest is not None and size > largest):
                return f"{name} = {size} is not between {least} and {'any size' if largest is None else largest}"
        broken = next((guard for guard in self.guards if not evaluated(guard, known)), None)
        return "" if broken is None else f"{in_words(broken)} does not hold"

    def relaxed(self, shapes: Shapes) -> Sizes:
        """Return sizes that include these shapes: conditions that they break are left out, ranges reach to them."""
        known = self.bound(shapes)
        ranges = {}
        for name, (least, largest) in self.ranges.items():
            size = known.get(name, least)
            ranges[name] = min(least, size), None if largest is None else max(largest, size)
        return replace(self, ranges=ranges, guards=tuple(g for g in self.guards if evaluated(g, known)))

    def fixed_at_example(self, names: set[str]) -> Sizes:
        """Return sizes in which these symbols have the example's size only."""
        at = self.bound(self.example)
        ranges = {name: (at[name], at[name]) if name in names else limits for name, limits in self.ranges.items()}
        return replace(self, ranges=ranges)

    def with_symbols(self, changed: Mapping[str, int]) -> Shapes:
        """Return the example's shapes with other sizes for some symbols."""
        known = {**self.bound(self.example), **changed}
        return tuple(
            None
            if terms is None or shape is None
            else tuple(
                int(evaluated(term, known)) if _symbols(term) <= known.keys() else size
                for term, size in zip(terms, shape, strict=True)
            )
            for terms, shape in zip(self.dims, self.example, strict=True)
        )

    # ------------------------------------------------------------------ as JSON

    def to_dict(self) -> dict[str, Any]:
        """Return the sizes as JSON values."""
        return {
            "example": [None if shape is None else list(shape) for shape in self.example],
            "dims": [None if terms is None else list(terms) for terms in self.dims],
            "ranges": {name: list(limits) for name, limits in self.ranges.items()},
            "guards": list(self.guards),
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Sizes:
        """Return what :meth:`to_dict` wrote; raises :class:`FileFormatError` for anything else."""
        example = tuple(
            None if shape is None else tuple(a_whole_number(size, "a size") for size in shape)
            for shape in fields["example"]
        )
        count = [0]
        dims = tuple(
            None if terms is None else tuple(_checked(term, count) for term in terms) for terms in fields["dims"]
        )
        ranges = {}
        for name, (least, largest) in fields["ranges"].items():
            most = None if largest is None else a_whole_number(largest, "a largest size")
            ranges[str(name)] = (a_whole_number(least, "a least size"), most)
        guards = tuple(_checked(term, count) for term in fields["guards"])
        found = cls(example, dims, ranges, guards)
        bound = {dim for each in dims for dim in each or () if isinstance(dim, str)}
        ranks = [(s is None, len(s or ())) == (d is None, len(d or ())) for s, d in zip(example, dims, strict=False)]
        if len(example) != len(dims) or not all(ranks) or any(not _symbols(term) <= bound for term in guards):
            raise FileFormatError(message("the sizes that the graph takes", "a term per dim", "save it again"))
        return found


def evaluated(term: Term, known: Mapping[str, int]) -> Any:
    """Return the value of a term.

    >>> evaluated(["floordiv", ["add", "s0", -1], 2], {"s0": 16})
    7
    """
    if isinstance(term, str):
        return known[term]
    if not isinstance(term, (list, tuple)):
        return term
    name, *parts = term
    values = [evaluated(part, known) for part in parts]
    try:
        found = _OPERATIONS[name](*values)
    except (ArithmeticError, ValueError, OverflowError):
        return False  # sizes for which a condition has no value break it
    return found if not isinstance(found, int) or abs(found) < _MOST else False


_SIGNS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "add": "+", "mul": "*", "mod": "%"}
_SIGNS |= {"floordiv": "//", "truediv": "/", "and": "and", "or": "or"}


def in_words(term: Term) -> str:
    """Return a term as people write it.

    >>> in_words(["eq", ["mod", "s0", 4], 0])
    '(s0 % 4) == 0'
    """
    if not isinstance(term, (list, tuple)):
        return str(term)
    name, *parts = term
    texts = [f"({in_words(part)})" if isinstance(part, (list, tuple)) else str(part) for part in parts]
    return f" {_SIGNS[name]} ".join(texts) if name in _SIGNS else f"{name}({', '.join(map(in_words, parts))})"


def _replaced(environment: Any, expression: Any) -> Any:
    """Return an expression in the symbols that remain; as it is where torch's arithmetic does not get there."""
    try:
        return environment.replace(expression)
    except (ArithmeticError, AssertionError):
        return expression


def _dim(size: Any) -> Term:
    if not isinstance(size, SymInt):
        return int(size)
    return _term(_replaced(size.node.shape_env, size.node.expr))


def _term(expression: Any) -> Term:  # noqa: PLR0911 - one per kind of expression
    """Return an expression of torch's symbols as a term; raises ValueError for one with an operation not known here."""
    if expression is True or expression is False:
        return expression
    if getattr(expression, "is_Boolean", False) and not expression.args:
        return bool(expression)
    if getattr(expression, "is_Integer", False):
        return int(expression)
    if getattr(expression, "is_Symbol", False):
        return str(expression)
    if getattr(expression, "is_Rational", False):
        return ["truediv", int(expression.p), int(expression.q)]
    if getattr(expression, "is_number", False) and not expression.args:
        return float(expression)
    name = type(expression).__name__
    if name in ("Pow", "PowByNatural"):
        base, power = expression.args
        if not power.is_Integer or not 0 < int(power) <= 8:
            raise ValueError(f"no term for {expression}")
        return ["mul", *[_term(base)] * int(power)]
    if name not in _OF_SYMPY:
        raise ValueError(f"no term for {expression}")
    return [_OF_SYMPY[name], *(_term(part) for part in expression.args)]


def _symbols(term: Term) -> set[str]:
    if isinstance(term, str):
        return {term}
    return {name for part in term[1:] for name in _symbols(part)} if isinstance(term, (list, tuple)) else set()


def _least(limit: Any) -> int:
    return int(limit) if getattr(limit, "is_Integer", False) and int(limit) > 0 else 0


def _largest(limit: Any) -> int | None:
    return int(limit) if getattr(limit, "is_Integer", False) and int(limit) < _MOST else None


def _checked(term: Any, count: list[int], depth: int = _DEEPEST) -> Term:
    """Return a term of a file; raises for what is none."""
    count[0] += 1
    if depth == 0 or count[0] > _MOST_TERMS:
        raise FileFormatError(message("a size of the stored graph", "a term of few operations", "save it again"))
    if isinstance(term, (bool, int, float, str)):
        return term
    if isinstance(term, list) and len(term) > 1 and isinstance(term[0], str) and term[0] in _OPERATIONS:
        return [term[0], *(_checked(part, count, depth - 1) for part in term[1:])]
    raise FileFormatError(message("a size of the stored graph", "a number, a symbol or an operation", "save it again"))

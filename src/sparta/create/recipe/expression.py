"""Expressions of a recipe: arithmetic over its variables, read with Python's grammar and worked out by ourselves.

``${num_epochs / 2}`` in a recipe stays an expression until the recipe is used, so that a changed variable changes
everything that hangs on it. The language has numbers, names, ``+ - * / // % **`` and a handful of functions: a text is
first cut into these tokens, then parsed by :mod:`ast`, and of the tree only the nodes that are known here are walked.
Nothing is ever compiled, so reading a stranger's recipe cannot run a stranger's code.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from sparta.errors import NameNotFoundError, ValueRangeError, did_you_mean, message

__all__ = ["FUNCTIONS", "Expression", "parse"]

Value: TypeAlias = int | float

_TOKEN = re.compile(
    r"\s*(?:(?P<number>(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?)|(?P<name>[A-Za-z_]\w*)"
    r"|(?P<mark>\*\*|//|[-+*/%(),]))"
)
_DEEPEST = 50  # brackets within brackets; far beyond what a person writes, far below Python's stack
_LONGEST = 400  # keeps the deepest tree, a long chain of powers, within Python's stack
_MOST_DIGITS = 400  # of round(): no number has so many before or after its point

FUNCTIONS: dict[str, tuple[Callable[..., Value], int, int | None]] = {
    "abs": (abs, 1, 1),
    "min": (min, 2, None),
    "max": (max, 2, None),
    "round": (lambda value, digits=None: _rounded(value, digits), 1, 2),
    "int": (int, 1, 1),
    "float": (float, 1, 1),
    "ceil": (math.ceil, 1, 1),
    "floor": (math.floor, 1, 1),
}
"""The functions there are, each with the least and the most arguments it takes."""

_OPERATIONS: dict[type[ast.operator], tuple[str, Callable[[Value, Value], Value], int]] = {
    ast.Add: ("+", operator.add, 1),
    ast.Sub: ("-", operator.sub, 1),
    ast.Mult: ("*", operator.mul, 2),
    ast.Div: ("/", operator.truediv, 2),
    ast.FloorDiv: ("//", operator.floordiv, 2),
    ast.Mod: ("%", operator.mod, 2),
}
"""How each operation is written, what it does, and how tightly it binds; a sign binds with 3, a power with 4."""


@dataclass(frozen=True)
class Expression:
    """An arithmetic expression over variables; :func:`parse` makes it. Those that print the same are equal.

    Examples
    --------
    >>> half = parse("(num_epochs-5) / 2")
    >>> half.evaluate({"num_epochs": 20})
    7.5
    >>> sorted(half.names()), str(half)
    (['num_epochs'], '(num_epochs - 5) / 2')
    """

    _text: str
    _names: frozenset[str] = field(repr=False, compare=False)
    _value: Callable[[Mapping[str, Any]], Value] = field(repr=False, compare=False)
    _binds: int = field(default=5, repr=False, compare=False)  # how tightly: 1 a sum to 5 a name or a number

    def names(self) -> set[str]:
        """Return the variables it depends on."""
        return set(self._names)

    def evaluate(self, variables: Mapping[str, Any]) -> Value:
        """Return its value; each variable it names must be a number."""
        return self._value(variables)

    def __str__(self) -> str:
        return self._text

    def _within(self, least: int) -> str:
        """Return its text, in brackets if it binds less tightly than `least`."""
        return self._text if self._binds >= least else f"({self._text})"


def parse(text: str) -> Expression:
    """Return the expression that `text` is.

    Parameters
    ----------
    text
        For example ``max(1, floor(num_epochs / 4))``. ``**`` binds tightest and to the right, then the sign, then
        ``* / // %``, then ``+ -``, as in Python.

    Examples
    --------
    >>> parse("-2 ** 2 + 7 // 2").evaluate({})
    -1
    """
    if len(text) > _LONGEST:
        allowed = f"{_LONGEST} at most"
        raise ValueRangeError(
            message(f"an expression of {len(text)} characters", allowed, "give its parts names of their own")
        )
    tokens = list(_tokens(text))
    _check_depth(text, [token for token, _ in tokens])
    source = " ".join(token for token, _ in tokens)
    try:
        tree = ast.parse(source, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        column = (getattr(error, "offset", 0) or len(source) + 1) - 1
        place = tokens[source[:column].count(" ")][1] if column < len(source) else len(text.rstrip())
        what = f"did not expect {text[place:]!r}" if place < len(text.rstrip()) else "expected a number or a variable"
        raise _error(text, what, place) from error
    return _read(tree, text)


def _tokens(text: str) -> Iterator[tuple[str, int]]:
    """Yield each token as Python is to see it, and its place; names get a v first, so that none is a Python keyword."""
    place, end = 0, len(text.rstrip())
    while place < end:
        found = _TOKEN.match(text, place)
        if found is None:
            start = place + len(text[place:]) - len(text[place:].lstrip())
            raise _error(text, f"{text[start]!r}", start)
        token, start = found[found.lastgroup or 0], found.start(found.lastgroup or 0)
        if found.lastgroup == "number":
            if not math.isfinite(float(token)):
                raise _error(text, f"the number {token} is too large", start)
            token = repr(int(token) if token.isdecimal() else float(token))
        yield f"v{token}" if found.lastgroup == "name" else token, start
        place = found.end()


def _check_depth(text: str, tokens: list[str]) -> None:
    """Raise before the parser would have to go deep."""
    brackets = signs = 0
    for mark in tokens:
        brackets += (mark == "(") - (mark == ")")
        signs = signs + 1 if mark in {"+", "-"} else 0
        for count, what in ((brackets, "brackets within each other"), (signs, "signs in a row")):
            if count >= _DEEPEST:
                raise _error(text, f"{_DEEPEST} {what} or more", 0)


def _error(text: str, what: str, place: int) -> ValueRangeError:
    allowed = f"numbers, variables, + - * / // % **, brackets, {', '.join(FUNCTIONS)}"
    return ValueRangeError(message(f"{what} at character {place + 1} of the expression {text!r}", allowed))


def _read(tree: ast.expr, text: str) -> Expression:
    """Return the expression that a tree is; raises unless it is made of what the language has."""
    match tree:
        case ast.Constant(value=int() | float() as number):
            return Expression(repr(number), frozenset(), lambda _: number)
        case ast.Name(id=written):
            name = written[1:]
            return Expression(name, frozenset({name}), lambda variables: _variable(name, variables))
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=inner):
            operand, minus = _read(inner, text), isinstance(sign, ast.USub)
            shown = ("-" if minus else "+") + operand._within(3)
            return Expression(shown, operand._names, lambda v: -operand._value(v) if minus else operand._value(v), 3)
        case ast.BinOp(op=op) if isinstance(op, ast.Pow) or type(op) in _OPERATIONS:
            left, right = _read(tree.left, text), _read(tree.right, text)
            mark, function, level = _OPERATIONS.get(type(op), ("**", _power, 4))
            low, high = (5, 3) if level == 4 else (level, level + 1)
            shown = f"{left._within(low)} {mark} {right._within(high)}"
            names = left._names | right._names
            return Expression(shown, names, lambda v: _applied(shown, function, left._value(v), right._value(v)), level)
        case ast.Call(func=ast.Name(id=written), args=inside, keywords=[]):
            given = [_read(argument, text) for argument in inside]
            function, shown = _function(written[1:], len(given), text), f"{written[1:]}({', '.join(map(str, given))})"
            names = frozenset().union(*(argument._names for argument in given))
            return Expression(shown, names, lambda v: _applied(shown, function, *[one._value(v) for one in given]))
    raise _error(text, "no arithmetic", 0)


def _function(name: str, count: int, text: str) -> Callable[..., Value]:
    if name not in FUNCTIONS:
        raise NameNotFoundError(did_you_mean(name, FUNCTIONS, "function in an expression:"))
    function, least, most = FUNCTIONS[name]
    if count < least or (most is not None and count > most):
        allowed = f"{least} or more" if most is None else str(least) if least == most else f"{least} to {most}"
        raise ValueRangeError(message(f"{name}() with {count} arguments in {text!r}", allowed))
    return function


def _variable(name: str, variables: Mapping[str, Any]) -> Value:
    if name not in variables:
        raise NameNotFoundError(did_you_mean(name, variables, "variable"))
    found = variables[name]
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise ValueRangeError(message(f"the variable {name!r} is {found!r} in a sum", "a number"))
    return found


def _applied(shown: str, function: Callable[..., Value], *given: Value) -> Value:
    """Return what a function gives; integers are no larger than floats can be, so that sums stay cheap."""
    try:
        value = function(*given)
    except ZeroDivisionError as error:
        raise ValueRangeError(message(f"{shown} divides by zero")) from error
    except (OverflowError, ValueError) as error:
        raise ValueRangeError(message(f"{shown} has no value: it is no finite real number")) from error
    try:
        if math.isfinite(value):
            return value
    except OverflowError:
        pass
    raise ValueRangeError(message(f"{shown} is too large", "finite numbers"))


def _power(left: Value, right: Value) -> Value:
    rough = math.pow(left, right)  # refuses what is huge or complex before an exact power is tried
    return int(left**right) if isinstance(left, int) and isinstance(right, int) and right >= 0 else rough


def _rounded(value: Value, digits: Value | None) -> Value:
    return round(value) if digits is None else round(value, max(-_MOST_DIGITS, min(_MOST_DIGITS, int(digits))))

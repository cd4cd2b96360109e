"""Expressions of a recipe: arithmetic over its variables, parsed into a small tree and never given to Python.

``${num_epochs / 2}`` in a recipe stays an expression until the recipe is used, so that a changed variable changes
everything that hangs on it. The one idea to know: the language has numbers, names, ``+ - * / // % **`` and a handful
of functions, and nothing else, so reading a stranger's recipe cannot run a stranger's code.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from sparta.errors import NameNotFoundError, ValueRangeError, did_you_mean, message

__all__ = ["FUNCTIONS", "Binary", "Call", "Expression", "Name", "Node", "Number", "Unary", "parse"]

Value: TypeAlias = int | float

_TOKEN = re.compile(
    r"\s*(?:(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)|(?P<name>[A-Za-z_]\w*)|(?P<mark>\*\*|//|[-+*/%(),]))"
)
_DEEPEST = 50  # brackets within brackets; far beyond what a person writes, far below Python's stack
_LONGEST = 400  # keeps the deepest tree, a long chain of powers, within Python's stack

FUNCTIONS: dict[str, tuple[Callable[..., Value], int, int | None]] = {
    "abs": (abs, 1, 1),
    "min": (min, 2, None),
    "max": (max, 2, None),
    "round": (lambda value, digits=None: round(value, None if digits is None else int(digits)), 1, 2),
    "int": (int, 1, 1),
    "float": (float, 1, 1),
    "ceil": (math.ceil, 1, 1),
    "floor": (math.floor, 1, 1),
}
"""The functions there are, each with the least and the most arguments it takes."""

_SUMS: dict[str, Callable[[Value, Value], Value]] = {"+": operator.add, "-": operator.sub}
_PRODUCTS: dict[str, Callable[[Value, Value], Value]] = {
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
}


@dataclass(frozen=True)
class Number:
    """A number as it is written."""

    value: Value


@dataclass(frozen=True)
class Name:
    """A variable."""

    name: str


@dataclass(frozen=True)
class Unary:
    """``-operand`` or ``+operand``."""

    sign: str
    operand: Node


@dataclass(frozen=True)
class Binary:
    """``left mark right``."""

    mark: str
    left: Node
    right: Node


@dataclass(frozen=True)
class Call:
    """``function(arguments, ...)``."""

    function: str
    arguments: tuple[Node, ...]


Node: TypeAlias = Number | Name | Unary | Binary | Call


@dataclass(frozen=True)
class Expression:
    """An arithmetic expression over variables.

    Parameters
    ----------
    tree
        What :func:`parse` made of the text.

    Examples
    --------
    >>> half = parse("(num_epochs - 5) / 2")
    >>> half.evaluate({"num_epochs": 20})
    7.5
    >>> sorted(half.names()), str(half)
    (['num_epochs'], '(num_epochs - 5) / 2')
    """

    tree: Node

    def names(self) -> set[str]:
        """Return the variables it depends on."""
        return set(_names(self.tree))

    def evaluate(self, variables: Mapping[str, Any]) -> Value:
        """Return its value; each variable it names must be a number."""
        return _value(self.tree, variables)

    def __str__(self) -> str:
        return _text(self.tree)[0]


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
        raise ValueRangeError(
            message(
                f"an expression of {len(text)} characters", f"{_LONGEST} at most", "give its parts names of their own"
            )
        )
    return Expression(_Parser(text).whole())


class _Parser:
    """Recursive descent, one method a level of binding."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = list(self._split())
        self.place = 0
        self.depth = 0

    def _split(self) -> Iterator[tuple[str, str, int]]:
        place, end = 0, len(self.text.rstrip())
        while place < end:
            found = _TOKEN.match(self.text, place)
            if found is None:
                start = place + len(self.text[place:]) - len(self.text[place:].lstrip())
                raise self._error(f"{self.text[start]!r}", start)
            kind = str(found.lastgroup)
            yield kind, found[kind], found.start(kind)
            place = found.end()
        yield "end", "the end", end

    def _error(self, what: str, place: int) -> ValueRangeError:
        return ValueRangeError(
            message(
                f"{what} at character {place + 1} of the expression {self.text!r}",
                f"numbers, variables, + - * / // % **, brackets, {', '.join(FUNCTIONS)}",
            )
        )

    def _next(self) -> tuple[str, str, int]:
        token = self.tokens[self.place]
        self.place += 1
        return token

    def _take(self, *marks: str) -> str | None:
        """Step over the next token if it is one of `marks`, and return it."""
        kind, text, _ = self.tokens[self.place]
        if kind == "mark" and text in marks:
            self.place += 1
            return text
        return None

    def _close(self) -> None:
        if self._take(")") is None:
            _, text, place = self.tokens[self.place]
            raise self._error(f"expected ')', not {text!r}", place)

    def whole(self) -> Node:
        tree = self.sum()
        kind, text, place = self.tokens[self.place]
        if kind != "end":
            raise self._error(f"did not expect {text!r}", place)
        return tree

    def sum(self) -> Node:
        self.depth += 1
        if self.depth > _DEEPEST:
            raise self._error(f"more than {_DEEPEST} brackets within each other", self.tokens[self.place][2])
        tree = self.product()
        while mark := self._take(*_SUMS):
            tree = Binary(mark, tree, self.product())
        self.depth -= 1
        return tree

    def product(self) -> Node:
        tree = self.sign()
        while mark := self._take(*_PRODUCTS):
            tree = Binary(mark, tree, self.sign())
        return tree

    def sign(self) -> Node:
        if mark := self._take("-", "+"):
            self.depth += 1
            if self.depth > _DEEPEST:
                raise self._error(f"more than {_DEEPEST} signs in a row", self.tokens[self.place][2])
            tree = Unary(mark, self.sign())
            self.depth -= 1
            return tree
        return self.power()

    def power(self) -> Node:
        base = self.atom()
        if self._take("**"):
            return Binary("**", base, self.sign())
        return base

    def atom(self) -> Node:
        kind, text, place = self._next()
        if kind == "number":
            if not math.isfinite(float(text)):
                raise self._error(f"the number {text} is too large", place)
            return Number(int(text) if text.isdigit() else float(text))
        if kind == "name":
            return self._call(text) if self._take("(") else Name(text)
        if text == "(":
            tree = self.sum()
            self._close()
            return tree
        raise self._error(f"expected a number, a variable or a function, not {text!r}", place)

    def _call(self, function: str) -> Node:
        if function not in FUNCTIONS:
            raise NameNotFoundError(did_you_mean(function, FUNCTIONS, "function in an expression:"))
        arguments = []
        if not self._take(")"):
            arguments.append(self.sum())
            while self._take(","):
                arguments.append(self.sum())
            self._close()
        _, least, most = FUNCTIONS[function]
        if len(arguments) < least or (most is not None and len(arguments) > most):
            allowed = f"{least} or more" if most is None else str(least) if least == most else f"{least} to {most}"
            raise ValueRangeError(message(f"{function}() with {len(arguments)} arguments in {self.text!r}", allowed))
        return Call(function, tuple(arguments))


def _names(tree: Node) -> Iterator[str]:
    match tree:
        case Name(name):
            yield name
        case Unary(_, operand):
            yield from _names(operand)
        case Binary(_, left, right):
            yield from _names(left)
            yield from _names(right)
        case Call(_, arguments):
            for argument in arguments:
                yield from _names(argument)
        case _:
            pass


def _value(tree: Node, variables: Mapping[str, Any]) -> Value:
    match tree:
        case Number(value):
            return value
        case Name(name):
            if name not in variables:
                raise NameNotFoundError(did_you_mean(name, variables, "variable"))
            found = variables[name]
            if isinstance(found, bool) or not isinstance(found, int | float):
                raise ValueRangeError(message(f"the variable {name!r} is {found!r} in a sum", "a number"))
            return found
        case Unary(sign, operand):
            value = _value(operand, variables)
            return -value if sign == "-" else value
        case Binary(mark, left, right):
            return _applied(tree, mark, _value(left, variables), _value(right, variables))
        case Call(function, arguments):
            given = [_value(argument, variables) for argument in arguments]
            try:
                return _finite(FUNCTIONS[function][0](*given), tree)
            except (OverflowError, ValueError) as error:
                raise ValueRangeError(message(f"{_text(tree)[0]} has no value: {error}")) from error


def _applied(tree: Node, mark: str, left: Value, right: Value) -> Value:
    try:
        if mark == "**":
            rough = math.pow(left, right)  # refuses what is huge or complex before an exact power is tried
            exact = isinstance(left, int) and isinstance(right, int) and right >= 0
            return left**right if exact else rough
        result = (_SUMS | _PRODUCTS)[mark](left, right)
    except ZeroDivisionError as error:
        raise ValueRangeError(message(f"{_text(tree)[0]} divides by zero")) from error
    except (OverflowError, ValueError) as error:
        raise ValueRangeError(
            message(f"{_text(tree)[0]} is {left} {mark} {right}, which is no finite real number")
        ) from error
    return _finite(result, tree)


def _finite(value: Value, tree: Node) -> Value:
    """Return `value`; floats are finite and integers no larger than floats are, so that sums stay cheap."""
    try:
        if math.isfinite(value):
            return value
    except OverflowError:
        pass
    raise ValueRangeError(message(f"{_text(tree)[0]} is too large", "finite numbers"))


def _text(tree: Node) -> tuple[str, int]:
    """Return the text of a tree and how tightly it binds: 1 a sum, 2 a product, 3 a sign, 4 a power, 5 an atom."""
    match tree:
        case Number(value):
            return repr(value), 5
        case Name(name):
            return name, 5
        case Call(function, arguments):
            return f"{function}({', '.join(_text(argument)[0] for argument in arguments)})", 5
        case Unary(sign, operand):
            return sign + _bracketed(operand, 3), 3
        case Binary("**", left, right):
            return f"{_bracketed(left, 5)} ** {_bracketed(right, 3)}", 4
        case Binary(mark, left, right):
            level = 1 if mark in _SUMS else 2
            return f"{_bracketed(left, level)} {mark} {_bracketed(right, level + 1)}", level


def _bracketed(tree: Node, least: int) -> str:
    """Return the text of a tree, in brackets if it binds less tightly than `least`."""
    text, level = _text(tree)
    return text if level >= least else f"({text})"

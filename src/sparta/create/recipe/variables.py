"""Variables of a recipe: where expressions hide in its values, what they refer to, and what they come to.

The recipe keeps values as they were written; this module looks into them. A text that is wholly ``${...}`` is an
expression, anywhere inside a value; a bare name in it stands for that variable whatever it holds (text, a list, null),
anything else is arithmetic.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from typing import Any

from sparta.create.recipe.document import Size, parse_scalar
from sparta.create.recipe.expression import FUNCTIONS, Expression, parse
from sparta.errors import NameNotFoundError, ValueRangeError, did_you_mean, message
from sparta.files import read_json

__all__ = [
    "STEPS_PER_EPOCH",
    "as_overrides",
    "check_name",
    "check_references",
    "expression_of",
    "references",
    "resolve",
    "shadow_safe",
    "substitute",
]

STEPS_PER_EPOCH = "steps_per_epoch"
"""The one variable that a recipe does not define: it is known when training starts."""

_NAME = re.compile(r"[A-Za-z_]\w*")
_WHOLE = re.compile(r"\s*\$\{([^{}]*)\}\s*")


def expression_of(value: object) -> Expression | None:
    """Return the expression that a value is, or None if it is a plain value.

    >>> str(expression_of("${num_epochs/2}")), expression_of("linear")
    ('num_epochs / 2', None)
    """
    if not isinstance(value, str) or "${" not in value:
        return None
    found = _WHOLE.fullmatch(value)
    if found is None:
        raise ValueRangeError(
            message(
                f"the text {value!r} has an expression in its middle", "texts that are wholly ${...}, or not at all"
            )
        )
    return parse(found[1])


def check_name(name: str) -> None:
    """Raise unless `name` can be a variable's."""
    if name == STEPS_PER_EPOCH:
        raise ValueRangeError(
            message(f"the recipe defines {name!r}", "other names", "it is known when training starts; just use it")
        )
    if name in FUNCTIONS or not _NAME.fullmatch(name):
        raise ValueRangeError(
            message(f"the variable {name!r}", "letters, digits and _, no digit first, and not a function's name")
        )


def _expressions(value: object) -> Iterator[Expression]:
    """Yield all expressions inside a value."""
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _expressions(item)
    elif isinstance(value, list):
        for item in value:
            yield from _expressions(item)
    elif (found := expression_of(value)) is not None:
        yield found


def references(value: object) -> set[str]:
    """Return the variables that the expressions inside a value name.

    >>> sorted(references({"a": ["${x + y}", 1], "b": "${z}"}))
    ['x', 'y', 'z']
    """
    return {name for expression in _expressions(value) for name in expression.names()}


def check_references(variables: Mapping[str, Any], outer: Mapping[str, Any] | None = None) -> None:
    """Raise if a variable refers to one that does not exist, or to itself, be it in a roundabout way.

    Parameters
    ----------
    variables
        Raw values by name.
    outer
        What they may refer to besides each other.
    """
    known = {*variables, *(outer or {}), STEPS_PER_EPOCH}
    graph = {name: references(value) for name, value in variables.items()}
    for name, wanted in graph.items():
        for other in sorted(wanted - known):
            raise NameNotFoundError(f"in the variable {name!r}: {did_you_mean(other, known, 'variable')}")
    _order(graph)


def _order(graph: Mapping[str, set[str]]) -> list[str]:
    """Return the names so that each comes after all that it refers to."""
    try:
        return list(
            TopologicalSorter({name: sorted(wanted & graph.keys()) for name, wanted in graph.items()}).static_order()
        )
    except CycleError as error:
        circle = error.args[1][:0:-1]  # without the first, which is the last again; each refers to the next
        first = circle.index(min(circle))
        text = " -> ".join([*circle[first:], *circle[: first + 1]])
        raise ValueRangeError(
            message(f"variables refer to each other in a circle: {text}", fix="give one a value")
        ) from error


def resolve(variables: Mapping[str, Any], outer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of all variables, and those of `outer` that they do not shadow.

    Parameters
    ----------
    variables
        Raw values by name, in any order; checked by :func:`check_references`.
    outer
        Values that are known already.

    Examples
    --------
    >>> resolve({"active": "${num_epochs / 2}", "num_epochs": 20, "layers": ["a"], "alias": "${layers}"}, {})
    {'num_epochs': 20, 'layers': ['a'], 'active': 10.0, 'alias': ['a']}
    """
    scope = {name: value for name, value in outer.items() if name not in variables}
    size = Size("the variables")
    for name in _order({name: references(value) for name, value in variables.items()}):
        scope[name] = substitute(variables[name], scope)
        size.add(scope[name])
    return scope


def substitute(value: Any, scope: Mapping[str, Any]) -> Any:
    """Return a value with every expression inside it replaced by what it comes to.

    >>> substitute({"end_epoch": "${n * 2}", "params": "${names}"}, {"n": 3, "names": ["a.weight"]})
    {'end_epoch': 6, 'params': ['a.weight']}
    """
    if isinstance(value, Mapping):
        return {key: substitute(item, scope) for key, item in value.items()}
    if isinstance(value, list):
        return [substitute(item, scope) for item in value]
    expression = expression_of(value)
    if expression is None:
        return value
    for name in sorted(expression.names() - scope.keys()):
        if name == STEPS_PER_EPOCH:
            raise ValueRangeError(
                message("the recipe counts in steps, and steps_per_epoch is not known", fix="pass steps_per_epoch")
            )
        raise NameNotFoundError(did_you_mean(name, scope, "variable"))
    if str(expression) in scope:  # nothing but a variable, of any type
        return scope[str(expression)]
    return expression.evaluate(scope)


def shadow_safe(root: Mapping[str, Any], inner: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables of a recipe merged into those of one of its stages, every one meaning what it meant.

    A variable of the recipe that hangs on one that the stage shadows is replaced by its value: written out inside
    the stage it would see the stage's.

    >>> shadow_safe({"n": 8, "half": "${n / 2}", "m": 1}, {"n": 2})
    {'half': 4.0, 'm': 1, 'n': 2}
    """
    changed = set(inner)
    values: dict[str, Any] | None = None
    merged: dict[str, Any] = {}
    while more := {name for name, value in root.items() if references(value) & changed} - changed:
        changed |= more
    for name, value in root.items():
        if name in inner:
            continue
        if name in changed:
            values = resolve(root, {}) if values is None else values
            merged[name] = values[name]
        else:
            merged[name] = value
    return {**merged, **inner}


def as_overrides(given: Mapping[str, Any] | str) -> dict[str, Any]:
    """Return overrides as a dictionary, from one, from a JSON object, or from ``"name=value,name=value"``.

    >>> as_overrides("num_epochs=10, lr_func: cosine")
    {'num_epochs': 10, 'lr_func': 'cosine'}
    """
    if isinstance(given, Mapping):
        return dict(given)
    text = given.strip()
    if text.startswith("{"):
        return dict(read_json(text, "the text of the overrides"))  # an object, by its first character
    overrides: dict[str, Any] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        found = re.fullmatch(r"([\w.]+)\s*[=:]\s*(.*)", part, re.DOTALL)
        if found is None:
            raise ValueRangeError(message(f"the override {part!r}", "name=value", "write values with commas as JSON"))
        overrides[found[1]] = parse_scalar(found[2])
    return overrides

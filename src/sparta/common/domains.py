"""Domains: the values that one parameter of a search space may take.

A search space (:mod:`sparta.common.space`) is a tree whose every node is decided by one pick from one of these domains.
A finite domain is an indexable list that is never written out, so that `randint` over a billion values costs nothing
until a value is asked for.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeGuard

from sparta.errors import NameNotFoundError, ValueRangeError, did_you_mean, message

__all__ = [
    "DOMAIN_TYPES",
    "Choices",
    "Domain",
    "Integers",
    "Interval",
    "Scalar",
    "Steps",
    "domain_of",
    "freeze",
    "identity",
    "thaw",
]

Scalar = None | bool | int | float | str | tuple[Any, ...]

_EXACT_INTEGERS = 2**53  # beyond this, a float (and so every tuning store) cannot tell neighbours apart


def freeze(value: object) -> Scalar:
    """Return a value as it is kept in a choice: plain, immutable and finite; lists become tuples.

    >>> freeze([16, [32, "row"]])
    (16, (32, 'row'))
    """
    if value is None or isinstance(value, bool):
        return value
    for plain in (int, float, str):
        if isinstance(value, plain):
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueRangeError(message(f"a choice holds {value}", "finite numbers"))
            return plain(value)
    if isinstance(value, list | tuple):
        return tuple(freeze(part) for part in value)
    raise ValueRangeError(
        message(
            f"a choice holds {value!r}, a {type(value).__name__}",
            "None, bool, int, float, str, and lists of these, so that samples can be stored as JSON",
            "pass a name or a number and look the object up when the sample is used",
        )
    )


def thaw(value: object) -> Any:
    """Return a frozen value as JSON has it: tuples become lists, also inside dicts.

    >>> thaw({"tile": (16, 32)})
    {'tile': [16, 32]}
    """
    if isinstance(value, tuple | list):
        return [thaw(part) for part in value]
    if isinstance(value, dict):
        return {name: thaw(part) for name, part in value.items()}
    return value


def identity(value: Scalar) -> object:
    """Return what makes two frozen values the same: as Python's ``==``, except that True is not 1.

    >>> identity((1, 2)) == identity((1.0, 2)), identity(True) == identity(1)
    (True, False)
    """
    if isinstance(value, tuple):
        return tuple(identity(part) for part in value)
    return ("bool", value) if isinstance(value, bool) else value


@dataclass(frozen=True)
class Choices:
    """Any of some listed values, in their order.

    >>> Choices((16, 32, 64)).at(1)
    32
    """

    values: tuple[Scalar, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueRangeError(message("a choice without values", "one value or more"))
        if len(self._index) != len(self.values):
            counted = [identity(value) for value in self.values]
            twice = next(value for value in self.values if counted.count(identity(value)) > 1)
            raise ValueRangeError(message(f"a choice holds {twice!r} twice", "different values", "drop one of them"))

    @cached_property
    def _index(self) -> dict[object, int]:
        return {identity(value): index for index, value in enumerate(self.values)}

    @property
    def count(self) -> int:
        """How many values there are."""
        return len(self.values)

    @property
    def middle(self) -> Scalar:
        """The value to use before anything is known: the first."""
        return self.values[0]

    def at(self, index: int) -> Scalar:
        """Return the value at a position."""
        return self.values[index]

    def position(self, value: object) -> int:
        """Return where a value stands; raises LookupError if it is not listed."""
        try:
            return self._index[identity(freeze(value))]
        except ValueRangeError as error:
            raise LookupError from error

    def match(self, value: object) -> Scalar:
        """Return the listed value equal to `value`; raises LookupError if there is none."""
        return self.values[self.position(value)]

    def draw(self, rng: random.Random) -> Scalar:
        """Return a random value."""
        return rng.choice(self.values)

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """The values as JSON texts: unique strings for stores that keep only strings."""
        return tuple(json.dumps(thaw(value)) for value in self.values)

    def __str__(self) -> str:
        shown = ", ".join(repr(value) for value in self.values[:12])
        return f"one of {shown}" + (", ..." if self.count > 12 else "")


@dataclass(frozen=True)
class Integers:
    """The integers from `low` up to, not including, `high`."""

    low: int
    high: int

    @property
    def count(self) -> int:
        """How many values there are."""
        return self.high - self.low

    @property
    def middle(self) -> int:
        """The value to use before anything is known: the lowest."""
        return self.low

    def at(self, index: int) -> int:
        """Return the value at a position."""
        return self.low + index

    def match(self, value: object) -> int:
        """Return `value` as an integer of the range; raises LookupError if it is none."""
        if _is_number(value) and value == math.floor(value) and self.low <= value < self.high:
            return int(value)
        raise LookupError

    def draw(self, rng: random.Random) -> int:
        """Return a random value."""
        return rng.randrange(self.low, self.high)

    def __str__(self) -> str:
        return f"an integer in [{self.low}, {self.high})"


@dataclass(frozen=True)
class Steps:
    """The multiples of `step` nearest to the numbers in [`low`, `high`], clipped to that interval.

    >>> steps = Steps(1.0, 10.0, 4.0)
    >>> [steps.at(index) for index in range(steps.count)]
    [1.0, 4.0, 8.0]
    """

    low: float
    high: float
    step: float

    @property
    def count(self) -> int:
        """How many values there are."""
        return round(self.high / self.step) - round(self.low / self.step) + 1

    @property
    def middle(self) -> float:
        """The value to use before anything is known: the lowest."""
        return self.at(0)

    def at(self, index: int) -> float:
        """Return the value at a position."""
        return min(max((round(self.low / self.step) + index) * self.step, self.low), self.high)

    def position(self, value: object) -> int:
        """Return where a value stands, up to rounding; raises LookupError if it is no step."""
        if _is_number(value) and self.low - self.step <= value <= self.high + self.step:
            index = round(value / self.step) - round(self.low / self.step)
            if 0 <= index < self.count and math.isclose(self.at(index), value, abs_tol=1e-9 * self.step):
                return index
        raise LookupError

    def match(self, value: object) -> float:
        """Return the step equal to `value` up to rounding; raises LookupError if there is none."""
        return self.at(self.position(value))

    def draw(self, rng: random.Random) -> float:
        """Return a random value."""
        return self.at(rng.randrange(self.count))

    def __str__(self) -> str:
        return f"a multiple of {self.step:g} in [{self.low:g}, {self.high:g}]"


@dataclass(frozen=True)
class Interval:
    """All numbers from `low` to `high`, drawn evenly, or evenly in their logarithm."""

    low: float
    high: float
    log: bool

    count = None

    @property
    def middle(self) -> float:
        """The value to use before anything is known: the centre (of the logarithms, if `log`)."""
        return self._clip(math.sqrt(self.low) * math.sqrt(self.high) if self.log else (self.low + self.high) / 2)

    def at(self, index: int) -> float:
        """Refuse: there is no list of these values."""
        raise ValueRangeError(message(f"position {index} of a continuous range", "positions of finite spaces"))

    def match(self, value: object) -> float:
        """Return `value` as a float of the interval; raises LookupError if it lies outside."""
        if _is_number(value) and self.low <= value <= self.high:
            return float(value)
        raise LookupError

    def draw(self, rng: random.Random) -> float:
        """Return a random value."""
        if self.log:
            return self._clip(math.exp(rng.uniform(math.log(self.low), math.log(self.high))))
        return self._clip(rng.uniform(self.low, self.high))

    def _clip(self, value: float) -> float:
        return min(max(value, self.low), self.high)

    def __str__(self) -> str:
        return f"a number in [{self.low:g}, {self.high:g}]"


Domain = Choices | Integers | Steps | Interval

DOMAIN_TYPES = {
    "choice": "a list of values",
    "uniform": "[low, high]",
    "loguniform": "[low, high] with 0 < low",
    "quniform": "[low, high, q]",
    "randint": "[lower, upper), two integers",
}


def domain_of(kind: str, value: object) -> Domain:
    """Return the domain that NNI's ``_type`` and ``_value`` describe.

    Parameters
    ----------
    kind
        A key of :data:`DOMAIN_TYPES`.
    value
        What that type needs: the values of a choice, the bounds of a range.

    Examples
    --------
    >>> print(domain_of("randint", [0, 8]))
    an integer in [0, 8)
    """
    if not isinstance(kind, str) or kind not in DOMAIN_TYPES:
        raise NameNotFoundError(did_you_mean(str(kind), DOMAIN_TYPES, "parameter type"))
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise ValueRangeError(message(f"the _value of a {kind} is {value!r}", DOMAIN_TYPES[kind]))
    if kind == "choice":
        return Choices(tuple(freeze(part) for part in value))
    return _range(kind, value)


def _range(kind: str, bounds: Sequence[object]) -> Integers | Steps | Interval:
    """Return the domain of a numeric type after checking its bounds."""
    needed = 3 if kind == "quniform" else 2
    numbers = [float(bound) for bound in bounds if _is_number(bound)]
    if len(numbers) != needed or len(bounds) != needed:
        raise ValueRangeError(message(f"the _value of a {kind} is {list(bounds)!r}", DOMAIN_TYPES[kind]))
    low, high = numbers[:2]
    if not low < high or not math.isfinite(high - low):
        fix = "use a choice of one value for a fixed parameter"
        raise ValueRangeError(message(f"a {kind} from {low:g} to {high:g}", "a lower bound below the upper", fix))
    if kind == "randint":
        if any(bound != math.floor(bound) or abs(bound) > _EXACT_INTEGERS for bound in (low, high)):
            raise ValueRangeError(message(f"a randint from {low:g} to {high:g}", "integers up to 2**53 in size"))
        return Integers(int(low), int(high))
    if kind == "quniform":
        step = numbers[2]
        if not step > 0 or max(abs(low), abs(high)) / step > _EXACT_INTEGERS:
            raise ValueRangeError(message(f"a quniform with q = {step:g}", "q > 0, and at most 2**53 steps"))
        return Steps(low, high, step)
    if kind == "loguniform" and low <= 0:
        raise ValueRangeError(message(f"a loguniform from {low:g}", "bounds above 0", "use uniform, or a higher bound"))
    return Interval(low, high, log=kind == "loguniform")


def _is_number(value: object) -> TypeGuard[int | float]:
    """Tell whether this is a number that a float can hold: no bool, NaN, infinity or giant integer."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max

"""What every pattern is: a frozen dataclass that projects, validates, prints and (de)serialises itself.

The base class does everything that is common (checking scores, masks and fields, wording errors, dictionaries and text
forms); a concrete pattern only says what its units are and what it forbids. A pattern sees a tensor as *units*
(elements, blocks, slices), which it keeps or prunes as one; allocation compares units across layers, so that a budget
means the same for every pattern. Nothing outside asks which pattern it has: a new pattern is one file and one
registration.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from sparta.errors import NameNotFoundError, PatternError, ShapeError, ValueRangeError, did_you_mean, message
from sparta.tesa.mask import as_mask
from sparta.tesa.select import check_sparsity, comparable, lowest, pruned_count

__all__ = ["Pattern", "as_pattern", "check_size", "parse_pattern", "register", "resolve_axis"]

_REGISTRY: dict[str, type[Pattern]] = {}
_ALIASES = {"block4": "block:1x4", "tensorrt": "2:4", "filter": "channel:0"}  # names that recipes use
_P = TypeVar("_P", bound="type[Pattern]")


def register(name: str) -> Callable[[_P], _P]:
    """Class decorator: make a pattern known under `name` to dictionaries, files and :func:`parse_pattern`."""

    def add(pattern: _P) -> _P:
        pattern.name = name
        _REGISTRY[name] = pattern
        return pattern

    return add


@dataclasses.dataclass(frozen=True)
class Pattern(ABC):
    """Where the zeros of a mask may be.

    Subclasses are frozen dataclasses: their fields are the parameters of the pattern, so patterns compare and hash
    by value. Masks are bool tensors with True for kept elements.

    Examples
    --------
    >>> import torch
    >>> from sparta.tesa.patterns import NM, Pattern
    >>> pattern = NM(2, 4)
    >>> pattern.project(torch.tensor([[1.0, 4.0, 2.0, 3.0]]))
    tensor([[False,  True, False,  True]])
    >>> Pattern.from_dict(pattern.to_dict()) == pattern
    True
    """

    name: ClassVar[str]
    """The registered name: the value of ``"pattern"`` in a dictionary."""
    unit: ClassVar[str]
    """What one unit is called in messages."""
    spelling: ClassVar[str]
    """Regular expression of the text form; its named groups are the fields."""
    example: ClassVar[str]
    """One text form, shown when a text is not understood."""

    def project(self, score: Tensor, sparsity: float | None = None) -> Tensor:
        """Return the mask that keeps the highest scores the pattern allows.

        Parameters
        ----------
        score
            Real tensor of any shape, stride and device, used as given (pass ``weight.abs()`` for magnitudes).
            Among equal scores the lower row-major index is pruned first. NaN is refused.
        sparsity
            Fraction of the units to prune, in [0, 1]; the count is rounded to the nearest integer and exact.
            N:M patterns have a sparsity of their own and take None for it.

        Returns
        -------
        Tensor
            Bool mask of the shape of `score`, contiguous, on its device.
        """
        if sparsity is not None or self.own_sparsity() is None:
            sparsity = check_sparsity(sparsity)
        self.check_shape(score.shape)
        values = comparable(score)
        if values.numel() == 0:
            return torch.zeros_like(values, dtype=torch.bool)
        return self._project(values, sparsity)

    def validate(self, mask: Tensor) -> None:
        """Raise `PatternError` when `mask` breaks the pattern, saying where first and how often.

        Parameters
        ----------
        mask
            Bool tensor, or a numeric one of zeros and ones, of any shape the pattern accepts.
        """
        mask = as_mask(mask)
        broken = self._broken_units(mask)
        count = int(torch.count_nonzero(broken))
        if not count:
            return
        # argmax of equal maxima is the first one
        flat = int(broken.flatten().to(torch.uint8).argmax())
        unit = [int(i) for i in torch.unravel_index(torch.tensor(flat), broken.shape)]
        first = [i * step for i, step in zip(unit, self._unit_steps(mask.ndim), strict=True)]
        raise PatternError(
            message(
                f"the mask of shape {tuple(mask.shape)} breaks {self} in {count} of {broken.numel()} "
                f"{self.unit}s, first in the {self.unit} that starts at {first}",
                self._rule,
                "project a score with this pattern, or use detect(mask) to see which pattern holds",
            )
        )

    def holds(self, mask: Tensor) -> bool:
        """Return whether `mask` obeys the pattern; like :meth:`validate`, without the error."""
        return not bool(self._broken_units(as_mask(mask)).any())

    @abstractmethod
    def check_shape(self, shape: Sequence[int]) -> None:
        """Raise `ShapeError` when the pattern cannot be laid over a tensor of this shape."""

    def capacity(self, shape: Sequence[int]) -> float:
        """Return the largest density that a mask of this shape may have under the pattern."""
        self.check_shape(shape)
        return 1.0

    # ------------------------------------------------------------------ units

    def unit_count(self, shape: Sequence[int]) -> int:
        """Return how many units the pattern has on a tensor of this shape.

        >>> as_pattern("block:4x4").unit_count((8, 10)), as_pattern("channel:0").unit_count((8, 10))
        (6, 8)
        """
        return math.prod(shape)

    def unit_scores(self, score: Tensor) -> Tensor:
        """Return the score of each unit, the mean of its elements: 1-D, in the order in which units are counted.

        Parameters
        ----------
        score
            Real tensor of the shape of the weight, or of the rows of it that are here.

        Examples
        --------
        >>> as_pattern("channel:1").unit_scores(torch.tensor([[1.0, 2.0], [3.0, 6.0]]))
        tensor([2., 4.])
        """
        return (self._unit_means(score) if score.numel() else score).flatten()

    def spread(self, kept: Tensor, shape: Sequence[int]) -> Tensor:
        """Return the mask of a tensor of this shape from one bool per unit, as :meth:`unit_scores` orders them.

        >>> as_pattern("channel:1").spread(torch.tensor([True, False]), (2, 2))
        tensor([[ True, False],
                [ True, False]])
        """
        return kept.reshape(tuple(shape))

    def own_sparsity(self, shape: Sequence[int] | None = None) -> float | None:
        """Return the sparsity that the pattern itself asks for (of a tensor of this shape); None if it has none."""
        del shape
        return None

    def final_sparsity(self, sparsity: float | None) -> float | None:
        """Return a sparsity that masks of this pattern can end at; raise `ValueRangeError` for any other.

        A pattern with a sparsity of its own, such as N:M, ends at that one and at no other, so None stands for it.

        >>> as_pattern("2:4").final_sparsity(0.5), as_pattern("4x1").final_sparsity(0.9)
        (None, 0.9)
        """
        own = self.own_sparsity()
        if own is None:
            return check_sparsity(sparsity)
        if sparsity is not None and abs(check_sparsity(sparsity) - own) > 1e-6:
            raise ValueRangeError(
                message(
                    f"sparsity {sparsity} with the pattern {self}, which prunes {own:.4g}",
                    f"{own:.4g}, or no sparsity",
                    "leave the sparsity out, or take another pattern, such as 1:8 or block:4x1",
                )
            )
        return None

    def along(self, axis: int) -> Pattern:
        """Return the pattern for a weight whose input channels lie along `axis`; itself where that does not matter."""
        del axis
        return self

    def rows_per_unit(self, shape: Sequence[int]) -> int | None:
        """Return how many rows (indices of the first axis) stay together in a unit; None: all of them."""
        del shape
        return 1

    # ------------------------------------------------------------------ as data

    @property
    def params(self) -> dict[str, Any]:
        """The parameters of the pattern, by field name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def to_dict(self) -> dict[str, Any]:
        """Return the name and the parameters as plain JSON values."""
        plain = {key: list(value) if isinstance(value, tuple) else value for key, value in self.params.items()}
        return {"pattern": self.name, **plain}

    @staticmethod
    def from_dict(fields: Mapping[str, Any]) -> Pattern:
        """Return the pattern that :meth:`to_dict` wrote.

        >>> Pattern.from_dict({"pattern": "channel", "axis": 1})
        Channel(axis=1)
        """
        params = dict(fields)
        if "pattern" not in params:
            raise NameNotFoundError(
                message(f"{params!r} does not name a pattern", ", ".join(sorted(_REGISTRY)), 'add a "pattern" key')
            )
        name = params.pop("pattern")
        if not isinstance(name, str) or name not in _REGISTRY:
            raise NameNotFoundError(did_you_mean(str(name), _REGISTRY, "pattern"))
        known = {field.name: field for field in dataclasses.fields(_REGISTRY[name])}
        for key in params:
            if key not in known:
                raise NameNotFoundError(did_you_mean(str(key), known, f"parameter of pattern {name!r}:"))
        missing = [k for k, f in known.items() if k not in params and f.default is dataclasses.MISSING]
        if missing:
            raise NameNotFoundError(
                message(f"pattern {name!r} lacks {', '.join(missing)}", ", ".join(known), "add what is missing")
            )
        return _REGISTRY[name](**params)

    # ------------------------------------------------------------------ for subclasses

    @property
    @abstractmethod
    def _rule(self) -> str:
        """What a valid unit is, in words."""

    def _unit_means(self, score: Tensor) -> Tensor:
        """Return the mean score of each unit, of any shape that counts them in order; the score is not empty."""
        return score

    def _project(self, score: Tensor, sparsity: float | None) -> Tensor:
        """Project a score that is checked, comparable and not empty."""
        means = self.unit_scores(score)
        return self.spread(~lowest(means, pruned_count(means.numel(), check_sparsity(sparsity))), score.shape)

    @abstractmethod
    def _broken_units(self, mask: Tensor) -> Tensor:
        """Check the shape; return a bool tensor of the rank of `mask` with one element per unit, True if broken."""

    def _unit_steps(self, ndim: int) -> list[int]:
        """Return how far apart units start along each axis of a mask with `ndim` axes."""
        return [1] * ndim


def as_pattern(given: Pattern | str) -> Pattern:
    """Return a pattern from itself or from its text form. Every public function that takes a pattern calls this.

    >>> as_pattern("4x1") == as_pattern("block:4x1") == as_pattern(as_pattern("4x1"))
    True
    """
    if isinstance(given, Pattern):
        return given
    text: object = given
    if isinstance(text, str):
        return parse_pattern(text)
    forms = ", ".join(repr(pattern.example) for pattern in _REGISTRY.values())
    raise ValueRangeError(message(f"the pattern is {given!r}", f"a Pattern, or a text such as {forms}"))


def parse_pattern(text: str) -> Pattern:
    """Return the pattern that a short text names; the inverse of ``str(pattern)``.

    >>> parse_pattern("2:4"), parse_pattern("block:32x16"), parse_pattern("channel:0")
    (NM(n=2, m=4, axis=1), Block(h=32, w=16, axes=(0, 1)), Channel(axis=0))
    """
    normal = " ".join(text.lower().replace("×", "x").split())
    normal = _ALIASES.get(normal, normal)
    for pattern in _REGISTRY.values():
        found = re.fullmatch(pattern.spelling, normal)
        if found:
            given = {key: value for key, value in found.groupdict().items() if value is not None}
            return pattern(**{key: _integers(value) for key, value in given.items()})
    forms = [pattern.example for pattern in _REGISTRY.values()]
    raise NameNotFoundError(did_you_mean(text, [*forms, *_ALIASES], "pattern"))


def _integers(text: str) -> int | tuple[int, ...]:
    """Return the integer in `text`, or a tuple when commas separate several."""
    numbers = tuple(int(part) for part in text.split(","))
    return numbers if len(numbers) > 1 else numbers[0]


def check_size(name: str, value: object, *, least: int | None = 1) -> int:
    """Return `value` as an int; raise `ValueRangeError` when it is no integer or smaller than `least`.

    >>> check_size("h", 4)
    4
    """
    allowed = "an integer" if least is None else f"an integer of {least} or more"
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or (least is not None and number < least):
        raise ValueRangeError(message(f"{name} is {value!r}", allowed))
    return number


def resolve_axis(axis: int, shape: Sequence[int], pattern: Pattern) -> int:
    """Return `axis` counted from the front; raise `ShapeError` when a tensor of this shape has no such axis."""
    ndim = len(shape)
    if -ndim <= axis < ndim:
        return axis % ndim
    raise ShapeError(
        message(
            f"{pattern} lies along axis {axis}, but the shape is {tuple(shape)}",
            f"a tensor with {axis + 1 if axis >= 0 else -axis} or more axes",
            "give the pattern another axis",
        )
    )

"""What every pattern is: a frozen dataclass that projects, validates, prints and (de)serialises itself.

The base class does everything that is common (checking scores, masks and fields, wording errors, dictionaries and text
forms); a concrete pattern only says how it selects and what it forbids. A pattern sees a tensor as *units* (blocks,
groups, slices), and a mask is valid when no unit is broken.
"""

from __future__ import annotations

import dataclasses
import operator
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from sparta.errors import NameNotFoundError, PatternError, ShapeError, ValueRangeError, did_you_mean, message
from sparta.tesa.mask import as_mask
from sparta.tesa.select import check_sparsity, comparable

__all__ = ["Pattern", "check_size", "parse_pattern", "register", "resolve_axis"]

_REGISTRY: dict[str, type[Pattern]] = {}
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
        if sparsity is not None or not self._has_own_sparsity:
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

    @property
    def _has_own_sparsity(self) -> bool:
        """Whether `project` may be called without a sparsity."""
        return False

    @property
    @abstractmethod
    def _rule(self) -> str:
        """What a valid unit is, in words."""

    @abstractmethod
    def _project(self, score: Tensor, sparsity: float | None) -> Tensor:
        """Project a score that is checked, comparable and not empty."""

    @abstractmethod
    def _broken_units(self, mask: Tensor) -> Tensor:
        """Check the shape; return a bool tensor of the rank of `mask` with one element a unit, True if broken."""

    def _unit_steps(self, ndim: int) -> list[int]:
        """Return how far apart units start along each axis of a mask with `ndim` axes."""
        return [1] * ndim


def parse_pattern(text: str) -> Pattern:
    """Return the pattern a short text names; the inverse of ``str(pattern)``.

    >>> parse_pattern("2:4"), parse_pattern("block:32x16"), parse_pattern("channel:0")
    (NM(n=2, m=4, axis=1), Block(h=32, w=16, axes=(0, 1)), Channel(axis=0))
    """
    normal = " ".join(text.lower().replace("×", "x").split())
    for pattern in _REGISTRY.values():
        found = re.fullmatch(pattern.spelling, normal)
        if found:
            given = {key: value for key, value in found.groupdict().items() if value is not None}
            return pattern(**{key: _integers(value) for key, value in given.items()})
    raise NameNotFoundError(did_you_mean(text, [pattern.example for pattern in _REGISTRY.values()], "pattern"))


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

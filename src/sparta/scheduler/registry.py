"""Registries: the `type` names of a configuration, and how to add one's own.

There is one registry for mask generators, one for fake-sparse modules and one for schedulers. A configuration's
``kwargs`` are checked against the constructor's own signature and annotations, so a new type needs a class, a decorator
and nothing else.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, get_type_hints

from sparta.errors import NameNotFoundError, ValueRangeError, did_you_mean, message
from sparta.spelling import present_name

__all__ = [
    "FAKE_SPARSES",
    "MASK_GENERATORS",
    "SCHEDULERS",
    "Registry",
    "register_fake_sparse",
    "register_mask_generator",
    "register_scheduler",
]

_T = TypeVar("_T", bound="type[Any]")


class Registry:
    """The types known under a name, for one place of a configuration.

    Parameters
    ----------
    what
        What the types are, in words, for messages.
    given
        How many positional arguments a constructor gets that are not in ``kwargs``.
    """

    def __init__(self, what: str, given: int = 0) -> None:
        self.what = what
        self._given = given
        self._types: dict[str, type[Any]] = {}

    def register(self, *names: str) -> Callable[[_T], _T]:
        """Class decorator: make a class known under `names`; a name that is taken is an error."""

        def add(made: _T) -> _T:
            for name in names:
                if self._types.get(name, made) is not made:
                    raise ValueRangeError(message(f"the {self.what} {name!r} is already registered", "another name"))
                self._types[name] = made
            return made

        return add

    def find(self, name: str) -> type[Any]:
        """Return the class registered under `name`."""
        if name not in self._types:
            raise NameNotFoundError(did_you_mean(name, self._types, self.what))
        return self._types[name]

    def checked(self, name: str, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return `kwargs` checked against the constructor of `name`: known names, right types, nothing missing."""
        from pydantic import ConfigDict, ValidationError, create_model

        made = self.find(name)
        hints = get_type_hints(made.__init__)
        fields: dict[str, Any] = {}
        for parameter in list(inspect.signature(made).parameters.values())[self._given :]:
            if parameter.kind in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD}:
                continue
            default = ... if parameter.default is parameter.empty else parameter.default
            fields[parameter.name] = (hints.get(parameter.name, Any), default)
        renamed: dict[str, Any] = {}
        for key, value in kwargs.items():
            present = present_name(made.__init__, str(key))
            if present not in fields:
                raise NameNotFoundError(did_you_mean(str(key), fields, f"kwarg of {name}:"))
            if present in renamed:
                given = f"kwargs of {name}: {present} twice, under two names"
                raise ValueRangeError(message(given, "one of them"))
            renamed[present] = value
        kwargs = renamed
        config = ConfigDict(arbitrary_types_allowed=True, extra="forbid", protected_namespaces=())
        try:
            model = create_model(f"{name} kwargs", __config__=config, **fields)(**kwargs)
        except ValidationError as error:
            raise _told(error, f"kwargs of {name}") from error
        return {key: getattr(model, key) for key in kwargs}


def _told(error: Any, where: str) -> ValueRangeError:
    """Return a pydantic error in one sentence: where, what was given, what is allowed."""
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    given = "is missing" if first["type"] == "missing" else f"is {first['input']!r}"
    return ValueRangeError(message(f"{where}: {place} {given}", first["msg"]))


MASK_GENERATORS = Registry("mask generator")
FAKE_SPARSES = Registry("fake-sparse type", given=1)
SCHEDULERS = Registry("scheduler", given=1)


def register_mask_generator(*names: str) -> Callable[[_T], _T]:
    """Class decorator: make a :class:`~sparta.scheduler.generators.MaskGenerator` known to configurations."""
    return MASK_GENERATORS.register(*names)


def register_fake_sparse(*names: str) -> Callable[[_T], _T]:
    """Class decorator: make a fake-sparse module known; its constructor gets the weight first."""
    return FAKE_SPARSES.register(*names)


def register_scheduler(*names: str) -> Callable[[_T], _T]:
    """Class decorator: make a scheduler known; its constructor gets the :class:`~sparta.scheduler.base.Setup` first."""
    return SCHEDULERS.register(*names)

"""Errors of public functions that wrong arguments explain are ours, and name the argument.

A package lets its public names pass :func:`front_door` once. A call that works is left alone, and so is an error of
ours, which knows more. Where anything else comes out, the arguments are compared with their annotations: the first that
does not fit is named in an :class:`~sparta.errors.ArgumentError`. Code inside the package imports the functions from
their modules, as they are.
"""

from __future__ import annotations

import collections.abc
import functools
import inspect
import numbers
import sys
import types
import typing
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor

from sparta.errors import ArgumentError, SpartaError, message

__all__ = ["explained", "front_door", "matches"]

_F = TypeVar("_F", bound=Callable[..., Any])
_LONGEST = 60  # characters of a value in a message


def front_door(names: dict[str, Any], public: Iterable[str], methods: Iterable[str] = ()) -> None:
    """Explain the errors of public functions and classes of a package, whose names are `names` (its ``globals()``).

    Functions are replaced in the package alone. Of classes it is the making of an object, and what `methods` names, as
    ``"Class.method"``.
    """
    for name in public:
        thing = names[name]
        if inspect.isfunction(thing):
            names[name] = explained(thing)
        elif inspect.isclass(thing) and "__init__" in vars(thing):
            _replace(thing, "__init__", thing.__qualname__)
    for method in methods:
        owner, _, name = method.partition(".")
        _replace(names[owner], name, method)


def _replace(owner: type, name: str, shown: str) -> None:
    found = vars(owner)[name]
    if isinstance(found, classmethod | staticmethod):
        setattr(owner, name, type(found)(explained(found.__func__, shown)))
    else:
        setattr(owner, name, explained(found, shown))


def explained(function: _F, name: str = "") -> _F:
    """Return the function with its errors explained by its arguments; one that is so already is returned as it is.

    >>> @explained
    ... def half(x: float) -> float:
    ...     return x / 2
    >>> half(3)
    1.5
    >>> half("3")
    Traceback (most recent call last):
    sparta.errors.ArgumentError: half() got '3' (str) for x; allowed: float.
    """
    if hasattr(function, "__sparta_explained__"):
        return function

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except SpartaError:
            raise
        except Exception as error:
            wrong = _unfit(function, args, kwargs)
            if wrong is None:
                raise
            raise ArgumentError(message(f"{name or function.__name__}() got {wrong[0]}", wrong[1])) from error

    call.__sparta_explained__ = True  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]


def _unfit(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, str] | None:
    """Return the first argument that does not fit, and what is allowed; None if all fit, or are too few or too many."""
    signature, hints = inspect.signature(function), _hints(function)
    try:
        given = signature.bind(*args, **kwargs).arguments
    except TypeError:  # Python says best that there are too few or too many
        return None
    for name, value in given.items():
        parameter = signature.parameters[name]
        if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            continue
        if value is not parameter.default and not matches(value, hints.get(name, Any)):
            return f"{_shown(value)} for {name}", _text(hints[name])
        if isinstance(value, str) and torch.device in typing.get_args(hints.get(name)) and not _is_device(value):
            return f"{_shown(value)} for {name}", "a device such as 'cpu' or 'cuda:0'"
        if _is_unusable(value):
            return f"{_shown(value)} for {name}", "real numbers that are there, and fit 64 bits"
    return None


def _is_device(text: str) -> bool:
    try:
        torch.device(text)
    except RuntimeError:
        return False
    return True


def _is_unusable(value: object) -> bool:
    """Return whether a value is of the right type and still nothing to compute with: no data, complex, or too large."""
    if isinstance(value, Tensor):
        return value.is_meta or value.is_complex()
    if isinstance(value, list | tuple):
        return any(_is_unusable(one) for one in value if isinstance(one, Tensor))
    return isinstance(value, int) and abs(value) >= 2**63


def matches(value: object, hint: Any) -> bool:
    """Return whether a value is of the type that an annotation says; what cannot be told is taken.

    >>> matches([1, 2], collections.abc.Sequence[int]), matches([1, "2"], collections.abc.Sequence[int])
    (True, False)
    >>> matches(None, int | None), matches(3, float), matches("a", dict[str, int])
    (True, True, False)
    """
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is None:
        return _is_instance(value, hint)
    if origin in (typing.Union, types.UnionType):
        return any(matches(value, part) for part in parts)
    if origin in _SPECIAL:
        return _SPECIAL[origin](value, parts)
    if issubclass(origin, collections.abc.Mapping):
        return _fits_mapping(value, parts)
    if issubclass(origin, collections.abc.Iterable) and origin.__module__ in ("builtins", "collections.abc"):
        return _fits_several(value, parts, ordered=issubclass(origin, collections.abc.Sequence))
    return _is_instance(value, origin)


def _is_instance(value: object, kind: Any) -> bool:
    kind = {None: types.NoneType, float: numbers.Real, int: numbers.Integral}.get(kind, kind)
    known = kind is not Any and isinstance(kind, type) and not getattr(kind, "_is_protocol", False)
    return isinstance(value, kind) if known else True


def _fits_tuple(value: Any, parts: tuple[Any, ...]) -> bool:
    if not isinstance(value, tuple | list):
        return False
    if len(parts) == 2 and parts[1] is Ellipsis:
        return all(matches(one, parts[0]) for one in value)
    return len(value) == len(parts) and all(map(matches, value, parts))


def _fits_mapping(value: Any, parts: tuple[Any, ...]) -> bool:
    if not isinstance(value, collections.abc.Mapping):
        return False
    return all(matches(key, parts[0]) and matches(one, parts[1]) for key, one in value.items())


def _fits_several(value: Any, parts: tuple[Any, ...], *, ordered: bool) -> bool:
    if not isinstance(value, collections.abc.Iterable) or isinstance(value, str | bytes):
        return False
    if isinstance(value, Tensor):
        return not ordered and value.ndim > 0 and (value.ndim == 1 or parts[0] not in (int, float))
    if ordered and isinstance(value, collections.abc.Mapping):
        return False
    return not isinstance(value, list | tuple | collections.abc.Mapping) or all(matches(one, parts[0]) for one in value)


_SPECIAL: dict[Any, Callable[[Any, tuple[Any, ...]], bool]] = {
    typing.Annotated: lambda value, parts: matches(value, parts[0]),
    typing.Literal: lambda value, parts: any(type(value) is type(part) for part in parts),
    tuple: _fits_tuple,
    collections.abc.Callable: lambda value, _: callable(value),
    type: lambda value, _: isinstance(value, type),
}


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotations that can be resolved; those that only a type checker knows are left out."""
    found: dict[str, Any] = {}
    for name, text in inspect.get_annotations(function).items():
        try:
            alone = types.SimpleNamespace(__annotations__={name: text}, __globals__=_globals(function))
            found |= typing.get_type_hints(alone, alone.__globals__, include_extras=True)
        except (NameError, TypeError, AttributeError):
            continue
    return found


def _globals(function: Callable[..., Any]) -> dict[str, Any]:
    return vars(sys.modules[function.__module__])


def _shown(value: object) -> str:
    text = " ".join(repr(value).split())
    return f"{text if len(text) <= _LONGEST else text[: _LONGEST - 3] + '...'} ({type(value).__name__})"


def _text(hint: Any) -> str:
    """Return an annotation as a person writes it.

    >>> _text(collections.abc.Sequence[str] | str | None)
    'Sequence[str], str or None'
    """
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        *first, last = map(_text, typing.get_args(hint))
        return f"{', '.join(first)} or {last}"
    if hint is types.NoneType or hint is None:
        return "None"
    if isinstance(hint, type) and not typing.get_args(hint):
        return hint.__name__
    return str(hint).replace("collections.abc.", "").replace("typing.", "")

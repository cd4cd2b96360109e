"""Tensor names: matching what a user writes with what a wrapped model calls its parameters.

`torch.compile`, DDP, FSDP and activation checkpointing each add a component to a parameter's name; users should not
need to know. An exact match always wins, and only then are wrapper components looked through, so a model that really
has a submodule called ``module`` keeps its own names.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase

from sparta.errors import NameNotFoundError, ValueRangeError, did_you_mean, message

__all__ = ["canonical", "is_name_pattern", "resolve", "select"]

_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


def canonical(name: str) -> str:
    """Return a tensor's name without the components that wrappers add.

    >>> canonical("module._orig_mod.encoder.0._checkpoint_wrapped_module.weight")
    'encoder.0.weight'
    """
    parts = [p for p in name.split(".") if p not in _WRAPPERS]
    while len(parts) > 1 and parts[0] == "module":
        parts.pop(0)
    return ".".join(parts)


def is_name_pattern(name: str) -> bool:
    """Whether `name` stands for several names: a glob, or a regular expression after ``re:``."""
    return name.startswith("re:") or any(c in name for c in "*?[")


def resolve(name: str, known: Collection[str]) -> list[str]:
    """Return the known names meant by `name`: itself, itself under wrappers, or all that a pattern matches.

    Parameters
    ----------
    name
        A plain name, a glob (``"encoder.*.weight"``), or ``"re:"`` and a regular expression for the whole name.
    known
        The names there are.

    Examples
    --------
    >>> resolve("fc.weight", ["module.fc.weight", "module.fc.bias"])
    ['module.fc.weight']
    """
    if name in known:
        return [name]
    plain = {actual: canonical(actual) for actual in known}
    if is_name_pattern(name):
        found = [actual for actual, short in plain.items() if _matches(name, short) or _matches(name, actual)]
    else:
        found = [actual for actual, short in plain.items() if short == canonical(name)]
        if len(found) > 1:
            raise NameNotFoundError(
                message(f"the name {name!r} fits several tensors: {found}", fix="write one of them in full")
            )
    if not found:
        raise NameNotFoundError(did_you_mean(name, plain.values(), "tensor name"))
    return found


def select(known: Iterable[str], include: Sequence[str] | str | None, ignore: Sequence[str] | str | None) -> list[str]:
    """Return the known names that `include` matches (None: all) and `ignore` does not, in their order.

    A pattern that matches nothing is an error: it is a typo more often than it is meant.
    """
    names = list(known)
    wanted = set(names)
    if include is not None:
        wanted = {actual for pattern in _listed(include) for actual in resolve(pattern, names)}
    for pattern in _listed(ignore or ()):
        wanted.difference_update(resolve(pattern, names))
    return [name for name in names if name in wanted]


def _listed(given: Sequence[str] | str) -> Sequence[str]:
    return (given,) if isinstance(given, str) else given


def _matches(pattern: str, name: str) -> bool:
    if not pattern.startswith("re:"):
        return fnmatchcase(name, pattern)
    try:
        return re.fullmatch(pattern.removeprefix("re:"), name) is not None
    except re.error as error:
        raise ValueRangeError(message(f"{pattern!r} is not a regular expression: {error}")) from error

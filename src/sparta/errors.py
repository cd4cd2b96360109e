"""Errors a user can cause: one base class, one sentence each for what was given, what is allowed, what to do.

Every error raised on purpose derives from :class:`SpartaError`, so ``except sparta.errors.SpartaError`` catches all of
them and nothing else. Most also derive from the built-in a Python programmer would expect (``ValueError``,
``KeyError``, ``OSError``), so that generic handlers keep working. Build messages with :func:`message` and
:func:`did_you_mean`, so that no error forgets to say what to do next.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "ArgumentError",
    "CheckError",
    "FileFormatError",
    "MissingPackageError",
    "NameNotFoundError",
    "PatternError",
    "ShapeError",
    "SignatureError",
    "SpartaError",
    "ValueRangeError",
    "did_you_mean",
    "message",
]


class SpartaError(Exception):
    """Base of every error this package raises on purpose."""


class ArgumentError(SpartaError, TypeError):
    """An argument is of another type than the function takes."""


class ValueRangeError(SpartaError, ValueError):
    """A value is outside what is allowed: a sparsity of 1.5, ``n > m``, NaN in a score."""


class ShapeError(SpartaError, ValueError):
    """Shapes, ranks, block sizes or axes do not fit each other."""


class PatternError(SpartaError, ValueError):
    """A mask does not obey the pattern it is claimed to have."""


class CheckError(SpartaError, AssertionError):
    """A verification failed: numerics differ, or weights do not obey their spec."""


class NameNotFoundError(SpartaError, KeyError):
    """A name is unknown: a tensor, a pattern, a bit format, a config key."""

    def __str__(self) -> str:
        """Return the message as written (``KeyError`` would print its ``repr``)."""
        return str(self.args[0]) if self.args else ""


class FileFormatError(SpartaError, OSError):
    """A file is truncated, edited, of another kind, or of a newer version than this package reads."""


class SignatureError(FileFormatError):
    """A file is not signed, not by the key that was asked for, or not as it is now."""


class MissingPackageError(SpartaError, ImportError):
    """An optional package is needed for what was asked and is not installed."""


def message(given: str, allowed: str = "", fix: str = "") -> str:
    """Join the parts of an error message: what was given, what is allowed, what to do.

    >>> message("sparsity is 1.5", "a number in [0, 1]", "pass 0.5 for half the elements")
    'sparsity is 1.5; allowed: a number in [0, 1]; pass 0.5 for half the elements.'
    """
    parts = [given]
    if allowed:
        parts.append(f"allowed: {allowed}")
    if fix:
        parts.append(fix)
    return "; ".join(parts) + "."


def did_you_mean(name: str, known: Iterable[str], what: str = "name") -> str:
    """Return a message for an unknown name, with the closest known names and the list of all when it is short.

    >>> did_you_mean("blok", ["block", "channel"], "pattern")
    "unknown pattern 'blok'; did you mean 'block'? known: block, channel."
    """
    choices = sorted(known)
    close = difflib.get_close_matches(name, choices, n=3, cutoff=0.6)
    text = f"unknown {what} {name!r}"
    if close:
        text += "; did you mean " + " or ".join(repr(c) for c in close) + "?"
    if not choices:
        return text + f"; there are no known {what}s."
    shown = ", ".join(choices[:20])
    more = f", ... ({len(choices) - 20} more)" if len(choices) > 20 else ""
    return text + ("" if close else ";") + f" known: {shown}{more}."

"""Numbers out of files: what a stranger wrote where a number should be is refused here, not met by a formula later."""

from __future__ import annotations

from sparta.errors import FileFormatError, message

__all__ = ["a_flag", "a_number", "a_whole_number"]

_LARGEST = 2**63


def a_number(given: object, what: str) -> float:
    """Return a finite number of a file as a float.

    >>> a_number(3, "a density")
    3.0
    """
    if isinstance(given, bool) or not isinstance(given, int | float) or not abs(given) < _LARGEST:  # NaN is refused too
        raise FileFormatError(message(f"{what}: {_shown(given)}", "a number", "save it again"))
    return float(given)


def a_whole_number(given: object, what: str) -> int:
    """Return a whole number of a file, 0 or more.

    >>> a_whole_number(3, "a size")
    3
    """
    if isinstance(given, bool) or not isinstance(given, int) or not 0 <= given < _LARGEST:
        raise FileFormatError(message(f"{what}: {_shown(given)}", "a whole number, 0 or more", "save it again"))
    return given


def a_flag(given: object, what: str) -> bool:
    """Return a truth value of a file."""
    if not isinstance(given, bool):
        raise FileFormatError(message(f"{what}: {_shown(given)}", "true or false", "save it again"))
    return given


def _shown(given: object) -> str:
    return "a number out of range" if isinstance(given, int | float) else f"a {type(given).__name__}"

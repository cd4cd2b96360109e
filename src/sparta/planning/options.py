"""Options: what a layer may become, a pattern with a sparsity, and which of them are worth measuring.

Dense is an option like any other, and the one to beat: an option that is not faster than dense in measurement is
dropped, and with it all that are denser in the same pattern.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sparta.errors import ArgumentError, NameNotFoundError, ValueRangeError, did_you_mean, message
from sparta.tesa.patterns import Pattern, as_pattern

__all__ = ["CHANNELS", "DENSE", "SPARSITIES", "Option", "options_of"]

SPARSITIES = (0.95, 0.9, 0.8, 0.7, 0.6, 0.5)
"""Levels of patterns that have none of their own, the fastest first."""
CHANNELS = "channels"
"""Whole inputs of a layer (columns, heads), and with them the outputs of the layers that make them."""
_CHANNEL_SPARSITIES = (0.75, 0.625, 0.5, 0.375, 0.25, 0.125)
_AUTO = {
    "cpu": ("unstructured", "4x1", "16x1", CHANNELS),
    "cuda": ("2:4", "unstructured", "32x32", CHANNELS),
}


@dataclass(frozen=True, order=True)
class Option:
    """One thing that a layer may become.

    Parameters
    ----------
    pattern
        The text form of a pattern, ``"dense"``, or ``"channels"``.
    sparsity
        The fraction of units that goes; None for dense and for patterns with a sparsity of their own.

    >>> print(Option("4x1", 0.7)), print(Option("2:4"))
    4x1 70 %
    2:4
    (None, None)
    """

    pattern: str
    sparsity: float | None = None

    def __str__(self) -> str:
        return self.pattern if self.sparsity is None else f"{self.pattern} {100 * self.sparsity:g} %"

    @property
    def made(self) -> Pattern:
        """The pattern as an object."""
        return as_pattern(self.pattern)

    @property
    def density(self) -> float:
        """The share of weights that stays."""
        if self.pattern == "dense":
            return 1.0
        own = None if self.pattern == CHANNELS else self.made.own_sparsity()
        return 1.0 - (self.sparsity or own or 0.0)


DENSE = Option("dense")


def options_of(patterns: Sequence[str | Pattern] | str | Pattern, device: str) -> dict[str, list[Option]]:
    """Return the options of each pattern, the fastest first.

    Parameters
    ----------
    patterns
        ``"auto"`` for what kernels of the device are good at; a pattern, or several, ``"channels"`` among them.

    >>> [str(option) for option in options_of(["2:4", "channels"], "cpu")["2:4"]]
    ['2:4']
    """
    if isinstance(patterns, str) and patterns == "auto":
        chosen: Sequence[str | Pattern] = _AUTO.get(device, _AUTO["cpu"])
    elif isinstance(patterns, str | Pattern):
        chosen = [patterns]
    elif isinstance(patterns, Sequence):
        chosen = patterns
    else:
        raise ArgumentError(message(f"patterns is a {type(patterns).__name__}", "'auto', a pattern or several of them"))
    if not chosen:
        raise ValueRangeError(message("no patterns", "'auto', a pattern or several of them"))
    return {str(pattern): _levels(pattern) for pattern in chosen}


def _levels(pattern: str | Pattern) -> list[Option]:
    if pattern == CHANNELS:
        return [Option(CHANNELS, sparsity) for sparsity in _CHANNEL_SPARSITIES]
    if isinstance(pattern, str) and pattern.startswith(CHANNELS[:4]) and ":" not in pattern:
        raise NameNotFoundError(did_you_mean(pattern, [CHANNELS], "pattern"))
    made = as_pattern(pattern)
    text = pattern if isinstance(pattern, str) else str(made)
    if made.own_sparsity() is not None:
        return [Option(text)]
    return [Option(text, sparsity) for sparsity in SPARSITIES]

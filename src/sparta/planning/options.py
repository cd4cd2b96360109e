"""Options: what a layer may become, a pattern with a sparsity and a precision, and which of them are worth measuring.

Dense is an option like any other, and the one to beat: an option that is not faster than dense in measurement is
dropped, and with it all that are denser in the same pattern.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from sparta.compiler.precise import computes_in_bf16
from sparta.errors import ArgumentError, NameNotFoundError, ValueRangeError, did_you_mean, message
from sparta.tesa.patterns import Pattern, as_pattern

__all__ = ["BF16", "CHANNELS", "DENSE", "MEASURED", "SPARSITIES", "Option", "options_of", "precisions_of"]

SPARSITIES = (0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5)
"""Levels of patterns that have none of their own, the fastest first."""
MEASURED = (0.8, 0.5, 0.95)
"""Those of them that are measured, the likeliest to be of use first; times and costs of the others lie between."""
CHANNELS = "channels"
"""Whole inputs of a layer (columns, heads), and with them the outputs of the layers that make them."""
_CHANNEL_SPARSITIES = (0.75, 0.625, 0.5, 0.375, 0.25, 0.125)
_AUTO = {
    "cpu": ("unstructured", "4x1", "16x1", CHANNELS),
    "cuda": ("2:4", "unstructured", "32x32", CHANNELS),
}
BF16 = "bf16"
"""Sixteen bits for the layers that need more than eight; a model that is in 16 bits as a whole does not need it."""
_PRECISIONS = {"cpu": ("int8", BF16), "cuda": ("fp8", BF16)}
_DTYPES = {"int8": {torch.float32}, "fp8": {torch.bfloat16, torch.float16}, BF16: {torch.float32}}
_FP8_CAPABILITY, _BF16_CAPABILITY = (8, 9), (8, 0)


@dataclass(frozen=True, order=True)
class Option:
    """One thing that a layer may become.

    Parameters
    ----------
    pattern
        The text form of a pattern, ``"dense"``, or ``"channels"``.
    sparsity
        The fraction of units that goes; None for dense and for patterns with a sparsity of their own.
    precision
        ``"int8"``, ``"fp8"`` or ``"bf16"`` for weights and inputs that are rounded; None for the model's own numbers.

    >>> print(Option("4x1", 0.7)), print(Option("2:4")), print(Option("dense", precision="int8"))
    4x1 70 %
    2:4
    int8
    (None, None, None)
    """

    pattern: str
    sparsity: float | None = None
    precision: str | None = None

    def __str__(self) -> str:
        if self.pattern == "dense" and self.precision is not None:
            return self.precision
        mask = self.pattern if self.sparsity is None else f"{self.pattern} {100 * self.sparsity:g} %"
        return mask if self.precision is None else f"{mask} {self.precision}"

    @property
    def prunes(self) -> bool:
        """Whether any weight goes."""
        return self.pattern != "dense"

    @property
    def measured(self) -> bool:
        """Whether it is measured, where its layer is; else its time and cost are between those of its neighbours."""
        return self.pattern == CHANNELS or self.sparsity is None or self.sparsity in MEASURED

    @property
    def unrounded(self) -> Option:
        """The same in the model's own numbers."""
        return replace(self, precision=None)

    @property
    def made(self) -> Pattern:
        """The pattern as an object."""
        return as_pattern(self.pattern)

    @property
    def density(self) -> float:
        """The share of weights that stays."""
        if not self.prunes:
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


def precisions_of(asked: Sequence[str] | str | None, device: str, dtypes: set[torch.dtype]) -> list[str]:
    """Return the precisions that layers may be rounded to on a device.

    Parameters
    ----------
    asked
        ``"auto"`` for 8 bits where the device has kernels for them; a precision, or several; None or nothing for none.
    dtypes
        Of the model's own numbers.

    >>> precisions_of("auto", "cpu", {torch.float32}), precisions_of(None, "cpu", {torch.float32})
    (['int8'], [])
    """
    able = [each for each in _PRECISIONS.get(device, ()) if dtypes <= _DTYPES[each] and _has_kernels(each, device)]
    if asked is None or asked == "auto":
        return [each for each in able if each != BF16] if asked else []
    if not isinstance(asked, str | Sequence):
        raise ArgumentError(
            message(f"precisions is a {type(asked).__name__}", "'auto', a precision or several of them")
        )
    chosen = [asked] if isinstance(asked, str) else list(asked)
    for each in chosen:
        if each not in _DTYPES:
            raise NameNotFoundError(did_you_mean(str(each), _DTYPES, "precision"))
        if each not in able:
            kinds = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
            fix = "leave precisions out" if not able else f"pass precisions={able[0]!r}"
            here = f"{', '.join(able) or 'none'} for {kinds} on this {device}"
            raise ValueRangeError(message(f"precisions={each!r}", here, fix))
    return chosen


def _has_kernels(precision: str, device: str) -> bool:
    if device == "cpu":
        return precision != BF16 or computes_in_bf16()
    return torch.cuda.get_device_capability() >= (_BF16_CAPABILITY if precision == BF16 else _FP8_CAPABILITY)

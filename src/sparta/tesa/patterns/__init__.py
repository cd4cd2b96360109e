"""Patterns: where the zeros of a mask may be, and how a score becomes a mask that obeys.

A pattern projects a score to a mask with an exact number of zeros, validates a mask, and says its own parameters;
:func:`detect` goes the other way, from a mask to the most regular pattern that holds. All patterns prune in one order,
smaller score first and lower index first among equals (see :mod:`sparta.tesa.select`). A new pattern is one new file
with a ``@register``-ed frozen dataclass: of this package, imported here; of anyone else, imported by them.
"""

from sparta.tesa.patterns.base import Pattern, as_pattern, parse_pattern, register
from sparta.tesa.patterns.block import Block
from sparta.tesa.patterns.channel import Channel
from sparta.tesa.patterns.detect import Detection, detect
from sparta.tesa.patterns.nm import NM
from sparta.tesa.patterns.unstructured import Unstructured
from sparta.tesa.patterns.vnm import VNM

__all__ = [
    "NM",
    "VNM",
    "Block",
    "Channel",
    "Detection",
    "Pattern",
    "Unstructured",
    "as_pattern",
    "detect",
    "parse_pattern",
    "register",
]

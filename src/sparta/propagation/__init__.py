"""Propagation: from the TeSAs of some tensors to those of all, and to a physically smaller model.

`capture` turns a model into one graph, `engine` walks it with the rules of `rules` (one file a family of ops), `axes`
finds what can be cut, `compact` cuts it, and `result` tells people. Register a rule for an op of your own with `rule`.
Its function :func:`propagate` is also ``sparta.propagate``.
"""

from __future__ import annotations

from sparta.arguments import front_door
from sparta.propagation.api import compact, propagate
from sparta.propagation.capture import Captured, CaptureError, capture
from sparta.propagation.compact import CompactModel, Origin
from sparta.propagation.registry import rule
from sparta.propagation.result import PropagationResult
from sparta.propagation.structured import PruningReport, prune_structured

__all__ = [
    "CaptureError",
    "Captured",
    "CompactModel",
    "Origin",
    "PropagationResult",
    "PruningReport",
    "capture",
    "compact",
    "propagate",
    "prune_structured",
    "rule",
]

front_door(globals(), [name for name in __all__ if name != "rule"])

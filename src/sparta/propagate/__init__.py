"""Propagation: from the TeSAs of some tensors to those of all, and to a physically smaller model.

`capture` turns a model into one graph, `engine` walks it with the rules of `rules` (one file a family of ops), `axes`
finds what can be cut, `compact` cuts it, and `result` tells people. Register a rule for an op of your own with `rule`.
"""

from sparta.propagate.api import compact, propagate
from sparta.propagate.capture import Captured, CaptureError, capture
from sparta.propagate.compact import CompactModel, Origin
from sparta.propagate.registry import rule
from sparta.propagate.result import PropagationResult

__all__ = [
    "CaptureError",
    "Captured",
    "CompactModel",
    "Origin",
    "PropagationResult",
    "capture",
    "compact",
    "propagate",
    "rule",
]

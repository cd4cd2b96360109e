"""Propagation: from the TeSAs of some tensors to those of all, and to a physically smaller model.

`capture` turns a model into one graph, `engine` walks it with the rules of `rules` (one file a family of ops), `axes`
finds what can be cut, `compact` cuts it, and `result` tells people. Register a rule for an op of your own with `rule`.
The one idea to know: the package is named after its main function and may be called like it, so that both
``sparta.propagate(model, inputs)`` and ``from sparta.propagate import rule`` work.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from sparta.propagate.api import compact, propagate
from sparta.propagate.capture import Captured, CaptureError, capture
from sparta.propagate.compact import CompactModel, Origin
from sparta.propagate.registry import rule
from sparta.propagate.result import PropagationResult
from sparta.propagate.structured import PruningReport, prune_structured

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


class _CallablePackage(ModuleType):
    """A package that may be called as its function :func:`propagate`."""

    def __call__(self, *args: Any, **kwargs: Any) -> PropagationResult:
        return propagate(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage

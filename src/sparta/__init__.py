"""SparTA: model sparsity for PyTorch, from "some of these weights could be zero" to "the same model, measured faster".

This module is the public API. Names that need nothing but torch are imported here; subpackages are imported when they
are first used, so that ``import sparta`` costs next to nothing beyond torch's own import and never needs a GPU, a
compiler or an optional package.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sparta import errors
from sparta.tesa.attribute import TeSA
from sparta.tesa.patterns import NM, VNM, Block, Channel, Pattern, Unstructured, detect
from sparta.tesa.spec import Spec
from sparta.version import __version__

if TYPE_CHECKING:
    from sparta import nn, propagate, scheduler, sparsify, tesa, testing
    from sparta.propagate import compact
    from sparta.scheduler import build_sparse_scheduler

__all__ = [
    "NM",
    "VNM",
    "Block",
    "Channel",
    "Pattern",
    "Spec",
    "TeSA",
    "Unstructured",
    "__version__",
    "build_sparse_scheduler",
    "compact",
    "detect",
    "errors",
    "nn",
    "propagate",
    "scheduler",
    "sparsify",
    "tesa",
    "testing",
]

_SUBPACKAGES = frozenset({"nn", "propagate", "scheduler", "sparsify", "tesa", "testing"})
_FUNCTIONS = {"build_sparse_scheduler": "sparta.scheduler", "compact": "sparta.propagate"}


def __getattr__(name: str) -> Any:  # noqa: ANN401 - a module
    if name in _SUBPACKAGES:
        return import_module(f"sparta.{name}")
    if name in _FUNCTIONS:
        return getattr(import_module(_FUNCTIONS[name]), name)
    raise AttributeError(errors.did_you_mean(name, __all__, "attribute of sparta"))


def __dir__() -> list[str]:
    return sorted(__all__)

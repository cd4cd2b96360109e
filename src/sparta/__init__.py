"""SparTA: model sparsity for PyTorch, from "some of these weights could be zero" to "the same model, measured faster".

This module is the public API. Every name is imported when it is first used, so that ``import sparta`` costs next to
nothing, and never needs a GPU, a compiler or an optional package.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sparta import errors
from sparta.version import __version__

if TYPE_CHECKING:
    from sparta import (
        compiler,
        create,
        generation,
        hf,
        measure,
        nn,
        oneshot,
        planning,
        precision,
        propagation,
        recovery,
        scheduler,
        signing,
        sparsify,
        specialize,
        tesa,
        testing,
    )
    from sparta.compiler import compile_model as compile  # noqa: A004 - as torch.compile
    from sparta.compiler import load, optimize
    from sparta.create import compare
    from sparta.oneshot import prune
    from sparta.planning import plan
    from sparta.propagation.api import compact, propagate
    from sparta.propagation.structured import prune_structured
    from sparta.recovery import recover
    from sparta.scheduler import build_sparse_scheduler
    from sparta.tesa import NM, VNM, Block, Channel, Pattern, Spec, TeSA, Unstructured, detect

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
    "compare",
    "compile",
    "compiler",
    "create",
    "detect",
    "errors",
    "generation",
    "hf",
    "load",
    "measure",
    "nn",
    "oneshot",
    "optimize",
    "plan",
    "planning",
    "precision",
    "propagate",
    "propagation",
    "prune",
    "prune_structured",
    "recover",
    "recovery",
    "scheduler",
    "signing",
    "sparsify",
    "specialize",
    "tesa",
    "testing",
]

_SUBPACKAGES = frozenset(
    {
        "compiler",
        "create",
        "generation",
        "hf",
        "measure",
        "nn",
        "oneshot",
        "planning",
        "precision",
        "propagation",
        "recovery",
        "scheduler",
        "signing",
        "sparsify",
        "specialize",
        "tesa",
        "testing",
    }
)
_NAMES = {
    **{
        name: ("sparta.tesa", name)
        for name in ("NM", "VNM", "Block", "Channel", "Pattern", "Spec", "TeSA", "Unstructured", "detect")
    },
    "build_sparse_scheduler": ("sparta.scheduler", "build_sparse_scheduler"),
    "compact": ("sparta.propagation", "compact"),
    "compare": ("sparta.create", "compare"),
    "compile": ("sparta.compiler", "compile_model"),
    "load": ("sparta.compiler", "load"),
    "optimize": ("sparta.compiler", "optimize"),
    "propagate": ("sparta.propagation", "propagate"),
    "plan": ("sparta.planning", "plan"),
    "prune": ("sparta.oneshot", "prune"),
    "prune_structured": ("sparta.propagation", "prune_structured"),
    "recover": ("sparta.recovery", "recover"),
}


def __getattr__(name: str) -> Any:
    if name in _SUBPACKAGES:
        return import_module(f"sparta.{name}")
    if name in _NAMES:
        module, attribute = _NAMES[name]
        return getattr(import_module(module), attribute)
    raise AttributeError(errors.did_you_mean(name, __all__, "attribute of sparta"))


def __dir__() -> list[str]:
    return sorted(__all__)

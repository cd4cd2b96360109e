"""Specialise: choose by measurement the fastest way to run one fused operator.

A :class:`~sparta.specialize.kernel_spec.KernelSpec` says what is needed, every *implement* in one registry says whether
it can and what to try, and the tuner times the candidates, dense among them. Nothing here fuses; the caller does. The
public names below are loaded when they are first used; none needs Triton, a GPU or a compiler.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sparta.errors import did_you_mean

if TYPE_CHECKING:
    from sparta.specialize.implement import (
        Cause,
        Implement,
        Kernel,
        KernelLayout,
        Support,
        TiledImplement,
        implement_named,
        implements_of,
        register,
        search_space,
        supported,
    )
    from sparta.specialize.kernel_spec import Epilogue, KernelSpec
    from sparta.specialize.linear.spec import linear_spec
    from sparta.specialize.tuning.select import Choice, Problem, choose, tune_kernel
    from sparta.specialize.tuning.store import Entry, TuningStore

__all__ = [
    "Cause",
    "Choice",
    "Entry",
    "Epilogue",
    "Implement",
    "Kernel",
    "KernelLayout",
    "KernelSpec",
    "Problem",
    "Support",
    "TiledImplement",
    "TuningStore",
    "choose",
    "implement_named",
    "implements_of",
    "linear_spec",
    "register",
    "search_space",
    "supported",
    "tune_kernel",
]

_MODULES = {
    "Choice": "tuning.select",
    "Entry": "tuning.store",
    "Epilogue": "kernel_spec",
    "KernelSpec": "kernel_spec",
    "Problem": "tuning.select",
    "TuningStore": "tuning.store",
    "choose": "tuning.select",
    "linear_spec": "linear.spec",
    "tune_kernel": "tuning.select",
}
"""Where names are that are not in ``implement``."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(did_you_mean(name, __all__, "attribute of sparta.specialize"))
    return getattr(import_module(f"sparta.specialize.{_MODULES.get(name, 'implement')}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)

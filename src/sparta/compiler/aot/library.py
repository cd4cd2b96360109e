"""The operator library: our CPU kernels registered with PyTorch's dispatcher, compiled on demand.

It needs PyTorch's headers, so it is not part of the kernel library that modules load. It is built once for a processor
and a version of PyTorch, and a program loads it before the packaged model.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from sparta.specialize.cpu.toolchain import SOURCES, chosen_isa, isa_flags, sources
from sparta.specialize.runtime.cpp_library import operator_library

__all__ = ["library_path", "load_operators"]

_OPERATORS = Path(__file__).parent / "native" / "ops.cpp"


def library_path() -> Path:
    """Return the operator library for this processor and version of PyTorch, compiled if it is not in the cache.

    Raises
    ------
    sparta.errors.MissingPackageError
        If there is no C++ compiler, or it fails.
    """
    isa = [flag for flag in isa_flags(chosen_isa()) if not flag.startswith("-std=")]
    checks = _OPERATORS.with_name("checks.h")
    return operator_library("sparta_aot", _OPERATORS, [*isa, f"-I{SOURCES}"], [*sources(), checks])


@functools.cache
def load_operators() -> Path:
    """Load the operators into this process and tell `torch.export` the shapes they return."""
    path = library_path()
    torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
    torch.library.register_fake("sparta_aot::linear", _linear_shape)
    torch.library.register_fake("sparta_aot::conv2d", _conv_shape)
    torch.library.register_fake("sparta_aot::int8_linear", _int8_shape)
    return path


def _linear_shape(
    x: Tensor,
    values: Tensor,
    arrays: Sequence[Tensor],
    numbers: Sequence[int],
    bias: Tensor | None,
    residual: Tensor | None,
) -> Tensor:
    del values, arrays, bias, residual
    return x.new_empty(x.shape[0], numbers[1])


def _conv_shape(
    x: Tensor,
    values: Tensor,
    arrays: Sequence[Tensor],
    numbers: Sequence[int],
    bias: Tensor | None,
    residual: Tensor | None,
) -> Tensor:
    del values, arrays, bias, residual
    return x.new_empty(x.shape[0], numbers[0], *numbers[10:12])


def _int8_shape(
    x: Tensor, operands: Sequence[Tensor], arrays: Sequence[Tensor], numbers: Sequence[int], offset: Tensor | None
) -> Tensor:
    del operands, arrays, offset
    return x.new_empty(x.shape[0], numbers[0], dtype=(torch.float32, torch.int8, torch.uint8)[numbers[8]])

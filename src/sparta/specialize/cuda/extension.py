"""The second binding of the CUDA C++ kernel for 2:4 weights: an operator of PyTorch's dispatcher, written in C++.

Kernels are compiled by NVRTC and started through ctypes; once :func:`load_extension` was called, those of ``cuda-24``
are started by ``sparta_cuda::launch``, which `torch.export` records and a program without Python can call. Both
bindings start the same machine code with the same argument, on PyTorch's current stream.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from sparta.specialize.runtime.cpp_library import operator_library

__all__ = ["extension_loaded", "launch", "load_extension", "without_extension"]

_SOURCE = Path(__file__).parent / "native" / "extension.cpp"
_ROWS = 6  # where in the numbers of a call the shape of its result begins
_operator: list[Callable[..., Tensor]] = []  # the operator, once it is loaded: to look it up costs the host time


@functools.cache
def load_extension() -> Path:
    """Compile the operator, load it into this process, and start the kernels of ``cuda-24`` through it from now on.

    Returns
    -------
    Path
        The library, for `torch.ops.load_library` of another program.

    Raises
    ------
    sparta.errors.MissingPackageError
        If there is no C++ compiler, or it fails.
    """
    path = operator_library("sparta_cuda", _SOURCE)
    torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
    torch.library.register_fake("sparta_cuda::launch", _launched)
    _operator.append(torch.ops.sparta_cuda.launch.default)
    return path


def extension_loaded() -> bool:
    """Return whether kernels are started by the operator.

    >>> extension_loaded() in (True, False)
    True
    """
    return bool(_operator)


@contextmanager
def without_extension() -> Iterator[None]:
    """Start kernels through ctypes inside, also in a process that has loaded the operator; for comparisons.

    >>> with without_extension():
    ...     extension_loaded()
    False
    """
    loaded = _operator.copy()
    _operator.clear()
    try:
        yield
    finally:
        _operator.extend(loaded)


def launch(code: Tensor, name: str, tensors: Sequence[Tensor], numbers: Sequence[int]) -> Tensor:
    """Start a kernel and return what it writes.

    Parameters
    ----------
    code
        Machine code, bytes on the CPU.
    name
        The function in it.
    tensors
        Those that the structure which the kernel takes points to; the first one gives device and dtype of the result.
    numbers
        Blocks along x and y, threads of a block, bytes of shared memory; which of the structure's pointers have a
        tensor, as bits with a 1 after the last; the stride of rows of the first tensor; then the structure's numbers
        of 32 bits, of which the first two are the rows and columns of the result.
    """
    return _operator[0](code, name, tensors, numbers)


def _launched(code: Tensor, name: str, tensors: Sequence[Tensor], numbers: Sequence[int]) -> Tensor:
    del code, name
    return tensors[0].new_empty(tuple(numbers[_ROWS : _ROWS + 2]))

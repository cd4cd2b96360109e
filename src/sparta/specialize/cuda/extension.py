"""The second binding of our CUDA C++ kernels: an operator of PyTorch's dispatcher, written in C++.

Kernels are compiled by NVRTC and started through ctypes unless :func:`load_extension` was called; then they are started
by ``sparta_cuda::launch``, which `torch.export` records and a program without Python can call. The one idea to know:
both bindings start the same machine code with the same argument, on PyTorch's current stream.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from sparta.specialize.torch_library import operator_library

__all__ = ["extension_loaded", "launch", "load_extension"]

_SOURCE = Path(__file__).parent / "native" / "extension.cpp"


@functools.cache
def load_extension() -> Path:
    """Compile the operator, load it into this process, and start kernels through it from now on.

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
    return path


def extension_loaded() -> bool:
    """Return whether kernels are started by the operator.

    >>> extension_loaded() in (True, False)
    True
    """
    return load_extension.cache_info().currsize > 0


def launch(
    code: Tensor,
    name: str,
    geometry: Sequence[int],
    tensors: Sequence[Tensor | None],
    wide: Sequence[int],
    narrow: Sequence[int],
    shape: Sequence[int],
) -> Tensor:
    """Start a kernel and return what it writes.

    Parameters
    ----------
    code
        Machine code, bytes on the CPU.
    name
        The function in it.
    geometry
        Blocks along x and y, threads of a block, bytes of shared memory.
    tensors, wide, narrow
        What the structure that the kernel takes is made of: pointers, with the result's behind them, numbers of 64 bits
        and numbers of 32.
    shape
        Of the result, which is like the first tensor otherwise.
    """
    y: Tensor = torch.ops.sparta_cuda.launch(code, name, geometry, tensors, wide, narrow, shape)
    return y


def _launched(
    code: Tensor,
    name: str,
    geometry: Sequence[int],
    tensors: Sequence[Tensor | None],
    wide: Sequence[int],
    narrow: Sequence[int],
    shape: Sequence[int],
) -> Tensor:
    del code, name, geometry, wide, narrow
    first = tensors[0]
    assert first is not None  # noqa: S101 - the operator's convention
    return first.new_empty(tuple(shape))

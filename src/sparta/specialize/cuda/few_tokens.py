"""What the kernels in CUDA C++ for few tokens share: which numbers they compute, what x must be, how they are loaded.

``cuda-24`` and ``cuda-bitmap`` differ in how a weight is stored; their device code shares ``native/few_tokens.cuh``. A
kernel reads x in pieces of 16 bytes, so rows of x begin at multiples of them or are copied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

import torch
from torch import Tensor
from torch.nn import functional

from sparta.errors import ShapeError, ValueRangeError, message
from sparta.specialize.cuda.device import HOPPER, capability, cuda_here
from sparta.specialize.cuda.nvrtc import Function, compile_native, load_function, nvrtc_obstacle
from sparta.specialize.cuda.text_tile import TextTile
from sparta.specialize.implement import Cause, Support

__all__ = ["PIECE", "SHARED_BYTES", "addressable", "fitting_residual", "load_tile", "nvrtc_here"]

SHARED_BYTES = 227 * 1024
"""The most shared memory that a block may have."""
PIECE = 8
"""Elements of 16 bytes."""
_ACTIVATIONS = {None: 0, "relu": 1, "gelu": 2, "silu": 3}


def addressable(x: Tensor, inputs: int, dtype: torch.dtype) -> Tensor:
    """Return x (M, K) with rows of whole 16-byte pieces, copied only if they are not.

    >>> addressable(torch.zeros(2, 12, dtype=torch.float16), 12, torch.float16).shape
    torch.Size([2, 16])
    """
    shape = x.shape
    if len(shape) != 2 or shape[1] != inputs:
        raise ShapeError(message(f"an input of shape {tuple(shape)}", f"(M, {inputs})"))
    if x.dtype != dtype:
        raise ValueRangeError(message(f"an input in {x.dtype}", f"{dtype}, as the weight", "cast one"))
    if inputs % PIECE:
        return functional.pad(x, (0, -inputs % PIECE))
    fits = x.stride(1) == 1 and x.stride(0) % PIECE == 0 and x.data_ptr() % 16 == 0
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def fitting_residual(residual: Tensor | None, tokens: int, outputs: int) -> Tensor | None:
    """Return the residual (M, N) or None, contiguous.

    >>> fitting_residual(torch.zeros(3, 2).t(), 2, 3).is_contiguous()
    True
    """
    if residual is None:
        return None
    if residual.shape != (tokens, outputs):
        raise ShapeError(message(f"a residual of shape {tuple(residual.shape)}", f"({tokens}, {outputs})"))
    return residual.contiguous()


def load_tile(
    name: str,
    tile: TextTile,
    spec: tuple[torch.dtype, str | None],
    block: tuple[int, int],
    device: torch.device,
    constants: Mapping[str, int] | None = None,
    *,
    early: bool = False,
    exactly: bool = False,
) -> Function:
    """Compile ``native/<name>.cu`` for a tile and load it.

    Parameters
    ----------
    spec
        The dtype, and the activation of the epilogue.
    block
        Threads of a block, and its bytes of shared memory.
    constants
        What else the source is compiled for, by the names it has there.
    early
        Whether it is set up while the kernel before it ends; its source must wait for that one.
    exactly
        Whether it uses what later GPUs may not have, see :func:`sparta.specialize.cuda.nvrtc.compile_cuda`.
    """
    dtype, activation = spec
    numbers = {key.upper(): value for key, value in asdict(tile).items()}  # type: ignore[call-overload]
    numbers |= {"IS_HALF": int(dtype == torch.float16), "ACTIVATION": _ACTIVATIONS[activation], **(constants or {})}
    code = compile_native(name, numbers, capability(device), exactly=exactly)
    return load_function(code, name, *block, device, early=early and capability(device) >= HOPPER)


def nvrtc_here(least: tuple[int, int], device: torch.device | None = None) -> Support:
    """Say whether such a kernel can be compiled and run here, if it needs this compute capability.

    >>> isinstance(nvrtc_here((8, 0)), Support)
    True
    """
    answer = cuda_here(least, device)
    missing = nvrtc_obstacle() if answer else ""
    return Support.no(missing, Cause.MISSING_TOOL) if missing else answer

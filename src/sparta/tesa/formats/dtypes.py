"""How the packed formats treat dtypes: how to move any of them, and what their sums are made of.

PyTorch has kernels that gather and scatter the common dtypes only; fp8 and the wide unsigned integers lack some.
Packing never computes with values, so such tensors travel as integers of the same width (:func:`as_movable`) and come
back by a view.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparta.errors import ValueRangeError, message

__all__ = ["accumulation_dtype", "as_movable", "sum_dtype"]

_MOVED_NATIVELY = frozenset(
    {
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
    }
)
_INTEGER_OF_WIDTH = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_movable(tensor: Tensor) -> Tensor:
    """Return `tensor` itself, or a view of its bits as integers when PyTorch cannot move its dtype.

    Integer 0 in the view is value 0 in the tensor, so the zeros packing writes are right in either form. The
    view shares memory; ``.view(tensor.dtype)`` undoes it.

    >>> as_movable(torch.zeros(3, dtype=torch.float8_e4m3fn)).dtype
    torch.int8
    >>> as_movable(torch.zeros(3)).dtype
    torch.float32
    """
    if tensor.dtype in _MOVED_NATIVELY:
        return tensor
    integer = _INTEGER_OF_WIDTH.get(tensor.dtype.itemsize)
    if integer is None or tensor.dtype == torch.float8_e8m0fnu or tensor.is_quantized:
        raise ValueRangeError(
            message(
                f"values of dtype {tensor.dtype}",
                "a dtype of 1 to 8 bytes that can represent zero, or complex128",
                "convert first, e.g. values.to(torch.float32)",
            )
        )
    return tensor.view(integer)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums of `dtype`: at least float32 for floats, int64 for integers and bool.

    >>> sum_dtype(torch.bfloat16), sum_dtype(torch.float64), sum_dtype(torch.uint8)
    (torch.float32, torch.float64, torch.int64)
    """
    if dtype.is_complex:
        return torch.complex64 if dtype.itemsize < torch.complex64.itemsize else dtype
    if dtype.is_floating_point:
        return torch.float32 if dtype.itemsize < torch.float32.itemsize else dtype
    return torch.int64


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which long sums of `dtype` are accumulated: the 64-bit type of its kind.

    >>> accumulation_dtype(torch.float16), accumulation_dtype(torch.int8)
    (torch.float64, torch.int64)
    """
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else torch.int64

"""A linear operator that reads no weights of small inputs: ``x' W^T + bias`` with x' 0 where ``|x| <= threshold``.

The kernel is CUDA C++ (``native/threshold.cu``), compiled at run time for 1, 2, 4 or 8 tokens. A weight that is stored
input by input, (K, N), lets a dead input skip one contiguous row, and each block lists its own live inputs, so the host
never waits to learn how many there are.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from sparta.specialize.cuda.device import HALF_FORMATS, HOPPER, capability
from sparta.specialize.cuda.few_tokens import nvrtc_here
from sparta.specialize.cuda.nvrtc import Function, compile_native, load_function

__all__ = ["threshold_linear", "threshold_obstacle"]

_DTYPES = tuple(HALF_FORMATS.values())
_TOKENS = (1, 2, 4, 8)
_MOST_TOKENS = 1  # with 4 it was slower than dense everywhere on an H200, even with 90 % of the inputs dead
_COLUMNS = 256  # as in the kernel
_WARPS, _ROUND = 16, 2048  # inputs that a block lists at once
_BLOCKS = 264  # of which all run at once on the largest Hopper GPU


class _Call(ctypes.Structure):
    """The argument of the kernel; see ``native/threshold.cu``."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("x_stride", ctypes.c_longlong),
        ("tokens", ctypes.c_int),
        ("outputs", ctypes.c_int),
        ("inputs", ctypes.c_int),
        ("threshold", ctypes.c_float),
    )


def threshold_obstacle(x: Tensor, weight: Tensor) -> str:
    """Return why :func:`threshold_linear` cannot or should not take x (M, K) and the weight (K, N); else nothing.

    >>> threshold_obstacle(torch.zeros(1, 4), torch.zeros(4, 2))
    'it runs on CUDA, not on cpu'
    """
    if x.device.type != "cuda":
        return f"it runs on CUDA, not on {x.device.type}"
    if x.dtype not in _DTYPES or weight.dtype != x.dtype:
        return f"it computes bf16 and fp16, not {x.dtype} with a weight in {weight.dtype}"
    if not 0 < x.shape[0] <= _MOST_TOKENS:
        return f"{x.shape[0]} tokens; it is faster than dense for {_MOST_TOKENS} only"
    if not weight.is_contiguous() or not weight.numel():
        return "the weight is empty, or not stored input by input"
    reason: str = _obstacle(x.device)
    return reason


def threshold_linear(x: Tensor, weight: Tensor, bias: Tensor | None, threshold: float) -> Tensor:
    """Return (M, N) for x (M, K), the weight (K, N), contiguous, the bias (N,) or None, all on CUDA.

    Sums are in float32 and in one fixed order: equal inputs give equal bits. NaN counts as live.
    """
    if torch.compiler.is_compiling():  # only who traces needs the op, and going through it takes the host time
        y: Tensor = torch.ops.sparta.threshold_linear(x, weight, bias, threshold)
        return y
    return _launch(x, weight, bias, threshold)


def _launch(x: Tensor, weight: Tensor, bias: Tensor | None, threshold: float) -> Tensor:
    (tokens, inputs), outputs = x.shape, weight.shape[1]
    x = x if x.stride(1) == 1 else x.contiguous()
    bias = None if bias is None else bias.contiguous()
    y = x.new_empty(tokens, outputs)
    call = _Call(
        x.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr(), y.data_ptr(), x.stride(0),
        tokens, outputs, inputs, threshold,
    )  # fmt: skip
    width = next(each for each in _TOKENS if each >= min(tokens, _TOKENS[-1]))
    tiles = -(-outputs // _COLUMNS)
    cluster = 8 if tiles * 8 <= _BLOCKS else 4
    function = _function((width, cluster), x.device, half=x.dtype == torch.float16, whole=outputs % 8 == 0)
    function.launch((tiles * cluster, -(-tokens // width)), call, x.device)
    return y


@torch.library.custom_op("sparta::threshold_linear", mutates_args=())
def _operator(x: Tensor, weight: Tensor, bias: Tensor | None, threshold: float) -> Tensor:
    return _launch(x, weight, bias, threshold)


@_operator.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, threshold: float) -> Tensor:
    del bias, threshold
    return x.new_empty(x.shape[0], weight.shape[1])


@functools.cache
def _function(shape: tuple[int, int], device: torch.device, *, half: bool, whole: bool) -> Function:
    tokens, cluster = shape
    numbers = {"TOKENS": tokens, "WARPS": _WARPS, "CLUSTER": cluster, "ROUND": _ROUND}
    numbers |= {"WHOLE": int(whole), "IS_HALF": int(half)}
    code = compile_native("threshold", numbers, capability(device))
    lists, partials = _ROUND * (1 + tokens) * 4 + _ROUND // 32 * 4, _WARPS * tokens * (_COLUMNS + 4) * 4
    return load_function(code, "threshold", _WARPS * 32, max(lists, partials), device)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _obstacle(device: torch.device) -> str:
    return _hardware_obstacle(device)


@functools.cache
def _hardware_obstacle(device: torch.device) -> str:
    """Return why the kernel cannot run on a CUDA device; empty when it can."""
    answer = nvrtc_here(HOPPER, device)
    return "" if answer else answer.reason

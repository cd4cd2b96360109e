"""Max pooling on the CPU: the same values as PyTorch's, without the indices that only a backward pass needs.

:func:`max_pool2d` stands in for ``torch.nn.functional.max_pool2d`` between sparse convolutions. Whatever the C++ kernel
does not take, and every machine without it, goes to PyTorch.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from sparta.errors import SpartaError
from sparta.specialize.cpu.chain import PLACE, Step, StepKind
from sparta.specialize.cpu.library import Library, load, raise_for
from sparta.specialize.cpu.packing import is_float

__all__ = ["max_pool2d", "pool_step"]

# x, y, planes, rows and columns of both; kernel, stride, padding, dilation; threads: see native/pool.h.
_CALL = struct.Struct("@2P13qi")
_KINDS = {torch.float32: StepKind.POOL, torch.bfloat16: StepKind.BF16_POOL, torch.int8: StepKind.INT8_POOL}
_library: list[Library | None] = []


def max_pool2d(
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    ceil_mode: bool = False,  # noqa: FBT001, FBT002 - PyTorch's arguments
) -> Tensor:
    """Return the largest value of every window, as ``torch.nn.functional.max_pool2d`` does, without autograd.

    >>> max_pool2d(torch.arange(16.0).reshape(1, 1, 4, 4), [2, 2])
    tensor([[[[ 5.,  7.],
              [13., 15.]]]])
    """
    library = _loaded() if x.dim() == 4 and x.numel() and is_float(x) else None
    if library is None:
        return functional.max_pool2d(x, list(kernel_size), list(stride), list(padding), list(dilation), ceil_mode)
    (kh, kw), (sh, sw) = _pair(kernel_size), _pair(stride or kernel_size)
    (ph, pw), (dh, dw) = _pair(padding), _pair(dilation)
    # PyTorch checks the arguments and knows the size; on the device "meta" it computes nothing.
    empty = torch.empty(x.shape, device="meta")
    y = torch.empty(functional.max_pool2d(empty, (kh, kw), (sh, sw), (ph, pw), (dh, dw), ceil_mode).shape)
    planes = x.shape[0] * x.shape[1]
    sizes = (planes, *x.shape[2:], *y.shape[2:], kh, kw, sh, sw, ph, pw, dh, dw)
    code = library.handle.sparta_max_pool(_CALL.pack(x.data_ptr(), y.data_ptr(), *sizes, torch.get_num_threads()))
    if code:
        raise_for(code)
    return y


def pool_step(
    shape: Sequence[int],
    out_shape: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    *,
    dtype: torch.dtype = torch.float32,
) -> Step:
    """Return the pooling of contiguous images (B, C, H, W) as a step of a chain; of bf16, or of int8 in places."""
    planes = shape[0] * (-(-shape[1] // PLACE) if dtype == torch.int8 else shape[1])
    return Step(
        _KINDS[dtype],
        _CALL.pack(0, 0, planes, *shape[2:], *out_shape[2:], *kernel, *stride, *padding, *dilation, 0),
    )


def _loaded() -> Library | None:
    """Return the kernel library, asked for once; None where it cannot be built."""
    if not _library:
        try:
            _library.append(load())
        except SpartaError:
            _library.append(None)
    return _library[0]


def _pair(value: Sequence[int]) -> tuple[int, int]:
    """Return what a list of one or two numbers means.

    >>> _pair([3])
    (3, 3)
    """
    return int(value[0]), int(value[-1])

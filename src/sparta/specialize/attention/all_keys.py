"""Attention of many queries to all keys, by the matrix instructions of Hopper's warpgroups, for heads of 64 elements.

The kernel is CUDA C++ (``native/attend.cu``), compiled at run time. It begins while the kernel before it ends, lets the
kernel after it begin early, and writes the heads of a token side by side, where the layer that follows reads them.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from ctypes import c_float, c_int, c_uint64, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from sparta.specialize.cuda.direct import tensor_map_of_heads
from sparta.specialize.cuda.nvrtc import Function, compile_native, load_function

__all__ = ["WIDTH", "attention_to_all_keys", "readable"]

WIDTH = 64
"""Elements of a head."""
_KEYS, _GROUPS, _STAGES = 128, 2, 6
_PIECE = 16  # bytes
_LOG2_E = 1.4426950408889634
_Map = Callable[[int, tuple[int, ...], tuple[int, ...]], bytes]


class _Call(ctypes.Structure):
    """See ``native/attend.cu``, which aligns it to 64 bytes."""

    _fields_ = (
        *((name, c_uint64 * 16) for name in ("q_map", "k_map", "v_map")),
        ("y", c_void_p),
        *((name, c_int) for name in ("heads", "group", "queries", "keys", "query_tiles", "tiles")),
        ("factor", c_float),
        ("rest", c_int * 7),
    )


class _Loaded(NamedTuple):
    function: Function
    of_queries: _Map
    of_keys: _Map
    processors: int


def readable(x: Tensor) -> bool:
    """Whether the copy engine reads x (B, H, N, 64) in 16 bits.

    >>> readable(torch.zeros(2, 3, 5, 64, dtype=torch.bfloat16))
    True
    """
    steps = [stride for stride, size in zip(x.stride()[:3], x.shape[:3], strict=True) if size > 1]
    aligned = all(stride > 0 and stride * x.element_size() % _PIECE == 0 for stride in steps)
    return aligned and x.stride(3) == 1 and x.data_ptr() % _PIECE == 0


def attention_to_all_keys(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Return (B, H, M, 64) for q (B, H, M, 64), k and v (B, H / G, N, 64), that are :func:`readable`, on a Hopper GPU.

    Parameters
    ----------
    scale
        Above 0.
    """
    batches, heads, queries, width = q.shape
    loaded = _loaded(q.device, q.dtype)
    y = torch.empty((batches, queries, heads, width), dtype=q.dtype, device=q.device)
    query_tiles = -(-queries // (_GROUPS * 64))
    tiles = batches * heads * query_tiles
    of_each = (loaded.of_queries, loaded.of_keys, loaded.of_keys)
    maps = [(c_uint64 * 16).from_buffer_copy(_map(encode, x)) for encode, x in zip(of_each, (q, k, v), strict=True)]
    sizes = (heads, heads // k.shape[1], queries, k.shape[2], query_tiles, tiles)
    call = _Call(*maps, y.data_ptr(), *sizes, scale * _LOG2_E)
    loaded.function.launch((min(tiles, loaded.processors), 1), call, q.device)
    return y.transpose(1, 2)


def _map(encode: _Map, x: Tensor) -> bytes:
    sizes = tuple(x.shape[:3])
    # A dim of one element has any stride, and the copy engine does not take any.
    strides = tuple(
        stride if size > 1 else WIDTH * sizes[2] for stride, size in zip(x.stride()[:3], sizes, strict=True)
    )
    return encode(x.data_ptr(), sizes, strides)


@functools.cache
def _loaded(device: torch.device, dtype: torch.dtype) -> _Loaded:
    rows = (_GROUPS * 64, _KEYS)
    shared = (rows[0] + _STAGES * _KEYS) * WIDTH * 2 + 16 * (_STAGES + 1) + 1024
    numbers = {"IS_HALF": int(dtype == torch.float16), "GROUPS": _GROUPS, "STAGES": _STAGES, "BESIDE": 1, "CLUSTER": 1}
    code = compile_native("attend", numbers, torch.cuda.get_device_capability(device), exactly=True)
    function = load_function(code, "attend", (_GROUPS + 1) * 128, shared, device, early=True)
    of_queries, of_keys = (tensor_map_of_heads(dtype, (height, WIDTH), function.context) for height in rows)
    return _Loaded(function, of_queries, of_keys, torch.cuda.get_device_properties(device).multi_processor_count)

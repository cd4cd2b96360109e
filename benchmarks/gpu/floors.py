"""What the parts of a layer with an unstructured weight and few tokens take at the least, measured by stripped kernels.

Each kernel (``floors.cu``) does one part alone, in CUDA graphs over rotated memory as everything else is timed: reading
the fewest bytes that the weight can be stored in, looking up inputs in shared memory without a conflict, or expanding
bits and live values to what the dense matrix unit takes. A layer takes at least as long as the longest of its parts.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from graphed import rotated
from torch import Tensor

import sparta.specialize.cuda as cuda_package
from sparta.specialize.cuda.nvrtc import Function, compile_cuda, load_function
from sparta.testing import compare

_COUNT = 20  # calls of a graph
_THREADS, _LANES, _LOOKS, _FRAGMENT = 512, 32, 4, 256
_NATIVE = Path(cuda_package.__file__).parent / "native"
_SHARED = {0: 0, 1: 32 << 10, 2: _THREADS // _LANES * 88 * 128}


class _Call(ctypes.Structure):
    _fields_ = (
        ("from_", ctypes.c_void_p),
        ("to", ctypes.c_void_p),
        ("pieces", ctypes.c_longlong),
        ("rounds", ctypes.c_int),
        ("unused", ctypes.c_int),
    )


@functools.cache
def _function(kind: int, group: int) -> Function:
    headers = {name: (_NATIVE / name).read_text() for name in ("few_tokens.cuh",)}
    source = Path(__file__).with_name("floors.cu").read_text()
    device = torch.device("cuda", torch.cuda.current_device())
    numbers = {"KIND": kind, "GROUP": group, "IS_HALF": 0}
    code = compile_cuda(source, headers, numbers, torch.cuda.get_device_capability())
    return load_function(code, "floors", _THREADS, _SHARED[kind], device, early=True)


def _microseconds(kind: int, read: Tensor, *, pieces: int = 0, rounds: int = 0, blocks: int, group: int = 1) -> float:
    """Return what one call takes in a graph."""
    function, to = _function(kind, group), torch.zeros(_THREADS, dtype=torch.int32, device="cuda")

    def call(memory: Tensor) -> None:
        function.launch((blocks, 1), _Call(memory.data_ptr(), to.data_ptr(), pieces, rounds, 0), memory.device)

    replay = rotated(call, (read,), _COUNT)
    took = compare({"it": replay}, warmup=2, iters=15, max_seconds=0.1, device="cuda")["it"].median
    return float(took * 1e3 / _COUNT)


def processors() -> int:
    """Return the number of multiprocessors."""
    return int(torch.cuda.get_device_properties(0).multi_processor_count)


def launch_us() -> float:
    """Return what a kernel that does nothing takes."""
    return _microseconds(0, torch.zeros(16, device="cuda"), blocks=2 * processors())


def stream_us(size: int) -> float:
    """Return what reading so many bytes takes."""
    pieces = max(1, size // (16 * 2 * processors()))
    memory = torch.randint(0, 255, (pieces * 16 * 2 * processors(),), dtype=torch.uint8, device="cuda")
    return _microseconds(0, memory, pieces=pieces, blocks=2 * processors())


def look_us(live: int) -> float:
    """Return what looking up one input for each of so many live weights takes, and multiplying it."""
    rounds = max(1, round(live / (2 * processors() * _THREADS * _LOOKS)))
    return _microseconds(1, torch.zeros(16, device="cuda"), rounds=rounds, blocks=2 * processors())


def expand_us(elements: int, density: float, group: int) -> float:
    """Return what expanding so many elements, with a bit for `group` of them, and multiplying 16 tokens takes."""
    bits = torch.rand(64 * _LANES, 32) < 1.0 - (1.0 - density) ** group
    words = (bits.to(torch.int64) << torch.arange(32)).sum(1)
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32).cuda()
    warps = processors() * (_THREADS // _LANES)
    rounds = max(1, round(elements / (warps * _LANES * 32 * group)))
    return _microseconds(2, words, rounds=rounds, blocks=processors(), group=group)


def fewest_bytes(elements: int, density: float, value_bytes: int) -> int:
    """Return the fewest bytes of a weight: its live values, and a bitmap, or a byte or half of one for each of them.

    Distances of half a byte that do not fit take a value of 0 in between for every 15.
    """
    live = density * elements
    fillers = (1.0 - density) ** 15 / (1.0 - (1.0 - density) ** 15)
    found = (elements / 8 + live * value_bytes, live * (value_bytes + 1), live * (1 + fillers) * (value_bytes + 0.5))
    return round(min(found))


def floors(shape: tuple[int, int], density: float, tokens: int, value_bytes: int) -> dict[str, Any]:
    """Return the fewest bytes of a weight, and microseconds of each part on its own."""
    elements = shape[0] * shape[1]
    size = fewest_bytes(elements, density, value_bytes)
    found: dict[str, Any] = {"bytes": size, "launch": launch_us(), "stream": stream_us(size)}
    if tokens == 1:
        found["look"] = look_us(round(density * elements))
    else:
        found["expand"] = min(expand_us(elements, density, group) for group in (1, 2))
    return found

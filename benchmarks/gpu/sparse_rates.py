"""What a 2:4 layer on Hopper cannot be faster than, measured by kernels that do one part of its work and nothing else.

One multiplies operands that stay in shared memory by the sparse matrix instructions, for some milliseconds: its rate is
that of a layer whose operands come for nothing. The other brings bytes from memory and does nothing with them, in a
CUDA graph, as layers are timed: its time, for the bytes of a layer, is that of a layer whose products take no time.
Run ``python benchmarks/gpu/sparse_rates.py`` to see both.
"""

from __future__ import annotations

import ctypes
import sys
from ctypes import c_int, c_void_p
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from graphed import rotated

import sparta.specialize.cuda.nvrtc as compiler
from sparta.specialize.cuda.nvrtc import Function, compile_cuda, load_function
from sparta.testing import compare

_SOURCE = Path(__file__).with_suffix(".cu")
_HEADERS = ("few_tokens.cuh", "warpgroup.cuh", "warpgroup24.cuh")
_SHAPES = ((256, 2, 1), (192, 2, 2), (128, 2, 2))  # tokens, warpgroups, and times 64 outputs of each
_ROUNDS, _TURNS = 8000, 2
_PIECE, _RING = 16384, 12 * 16384 + 2048  # bytes of a copy; of the place for them
_BYTES = {"bf16": 2, "fp8": 1}
_MEGABYTES = (1, 8, 20, 40, 80)
_NIBBLES = torch.tensor([4, 8, 12, 9, 13, 14])  # two different places of four


class _Rate(ctypes.Structure):
    _fields_ = (("operands", c_void_p), ("sums", c_void_p), ("rounds", c_int))


class _Stream(ctypes.Structure):
    _fields_ = (("bytes", c_void_p), ("pieces", c_int))


def _function(name: str, shape: tuple[int, int, int], itemsize: int, threads: int, shared: int) -> Function:
    tokens, groups, each = shape
    native = Path(compiler.__file__).parent / "native"
    headers = {header: (native / header).read_text(encoding="utf-8") for header in _HEADERS}
    numbers = {"IS_HALF": 0, "FORMAT": int(itemsize == 1), "TOKENS": tokens, "GROUPS": groups, "EACH": each}
    numbers |= {"BESIDE": 1, "SPLIT": 1, "CLUSTER": 1}
    capability = torch.cuda.get_device_capability()
    code = compile_cuda(_SOURCE.read_text(encoding="utf-8"), headers, numbers, capability, exactly=True)
    return load_function(code, name, threads, shared, torch.device("cuda", 0), early=True)


def _operands(shape: tuple[int, int, int], itemsize: int) -> torch.Tensor:
    """Return random operands of two steps, as bytes in the order in which the kernel has them."""
    tokens, groups, each = shape
    dtype = torch.bfloat16 if itemsize == 2 else torch.float8_e4m3fn

    def drawn(count: int) -> torch.Tensor:
        return torch.randn(count // itemsize).to(dtype).view(torch.uint8)

    parts = []
    for _ in range(_TURNS):
        parts.append(drawn(tokens * 128))
        for _ in range(groups * each):
            nibbles = _NIBBLES[torch.randint(0, 6, (2, 1024 // itemsize))]
            parts += [drawn(4096), (nibbles[0] | nibbles[1] << 4).to(torch.uint8)]
    return torch.cat(parts).cuda()


def sparse_rate(itemsize: int) -> float:
    """Return operations a microsecond of the sparse instructions, pruned ones counted, in the best of some shapes."""
    processors, device = torch.cuda.get_device_properties(0).multi_processor_count, torch.device("cuda", 0)
    rates = []
    for shape in _SHAPES:
        tokens, groups, each = shape
        operands = _operands(shape, itemsize)
        sums = torch.empty(processors * groups * 128, device="cuda")
        function = _function("rate", shape, itemsize, groups * 128, operands.numel() + 1024)
        call = _Rate(operands.data_ptr(), sums.data_ptr(), _ROUNDS)
        took = compare(
            {"it": lambda function=function, call=call: function.launch((processors, 1), call, device)},
            warmup=2, iters=10, max_seconds=0.3, device="cuda",
        )["it"].median  # fmt: skip
        if not sums.isfinite().all():
            raise RuntimeError("sums of random numbers that are not finite")
        work = 2.0 * tokens * 64 * groups * each * (128 // itemsize) * _TURNS * _ROUNDS * processors
        rates.append(work / (took * 1e3))
    return max(rates)


def stream_times() -> list[tuple[float, float]]:
    """Return bytes, and the microseconds in which a call in a graph brings them from memory."""
    processors, device = torch.cuda.get_device_properties(0).multi_processor_count, torch.device("cuda", 0)
    function = _function("stream", (64, 1, 1), 2, 32, _RING)
    found = []
    for megabytes in _MEGABYTES:
        data = torch.randint(0, 255, (megabytes * 1_000_000 // _PIECE * _PIECE,), dtype=torch.uint8, device="cuda")

        def bring(part: torch.Tensor) -> None:
            function.launch((processors, 1), _Stream(part.data_ptr(), part.numel() // _PIECE), device)

        replay = rotated(bring, (data,), 40)
        took = compare({"it": replay}, warmup=2, iters=15, max_seconds=0.2, device="cuda")["it"].median
        found.append((float(data.numel()), took * 1e3 / 40))
    return found


def sparse_limits(*names: str) -> dict[str, Any]:
    """Return the rates of products, in bf16, fp8 or both, and the times of bytes."""
    return {"sparse": {name: sparse_rate(_BYTES[name]) for name in names}, "stream": stream_times()}


if __name__ == "__main__":
    torch.manual_seed(0)
    limits = sparse_limits(*_BYTES)
    for name, found in limits["sparse"].items():
        print(f"{name}: {found / 1e6:.0f} TFLOP/s of a dense product")
    for size, us in limits["stream"]:
        print(f"{size / 1e6:.1f} MB: {us:.2f} us")

"""The roofs of one core, measured where the layers are: multiply-adds a second in registers, bytes a second by size.

Scripts call :func:`measured_roof` once and ask it for the share that a kernel reached. A kernel is bound by whichever
share is larger, that of the arithmetic its live weights need or that of the bytes it must read and write once; those
bytes come from the level of caches that holds all that is used between two calls, so bandwidth is measured for several
sizes, memory being the largest.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from sparta.specialize.cpu.toolchain import build

__all__ = ["Roof", "measured_roof"]

# Twelve sums that do not wait for each other keep both multipliers busy, and fit the registers of every build.
_SOURCE = """
#include "simd.h"
using namespace sparta;
#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT int64_t lanes() { return kLanes; }

EXPORT float multiply_adds(int64_t rounds, float a, float b) {
  const Vec factor = splat(a), addend = splat(b);
  Vec sums[12];
#pragma GCC unroll 12
  for (int j = 0; j < 12; ++j) sums[j] = splat(b * j);  // equal sums would be computed once
  for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 12
    for (int j = 0; j < 12; ++j) sums[j] = sums[j] * factor + addend;
  }
  Vec all = {};
#pragma GCC unroll 12
  for (int j = 0; j < 12; ++j) all += sums[j];
  return all[0];
}

EXPORT int32_t byte_multiply_adds(int64_t rounds, int32_t a) {
#if defined(SPARTA_AVX512)
  if (!__builtin_cpu_supports("avx512vnni")) return -1;
  const IntVec factor = IntVec{} + a;
  IntVec sums[12];
#pragma GCC unroll 12
  for (int j = 0; j < 12; ++j) sums[j] = factor + j;
  for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 12
    for (int j = 0; j < 12; ++j) asm("vpdpbusd %1, %1, %0" : "+v"(sums[j]) : "v"(factor));
  }
  IntVec all = {};
#pragma GCC unroll 12
  for (int j = 0; j < 12; ++j) all ^= sums[j];
  return all[0] & 1;
#elif defined(SPARTA_AVX2)
  // Without VNNI, what an exact product takes: signs, pairs in 16 bits, pairs in 32 bits, a sum.
  const __m256i factor = _mm256_set1_epi32(a), ones = _mm256_set1_epi16(1);
  __m256i sums[12];
#pragma GCC unroll 12
  for (int j = 0; j < 12; ++j) sums[j] = _mm256_set1_epi32(j);
  __m256i weight = factor;
  for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 12
    for (int j = 0; j < 12; ++j) {
      asm volatile("" : "+x"(weight));  // or equal products would be computed once
      const __m256i pairs = _mm256_maddubs_epi16(factor, _mm256_sign_epi8(weight, factor));
      sums[j] = _mm256_add_epi32(sums[j], _mm256_madd_epi16(pairs, ones));
    }
  }
  __m256i all = _mm256_setzero_si256();
#pragma GCC unroll 12
  for (int j = 0; j < 12; ++j) all = _mm256_xor_si256(all, sums[j]);
  return _mm256_extract_epi32(all, 0) & 1;
#else
  return -1;
#endif
}

EXPORT float read_all(const float* from, int64_t count, int64_t times) {
  Vec sums[8] = {};
  for (int64_t t = 0; t < times; ++t) {
    for (int64_t i = 0; i + 8 * kLanes <= count; i += 8 * kLanes) {
#pragma GCC unroll 8
      for (int j = 0; j < 8; ++j) sums[j] += load(from + i + j * kLanes);
    }
  }
  Vec all = {};
  for (int j = 0; j < 8; ++j) all += sums[j];
  return all[0];
}
"""
_CHAINS = 12
_ROUNDS = 400_000
_SIZES = tuple(kib * 1024 for kib in (32, 512, 2048, 8192, 32768, 192 * 1024))  # bytes, from caches to memory
_LEAST_READ = 16 * 2**20  # bytes that one timed run reads, again and again where caches hold it all
_REPEATS = 9


@dataclass(frozen=True)
class Roof:
    """What one core can do at most.

    Attributes
    ----------
    multiply_adds
        Of fp32, a second.
    byte_multiply_adds
        Of 8-bit integers, exact, a second; None where the build has no instructions for them.
    bytes_read
        A second, by the bytes that are read over and over; the largest is memory.
    """

    multiply_adds: float
    byte_multiply_adds: float | None
    bytes_read: Mapping[int, float]

    def bandwidth(self, used: float) -> float:
        """Return the bytes a second where so many bytes are used over and over."""
        return next((rate for size, rate in self.bytes_read.items() if size >= used), min(self.bytes_read.values()))

    def reached(
        self, multiply_adds: float, nbytes: float, milliseconds: float, *, used: float | None = None, int8: bool = False
    ) -> dict[str, Any]:
        """Return the rates of one call and their shares, with the larger as ``share`` and what it is of as ``bound``.

        Parameters
        ----------
        nbytes
            What a call must read and write once.
        used
            What all calls between two of the same use together; `nbytes` where it is repeated on its own.
        """
        rate, bandwidth = (1e3 * amount / milliseconds for amount in (multiply_adds, nbytes))
        peak = self.byte_multiply_adds if int8 else self.multiply_adds
        compute, memory = None if peak is None else rate / peak, bandwidth / self.bandwidth(used or nbytes)
        bound = "memory" if compute is None or memory > compute else "arithmetic"
        return {
            "multiply_adds_per_second": rate,
            "bytes_per_second": bandwidth,
            "arithmetic": compute,
            "memory": memory,
            "share": max(memory, compute or 0.0),
            "bound": bound,
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the roofs as JSON values."""
        return {**asdict(self), "bytes_read": {str(size): rate for size, rate in self.bytes_read.items()}}

    def __str__(self) -> str:
        """Say the roofs in one line."""
        bytes_ = "" if self.byte_multiply_adds is None else f", int8 {2e-9 * self.byte_multiply_adds:.0f} GOP/s"
        read = ", ".join(f"{size // 1024} KiB {1e-9 * rate:.0f}" for size, rate in self.bytes_read.items())
        return f"one core: fp32 {2e-9 * self.multiply_adds:.0f} GFLOP/s{bytes_}; GB/s read by size: {read}"


def measured_roof() -> Roof:
    """Measure for about a second: the best of several short runs, since anything else on the machine only lowers it."""
    library = ctypes.CDLL(str(build(source=_SOURCE)))
    library.lanes.restype = ctypes.c_int64
    library.multiply_adds.argtypes = (ctypes.c_int64, ctypes.c_float, ctypes.c_float)
    library.byte_multiply_adds.argtypes = (ctypes.c_int64, ctypes.c_int32)
    library.read_all.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
    work = float(library.lanes() * _CHAINS * _ROUNDS)
    memory = torch.ones(max(_SIZES) // 4)
    vnni = library.byte_multiply_adds(1, 0) >= 0
    return Roof(
        multiply_adds=work / _shortest(lambda: library.multiply_adds(_ROUNDS, 0.5, 1.0)),
        byte_multiply_adds=4 * work / _shortest(lambda: library.byte_multiply_adds(_ROUNDS, 1)) if vnni else None,
        bytes_read={size: _bandwidth(library, memory, size) for size in _SIZES},
    )


def _bandwidth(library: ctypes.CDLL, memory: torch.Tensor, size: int) -> float:
    """Return the bytes a second that are read of the first `size` bytes."""
    times = max(1, _LEAST_READ // size)
    return size * times / _shortest(lambda: library.read_all(memory.data_ptr(), size // 4, times))


def _shortest(call: Callable[[], Any]) -> float:
    """Return the seconds of the shortest of several calls."""
    times = []
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return min(times)

"""What the linear layers of a compiled stack take at least, and which kernels take the time of a call.

Kernels that begin while the one before them still runs wait inside their own time, so times of kernels add up to more
than the call takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch.profiler import ProfilerActivity, profile

_SIDE = 64  # of a kept block
_TILE = 256  # tokens for which a kept block is read once


class Layer(Protocol):
    """What is told of a linear layer."""

    @property
    def density(self) -> float:
        """Of the weight."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight."""


def kernel_times(run: Callable[[], object], calls: int = 3) -> dict[str, tuple[int, float]]:
    """Return for each kernel of one call how often it ran and its microseconds."""
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(calls):
            run()
        torch.cuda.synchronize()
    return {
        each.key: (each.count // calls, each.self_device_time_total / calls)
        for each in found.key_averages()
        if each.self_device_time_total > 0
    }


def linear_microseconds(
    layers: Sequence[Layer], tokens: int, pattern: str, size: int, limits: Mapping[str, float]
) -> float:
    """Return what linear layers take at least, for kernels that read the columns of x once per kept block.

    Parameters
    ----------
    size
        Bytes of an element of x and of the weight, as they are multiplied.
    limits
        Bytes per microsecond from memory (`bytes`) and from the cache (`cache`), operations per microsecond.
    """
    total = 0.0
    for layer in layers:
        outputs, inputs = layer.shape
        live = layer.density * outputs * inputs
        stored = outputs * inputs * (size / 2 + 0.125) if pattern == "2:4" else live * size
        read = stored if pattern == "2:4" else live / _SIDE * tokens * size + stored * math.ceil(tokens / _TILE)
        cache = (read + 2 * tokens * outputs) / limits["cache"]
        total += max(cache, stored / limits["bytes"], 2 * tokens * live * size / 2 / limits["operations"])
    return total

"""CUDA graphs: a call recorded once and replayed without the host's work, for timing and for running.

The one idea to know: a graph replays kernels on the addresses it was recorded with, so whoever keeps one keeps what it
reads; and recording runs in this thread's mode, so that other threads may go on using the device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

import torch
from torch import Tensor

__all__ = ["copies", "recorded"]

_ROTATED_BYTES = 150 << 20  # more than twice the L2 cache of the largest GPUs
_lock = threading.Lock()
_streams: dict[int, torch.cuda.Stream] = {}
_T = TypeVar("_T")


def recorded(call: Callable[[], _T]) -> tuple[torch.cuda.CUDAGraph, _T]:
    """Return the graph of a call on the current device, and what the call returned, which each replay overwrites.

    The call runs once before it is recorded. Raises RuntimeError where it does something that a graph cannot hold,
    such as to wait for the device.
    """
    device = torch.cuda.current_device()
    with _lock:
        if device not in _streams:
            # One stream for all: cuBLAS keeps a workspace for each.
            _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream = _streams[device]
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            call()
            stream.synchronize()
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                result = call()
            except BaseException:
                with suppress(RuntimeError):  # it says once more what is on its way up already
                    graph.capture_end()
                raise
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
    return graph, result


def copies(tensors: Sequence[Tensor], most: int) -> list[tuple[Tensor, ...]]:
    """Return the tensors with as many copies as together leave the L2 cache, at most `most` in all.

    >>> len(copies((torch.zeros(8),), 3))
    3
    """
    size = sum(t.numel() * t.element_size() for t in tensors)
    needed = min(most, -(-_ROTATED_BYTES // max(1, size)))
    return [tuple(tensors), *(tuple(t.clone() for t in tensors) for _ in range(needed - 1))]

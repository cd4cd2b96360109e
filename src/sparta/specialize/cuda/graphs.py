"""CUDA graphs: a call recorded once and replayed without the host's work, for timing and for running.

A graph replays kernels on the addresses it was recorded with, so each of them must stay what it was as long as the
graph lives. What the call allocates, cuBLAS's workspaces included, lies in a pool of the graph's own; what was there
before, the graph object holds.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

__all__ = ["RecordedGraph", "copies", "keep", "recorded", "weight_packed", "weights_settled"]

_ROTATED_BYTES = 150 << 20  # more than twice the L2 cache of the largest GPUs
_CLEAR_ONE_STREAM = "_ZN2at4cuda30clearCublasWorkspacesForStreamEP11CUstream_st"
_lock = threading.RLock()  # a call that is warmed up may record graphs of its own
_streams: dict[int, torch.cuda.Stream] = {}
_failed: list[torch.cuda.CUDAGraph] = []
_in_other_graphs: dict[int, object] = {}
_T = TypeVar("_T")


class _Recording(threading.local):
    """What the graph is to hold that this thread records now; None where it records none of ours.

    Attributes
    ----------
    settled
        Whether nothing in that graph writes a packed weight.
    """

    held: list[object] | None = None
    settled: bool = False


_recording = _Recording()


class RecordedGraph(torch.cuda.CUDAGraph):
    """A CUDA graph that holds what it reads: as long as it lives, so do kernels, weights and inputs of its call."""

    held: list[object]


def recorded(call: Callable[[], _T], held: object = None) -> tuple[RecordedGraph, _T]:
    """Return the graph of a call on the current device, and what the call returned, which each replay overwrites.

    The call runs once before it is recorded. Raises RuntimeError where it does something that a graph cannot hold,
    such as to wait for the device; nothing of the attempt is left then.

    Parameters
    ----------
    call
        What is recorded. The graph keeps it, and with it all that it refers to.
    held
        What the graph reads and the call would not keep, such as tensors that a module may replace.
    """
    device, current = torch.cuda.current_device(), torch.cuda.current_stream()
    with _lock:
        if device not in _streams:
            # One stream for all, that no one else's graphs are recorded on.
            _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream = _streams[device]
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            call()
            stream.synchronize()
            graph, result = _captured(call, device, stream)
        current.wait_stream(stream)
    graph.held.extend((call, held))
    return graph, result


def keep(thing: _T) -> _T:
    """Return what a cache of tensors on CUDA hands out; a graph that is recorded just now keeps it.

    A cache may drop what it holds at any time, and the graph would go on reading that memory. Graphs that others
    record cannot be given anything to hold, so what they read is held for good.
    """
    if torch.cuda.is_current_stream_capturing():
        if _recording.held is None:
            _in_other_graphs[id(thing)] = thing
        else:
            _recording.held.append(thing)
    return thing


def weights_settled() -> bool:
    """Whether a graph is recorded just now, all of whose packed weights are older than its kernels.

    A kernel may then read its weight while the kernels before it still run, which hides most of what it takes to begin.

    >>> weights_settled()
    False
    """
    return _recording.settled


def weight_packed() -> None:
    """Say that a weight is packed: in a graph that is recorded just now, kernels wait for theirs from here on."""
    _recording.settled = False


def _captured(call: Callable[[], _T], device: int, stream: torch.cuda.Stream) -> tuple[RecordedGraph, _T]:
    """Record a call on the current stream, which is idle."""
    graph, pool = RecordedGraph(), torch.cuda.graph_pool_handle()
    graph.held = _recording.held = []
    _recording.settled = True
    with _no_collector(), _own_workspaces(stream):
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            result = call()
            graph.capture_end()
        except BaseException:
            _abandon(graph, device, pool)
            raise
        finally:
            _recording.held, _recording.settled = None, False
    return graph, result


def _abandon(graph: torch.cuda.CUDAGraph, device: int, pool: Any) -> None:
    """End a recording that failed.

    PyTorch ends its part of a recording only where CUDA's part ended well. Left like that, its allocator would take
    the recording for one under way, and neither empty its cache nor free what several streams have used.
    """
    _failed.append(graph)  # the allocator of pinned memory, which cannot be told, goes on asking this object
    with suppress(RuntimeError):  # it says once more what is on its way up already
        graph.capture_end()
    with suppress(RuntimeError):  # as it does where the line before has ended both
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)


@contextmanager
def _own_workspaces(stream: torch.cuda.Stream) -> Iterator[None]:
    """Let cuBLAS take new workspaces for a stream inside, and forget them afterwards.

    PyTorch keeps a workspace for each stream, and frees it whenever someone asks for that: Inductor does, and so does
    the end of any graph of the same stream. One that is allocated during the recording lies in the graph's pool, to
    which it goes back when it is freed.
    """
    _clear_workspaces(stream)
    try:
        yield
    finally:
        _clear_workspaces(stream)


def _clear_workspaces(stream: torch.cuda.Stream) -> None:
    """Free the workspaces of a stream; those of all streams where PyTorch cannot tell them apart.

    Other streams' are better left alone: someone else's graph may have been recorded with one in ordinary memory.
    """
    clear = _clear_one_stream()
    if clear is None:
        torch._C._cuda_clearCublasWorkspaces()
    else:
        clear(stream.cuda_stream)


@functools.cache
def _clear_one_stream() -> Callable[[int], None] | None:
    """Return PyTorch's own function, which has no name in Python; None where there is none."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"))
        function = library[_CLEAR_ONE_STREAM]
    except (OSError, AttributeError):
        return None
    function.argtypes, function.restype = [ctypes.c_void_p], None
    return function


@contextmanager
def _no_collector() -> Iterator[None]:
    """Keep the garbage collector from unloading kernels or destroying graphs, which no recording survives."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def copies(tensors: Sequence[Tensor], most: int) -> list[tuple[Tensor, ...]]:
    """Return the tensors with as many copies as together leave the L2 cache, at most `most` in all.

    >>> len(copies((torch.zeros(8),), 3))
    3
    """
    size = sum(t.numel() * t.element_size() for t in tensors)
    needed = min(most, -(-_ROTATED_BYTES // max(1, size)))
    return [tuple(tensors), *(tuple(t.clone() for t in tensors) for _ in range(needed - 1))]

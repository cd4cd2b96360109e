"""Graphed: a compiled graph on CUDA that is replayed from a CUDA graph, for models whose kernels outrun the host.

One step of a language model starts hundreds of kernels that take microseconds each; replayed, the host starts one
thing. A replay reads and writes fixed memory, so inputs are copied in and results are copied out: the result of an
earlier call stays what it was.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from sparta.compiler.graph.signature import NOT_EXACT, builder
from sparta.compiler.run.kernel_module import KernelModule
from sparta.specialize.cuda.graphs import RecordedGraph, recorded

__all__ = ["Graphed", "on_cuda"]


def on_cuda(module: fx.GraphModule) -> bool:
    """Whether all tensors of a graph are on CUDA, and there are some.

    >>> on_cuda(fx.symbolic_trace(torch.nn.Linear(2, 2)))
    False
    """
    tensors = [*module.parameters(), *module.buffers()]
    return bool(tensors) and all(t.is_cuda for t in tensors)


class Graphed:
    """A function of flat inputs, recorded at its first call and replayed for inputs of the same sizes.

    Calls of other sizes, on other devices, or while the caller records a graph of its own run the function itself; so
    do all calls when it cannot be recorded, which :attr:`problem` then says. Safe for several threads and streams: one
    waits for the other.

    Parameters
    ----------
    run
        The function; it must depend on nothing but its inputs and on tensors that stay where they are.
    quiet
        Whether a call that cannot be recorded is no reason to warn.
    module
        Whose tensors and kernels the function reads. The graph holds them as they are when it is recorded, so that it
        never reads memory that was given away, whatever the module is told to hold afterwards.
    """

    def __init__(self, run: Callable[..., Any], *, quiet: bool = False, module: nn.Module | None = None) -> None:
        self.problem = ""
        self._run, self._quiet, self._module = run, quiet, module
        self._lock = threading.Lock()
        self._graph: RecordedGraph | None = None
        self._device = torch.device("cpu")
        self._buffers: list[Any] = []
        self._results: list[Any] = []
        self._structure: pytree.TreeSpec | None = None
        self._last: list[torch.cuda.Stream] = []  # the stream of the last call
        self._replay: Callable[[tuple[Any, ...]], Any] | None = None

    def __call__(self, *leaves: Any) -> Any:
        """Return what the function returns."""
        if self._replay is None and not self.problem and not torch.cuda.is_current_stream_capturing():
            with self._lock:
                if self._replay is None and self._record(leaves):
                    self._replay = self.fast_path()
        if self._replay is not None and (result := self._replay(leaves)) is not NOT_EXACT:
            return result
        return self._run(*leaves)

    def fast_path(self, build: Callable[[Any], Any] | None = None) -> Callable[[tuple[Any, ...]], Any] | None:
        """Return a function of the inputs as a tuple that replays, and returns `NOT_EXACT` where it cannot.

        It is one function without calls of others in Python, because the device waits for each of them. None before
        anything was recorded.

        Parameters
        ----------
        build
            What to do with the function's result before it is returned.
        """
        if self._graph is None or self._structure is None:
            return None
        finish = builder(self._structure)
        replay, lock, device = self._graph.replay, self._lock, self._device
        buffers, results, last = self._buffers, self._results, self._last
        likes = [(b.shape, b.dtype) if isinstance(b, Tensor) else (None, None) for b in buffers]

        def call(leaves: tuple[Any, ...]) -> Any:
            if len(leaves) != len(likes) or torch._C._cuda_isCurrentStreamCapturing():
                return NOT_EXACT
            for leaf, buffer, (shape, dtype) in zip(leaves, buffers, likes, strict=True):
                if shape is None:
                    if type(leaf) is not type(buffer) or leaf != buffer:
                        return NOT_EXACT
                elif (
                    not isinstance(leaf, Tensor)
                    or leaf.shape != shape
                    or leaf.dtype is not dtype
                    or leaf.device != device
                ):
                    return NOT_EXACT
            with lock:
                if torch._C._cuda_getCurrentRawStream(device.index) != last[0].cuda_stream:
                    _wait(last, buffers, device)
                for buffer, leaf, (shape, _) in zip(buffers, leaves, likes, strict=True):
                    if shape is not None:
                        buffer.copy_(leaf)
                replay()
                found = finish(_cloned(results))
            return found if build is None else build(found)

        return call

    def _record(self, leaves: tuple[Any, ...]) -> bool:
        """Record the function; False where that cannot be done."""
        here = torch.device("cuda", torch.cuda.current_device())
        if any(isinstance(leaf, Tensor) and leaf.device != here for leaf in leaves):
            return False  # numbers on the host, or another device: nothing that a replay could follow
        run = self._run
        # Ordinary tensors, because those made in inference mode could not be written outside of it.
        with torch.inference_mode(mode=False), torch.no_grad():
            buffers = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            try:
                graph, result = recorded(lambda: run(*buffers), _memory(self._module))
            except RuntimeError as error:
                self.problem = str(error).strip().splitlines()[0] or type(error).__name__
                if not self._quiet:
                    warnings.warn(f"no CUDA graph of this model ({self.problem}); it runs without", stacklevel=5)
                return False
        self._buffers, self._last = buffers, [torch.cuda.current_stream()]
        self._results, self._structure = pytree.tree_flatten(result)
        self._graph, self._device = graph, here
        return True


def _memory(module: nn.Module | None) -> list[object]:
    """Return what keeps the memory of a module's tensors and kernels, also when it is told to hold others."""
    if module is None:
        return []
    tensors = [*module.parameters(), *module.buffers()]
    layers = [child for child in module.modules() if isinstance(child, KernelModule)]
    kernels = [layer.built(size) for layer in layers for size in layer.choices]
    return [*(t.untyped_storage() for t in tensors), *kernels]


def _cloned(results: list[Any]) -> list[Any]:
    """Return results with tensors of their own, copied by one kernel where there are several: each start counts."""
    tensors = [result for result in results if isinstance(result, Tensor)]
    copies = [torch.empty_like(tensor) for tensor in tensors]
    if copies:
        torch._foreach_copy_(copies, tensors)
    left = iter(copies)
    return [next(left) if isinstance(result, Tensor) else result for result in results]


def _wait(last: list[torch.cuda.Stream], buffers: list[Any], device: torch.device) -> None:
    """Let the current stream wait for the last call's, which still copies out of the buffers, and take its place."""
    stream = torch.cuda.current_stream(device)
    stream.wait_stream(last[0])
    for buffer in buffers:
        if isinstance(buffer, Tensor):
            buffer.record_stream(stream)  # which may still read it when the graph is let go
    last[0] = stream

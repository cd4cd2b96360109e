"""Graphed: a compiled graph on CUDA that is replayed from a CUDA graph, for models whose kernels outrun the host.

One step of a language model starts hundreds of kernels that take microseconds each; replayed, the host starts one
thing. The one idea to know: a replay reads and writes fixed memory, so inputs are copied in and results are copied out;
whoever holds a result of an earlier call still holds that one.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from sparta.compiler.signature import builder
from sparta.specialize.cuda.graphs import recorded

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
    do all calls when it cannot be recorded, which :attr:`problem` then says. Safe for several threads and streams:
    they take turns.

    Parameters
    ----------
    run
        The function; it must depend on nothing but its inputs and on tensors that stay where they are.
    quiet
        Whether a call that cannot be recorded is no reason to warn.
    """

    def __init__(self, run: Callable[..., Any], *, quiet: bool = False) -> None:
        self.problem = ""
        self._run, self._quiet = run, quiet
        self._lock = threading.Lock()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._device = 0
        self._buffers: list[Any] = []
        self._results: list[Any] = []
        self._build: Callable[[Sequence[Any]], Any] = tuple
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, *leaves: Any) -> Any:  # noqa: ANN401 - as the function takes and returns
        """Return what the function returns."""
        if self.problem or torch.cuda.is_current_stream_capturing():
            return self._run(*leaves)
        with self._lock:
            if self._graph is None and not self._record(leaves):
                return self._run(*leaves)
            if not all(map(_like, leaves, self._buffers)):
                return self._run(*leaves)
            return self._replay(leaves)

    def _record(self, leaves: tuple[Any, ...]) -> bool:
        """Record the function; False where that cannot be done."""
        here = torch.device("cuda", torch.cuda.current_device())
        if any(isinstance(leaf, Tensor) and leaf.device != here for leaf in leaves):
            return False  # numbers on the host, or another device: nothing that a replay could follow
        # Ordinary tensors, because those made in inference mode could not be written outside of it.
        with torch.inference_mode(mode=False), torch.no_grad():
            self._buffers = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            try:
                graph, result = recorded(lambda: self._run(*self._buffers))
            except RuntimeError as error:
                self.problem = str(error).strip().splitlines()[0] or type(error).__name__
                self._buffers = []
                if not self._quiet:
                    warnings.warn(f"no CUDA graph of this model ({self.problem}); it runs without", stacklevel=5)
                return False
        self._results, structure = pytree.tree_flatten(result)
        self._build = builder(structure)
        self._graph, self._device, self._stream = graph, here.index, torch.cuda.current_stream()
        return True

    def _replay(self, leaves: tuple[Any, ...]) -> Any:  # noqa: ANN401 - as the function returns
        assert self._graph is not None  # noqa: S101 - recorded before
        assert self._stream is not None  # noqa: S101 - recorded before
        if torch._C._cuda_getCurrentRawStream(self._device) != self._stream.cuda_stream:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_stream(self._stream)  # what the last call copies out is still in the buffers
            self._stream = stream
        for buffer, leaf in zip(self._buffers, leaves, strict=True):
            if isinstance(buffer, Tensor):
                buffer.copy_(leaf)
        self._graph.replay()
        return self._build([result.clone() if isinstance(result, Tensor) else result for result in self._results])


def _like(leaf: object, buffer: object) -> bool:
    """Whether an input is what a graph was recorded for."""
    if not isinstance(buffer, Tensor):
        return type(leaf) is type(buffer) and leaf == buffer
    return (
        isinstance(leaf, Tensor)
        and leaf.shape == buffer.shape
        and leaf.dtype is buffer.dtype
        and leaf.device == buffer.device
    )

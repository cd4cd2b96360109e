"""Rounding x to fp8 on the GPU: one program reads a token, finds its scale and writes its codes.

The kernels are Triton's; this module imports it only to run them. The definition of what they compute is
:func:`sparta.specialize.scaled_linear.spec.fp8_rows`.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from sparta.specialize.cuda.device import triton_here
from sparta.specialize.linear.spec import LinearKernel
from sparta.specialize.scaled_linear.spec import fp8_rows

__all__ = [
    "InputRounding",
    "RoundsInputs",
    "computed_once",
    "rounded_once",
    "rounding_is_shared",
    "shared_rounding",
]

_T = TypeVar("_T")


class _Sharing(threading.local):
    """What this thread has made of tensors in the present call of a model; None outside of such a call."""

    known: Any = None


_sharing = _Sharing()


class InputRounding:
    """Rounds x (M, K) to fp8 with one scale for each row, or with one static scale.

    Parameters
    ----------
    scale
        The static scale; None for one of each row.

    Examples
    --------
    >>> codes, scales = InputRounding(None)(torch.tensor([[448.0, 1.0], [0.0, 0.0]]))
    >>> codes.dtype, scales.tolist()
    (torch.float8_e4m3fn, [1.0, 1.0])
    """

    def __init__(self, scale: float | None) -> None:
        self._scale = scale

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return codes (M, K), float8_e4m3fn, and scales (M,), float32."""
        if not (x.is_cuda and triton_here()):
            codes, scales = fp8_rows(x, self._scale)
            return codes, scales.flatten()
        from sparta.specialize.scaled_linear.input_kernels import round_on_gpu

        return round_on_gpu(x, self._scale)


@contextmanager
def shared_rounding() -> Iterator[None]:
    """Let layers that are called with the same tensor inside share what the first of them rounded, or computed.

    It is for one call of a model in eager mode: there is no telling, from one call to the next, whether a tensor was
    written to by what does not count it, such as a replayed graph, and codes that one CUDA graph makes belong to it.
    """
    before, _sharing.known = _sharing.known, WeakTensorKeyDictionary()
    try:
        yield
    finally:
        _sharing.known = before


def rounding_is_shared() -> bool:
    """Whether this thread is inside :func:`shared_rounding`."""
    return _sharing.known is not None


def rounded_once(x: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    """Return x (..., K) in fp8, of the same shape, and the scales (M,) of its rows.

    Inside :func:`shared_rounding` the same are returned for the same tensor, such as the one that the queries, keys and
    values of an attention read, unless it was written to or is read on another stream.

    >>> x = torch.randn(2, 3, 8)
    >>> with shared_rounding():
    ...     codes, scales = rounded_once(x, None)
    ...     rounded_once(x, None)[0] is codes, rounded_once(x.add_(1), None)[0] is codes
    (True, False)
    >>> codes.shape, scales.shape, rounded_once(x, None)[0] is rounded_once(x, None)[0]
    (torch.Size([2, 3, 8]), torch.Size([6]), False)
    """

    def rounded(tokens: Tensor) -> tuple[Tensor, Tensor]:
        codes, scales = InputRounding(scale)(tokens.reshape(-1, tokens.shape[-1]))
        return codes.view(tokens.shape), scales

    return computed_once(x, ("fp8", scale), rounded)


def computed_once(x: Tensor, key: Hashable, make: Callable[[Tensor], _T]) -> _T:
    """Return what `make` makes of x: inside :func:`shared_rounding`, once for the same tensor and key.

    It is made again if x was written to, or is read on another stream.
    """
    shared = None if x.is_inference() else _sharing.known  # such a tensor does not tell when it is written to
    if shared is None:
        return make(x)
    state = x._version, _stream(x)
    known = shared.get(x)
    if known is None:
        known = shared[x] = {}
    if key not in known or known[key][0] != state:
        known[key] = (state, make(x))
    return cast("_T", known[key][1])


def _stream(x: Tensor) -> int:
    """Return the stream that x is read on."""
    return torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0


class RoundsInputs(LinearKernel):
    """A kernel that rounds x to fp8, and takes an x that is rounded already: several of them can share it."""

    _round: InputRounding

    def run(self, packed: Sequence[Tensor], *inputs: Tensor | None) -> Tensor:
        """Return (M, N) for the inputs x (M, K), bias (N,) or None, residual (M, N) or None."""
        x, bias, residual = inputs
        assert x is not None  # noqa: S101 - the operation's convention
        return self.run_rounded(packed, self._round(x), bias, residual)

    @abstractmethod
    def run_rounded(
        self, packed: Sequence[Tensor], x: tuple[Tensor, Tensor], bias: Tensor | None, residual: Tensor | None
    ) -> Tensor:
        """Return (M, N) for codes (M, K), float8_e4m3fn, and scales (M,) of x."""

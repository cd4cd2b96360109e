"""Rounding x to fp8 on the GPU: one program reads a token, finds its scale and writes its codes.

The kernels are Triton's; this module imports it only to run them. The definition of what they compute is
:func:`sparta.specialize.scaled_linear.spec.fp8_rows`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from sparta.specialize.cuda.device import triton_here
from sparta.specialize.linear.spec import LinearKernel
from sparta.specialize.scaled_linear.spec import fp8_rows

__all__ = ["InputRounding", "RoundsInputs", "rounded_once"]

_known: Any = WeakTensorKeyDictionary()  # what was made of a tensor, as long as that lives


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


def rounded_once(x: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    """Return x (..., K) in fp8, of the same shape, and the scales (M,) of its rows; known for as long as x is the same.

    Layers that are called one after the other with the same tensor, as the queries, keys and values of an attention,
    so share what the first of them rounded. It is found again only while x has not been written to, on the stream and
    in the CUDA graph, if any, on which it was made.

    >>> x = torch.randn(2, 3, 8)
    >>> codes, scales = rounded_once(x, None)
    >>> codes.shape, scales.shape, rounded_once(x, None)[0] is codes, rounded_once(x.add_(1), None)[0] is codes
    (torch.Size([2, 3, 8]), torch.Size([6]), True, False)
    """
    if x.is_inference():  # which does not tell when it is written to
        codes, scales = InputRounding(scale)(x.reshape(-1, x.shape[-1]))
        return codes.view(x.shape), scales
    state = (scale, x._version, _stream(x))
    known = _known.get(x)
    if known is None or known[0] != state:
        codes, scales = InputRounding(scale)(x.reshape(-1, x.shape[-1]))
        known = (state, codes.view(x.shape), scales)
        _known[x] = known
    found: tuple[Tensor, Tensor] = known[1:]
    return found


def _stream(x: Tensor) -> tuple[int, bool]:
    """Return the stream that x is read on, and whether a graph is recorded there."""
    if not x.is_cuda:
        return 0, False
    return torch.cuda.current_stream(x.device).cuda_stream, torch.cuda.is_current_stream_capturing()


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

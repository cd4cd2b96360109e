"""Rounding x to fp8 on the GPU: one program reads a token, finds its scale and writes its codes.

The kernels are Triton's; this module imports it only to run them. The definition of what they compute is
:func:`sparta.specialize.scaled_linear.spec.fp8_rows`.
"""

from __future__ import annotations

from torch import Tensor

from sparta.specialize.cuda.device import triton_here
from sparta.specialize.scaled_linear.spec import fp8_rows

__all__ = ["InputRounding"]


class InputRounding:
    """Rounds x (M, K) to fp8 with one scale for each row, or with one static scale.

    Parameters
    ----------
    scale
        The static scale; None for one of each row.

    Examples
    --------
    >>> import torch
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

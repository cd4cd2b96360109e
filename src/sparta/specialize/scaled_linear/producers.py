"""What makes tokens for layers: norms, and the product of a gated layer, with rounding to fp8 in the same pass.

A norm has all of a token at hand, and so its largest element: where it writes codes and scale itself, rounding costs a
byte per element and no pass of its own. Away from a GPU with Triton the two steps run one after the other; what both
compute is the same but for the order of sums.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from sparta.specialize.cuda.device import triton_here
from sparta.specialize.scaled_linear.inputs import InputRounding

__all__ = ["norm", "rounded_gate", "rounded_norm"]

_WIDEST = 16384


def rounded_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    rms: bool,
    scale: float | None = None,
    keep: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a norm of the last dim of x (..., K) in fp8, the scales (M,) of its rows, and the norm itself.

    Parameters
    ----------
    weight, bias
        (K,), or None.
    rms
        Whether it is an RMSNorm; else a LayerNorm.
    scale
        Of all rows; each has its own if not given.
    keep
        Whether the norm itself is wanted; else the third result is of no use.

    Examples
    --------
    >>> codes, scales, made = rounded_norm(torch.tensor([[3.0, -3.0]]), None, None, 0.0, rms=True, keep=True)
    >>> codes.float().tolist(), made.tolist()
    ([[448.0, -448.0]], [[1.0, -1.0]])
    """
    if _takes(x) and all(each is None or each.is_contiguous() for each in (weight, bias)):
        from sparta.specialize.scaled_linear.producer_kernels import norm_on_gpu

        codes, scales, made = norm_on_gpu(_rows(x), weight, bias, eps, scale, rms=rms, keep=keep)
        return codes.view(x.shape), scales, made.view(x.shape) if keep else x
    made = norm(x, weight, bias, eps, rms=rms)
    codes, scales = InputRounding(scale)(made.reshape(-1, x.shape[-1]))
    return codes.view(x.shape), scales, made


def norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, *, rms: bool) -> Tensor:
    """Return the LayerNorm, or RMSNorm, of the last dim of x (..., K).

    It is for inference: PyTorch's own runs where gradients are asked for, and away from a GPU with Triton.

    >>> norm(torch.tensor([[3.0, -3.0]]), None, None, 0.0, rms=False).tolist()
    [[1.0, -1.0]]
    """
    given = [each for each in (weight, bias) if each is not None]
    fits = _takes(x) and all(each.dtype == x.dtype and each.is_contiguous() for each in given)
    if fits and not (torch.is_grad_enabled() and any(each.requires_grad for each in (x, *given))):
        from sparta.specialize.scaled_linear.producer_kernels import plain_norm_on_gpu

        return plain_norm_on_gpu(_rows(x), weight, bias, eps, rms=rms).view(x.shape)
    sizes = (x.shape[-1],)
    return functional.rms_norm(x, sizes, weight, eps) if rms else functional.layer_norm(x, sizes, weight, bias, eps)


def rounded_gate(
    gate: Tensor, up: Tensor, *, activate: bool, scale: float | None = None, keep: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``silu(gate) * up``, both (..., K), in fp8, the scales (M,) of its rows, and the product itself.

    Parameters
    ----------
    activate
        Whether the gate is still to be activated; else it is ``gate * up``.
    scale, keep
        As for :func:`rounded_norm`.
    """
    if _takes(gate) and _takes(up) and gate.shape == up.shape and gate.dtype == up.dtype:
        from sparta.specialize.scaled_linear.producer_kernels import gate_on_gpu

        codes, scales, made = gate_on_gpu(_rows(gate), _rows(up), scale, activate=activate, keep=keep)
        return codes.view(up.shape), scales, made.view(up.shape) if keep else up
    made = (functional.silu(gate) if activate else gate) * up
    codes, scales = InputRounding(scale)(made.reshape(-1, made.shape[-1]))
    return codes.view(made.shape), scales, made


def _takes(x: Tensor) -> bool:
    """Whether a kernel takes x: on a GPU, in 16 bits, its rows short enough for a program to hold."""
    half = x.dtype in (torch.bfloat16, torch.float16)
    return x.is_cuda and half and 0 < x.shape[-1] <= _WIDEST and x.numel() > 0 and bool(triton_here())


def _rows(x: Tensor) -> Tensor:
    """Return x as rows (M, K) whose elements lie one after the other: a view of it where it has such."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()

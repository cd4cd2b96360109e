"""Attention of one query per head over many keys, as a decode step has it, without a mask.

A library's kernels are made for many queries; with one, what counts is how soon the keys and values are read. Away from
a GPU with Triton, and for whatever the kernels do not take, PyTorch's own attention runs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from sparta.specialize.cuda.device import triton_here

__all__ = ["attention_of_one_query"]

_WIDTHS = (64, 128)
_MOST_KEY_HEADS = 16  # of all batches; for 8 the kernels take 0.73 of the time of cuDNN's on an H200, for 128 1.26


def attention_of_one_query(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, *, shared: bool = False
) -> Tensor:
    """Return ``softmax(q k^T * scale) v`` (B, H, M, E) for q (B, H, M, E), k and v (B, H / G, N, E).

    It is for inference; kernels of ours run where M is 1, in bf16 and fp16 on a GPU.

    Parameters
    ----------
    scale
        One over the root of E if not given.
    shared
        Whether G may be more than 1.

    Examples
    --------
    >>> q, k, v = torch.randn(1, 4, 1, 64), torch.randn(1, 2, 9, 64), torch.randn(1, 2, 9, 64)
    >>> attention_of_one_query(q, k, v, shared=True).shape
    torch.Size([1, 4, 1, 64])
    """
    if _takes(q, k, v) and (shared or q.shape[1] == k.shape[1]):
        from sparta.specialize.attention.one_query_kernels import MOST_HEADS, one_query_on_gpu

        if q.shape[1] // k.shape[1] <= MOST_HEADS:
            return one_query_on_gpu(q, k, v, q.shape[-1] ** -0.5 if scale is None else scale)
    return functional.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=shared)


def _takes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the kernels take these tensors."""
    half = q.dtype in (torch.bfloat16, torch.float16) and q.dtype == k.dtype == v.dtype
    if not (half and q.is_cuda and q.dim() == 4 and q.shape[2] == 1 and k.shape == v.shape and k.dim() == 4):
        return False
    trained = torch.is_grad_enabled() and any(each.requires_grad for each in (q, k, v))
    fits = q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3] and q.shape[3] in _WIDTHS and k.numel() > 0
    fits = fits and k.shape[0] * k.shape[1] <= _MOST_KEY_HEADS
    whole = fits and q.shape[1] % k.shape[1] == 0 and all(each.stride(3) == 1 for each in (q, k, v))
    return whole and not trained and bool(triton_here())

"""Attention of all queries to all keys, without a mask, as encoders and decode steps have it.

A decode step has kernels for one query. Where attention takes microseconds, as between the layers of an encoder, a
kernel of ours runs that begins while the layer before it ends and lets the layer after it begin early; a library's
kernel, which computes as fast, leaves a gap on either side. All else is PyTorch's own attention.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from sparta.specialize.attention.one_query import attention_of_one_query
from sparta.specialize.cuda.device import HOPPER, capability, triton_here

__all__ = ["unmasked_attention"]

_WIDTH = 64
_FEWEST_QUERIES = 64
_MOST_PRODUCTS = 1 << 33  # multiplications; above it a gap does not count, and libraries are ahead


def unmasked_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, *, shared: bool = False) -> Tensor:
    """Return ``softmax(q k^T * scale) v`` (B, H, M, E) for q (B, H, M, E), k and v (B, H / G, N, E).

    It is for inference; kernels of ours run in bf16 and fp16 on a GPU.

    Parameters
    ----------
    scale
        One over the root of E if not given.
    shared
        Whether G may be more than 1.

    Examples
    --------
    >>> q, k, v = torch.randn(1, 4, 3, 64), torch.randn(1, 2, 9, 64), torch.randn(1, 2, 9, 64)
    >>> unmasked_attention(q, k, v, shared=True).shape
    torch.Size([1, 4, 3, 64])
    """
    if q.shape[-2] == 1:
        return attention_of_one_query(q, k, v, scale, shared=shared)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    if factor > 0 and _takes(q, k, v) and (shared or q.shape[1] == k.shape[1]):
        from sparta.specialize.attention.all_keys_kernels import all_keys_on_gpu

        return all_keys_on_gpu(q, k, v, factor)
    return functional.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=shared)


def _takes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the kernel takes these tensors, and is fast on them."""
    half = q.dtype in (torch.bfloat16, torch.float16) and q.dtype == k.dtype == v.dtype
    if not (half and q.is_cuda and q.dim() == k.dim() == 4 and k.shape == v.shape and k.numel() > 0):
        return False
    fits = q.shape[0] == k.shape[0] and q.shape[1] % k.shape[1] == 0 and q.shape[3] == k.shape[3] == _WIDTH
    whole = all(each.stride(3) == 1 and each[0, 0].numel() < 1 << 30 for each in (q, k, v))
    short = q.shape[2] >= _FEWEST_QUERIES and 2 * q.numel() * k.shape[2] <= _MOST_PRODUCTS
    trained = torch.is_grad_enabled() and any(each.requires_grad for each in (q, k, v))
    return fits and whole and short and not trained and capability(q.device) >= HOPPER and bool(triton_here())

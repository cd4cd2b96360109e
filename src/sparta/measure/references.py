"""Float64 references for every sparse operator: slow, but plainly right.

A kernel is correct when it agrees with the function here that bears its operator's name, up to rounding; see
:func:`sparta.testing.check`. A pruned operand is *replaced* by zero, not multiplied by it, so the NaN or inf that may
lie in a pruned place never reaches the result. Everything else is the masked dense model, so a live NaN spreads as it
does there. All functions follow their inputs' device and support autograd, which makes them references for gradients
too.
"""

# ruff: noqa: N803 -- A, B, C and T are the names the operators themselves use

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import ParamSpec

import torch
from torch.nn import functional

from sparta.errors import ShapeError, ValueRangeError, message

__all__ = [
    "attention_reference",
    "conv_reference",
    "linear_reference",
    "matmul_reference",
    "moe_reference",
    "softmax_backward_reference",
    "softmax_reference",
    "sparse_multi_head_attention_reference",
    "sparse_softmax_backward_reference",
    "sparse_softmax_forward_reference",
]

_P = ParamSpec("_P")


def _shapes_fit(reference: Callable[_P, torch.Tensor]) -> Callable[_P, torch.Tensor]:
    """Decorate a reference: where PyTorch cannot put its operands together, their shapes do not fit."""

    @functools.wraps(reference)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> torch.Tensor:
        try:
            return reference(*args, **kwargs)
        except (RuntimeError, IndexError) as error:
            given = f"operands of {reference.__name__} that do not fit: {str(error).splitlines()[0].rstrip('.')}"
            raise ShapeError(message(given, "shapes as its documentation says")) from error

    return call


@_shapes_fit
def matmul_reference(
    A: torch.Tensor,
    B: torch.Tensor,
    *,
    A_mask: torch.Tensor | None = None,
    B_mask: torch.Tensor | None = None,
    C_mask: torch.Tensor | None = None,
    transpose_A: bool = False,
    transpose_B: bool = False,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``C = A B + bias`` with the pruned elements of A, B and C at zero, in float64.

    Parameters
    ----------
    A, B
        (..., M, K) and (..., K, N); with ``transpose_A`` (..., K, M), with ``transpose_B`` (..., N, K).
        Leading dimensions broadcast.
    A_mask, B_mask, C_mask
        Bool, True = kept, broadcast to the operand as it is stored, or to C.
    transpose_A, transpose_B
        Whether the last two dimensions of an operand are swapped before the product.
    bias
        (N,), added before C is masked.

    Examples
    --------
    >>> A, B = torch.ones(2, 3), torch.ones(3, 2)
    >>> matmul_reference(A, B, A_mask=torch.tensor([[True, True, False], [False, False, False]])).tolist()
    [[2.0, 2.0], [0.0, 0.0]]
    """
    left, right = _masked(A, A_mask, "A_mask"), _masked(B, B_mask, "B_mask")
    if min(left.ndim, right.ndim) < 2:
        given = f"A of shape {tuple(A.shape)} and B of shape {tuple(B.shape)}"
        raise ShapeError(message(given, "two dimensions or more each", "add one with unsqueeze"))
    left = left.mT if transpose_A else left
    right = right.mT if transpose_B else right
    if left.shape[-1] != right.shape[-2]:
        given = f"a product of {tuple(left.shape)} and {tuple(right.shape)} (after transposition)"
        raise ShapeError(message(given, "(..., M, K) and (..., K, N)", "check transpose_A and transpose_B"))
    product = left @ right
    if bias is not None:
        product = product + bias.to(torch.float64)
    return _masked(product, C_mask, "C_mask")


@_shapes_fit
def linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    input_mask: torch.Tensor | None = None,
    weight_mask: torch.Tensor | None = None,
    output_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``x weight^T + bias`` with pruned elements at zero, in float64.

    Parameters
    ----------
    x
        (..., K).
    weight
        (N, K).
    bias
        (N,), added before the output is masked.
    input_mask, weight_mask, output_mask
        Bool, True = kept, broadcast to ``x``, ``weight`` and the result (..., N).

    Examples
    --------
    >>> kept = torch.tensor([[True], [False]])
    >>> linear_reference(torch.ones(1, 4), torch.ones(2, 4), weight_mask=kept).tolist()
    [[4.0, 0.0]]
    """
    if weight.ndim != 2 or x.ndim < 1 or x.shape[-1] != weight.shape[1]:
        given = f"x of shape {tuple(x.shape)} and a weight of shape {tuple(weight.shape)}"
        raise ShapeError(message(given, "x (..., K) and weight (N, K)"))
    output = functional.linear(
        _masked(x, input_mask, "input_mask"),
        _masked(weight, weight_mask, "weight_mask"),
        None if bias is None else bias.to(torch.float64),
    )
    return _masked(output, output_mask, "output_mask")


@_shapes_fit
def conv_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    weight_mask: torch.Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | str | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> torch.Tensor:
    """Return a 1-d, 2-d or 3-d convolution with the pruned weights at zero, in float64.

    Parameters
    ----------
    x
        (batch, C_in, ...) or (C_in, ...), with one to three spatial dimensions.
    weight
        (C_out, C_in / groups, ...), with as many; its rank says which convolution it is.
    bias
        (C_out,).
    weight_mask
        Bool, True = kept, broadcast to ``weight``.
    stride, padding, dilation, groups
        As in :func:`torch.nn.functional.conv2d`.

    Examples
    --------
    >>> kept = torch.tensor([[[True, False, True]]])
    >>> conv_reference(torch.ones(1, 1, 5), torch.ones(1, 1, 3), weight_mask=kept, padding=1).tolist()
    [[[1.0, 2.0, 2.0, 2.0, 1.0]]]
    """
    convolutions = {3: functional.conv1d, 4: functional.conv2d, 5: functional.conv3d}
    if weight.ndim not in convolutions or x.ndim not in (weight.ndim - 1, weight.ndim):
        given = f"x of shape {tuple(x.shape)} and a weight of shape {tuple(weight.shape)}"
        raise ShapeError(message(given, "a weight of 3 to 5 dimensions and x of the same rank, or one less"))
    return convolutions[weight.ndim](
        x.to(torch.float64),
        _masked(weight, weight_mask, "weight_mask"),
        None if bias is None else bias.to(torch.float64),
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
    )


@_shapes_fit
def softmax_reference(x: torch.Tensor, mask: torch.Tensor | None = None, temperature: float = 1.0) -> torch.Tensor:
    """Return ``softmax(x / temperature)`` over the kept elements of each row, in float64.

    Pruned elements are 0 and take no part, not even in the maximum that is subtracted against overflow; a row
    with nothing kept is 0.

    Parameters
    ----------
    x
        (..., W); rows lie along the last dimension.
    mask
        Bool, True = kept, broadcast to ``x``; ``None`` keeps all.
    temperature
        A positive number.

    Examples
    --------
    >>> x, mask = torch.tensor([[1.0, 1.0, 9.0]]), torch.tensor([[True, True, False]])
    >>> softmax_reference(x, mask).tolist()
    [[0.5, 0.5, 0.0]]
    """
    kept = _whole_mask(x, mask, "mask")
    logits = x.to(torch.float64).masked_fill(~kept, -math.inf) / _checked_temperature(temperature)
    if x.shape[-1] == 0:
        return logits
    some = kept.any(dim=-1, keepdim=True)
    peak = logits.detach().amax(dim=-1, keepdim=True).where(some, 0.0)
    powers = torch.exp(logits - peak)
    return powers / powers.sum(dim=-1, keepdim=True).where(some, 1.0)


@_shapes_fit
def softmax_backward_reference(
    grad: torch.Tensor, output: torch.Tensor, mask: torch.Tensor | None = None, temperature: float = 1.0
) -> torch.Tensor:
    """Return the gradient of :func:`softmax_reference` with respect to its ``x``, in float64.

    Parameters
    ----------
    grad, output
        (..., W): the gradient of the output, and the output itself.
    mask, temperature
        As given to the forward pass.

    Examples
    --------
    >>> output = softmax_reference(torch.zeros(1, 2))
    >>> softmax_backward_reference(torch.tensor([[1.0, 0.0]]), output).tolist()
    [[0.25, -0.25]]
    """
    slope, probability = _masked(grad, mask, "mask"), _masked(output, mask, "mask")
    mean_slope = (slope * probability).sum(dim=-1, keepdim=True)
    return probability * (slope - mean_slope) / _checked_temperature(temperature)


def attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    causal: bool = False,
    seqlens: torch.Tensor | Sequence[int] | None = None,
) -> torch.Tensor:
    """Return ``softmax(scale q k^T) v`` over the kept pairs of query and key, in float64.

    Parameters
    ----------
    q, k, v
        (..., heads, M, E), (..., kv_heads, N, E) and (..., kv_heads, N, F). With fewer kv heads than heads
        (grouped queries), each kv head serves ``heads / kv_heads`` neighbouring heads. Without a head
        dimension, (M, E).
    mask
        Bool, True = the query sees the key; broadcast to (..., heads, M, N), so it may differ by batch and
        head.
    scale
        Factor on the scores; ``None`` means ``1 / sqrt(E)``.
    causal
        Query ``i`` sees keys ``0 .. i``, as in torch's ``is_causal``.
    seqlens
        (batch,), the lengths along the first dimension of ``q``, for self-attention (M = N): what lies beyond
        is padding, which no query sees, and whose own output is 0.

    Returns
    -------
    torch.Tensor
        (..., heads, M, F). A query that sees no key gives 0; the value of a key that a query does not see
        never reaches it, NaN or not.

    Examples
    --------
    >>> q, k, v = torch.zeros(1, 2, 4), torch.zeros(1, 2, 4), torch.tensor([[[1.0], [3.0]]])
    >>> attention_reference(q, k, v, causal=True).tolist()
    [[[1.0], [2.0]]]
    """
    q, k, v = q.to(torch.float64), k.to(torch.float64), v.to(torch.float64)
    _check_attention_shapes(q, k, v)
    k, v = _repeat_heads(q, k), _repeat_heads(q, v)
    factor = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = factor * (q @ k.mT)
    kept = _whole_mask(scores, mask, "mask")
    queries, keys = scores.shape[-2:]
    if causal:
        kept = kept & torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril()
    if seqlens is not None:
        kept = kept & _within_lengths(scores, seqlens)
    return _sum_of_kept(softmax_reference(scores, kept), kept, v)


@_shapes_fit
def moe_reference(
    tokens: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor | Sequence[torch.Tensor],
    expert_biases: torch.Tensor | Sequence[torch.Tensor] | None = None,
    gates: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the mixture-of-experts layer, every token through its own experts, in float64.

    Parameters
    ----------
    tokens
        (T, K).
    expert_ids
        (T,) or (T, k), integers from 0 to the number of experts: where each token goes.
    expert_weights
        (experts, N, K), or a sequence of (N, K).
    expert_biases
        (experts, N), or a sequence of (N,).
    gates
        The shape of ``expert_ids``: the weight of each expert's answer; ``None`` means 1.

    Returns
    -------
    torch.Tensor
        (T, N): the gated sum over the k experts of each token.

    Examples
    --------
    >>> weights = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])
    >>> moe_reference(torch.tensor([[2.0, 5.0], [2.0, 5.0]]), torch.tensor([0, 1]), weights).tolist()
    [[2.0], [5.0]]
    """
    if isinstance(expert_weights, torch.Tensor) and not expert_weights.ndim:
        raise ShapeError(message("expert_weights without dimensions", "(E, N, K), or a weight (N, K) per expert"))
    experts = len(expert_weights)
    if tokens.ndim != 2 or expert_ids.ndim not in (1, 2) or expert_ids.shape[0] != tokens.shape[0]:
        given = f"tokens of shape {tuple(tokens.shape)} and expert_ids of shape {tuple(expert_ids.shape)}"
        raise ShapeError(message(given, "(T, K) and (T,) or (T, k)"))
    if gates is not None and gates.shape != expert_ids.shape:
        given = f"gates of shape {tuple(gates.shape)} for expert_ids of shape {tuple(expert_ids.shape)}"
        raise ShapeError(message(given, "the same shape"))
    if experts == 0 or bool(((expert_ids < 0) | (expert_ids >= experts)).any()):
        given = "expert_ids name experts that do not exist" if experts else "no experts"
        raise ValueRangeError(message(given, f"integers from 0 to {experts - 1}" if experts else "one or more"))

    choices = expert_ids if expert_ids.ndim == 2 else expert_ids[:, None]
    shares = torch.ones_like(choices) if gates is None else gates.reshape(choices.shape)
    output = tokens.new_zeros((tokens.shape[0], expert_weights[0].shape[0]), dtype=torch.float64)
    for expert in range(experts):
        bias = None if expert_biases is None else expert_biases[expert]
        answer = linear_reference(tokens, expert_weights[expert], bias)
        for choice in range(choices.shape[1]):
            chosen = (choices[:, choice] == expert)[:, None]
            # `where` and not a product: an expert's overflow must not reach tokens that never visit it.
            output = output + torch.where(chosen, shares[:, choice, None] * answer, 0.0)
    return output


def sparse_softmax_forward_reference(x: torch.Tensor, mask: torch.Tensor, T: float = 1.0) -> torch.Tensor:
    """Return :func:`softmax_reference` under the name and arguments of the original SparTA.

    >>> sparse_softmax_forward_reference(torch.zeros(1, 2), torch.tensor([[True, False]]), 2.0).tolist()
    [[1.0, 0.0]]
    """
    return softmax_reference(x, mask, temperature=T)


def sparse_softmax_backward_reference(
    grad: torch.Tensor, output: torch.Tensor, mask: torch.Tensor, T: float = 1.0
) -> torch.Tensor:
    """Return :func:`softmax_backward_reference` under the name and arguments of the original SparTA.

    >>> grad, output = torch.tensor([[2.0, 0.0]]), torch.tensor([[0.5, 0.5]])
    >>> kept = torch.tensor([[True, True]])
    >>> sparse_softmax_backward_reference(grad, output, kept, 2.0).tolist()
    [[0.25, -0.25]]
    """
    return softmax_backward_reference(grad, output, mask, temperature=T)


def sparse_multi_head_attention_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, T: float | None = None
) -> torch.Tensor:
    """Return :func:`attention_reference` under the name and arguments of the original SparTA.

    ``T`` is the softmax temperature, ``sqrt(E)`` by default.

    >>> q, v, kept = torch.zeros(1, 2, 4), torch.ones(1, 2, 1), torch.ones(2, 2, dtype=torch.bool)
    >>> sparse_multi_head_attention_reference(q, q, v, kept).tolist()
    [[[1.0], [1.0]]]
    """
    return attention_reference(q, k, v, mask, scale=None if T is None else 1.0 / _checked_temperature(T))


def _whole_mask(x: torch.Tensor, mask: torch.Tensor | None, name: str) -> torch.Tensor:
    """Return the mask as a bool tensor of the shape of ``x``."""
    if mask is None:
        return torch.ones(x.shape, dtype=torch.bool, device=x.device)
    if mask.dtype.is_floating_point or mask.dtype.is_complex:
        given = f"{name} of dtype {mask.dtype}"
        fix = "compare first, e.g. mask > -inf for an additive mask"
        raise ValueRangeError(message(given, "bool (True = kept) or integers (nonzero = kept)", fix))
    try:
        return (mask != 0).to(x.device).expand(x.shape)
    except RuntimeError as error:
        given = f"{name} of shape {tuple(mask.shape)} for a tensor of shape {tuple(x.shape)}"
        raise ShapeError(message(given, "a shape that broadcasts to the tensor's")) from error


def _masked(x: torch.Tensor, mask: torch.Tensor | None, name: str) -> torch.Tensor:
    """Return ``x`` in float64 with its pruned elements replaced by zero."""
    return torch.where(_whole_mask(x, mask, name), x.to(torch.float64), 0.0)


def _checked_temperature(temperature: float) -> float:
    """Return the temperature if a softmax can be divided by it."""
    if not 0.0 < temperature < math.inf:
        raise ValueRangeError(message(f"temperature is {temperature}", "a positive finite number"))
    return temperature


def _check_attention_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Raise unless q, k and v fit each other."""
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    same_rank = q.ndim == k.ndim == v.ndim and q.ndim >= 2
    if not same_rank or q.shape[-1] != k.shape[-1] or k.shape[:-1] != v.shape[:-1]:
        raise ShapeError(message(shapes, "(..., heads, M, E), (..., kv_heads, N, E), (..., kv_heads, N, F)"))
    if q.ndim > 2 and (k.shape[-3] == 0 or q.shape[-3] % k.shape[-3] or q.shape[:-3] != k.shape[:-3]):
        allowed = "the same leading dimensions, and heads a multiple of kv_heads"
        raise ShapeError(message(shapes, allowed))


def _repeat_heads(q: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Repeat the kv heads of ``x`` so that each head of ``q`` has its own."""
    return x if q.ndim == 2 else x.repeat_interleave(q.shape[-3] // x.shape[-3], dim=-3)


def _within_lengths(scores: torch.Tensor, seqlens: torch.Tensor | Sequence[int]) -> torch.Tensor:
    """Return where both query and key lie within their sequence; ``scores`` is (batch, ..., N, N)."""
    lengths = torch.as_tensor(seqlens, device=scores.device)
    size = scores.shape[-1]
    if scores.ndim < 3 or scores.shape[-2] != size or lengths.shape != scores.shape[:1]:
        given = f"seqlens of shape {tuple(lengths.shape)} for scores of shape {tuple(scores.shape)}"
        fix = "give a mask for cross-attention"
        raise ShapeError(message(given, "one length for each entry of the first dimension, and M = N", fix))
    if bool(((lengths < 0) | (lengths > size)).any()):
        raise ValueRangeError(message(f"seqlens are {lengths.tolist()}", f"integers from 0 to {size}"))
    inside = torch.arange(size, device=scores.device) < lengths[:, None]
    inside = inside.reshape(-1, *[1] * (scores.ndim - 3), size)
    return inside[..., :, None] & inside[..., None, :]


def _sum_of_kept(weights: torch.Tensor, kept: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return ``weights @ values`` where only kept pairs meet, so that 0 * NaN never happens."""
    finite = torch.isfinite(values)
    total = weights @ torch.where(finite, values, 0.0)
    has_stray = (~finite).flatten(0, -3).any(0) if values.ndim > 2 else ~finite
    for key in has_stray.any(-1).nonzero().flatten().tolist():
        stray = torch.where(finite, 0.0, values)[..., key, None, :]
        total = total + torch.where(kept[..., key, None], weights[..., key, None] * stray, 0.0)
    return total

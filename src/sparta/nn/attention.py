"""Attention that skips what is pruned: pairs of query and key by a mask, or padding by the lengths of sequences.

Both keep PyTorch's shapes and its scale of ``1 / sqrt(E)``. A query that sees no key gives 0, and what no query sees
never reaches the result, NaN or not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from sparta.errors import ShapeError, ValueRangeError, message
from sparta.measure.references import attention_reference
from sparta.nn.inputs import ExampleInputs, as_inputs, as_optional_inputs, checked_mask, demand, need_tensors
from sparta.nn.kernel_operator import KernelOperator
from sparta.specialize.attention.spec import DenseAttentionKernel, attention_spec, check_attention, repeat_heads
from sparta.specialize.kernel_spec import KernelSpec
from sparta.specialize.seqlen_attention.spec import DenseSeqlenKernel, seqlen_attention_spec
from sparta.specialize.tuning.select import Problem
from sparta.tesa.attribute import TeSA

__all__ = ["SeqlenDynamicSparseAttention", "SparseAttention"]


class SparseAttention(KernelOperator):
    """``softmax(q k^T / sqrt(E)) v`` over the kept pairs of query and key.

    Parameters
    ----------
    mask
        Bool or 0/1, or a TeSA: (..., M, N), True where query m sees key n. Leading dims broadcast to the batch and
        head dims of q, so that each head or batch may have a mask of its own.
    causal
        Whether query m sees keys 0 to m at most, on top of the mask.

    Notes
    -----
    The mask holds to the element, however coarse the tiles that are computed. A key that no query sees never reaches
    the result, whatever it holds; a NaN or inf that some query sees may reach queries beside it, as in PyTorch's own
    attention, which adds the mask to the scores.

    Examples
    --------
    >>> mask = torch.ones(6, 6, dtype=torch.bool).tril()
    >>> attention = SparseAttention(mask)
    >>> q, k, v = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8)
    >>> attention(q, k, v).shape
    torch.Size([2, 4, 6, 8])
    """

    mask: Tensor

    def __init__(self, mask: Tensor | TeSA, *, causal: bool = False) -> None:
        super().__init__()
        self.causal = causal
        self.register_buffer("mask", self._seen(checked_mask(mask, "mask")))
        self._reset()

    def update_mask(self, mask: Tensor | TeSA) -> None:
        """Take another mask, of any shape; dense runs until it is tuned or built for it."""
        self.mask = self._seen(checked_mask(mask, "mask").to(self.mask.device))
        self._reset()

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return (..., heads, M, F) for q (..., heads, M, E), k (..., kv heads, N, E), v (..., kv heads, N, F).

        Each kv head serves ``heads / kv heads`` neighbouring heads. Without a head dim, (M, E) and so on.
        """
        need_tensors(q=q, k=k, v=v)
        check_attention(self.mask.shape, q, k, v)
        return self._run(q, k, v)

    # ------------------------------------------------------------------ for KernelOperator

    def _seen(self, mask: Tensor) -> Tensor:
        return mask.tril() if self.causal else mask

    def _mask(self) -> Tensor:
        return self.mask

    def _reset(self) -> None:
        self.mask = self._seen(self.mask)  # a loaded one may be from a module that is not causal
        super()._reset()

    def _dense(self) -> DenseAttentionKernel:
        return DenseAttentionKernel(self.mask)

    def _spec(self, inputs: ExampleInputs, *, backward: bool = False) -> KernelSpec:
        q, k, v = as_inputs(inputs, 3)
        check_attention(self.mask.shape, q, k, v)
        return attention_spec(self.mask, q, k, v, backward=backward)

    def _problem(self, inputs: ExampleInputs, *, backward: bool) -> Problem:
        spec = self._spec(inputs, backward=backward)
        q, k, v = (x.detach() for x in as_inputs(inputs, 3))
        lead = check_attention(self.mask.shape, q, k, v)
        expected = _reference(q, k, v, self.mask, lead)
        return Problem(spec, self.mask, (q, k, v), expected, max(1, *self.mask.shape[-1:], q.shape[-1]), backward)

    def extra_repr(self) -> str:
        """Say the mask and what runs."""
        density = self.mask.float().mean().item() if self.mask.numel() else 1.0
        causal = ", causal" if self.causal else ""
        return f"mask {tuple(self.mask.shape)} density {density:.3g}{causal}, {super().extra_repr()}"


def _reference(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, lead: tuple[int, ...]) -> Tensor:
    """Return the right result, one head at a time: all scores at once in float64 may not fit into memory."""
    flat = [
        x.expand(*lead, *x.shape[-2:]).reshape(math.prod(lead), *x.shape[-2:])
        for x in (q, repeat_heads(q, k), repeat_heads(q, v), mask)
    ]
    results = [attention_reference(*one) for one in zip(*flat, strict=True)]
    shape = (*lead, q.shape[-2], v.shape[-1])
    return torch.stack(results).reshape(shape) if results else q.new_zeros(shape, dtype=torch.float64)


class SeqlenDynamicSparseAttention(KernelOperator):
    """Self-attention over a padded batch of sequences of several lengths; padding is skipped.

    Parameters
    ----------
    global_mode
        Whether lengths come from :meth:`set_global_seqlens`, once for all modules and layers, rather than with each
        call. Lengths that are passed to a call are used in either mode.

    Notes
    -----
    Scores are scaled by ``1 / sqrt(E)``, as everywhere; the original did not scale. Nothing is tuned again when the
    lengths change. Lengths are needed on the CPU, so on a GPU `global_mode` waits for the device once per batch, and
    otherwise each call does.

    Examples
    --------
    >>> attention = SeqlenDynamicSparseAttention(global_mode=False)
    >>> q = torch.randn(2, 4, 6, 8)
    >>> y = attention(q, q, q, torch.tensor([6, 2]))
    >>> y.shape, bool((y[1, :, 2:] == 0).all())
    (torch.Size([2, 4, 6, 8]), True)
    """

    _global_seqlens: ClassVar[Tensor | None] = None

    def __init__(self, global_mode: bool = True) -> None:  # noqa: FBT001, FBT002 - the original's signature
        super().__init__()
        self.global_mode = bool(global_mode)
        self._reset()

    @staticmethod
    def set_global_seqlens(seqlens: Tensor | Sequence[int] | None) -> None:
        """Set the lengths (B,) that all modules in global mode use from now on; None forgets them."""
        lengths = None if seqlens is None else _lengths(seqlens)
        SeqlenDynamicSparseAttention._global_seqlens = lengths

    def forward(self, q: Tensor, k: Tensor, v: Tensor, seqlens: Tensor | Sequence[int] | None = None) -> Tensor:
        """Return (B, heads, N, F) for q (B, heads, N, E), k and v (B, kv heads, N, ...); padding is 0.

        Parameters
        ----------
        seqlens
            (B,), integers from 0 to N: the length of each sequence; None takes the global ones.
        """
        return self._run(q, k, v, self._checked(q, k, v, seqlens))

    # ------------------------------------------------------------------ for KernelOperator

    def _checked(self, q: Tensor, k: Tensor, v: Tensor, seqlens: Tensor | Sequence[int] | None) -> Tensor:
        """Return the lengths (B,), where they are; raises when anything does not fit."""
        need_tensors(q=q, k=k, v=v)
        check_attention(None, q, k, v)
        if q.dim() != 4 or q.shape[-2] != k.shape[-2]:
            given = f"q of shape {tuple(q.shape)} and k of shape {tuple(k.shape)}"
            raise ShapeError(message(given, "(B, heads, N, E) and (B, kv heads, N, E)", "SparseAttention takes others"))
        if seqlens is None and self.global_mode:
            lengths = self._global_seqlens
        else:
            lengths = None if seqlens is None else _lengths(seqlens)
        if lengths is None:
            fix = "call set_global_seqlens first" if self.global_mode else "pass seqlens"
            raise ValueRangeError(message("no lengths", f"({q.shape[0]},) integers", fix))
        if tuple(lengths.shape) != (q.shape[0],):
            raise ShapeError(message(f"seqlens of shape {tuple(lengths.shape)}", f"({q.shape[0]},), one per sequence"))
        demand(lengths <= q.shape[2], lengths, f"seqlens must be from 0 to {q.shape[2]}")
        return lengths

    def _dense(self) -> DenseSeqlenKernel:
        return DenseSeqlenKernel()

    def _spec(self, inputs: ExampleInputs, *, backward: bool = False) -> KernelSpec:
        q, k, v, seqlens = _sample(inputs)
        self._checked(q, k, v, seqlens)
        return seqlen_attention_spec(q, k, v, backward=backward)

    def _problem(self, inputs: ExampleInputs, *, backward: bool) -> Problem:
        spec = self._spec(inputs, backward=backward)
        q, k, v, seqlens = _sample(inputs)
        lengths = self._checked(q, k, v, seqlens)
        whole = [x.detach() for x in (q, k, v)]
        expected = attention_reference(*whole, seqlens=lengths.to(q.device))
        return Problem(spec, None, (*whole, lengths), expected, max(1, *q.shape[-2:]), backward)

    def extra_repr(self) -> str:
        """Say where lengths come from and what runs."""
        return f"global_mode={self.global_mode}, {super().extra_repr()}"


def _sample(inputs: ExampleInputs) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    if isinstance(inputs, Sequence) and len(inputs) == 4 and inputs[3] is not None:
        inputs = (*inputs[:3], _lengths(inputs[3]))
    q, k, v, seqlens = as_optional_inputs(inputs, 3, 1)
    assert q is not None  # noqa: S101 - checked by as_optional_inputs
    assert k is not None  # noqa: S101
    assert v is not None  # noqa: S101
    return q, k, v, seqlens


def _lengths(seqlens: Tensor | Sequence[int]) -> Tensor:
    """Return lengths as int64."""
    try:
        lengths = torch.as_tensor(seqlens)
    except (TypeError, ValueError, RuntimeError) as error:  # no numbers, or rows of different lengths
        given = f"seqlens of type {type(seqlens).__name__} ({error})"
        raise ValueRangeError(message(given, "a tensor or a list of integers")) from error
    if lengths.dim() != 1 or lengths.is_floating_point() or lengths.is_complex() or lengths.dtype == torch.bool:
        given = f"seqlens of shape {tuple(lengths.shape)} and dtype {lengths.dtype}"
        raise ShapeError(message(given, "(B,) integers", "for a mask of the padding, mask.sum(-1)"))
    lengths = lengths.detach().to(torch.int64)
    demand(lengths >= 0, lengths, "seqlens must be from 0 to N")
    return lengths

"""The operation ``seqlen_attention``: self-attention over sequences of several lengths in one padded batch.

This file holds its conventions, plain dense with a mask, and ``lengths``, which computes sequences of alike length
together and cuts the padding off. Lengths are an input and not part of the kernel, so nothing is tuned again when they
change.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sparta.common.tuning import TunableItemCfg
from sparta.specialize.attention.spec import repeat_heads
from sparta.specialize.implement import DenseImplement, Implement, Kernel, Params, Support, present
from sparta.specialize.kernel_spec import KernelSpec
from sparta.tesa.attribute import TeSA

__all__ = [
    "DenseSeqlenAttention",
    "DenseSeqlenKernel",
    "LengthsSeqlenAttention",
    "SeqlenAttentionKernel",
    "seqlen_attention_spec",
]

_STEPS = (1, 16, 64)


class SeqlenAttentionKernel(Kernel):
    """A built kernel of ``seqlen_attention``."""

    def pack(self, operand: Tensor) -> tuple[Tensor, ...]:
        """Return nothing: there is nothing to know beforehand."""
        del operand
        return ()

    @abstractmethod
    def run(self, packed: Sequence[Tensor], *inputs: Tensor | None) -> Tensor:
        """Return (B, heads, N, F) for q (B, heads, N, E), k, v (B, kv heads, N, ...) and lengths (B,) on any device."""


def seqlen_attention_spec(q: Tensor, k: Tensor, v: Tensor, *, backward: bool = False) -> KernelSpec:
    """Return the kernel spec of attention over padded sequences; batch and padded length are dynamic.

    >>> q = torch.zeros(2, 3, 8, 4)
    >>> str(seqlen_attention_spec(q, q, q)["q"])
    'TeSA 2*×3×8*×4, dense, density 1, fp32'
    """
    operands = {name: TeSA.dense(x.shape, format=x.dtype, dynamic=[0, 2]) for name, x in (("q", q), ("k", k), ("v", v))}
    return KernelSpec("seqlen_attention", operands, attributes={"backward": backward}, device=q.device.type)


def _attend(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """Return dense attention within the lengths (B,); the padding is 0, whatever it holds in q, k and v."""
    inside = torch.arange(q.shape[2], device=q.device) < lengths.to(q.device)[:, None]
    row = inside[:, None, :, None]
    q, k, v = torch.where(row, q, 0.0), torch.where(row, k, 0.0), torch.where(row, v, 0.0)
    y = functional.scaled_dot_product_attention(q, k, v, attn_mask=inside[:, None, None, :])
    return torch.where(row, y, 0.0)


class DenseSeqlenKernel(SeqlenAttentionKernel):
    """PyTorch's fused attention over the whole padded batch, with a mask."""

    def run(self, packed: Sequence[Tensor], *inputs: Tensor | None) -> Tensor:
        """Return the attention of q, k, v within the lengths."""
        del packed
        q, k, v, lengths = present(*inputs)
        return _attend(q, repeat_heads(q, k), repeat_heads(q, v), lengths)


class DenseSeqlenAttention(DenseImplement):
    """``torch.nn.functional.scaled_dot_product_attention`` with a mask of the padding."""

    op = "seqlen_attention"

    def build(self, spec: KernelSpec, params: Params) -> SeqlenAttentionKernel:
        """Return the dense kernel."""
        del spec, params
        return DenseSeqlenKernel()


class _LengthsKernel(SeqlenAttentionKernel):
    """Sequences sorted by length, in groups of about one length, each cut to its longest."""

    def __init__(self, step: int) -> None:
        self._step = step

    def run(self, packed: Sequence[Tensor], *inputs: Tensor | None) -> Tensor:
        del packed
        q, k, v, lengths = present(*inputs)
        lengths = lengths.cpu()  # which sequences go together is decided here
        if not len(lengths):
            return _attend(q, repeat_heads(q, k), repeat_heads(q, v), lengths)
        ordered, order = lengths.sort(stable=True)
        rounded = (-(-ordered // self._step)).tolist()
        starts = [n for n in range(len(rounded)) if n == 0 or rounded[n] != rounded[n - 1]]
        sizes = [stop - start for start, stop in zip(starts, [*starts[1:], len(rounded)], strict=True)]
        place = order.to(q.device)
        sorted_by_length = (*(x.index_select(0, place) for x in (q, k, v)), ordered)
        groups = zip(*(torch.split(x, sizes) for x in sorted_by_length), strict=True)
        padded = [functional.pad(y, (0, 0, 0, q.shape[2] - y.shape[2])) for y in itertools.starmap(_group, groups)]
        return torch.cat(padded).index_select(0, place.argsort())


def _group(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """Return the attention of sequences of rising lengths, cut to the longest."""
    shortest, longest = int(lengths[0]), int(lengths[-1])
    q, k, v = (x[:, :, :longest] for x in (q, k, v))
    k, v = repeat_heads(q, k), repeat_heads(q, v)
    if shortest == longest:
        return functional.scaled_dot_product_attention(q, k, v)
    return _attend(q, k, v, lengths)


class LengthsSeqlenAttention(Implement):
    """Attention by groups of alike length, in plain PyTorch, on any device."""

    name = "lengths"
    op = "seqlen_attention"

    def supports(self, spec: KernelSpec) -> Support:
        """Any batch."""
        del spec
        return Support.yes("attention by groups of alike length")

    def space(self, spec: KernelSpec) -> Mapping[str, TunableItemCfg]:
        """Return the steps to try: lengths in one step are computed together."""
        del spec
        return {"step": TunableItemCfg("choice", _value=list(_STEPS))}

    def default(self, spec: KernelSpec) -> dict[str, Any]:
        """Return groups of exactly one length."""
        del spec
        return {"step": _STEPS[0]}

    def build(self, spec: KernelSpec, params: Params) -> SeqlenAttentionKernel:
        """Return the kernel."""
        del spec
        return _LengthsKernel(int(params["step"]))

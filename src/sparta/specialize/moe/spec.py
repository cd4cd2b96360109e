"""The operation ``moe``: each token through the linear layers of its own experts, the answers summed by gates.

This file holds its conventions, plain dense (every expert answers every token), and ``sorted``, which puts the tokens
of each expert side by side and multiplies once an expert. Experts take any number of tokens, so nothing is dropped and
nothing is padded.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from sparta.specialize.blocks.block_moves import gather
from sparta.specialize.implement import Cause, DenseImplement, Implement, Kernel, Params, Support, present
from sparta.specialize.kernel_spec import KernelSpec
from sparta.tesa.attribute import TeSA

__all__ = ["DenseMoE", "DenseMoEKernel", "MoEKernel", "SortedMoE", "moe_spec"]


class MoEKernel(Kernel):
    """A built kernel of ``moe``."""

    def pack(self, operand: Tensor) -> tuple[Tensor, ...]:
        """Return nothing: there is nothing to know beforehand."""
        del operand
        return ()

    @abstractmethod
    def run(self, packed: Sequence[Tensor], *inputs: Tensor | None) -> Tensor:
        """Return (T, N) for tokens (T, K), ids (T, k) int64, gates (T, k) or None, then weight and bias by expert.

        Weights are (N, K), biases (N,) or None.
        """


def moe_spec(tokens: Tensor, ids: Tensor, weights: Sequence[Tensor], *, backward: bool = False) -> KernelSpec:
    """Return the kernel spec of a mixture of experts; the number of tokens is dynamic.

    >>> spec = moe_spec(torch.zeros(6, 4), torch.zeros(6, 2, dtype=torch.int64), [torch.zeros(3, 4)] * 5)
    >>> str(spec["weight"]), spec.attributes["top_k"]
    ('TeSA 5×3×4, dense, density 1, fp32', 2)
    """
    return KernelSpec(
        "moe",
        {
            "tokens": TeSA.dense(tokens.shape, format=tokens.dtype, dynamic=[0]),
            "weight": TeSA.dense((len(weights), *weights[0].shape), format=weights[0].dtype),
        },
        attributes={"top_k": ids.shape[1], "backward": backward},
        device=tokens.device.type,
    )


def _experts(parameters: Sequence[Tensor | None]) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Return the weight and the bias of each expert in turn."""
    yield from zip(present(*parameters[::2]), parameters[1::2], strict=True)


class DenseMoEKernel(MoEKernel):
    """Every expert answers every token; what was not asked is dropped."""

    def run(self, packed: Sequence[Tensor], *inputs: Tensor | None) -> Tensor:
        """Return the gated sum of the experts' answers."""
        del packed
        (tokens, ids), gates, parameters = present(*inputs[:2]), inputs[2], inputs[3:]
        parts = []
        for expert, (weight, bias) in enumerate(_experts(parameters)):
            asked = ids == expert
            answer = functional.linear(tokens, weight, bias)
            share = asked.sum(1, keepdim=True) if gates is None else torch.where(asked, gates, 0.0).sum(1, keepdim=True)
            # `where` and not a product: an expert's overflow must not reach tokens that never visit it.
            parts.append(torch.where(asked.any(1, keepdim=True), answer * share, 0.0).to(answer.dtype))
        return functools.reduce(torch.add, parts)


class DenseMoE(DenseImplement):
    """Every expert on every token, masked."""

    op = "moe"

    def build(self, spec: KernelSpec, params: Params) -> MoEKernel:
        """Return the dense kernel."""
        del spec, params
        return DenseMoEKernel()


class _SortedKernel(MoEKernel):
    """Tokens sorted by expert, one product per expert over a contiguous slice."""

    def run(self, packed: Sequence[Tensor], *inputs: Tensor | None) -> Tensor:
        del packed
        (tokens, ids), gates, parameters = present(*inputs[:2]), inputs[2], inputs[3:]
        experts, visits = list(_experts(parameters)), ids.shape[1]
        asked = ids.flatten()
        order = asked.argsort(stable=True)
        counts = torch.bincount(asked, minlength=len(experts)).tolist()
        slices = torch.split(gather(tokens[None], [order // max(1, visits)])[0][0], counts)
        answers = torch.cat([functional.linear(x, *expert) for x, expert in zip(slices, experts, strict=True)])
        by_token = answers.index_select(0, order.argsort()).reshape(*ids.shape, answers.shape[1])
        if gates is not None:
            by_token = by_token * gates[..., None]
        total = by_token[:, 0] if visits == 1 else by_token.sum(1)
        return total.to(answers.dtype)


class SortedMoE(Implement):
    """Tokens sorted by expert, in plain PyTorch, on any device."""

    name = "sorted"
    op = "moe"

    def supports(self, spec: KernelSpec) -> Support:
        """Two experts or more."""
        experts = spec["weight"].shape[0]
        if experts < 2:
            return Support.no("a single expert needs no sorting", Cause.SHAPE)
        return Support.yes("one product per expert")

    def build(self, spec: KernelSpec, params: Params) -> MoEKernel:
        """Return the kernel."""
        del spec, params
        return _SortedKernel()

"""Attention under a fixed mask: ``scaled_dot_product_attention`` with a mask among the model's tensors.

Masks are bool, or 0 and -inf; a mask of other numbers shifts scores, which kernels of kept pairs do not do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, fx

from sparta.aten import arguments_of
from sparta.compiler.graph.constants import kept_pairs
from sparta.compiler.graph.program import Program
from sparta.compiler.lower.call import Call
from sparta.nn.attention import SparseAttention
from sparta.specialize.tuning.select import Problem
from sparta.tesa.attribute import TeSA

__all__ = ["find_attention"]

_SDPA = torch.ops.aten.scaled_dot_product_attention.default


def find_attention(node: fx.Node, program: Program, shapes: dict[fx.Node, Tensor]) -> Call | str | None:
    """Return how to run an attention call on the pairs that its mask keeps."""
    if node.target is not _SDPA:
        return None
    call = arguments_of(node)
    mask = call["attn_mask"]
    if mask is None:
        return None  # nothing is pruned, or all that is follows from the order
    if mask.op != "get_attr":
        return "its mask is computed at run time"
    kept = kept_pairs(program.tensors[str(mask.target)])
    operands = tuple(call[name] for name in ("query", "key", "value"))
    reason = _obstacle(kept, [shapes[operand] for operand in operands], call["scale"], call["dropout_p"])
    if reason or kept is None:
        return reason
    pairs = kept.contiguous()

    def problem(values: Sequence[Tensor]) -> Problem:
        return SparseAttention(pairs).problem(tuple(values))

    def flops(values: Sequence[Tensor]) -> int:
        q, k, v = values
        return 2 * q.numel() * k.shape[-2] + 2 * math.prod(q.shape[:-1]) * v.shape[-2] * v.shape[-1]

    name = f"{mask.target}_pairs"
    target, known = torch.ops.sparta.masked_attention.default, TeSA.from_mask(pairs)
    args = (*operands, name)
    return Call("attention", str(mask.target), node, operands, problem, target, args, known, flops, {name: pairs})


def _obstacle(kept: Tensor | None, operands: Sequence[Tensor], scale: float | None, dropout: float) -> str:
    """Return why kernels of kept pairs do not compute this attention, or nothing."""
    q, k, v = operands
    if kept is None:
        return "its mask has numbers other than 0 and -inf"
    ordinary = scale is None or math.isclose(scale, q.shape[-1] ** -0.5, rel_tol=1e-6)
    same = q.dim() == k.dim() == v.dim() and q.shape[:-3] == k.shape[:-3] and k.shape[:-1] == v.shape[:-1]
    lead = q.shape[:-2]
    masks = [1] * (len(lead) - kept.dim() + 2) + list(kept.shape[:-2])
    same = same and len(masks) == len(lead) and all(m in (1, n) for m, n in zip(masks, lead, strict=True))
    reasons = {
        "it drops pairs at random": not dropout,
        f"its scale is {scale} and not 1/sqrt({q.shape[-1]})": ordinary,
        f"its mask {tuple(kept.shape)} is stretched over {q.shape[-2]} queries and {k.shape[-2]} keys": (
            kept.dim() >= 2 and tuple(kept.shape[-2:]) == (q.shape[-2], k.shape[-2])
        ),
        "some queries see no key, of which implementations make different things": bool(kept.any(-1).all()),
        "its operands are stretched over each other": same,
    }
    return next((reason for reason, holds in reasons.items() if not holds), "")

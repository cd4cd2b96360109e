"""Products of batches with a fixed sparse matrix, or one for each head: ``bmm`` and ``matmul``.

A fixed (K, N) on the right is a linear layer, and lowered as one. Here the fixed matrix has more dims, or stands on the
left; its zeros are pruned tiles of the operation ``batch_matmul``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, fx

from sparta.compiler.graph.program import Program
from sparta.compiler.lower.call import Call
from sparta.compiler.run.ops import product_with
from sparta.specialize.blocks.batches import broadcast
from sparta.specialize.tuning.select import Problem
from sparta.tesa.attribute import TeSA

__all__ = ["find_product"]

_PRODUCTS = (torch.ops.aten.bmm.default, torch.ops.aten.matmul.default)


def find_product(node: fx.Node, program: Program, shapes: dict[fx.Node, Tensor]) -> Call | str | None:
    """Return how to run a product without the zeros of its fixed matrix."""
    if node.target not in _PRODUCTS:
        return None
    first, second = node.args[:2]
    fixed = [isinstance(side, fx.Node) and side.op == "get_attr" for side in (first, second)]
    if sum(fixed) != 1:
        return None  # two activations, or nothing that changes
    left = fixed[0]
    matrix_node, x_node = (first, second) if left else (second, first)
    assert isinstance(matrix_node, fx.Node)  # noqa: S101 - of the two, one is fixed and the other is not
    assert isinstance(x_node, fx.Node)  # noqa: S101
    matrix, x = program.tensors[str(matrix_node.target)], shapes[x_node]
    if matrix.dim() < 2 or x.dim() < 2 or (matrix.dim() == 2 and not left):
        return None  # vectors, and linear layers
    if not matrix.is_floating_point() or matrix.dtype != x.dtype or not matrix.numel() or not x.numel():
        return None
    known = TeSA.from_zeros(matrix)

    def problem(values: Sequence[Tensor]) -> Problem:
        A, B = (matrix, values[0]) if left else (values[0], matrix)  # noqa: N806 - the operands' names
        mask = matrix != 0
        expected = A.to(torch.float64) @ B.to(torch.float64)
        return Problem(product_with(left=left).spec(mask, A, B), mask, (A, B), expected, max(1, A.shape[-1]))

    def flops(values: Sequence[Tensor]) -> int:
        A, B = (matrix, values[0]) if left else (values[0], matrix)  # noqa: N806
        return 2 * math.prod(broadcast(A=A.shape[:-2], B=B.shape[:-2])) * A.shape[-2] * A.shape[-1] * B.shape[-1]

    name = str(matrix_node.target).removesuffix("weight").rstrip(".") or str(matrix_node.target)
    target = torch.ops.sparta.fixed_product.default
    args = (x_node, matrix_node, left)
    return Call("batch_matmul", name, node, (x_node,), problem, target, args, known, flops)

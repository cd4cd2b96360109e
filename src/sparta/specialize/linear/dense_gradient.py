"""The gradient of a sparse weight by the dense product, where no kernel has a better way.

The product is PyTorch's. What comes after it, to make pruned weights exactly 0 and to add up the bias's gradient, would
take PyTorch two passes of a kernel each; here one kernel does both at once, and sums at the rate of memory.
"""

# ruff: noqa: ANN001, ANN201, N803, PLR0913, PLR0917 - Triton's own conventions
# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparta.specialize.cuda.launcher import Launcher

__all__ = ["INTERPRETED", "dense_gradient", "finish_gradient"]

_STRIP, _ROWS = 32, 256  # channels of grad that one program adds up, and tokens that it reads at once
_BLOCK = 8192  # elements of the weight's gradient


@triton.jit
def finish_gradient(
    result, dead, grad, sums, elements, M, N, grad_stride, strips, STRIP: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Add up strips of the columns of grad by the first programs; by the others, make what is dead of the result 0."""
    program = tl.program_id(0)
    if program < strips:
        column = program * STRIP + tl.arange(0, STRIP)
        total = tl.zeros((ROWS, STRIP), tl.float32)
        for first in range(0, M, ROWS):
            token = first + tl.arange(0, ROWS)
            place = grad + token.to(tl.int64)[:, None] * grad_stride + column[None, :]
            total += tl.load(place, mask=(token < M)[:, None] & (column < N)[None, :], other=0.0).to(tl.float32)
        tl.store(sums + column, tl.sum(total, 0).to(sums.dtype.element_ty), mask=column < N)
    else:
        at = (program - strips).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(result + at, mask=at < elements, other=0.0)
        value = tl.where(tl.load(dead + at, mask=at < elements, other=0) != 0, 0.0, value)
        tl.store(result + at, value.to(result.dtype.element_ty), mask=at < elements)


INTERPRETED = not isinstance(finish_gradient, triton.runtime.JITFunction)
_finish = Launcher(finish_gradient, interpreted=INTERPRETED)


def dense_gradient(grad: Tensor, x: Tensor, dead: Tensor, *, bias: bool) -> tuple[Tensor, Tensor | None]:
    """Return ``grad^T x`` (N, K), exactly 0 where `dead`, and the sums (N,) of grad if they are asked for.

    Parameters
    ----------
    grad
        (M, N), rows contiguous.
    x
        (M, K).
    dead
        bool (N, K), contiguous.
    """
    result, (tokens, outputs) = grad.t() @ x, grad.shape
    sums = grad.new_empty(outputs) if bias else None
    strips, elements = -(-outputs // _STRIP) if bias else 0, result.numel()
    arguments = (
        result, dead.view(torch.uint8), grad, grad if sums is None else sums, elements, tokens, outputs, grad.stride(0),
        strips, _STRIP, _ROWS, _BLOCK,
    )  # fmt: skip
    programs = strips + -(-elements // _BLOCK)
    if programs:
        _finish(programs, arguments, grad.device, {"num_warps": 8})
    return result, sums

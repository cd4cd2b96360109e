"""A sampled product: ``sampled`` computes only what a mask keeps of ``A B^T``, for one mask and one B of shape (N, K).

It is the ``batch_matmul`` of mode ``dds`` for an output mask, in two forms: ``elements`` asks PyTorch's
``sampled_addmm`` for single dot products, and ``blocks`` makes one small product for each run of kept blocks, written
to its place in the result. Neither touches what is pruned, the first for very sparse masks of any pattern, the second
without copying anything; gradients are dense products of the masked gradient.
"""

# ruff: noqa: N806 -- A, B and C are the operands' names

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sparta.common.tuning import TunableItemCfg
from sparta.specialize.implement import Cause, Implement, Params, Support, present
from sparta.specialize.kernel_spec import KernelSpec
from sparta.specialize.matmul.spec import DenseMatmulKernel, MatmulKernel, Product

__all__ = ["SampledMatmul", "masked_output"]

_ELEMENTS, _BLOCKS = "elements", "blocks"
_LEAST_BLOCK = 8  # rows and columns; smaller products cost more to start than to compute
_DENSEST_ELEMENTS = 0.2  # above it single dot products lose to any dense kernel, everywhere we measured


class _SampledKernel(MatmulKernel):
    """The places of what a mask keeps; immutable, and all tensors are in what it packs."""

    def __init__(self, spec: KernelSpec, form: str) -> None:
        self._form, self._block = form, spec["C"].state.block
        self._dense = DenseMatmulKernel(Product.of(spec))

    def pack(self, operand: Tensor) -> tuple[Tensor, ...]:
        """Return the mask; then starts of rows, columns and places of kept elements, or the kept runs of blocks."""
        if self._form == _BLOCKS:
            return operand, kept_runs(operand, (self._block[0], self._block[1]))
        rows, columns = operand.nonzero(as_tuple=True)
        starts = torch.zeros(len(operand) + 1, dtype=torch.int64, device=operand.device)
        starts[1:] = operand.sum(1).cumsum(0)
        return operand, starts, columns, rows * operand.shape[1] + columns

    def run(self, packed: Sequence[Tensor], *inputs: Tensor | None) -> Tensor:
        A, B = present(*inputs[:2])
        bias = inputs[2] if len(inputs) > 2 else None
        plain = B.dim() == 2 and (self._form == _BLOCKS or A.dtype in (torch.float32, torch.float64))
        if not plain or not A.is_cpu or torch.is_autocast_enabled("cpu"):
            return self._dense.run(packed[:1], A, B, bias)  # built for others, and right for these too
        y: Tensor = torch.ops.sparta.masked_output(A, B, bias, packed[0], list(packed[1:]))
        return y


def kept_runs(mask: Tensor, block: tuple[int, int]) -> Tensor:
    """Return the rectangles (R, 4) that a mask of whole blocks keeps: first row, last row + 1, and the same of columns.

    >>> kept_runs(torch.tensor([[True, True, False, True]]).repeat_interleave(2, 0), (2, 1)).tolist()
    [[0, 2, 0, 2], [0, 2, 3, 4]]
    """
    (h, w), (rows, columns) = block, mask.shape
    cells = mask[::h, ::w].to("cpu", torch.int8)
    edges = torch.diff(functional.pad(cells, (1, 1)), dim=1)
    (row, first), (_, last) = (edge.nonzero(as_tuple=True) for edge in (edges == 1, edges == -1))
    bounds = (row * h, ((row + 1) * h).clamp_max(rows), first * w, (last * w).clamp_max(columns))
    return torch.stack(bounds, 1)


@torch.library.custom_op("sparta::masked_output", mutates_args=())
def masked_output(x: Tensor, weight: Tensor, bias: Tensor | None, mask: Tensor, index: list[Tensor]) -> Tensor:
    """Return ``x W^T + bias`` (..., M, N) where `mask` (M, N) keeps it, else 0, for x (..., M, K) and W (N, K).

    ``index`` is what the kernel packed after the mask.
    """
    del mask  # the index has it
    y = x.new_zeros(*x.shape[:-1], weight.shape[0])
    sheets, results = x.reshape(-1, *x.shape[-2:]), y.view(-1, *y.shape[-2:])
    for sheet, result in zip(sheets, results, strict=True):
        if len(index) == 1:
            _multiply_runs(sheet, weight, bias, index[0].tolist(), result)
        elif len(index[1]):
            _multiply_elements(sheet, weight, bias, index, result)
    return y


def _multiply_runs(
    x: Tensor, weight: Tensor, bias: Tensor | None, runs: list[tuple[int, int, int, int]], y: Tensor
) -> None:
    for top, bottom, left, right in runs:
        place, some = y[top:bottom, left:right], weight[left:right].t()
        if bias is None:
            torch.mm(x[top:bottom], some, out=place)
        else:
            torch.addmm(bias[left:right], x[top:bottom], some, out=place)


def _multiply_elements(x: Tensor, weight: Tensor, bias: Tensor | None, index: list[Tensor], y: Tensor) -> None:
    starts, columns, places = index
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse|.*invariant", category=UserWarning)
        zeros = x.new_zeros(len(columns))
        kept = torch.sparse_csr_tensor(starts, columns, zeros, tuple(y.shape), check_invariants=False)
        values = torch.sparse.sampled_addmm(kept, x, weight.t(), beta=0.0).values()
    y.view(-1)[places] = values if bias is None else values + bias[columns]


@masked_output.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, mask: Tensor, index: list[Tensor]) -> Tensor:
    del bias, mask, index
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    x, weight, bias, mask, index = inputs
    ctx.has_bias, ctx.indices = bias is not None, len(index)
    ctx.save_for_backward(x, weight, mask)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, weight, mask = ctx.saved_tensors
    kept = torch.where(mask, grad, 0.0)
    grad_x = kept @ weight if ctx.needs_input_grad[0] else None
    grad_weight = kept.flatten(0, -2).t() @ x.flatten(0, -2) if ctx.needs_input_grad[1] else None
    grad_bias = kept.flatten(0, -2).sum(0) if ctx.has_bias else None
    return grad_x, grad_weight, grad_bias, None, [None] * ctx.indices


masked_output.register_autograd(_backward, setup_context=_setup_context)


class SampledMatmul(Implement):
    """Only the kept elements or blocks of a product, in plain PyTorch on the CPU."""

    name = "sampled"
    op = "batch_matmul"

    def supports(self, spec: KernelSpec) -> Support:
        """Take one mask of C, stored whole, and one B (N, K) for all of a batch, on the CPU."""
        product = Product.of(spec)
        if product.sparse != "C" or product.compressed or product.transpose_A or not product.transpose_B:
            return Support.no("it computes a sparse C, stored whole, from a dense B of shape (N, K)", Cause.SHAPE)
        if spec.device != "cpu":
            return Support.no(f"it runs on the CPU, not on {spec.device}", Cause.DEVICE)
        if spec["C"].ndim != 2 or spec["B"].ndim != 2:
            return Support.no("it has one mask and one B for all of a batch", Cause.SHAPE)
        if not _forms(spec):
            reason = f"its mask is neither in blocks nor sparse enough: density {spec['C'].density:.2g}"
            return Support.no(reason, Cause.PATTERN)
        return Support.yes("products of what the mask keeps")

    def space(self, spec: KernelSpec) -> Mapping[str, TunableItemCfg]:
        """Return the forms that are worth timing."""
        return {"form": TunableItemCfg("choice", _value=_forms(spec))}

    def default(self, spec: KernelSpec) -> dict[str, Any]:
        """Return the best guess: the blocks of the mask, or single elements where it has none."""
        return {"form": _forms(spec)[0]}

    def build(self, spec: KernelSpec, params: Params) -> MatmulKernel:
        """Keep the form; the places are packed with the mask."""
        return _SampledKernel(spec, str(params["form"]))


def _forms(spec: KernelSpec) -> list[str]:
    """Return the forms worth timing: blocks where the mask has some of a size, and elements where they are few."""
    masked = spec["C"]
    blocks = min(masked.state.block) >= _LEAST_BLOCK and masked.density < 1.0
    few = masked.density <= _DENSEST_ELEMENTS and str(spec["B"].format) in ("fp32", "fp64")
    return [_BLOCKS] * blocks + [_ELEMENTS] * few

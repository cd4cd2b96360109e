"""The C++ kernels for a masked input: ``cpu`` for the product of a sparse A and a dense, shared B on the CPU.

``(A B^T)^T = B A^T`` is a linear layer whose weight is A and whose tokens are the rows of B, so the kernels for sparse
weights serve it, with A's live values packed again at every call. Only the mask is fixed, and what is compiled and laid
out beforehand depends on it alone.
"""

# ruff: noqa: N806 -- A, B and C are the operands' names

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparta.specialize.cpu.candidates import candidates
from sparta.specialize.cpu.device import DTYPES, FORMATS, library_here
from sparta.specialize.cpu.tile import Tile
from sparta.specialize.implement import Cause, Params, Support, TiledImplement, present
from sparta.specialize.kernel_spec import KernelSpec
from sparta.specialize.linear.cpu_packed import PackedLinear
from sparta.specialize.matmul.spec import DenseMatmulKernel, MatmulKernel, Product
from sparta.specialize.runtime.handles import find
from sparta.specialize.runtime.handles import register as register_handle

__all__ = ["CpuMaskedInput", "masked_input"]


class _MaskedInputKernel(MatmulKernel):
    """The layout of one mask; immutable, so copies of a module share it."""

    def __init__(self, spec: KernelSpec, tile: Tile) -> None:
        self.linear = PackedLinear(None, spec["A"], **tile.to_dict())
        self._dense = DenseMatmulKernel(Product.of(spec))
        self.handle = register_handle(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> _MaskedInputKernel:
        return self

    def pack(self, operand: Tensor) -> tuple[Tensor, ...]:
        return (operand,)

    def run(self, packed: Sequence[Tensor], *inputs: Tensor | None) -> Tensor:
        A, B = present(*inputs[:2])
        if B.dim() != 2 or not A.is_cpu or A.dtype not in DTYPES:
            return self._dense.run(packed, *inputs)  # built for others, and right for these too
        bias = inputs[2] if len(inputs) > 2 else None
        y: Tensor = torch.ops.sparta.masked_input(A, B, packed[0], self.handle)
        return y if bias is None else y + bias


@torch.library.custom_op("sparta::masked_input", mutates_args=())
def masked_input(x: Tensor, weight: Tensor, mask: Tensor, handle: int) -> Tensor:
    """Return ``x W^T`` (..., M, N) for x (..., M, K), 0 where `mask` (M, K) prunes it, and the weight (N, K)."""
    del mask  # the layout that the handle stands for has it
    linear = find(handle, _MaskedInputKernel).linear
    y = x.new_empty(*x.shape[:-1], weight.shape[0])
    rows = weight.contiguous()
    sheets = x.reshape(-1, *x.shape[-2:])
    for sheet, result in zip(sheets, y.view(-1, *y.shape[-2:]), strict=True):
        result.copy_(linear(rows, values=linear.pack(sheet.detach())).t())
    return y


@masked_input.register_fake
def _(x: Tensor, weight: Tensor, mask: Tensor, handle: int) -> Tensor:
    del mask, handle
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    x, weight, mask, _ = inputs
    ctx.save_for_backward(x, weight, mask)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, mask = ctx.saved_tensors
    grad_x = torch.where(mask, grad @ weight, 0.0) if ctx.needs_input_grad[0] else None
    kept = torch.where(mask, x, 0.0)
    grad_weight = grad.flatten(0, -2).t() @ kept.flatten(0, -2) if ctx.needs_input_grad[1] else None
    return grad_x, grad_weight, None, None


masked_input.register_autograd(_backward, setup_context=_setup_context)


class CpuMaskedInput(TiledImplement):
    """The hand-written C++ kernels for sparse weights, with the roles of input and weight exchanged."""

    name = "cpu"
    op = "batch_matmul"

    def supports(self, spec: KernelSpec) -> Support:
        """Take one mask of A, stored whole, and one B (N, K) for all of a batch, on the CPU."""
        product = Product.of(spec)
        if product.sparse != "A" or product.compressed or product.transpose_A or not product.transpose_B:
            return Support.no("it multiplies a sparse A, stored whole, by a dense B of shape (N, K)", Cause.SHAPE)
        if spec["A"].ndim != 2 or spec["B"].ndim != 2:
            return Support.no("it has one mask and one B for all of a batch", Cause.SHAPE)
        if str(spec["B"].format) not in FORMATS:
            return Support.no(f"it computes {', '.join(FORMATS)}, not {spec['B'].format}", Cause.DTYPE)
        return library_here(spec)

    def tiles(self, spec: KernelSpec) -> Sequence[object]:
        """Return the tiles that are worth timing, the best guess first."""
        return _tiles(spec)

    def build(self, spec: KernelSpec, params: Params) -> MatmulKernel:
        """Compile the library if it is not there yet, and lay the mask out."""
        return _MaskedInputKernel(spec, Tile.parse(params["tile"]))


def _tiles(spec: KernelSpec) -> list[str]:
    masked = spec["A"]
    h, w = masked.state.block
    (rows, inputs), outputs = masked.shape, spec["B"].shape[0]
    return [str(Tile(**fields)) for fields in candidates(outputs, rows, inputs, masked.density, (h, w))]

"""Dense layers with a weight in few bits: PyTorch's product in real numbers, and its product in fp8.

``dense`` multiplies the rounded weight as bf16, fp16 or fp32, on any device; it is what others are compared with.
``dense-fp8`` is what a user of a Hopper GPU would take instead of a sparse kernel: both operands in fp8, a scale for
each token and each output, sums in the matrix unit's own precision.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from sparta.errors import ShapeError, message
from sparta.specialize.cuda.device import HOPPER, cuda_here
from sparta.specialize.implement import Cause, DenseImplement, Implement, Params, Support
from sparta.specialize.kernel_spec import KernelSpec
from sparta.specialize.linear.spec import LinearKernel, apply_epilogue
from sparta.specialize.scaled_linear.inputs import InputRounding, RoundsInputs
from sparta.specialize.scaled_linear.packed import takes_scaled
from sparta.specialize.scaled_linear.spec import FP8, OP, codes_of, rounded_weight, rounds_inputs
from sparta.tesa.bits import bit_format

__all__ = ["DenseFp8", "DenseScaled"]

_STEP = 16  # sides of the weight are multiples of it, as the library wants


class _DenseKernel(LinearKernel):
    def __init__(self, spec: KernelSpec) -> None:
        self._weight, self._epilogue = spec["weight"], spec.epilogue
        self._dtype = bit_format(spec["input"].format).dtype

    def pack(self, operand: Tensor) -> tuple[Tensor, ...]:
        return (rounded_weight(operand, self._weight).to(self._dtype),)

    def run(self, packed: Sequence[Tensor], *inputs: Tensor | None) -> Tensor:
        x, bias, residual = inputs
        assert x is not None  # noqa: S101 - the operation's convention
        return apply_epilogue(functional.linear(x, packed[0], bias), self._epilogue, residual)


class DenseScaled(DenseImplement):
    """``torch.nn.functional.linear`` on the rounded weight."""

    op = OP
    every_epilogue = True

    def build(self, spec: KernelSpec, params: Params) -> LinearKernel:
        """Return the dense kernel."""
        del params
        return _DenseKernel(spec)


class _Fp8Kernel(RoundsInputs):
    """The product of torch in fp8; sums that it rounds are those of its own precision."""

    def __init__(self, spec: KernelSpec) -> None:
        self._weight, self._epilogue = spec["weight"], spec.epilogue
        self._round = InputRounding(spec.attributes["input_scale"])
        self._dtype = bit_format(spec["input"].format).dtype

    def pack(self, operand: Tensor) -> tuple[Tensor, ...]:
        codes, scales = codes_of(operand, self._weight)
        return codes, scales[:, :1].t().contiguous()

    def run_rounded(
        self, packed: Sequence[Tensor], x: tuple[Tensor, Tensor], bias: Tensor | None, residual: Tensor | None
    ) -> Tensor:
        (rounded, x_scales), (codes, scales) = x, packed
        if rounded.dim() != 2 or rounded.shape[1] != codes.shape[1]:
            raise ShapeError(message(f"an input of shape {tuple(rounded.shape)}", f"(M, {codes.shape[1]})"))
        if not rounded.shape[0]:
            return rounded.new_empty(0, codes.shape[0], dtype=self._dtype)
        y: Tensor = torch._scaled_mm(
            rounded, codes.t(), x_scales.unsqueeze(1), scales, bias=bias, out_dtype=self._dtype, use_fast_accum=True
        )
        return apply_epilogue(y, self._epilogue, residual)


class DenseFp8(Implement):
    """``torch._scaled_mm`` on the whole weight, zeros included; x is rounded to fp8."""

    name = "dense-fp8"
    op = OP
    every_epilogue = True

    def supports(self, spec: KernelSpec) -> Support:
        """Bf16 on Hopper where x may be rounded, sides that are multiples of 16."""
        if not rounds_inputs(spec):
            return Support.no("activations must not be rounded to fp8", Cause.DTYPE)
        answer = takes_scaled(spec, (FP8,))
        if not answer:
            return answer
        if str(spec["input"].format) != "bf16":
            return Support.no(f"it returns bf16, not {spec['input'].format}", Cause.DTYPE)
        if any(side % _STEP for side in spec["weight"].shape):
            return Support.no(f"sides {tuple(spec['weight'].shape)} are not multiples of {_STEP}", Cause.SHAPE)
        return cuda_here(HOPPER) and Support.yes("PyTorch's dense product in fp8")

    def build(self, spec: KernelSpec, params: Params) -> LinearKernel:
        """Return the kernel."""
        del params
        return _Fp8Kernel(spec)

"""Int8 layers: kernels of 8-bit integers with the interface of a linear layer in real numbers.

The operation ``quantized_linear`` is ``linear`` with a weight on an int8 grid (the scale of its TeSA) and the
:class:`~sparta.specialize.int8_linear.quantization.Quantization` of its input (attributes of the kernel spec). Kernels
in fp32, dense and sparse, compete with int8 ones, which round the input, sum exactly in integers and rescale in the
same pass. Candidates are compared on inputs that lie on the grid, where all must agree; what rounding the inputs costs
is measured on the whole model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from sparta.common.tuning import TunableItemCfg
from sparta.errors import SpartaError, ValueRangeError, message
from sparta.specialize.implement import (
    Cause,
    Implement,
    KernelLayout,
    Params,
    Support,
    implement_named,
    present,
)
from sparta.specialize.int8_linear.quantization import Quantization
from sparta.specialize.int8_linear.spec import Int8LinearKernel, int8_linear_spec, requantization
from sparta.specialize.kernel_spec import Epilogue, KernelSpec
from sparta.specialize.linear.cpu import CpuLinear
from sparta.specialize.linear.dense import DenseLinear
from sparta.specialize.linear.spec import LinearKernel, apply_epilogue
from sparta.tesa.attribute import TeSA

__all__ = ["INT8_IMPLEMENTS", "OP", "Int8Kernel", "integers_of", "row_scales"]

OP = "quantized_linear"
INT8_IMPLEMENTS = frozenset({"cpu-int8", "onednn-int8"})
"""The implements of :data:`OP` that round their inputs; the others compute in real numbers."""


def row_scales(weight: TeSA) -> Tensor:
    """Return the scale of each row (N,) of an int8 weight, float64; raises where a row has several."""
    scales = weight.scale.dense()
    if bool((scales != scales[:, :1]).any()):
        raise ValueRangeError(message("a weight with several scales in a row", "one scale per output channel, or one"))
    return scales[:, 0]


def integers_of(weight: Tensor, scales: Tensor) -> Tensor:
    """Return the integers (N, K), int8, of a weight that lies on its grid; raises where it does not.

    >>> integers_of(torch.tensor([[0.5, -1.0]]), torch.tensor([0.5])).tolist()
    [[1, -2]]
    """
    exact = weight.to(torch.float64) / scales.to(weight.device, torch.float64).unsqueeze(1)
    whole = exact.round()
    if bool(((exact - whole).abs() > 1e-3).any()) or bool((whole.abs() > 128).any()):
        raise ValueRangeError(message("a weight that is not on its int8 grid", fix="export the quantised model again"))
    return whole.clamp(-128, 127).to(torch.int8)


class Int8Kernel(LinearKernel):
    """Rounds its input unless it is integers already, multiplies integers, and rescales in the same pass."""

    def __init__(self, spec: KernelSpec, kernel: Int8LinearKernel) -> None:
        self._grid, self._epilogue = Quantization.from_dict(spec.attributes), spec.epilogue
        self._scales = row_scales(spec["weight"])
        output = Quantization.of_output(spec.attributes)
        self._output_scale = 1.0 if output is None else output.scale
        self._kernel = kernel
        self._multiplier, _ = requantization(self._scales, self._grid.scale, output_scale=self._output_scale)

    def pack(self, operand: Tensor) -> tuple[Tensor, ...]:
        """Return the integers of a weight (N, K) that lies on its grid, in the layout of the integer kernel."""
        return self._kernel.pack(integers_of(operand.detach(), self._scales))

    def layout(self) -> KernelLayout | None:
        """Return the layout of the integer kernel."""
        return self._kernel.layout()

    def run(self, packed: Sequence[Tensor], *inputs: Tensor | None) -> Tensor:
        """Return (M, N), in real numbers or as integers of the output's grid, for x (M, K) in either."""
        (x,), bias, residual = present(inputs[0]), inputs[1], inputs[2]
        offset = bias if bias is None or self._output_scale == 1.0 else bias / self._output_scale
        real, scaling = x.is_floating_point(), (self._multiplier, offset)
        # Some kernels round in the same pass, to the same integers.
        y = self._kernel.run_real(packed, self._grid.scale, x, *scaling) if real else None
        if y is None:
            y = self._kernel.run(packed, self._grid.integers(x) if real else x, *scaling)
        if _relu_inside(self._epilogue):  # the kernel did it
            return y if residual is None else y + residual
        return apply_epilogue(y, self._epilogue, residual)


class _Int8Linear(Implement):
    """An implement of ``int8_linear`` that takes and returns real numbers."""

    op = OP
    every_epilogue = True
    inner: ClassVar[str]

    def supports(self, spec: KernelSpec) -> Support:
        """Take int8 weights with one scale per row, on the CPU in fp32."""
        if spec.device != "cpu":
            return Support.no(f"it runs on the CPU, not on {spec.device}", Cause.DEVICE)
        if str(spec["input"].format) != "fp32":
            return Support.no(f"int8 kernels run for fp32 models, not {spec['input'].format}", Cause.DTYPE)
        if str(spec["weight"].format) != "int8":
            return Support.no(f"the weight is {spec['weight'].format}, not int8", Cause.DTYPE)
        try:
            return self._inner.supports(_integer_spec(spec))
        except SpartaError as error:
            return Support.no(str(error), Cause.SHAPE)

    def space(self, spec: KernelSpec) -> Mapping[str, TunableItemCfg]:
        """Return the parameters of the integer kernel."""
        return self._inner.space(_integer_spec(spec))

    def default(self, spec: KernelSpec) -> dict[str, Any]:
        """Return the defaults of the integer kernel."""
        return self._inner.default(_integer_spec(spec))

    def build(self, spec: KernelSpec, params: Params) -> LinearKernel:
        """Build the integer kernel."""
        return Int8Kernel(spec, cast("Int8LinearKernel", self._inner.build(_integer_spec(spec), params)))

    @property
    def _inner(self) -> Implement:
        return implement_named(self.inner, "int8_linear")


def _relu_inside(epilogue: Epilogue) -> bool:
    """Whether the integer kernel does the activation: a ReLU in front of the residual."""
    return epilogue.activation == "relu" and not epilogue.residual_first


def _integer_spec(spec: KernelSpec) -> KernelSpec:
    """Return the kernel spec of the product in integers."""
    grid = Quantization.from_dict(spec.attributes)
    output = Quantization.of_output(spec.attributes)
    relu = "relu" if _relu_inside(spec.epilogue) else None
    return int8_linear_spec(
        spec["weight"],
        spec["input"].shape[0],
        input_format=grid.format,
        input_zero_point=grid.zero_point,
        epilogue=Epilogue(bias=spec.epilogue.bias, activation=relu),
        output_format="fp32" if output is None else output.format,
        output_zero_point=0 if output is None else output.zero_point,
    )


class DenseQuantized(DenseLinear):
    """PyTorch's linear layer in real numbers."""

    op = OP


class CpuQuantized(CpuLinear):
    """The C++ kernels in real numbers."""

    op = OP


class CpuInt8(_Int8Linear):
    """The C++ kernels of 8-bit integers."""

    name = "cpu-int8"
    inner = "cpu-int8"


class OneDnnInt8(_Int8Linear):
    """oneDNN's dense product of 8-bit integers."""

    name = "onednn-int8"
    inner = "onednn"

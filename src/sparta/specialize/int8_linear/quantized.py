"""Int8 layers in real numbers: kernels in fp32 that run the operation ``int8_linear`` with a weight on its grid.

They do not round their input, so they are as exact as can be, and compete with the kernels of integers. A neighbour may
still hand them integers, or want them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sparta.specialize.implement import KernelLayout, Params, present
from sparta.specialize.int8_linear.quantization import Quantization
from sparta.specialize.int8_linear.spec import OP, Int8Kernel, integers_of, row_scales
from sparta.specialize.kernel_spec import KernelSpec
from sparta.specialize.linear.cpu import CpuLinear
from sparta.specialize.linear.dense import DenseLinear
from sparta.specialize.linear.spec import LinearKernel

__all__ = [
    "INT8_IMPLEMENTS",
    "OP",
    "CpuQuantized",
    "DenseQuantized",
    "Int8Kernel",
    "RealKernel",
    "integers_of",
    "row_scales",
]

INT8_IMPLEMENTS = frozenset({"cpu-int8", "onednn-int8", "torch-int8"})
"""The implements of :data:`OP` that round their inputs; the others compute in real numbers."""


class RealKernel(LinearKernel):
    """A kernel of ``linear`` that takes a weight as its integers too, and integers where a neighbour has them."""

    def __init__(self, spec: KernelSpec, kernel: LinearKernel) -> None:
        self._kernel, self._scales = kernel, row_scales(spec["weight"])
        self._grid = Quantization.from_dict(spec.attributes)
        self._output = Quantization.of_output(spec.attributes)

    def pack(self, operand: Tensor) -> tuple[Tensor, ...]:
        """Return the weight (N, K) in the kernel's layout."""
        if not operand.is_floating_point():
            operand = operand.float() * self._scales.to(operand.device, torch.float32).unsqueeze(1)
        return self._kernel.pack(operand)

    def shared(self, packed: Sequence[Tensor], operand: Tensor) -> Sequence[Tensor]:
        """Return what the kernel shares."""
        return self._kernel.shared(packed, operand) if operand.is_floating_point() else packed

    def run(self, packed: Sequence[Tensor], *inputs: Tensor | None) -> Tensor:
        """Return (M, N) for x (M, K), bias and residual."""
        (x,) = present(inputs[0])
        real = x if x.is_floating_point() else self._grid.real(x, torch.float32)
        y = self._kernel.run(packed, real, *inputs[1:])
        return y if self._output is None else self._output.integers(y)

    def fast_path(self, packed: Sequence[Tensor], bias: Tensor | None) -> Callable[..., Tensor | None] | None:
        """Return the kernel's own, for real numbers."""
        inner = self._kernel.fast_path(packed, bias) if self._output is None else None
        if inner is None:
            return None
        return lambda x, residual=None: inner(x, residual) if x.is_floating_point() else None

    def product(self, packed: Sequence[Tensor], bias: Tensor | None) -> Any:
        """Return the kernel's own, for real numbers."""
        return self._kernel.product(packed, bias) if self._output is None else None

    def layout(self) -> KernelLayout | None:
        """Return the kernel's layout."""
        return self._kernel.layout()


class DenseQuantized(DenseLinear):
    """PyTorch's linear layer in real numbers."""

    op = OP

    def build(self, spec: KernelSpec, params: Params) -> LinearKernel:
        """Return the dense kernel."""
        return RealKernel(spec, super().build(spec, params))


class CpuQuantized(CpuLinear):
    """The C++ kernels in real numbers."""

    op = OP

    def build(self, spec: KernelSpec, params: Params) -> LinearKernel:
        """Compile the library if it is not there yet, and pack the mask."""
        return RealKernel(spec, super().build(spec, params))

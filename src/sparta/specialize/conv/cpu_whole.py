"""The dense C++ kernels as implements of convolutions: ``cpu-dense``, for weights with few zeros and depthwise layers.

It multiplies with the masked weight, zeros included, as PyTorch does; whether that is faster than skipping them, or
than PyTorch, is measured as for any other implement.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from sparta.specialize.conv.cpu_dense import dense_images
from sparta.specialize.conv.spec import ConvGeometry, ConvKernel
from sparta.specialize.cpu.device import runs_here
from sparta.specialize.cpu.library import fused_activation
from sparta.specialize.implement import Cause, Implement, Params, Support
from sparta.specialize.kernel_spec import KernelSpec
from sparta.specialize.runtime.masked import Masked

__all__ = ["CpuDenseConv1d", "CpuDenseConv2d"]

_FEWEST_LIVE = 0.4  # with fewer, the kernels that skip zeros win everywhere


class _CpuDenseKernel(ConvKernel):
    def __init__(self, spec: KernelSpec) -> None:
        weight = spec["weight"]
        self._masked, self._activation = Masked(weight), fused_activation(spec.epilogue)
        self._images = dense_images(tuple(weight.shape), ConvGeometry.from_dict(spec.attributes))

    def pack(self, operand: Tensor) -> tuple[Tensor, ...]:
        return (self._images.pack(self._masked(operand)),)

    def run(self, packed: Sequence[Tensor], *inputs: Tensor | None) -> Tensor:
        x, bias, residual = inputs
        assert x is not None  # noqa: S101 - the operation's convention
        return self._images(x, packed[0], bias, self._activation, residual)

    def fast_path(self, packed: Sequence[Tensor], bias: Tensor | None) -> Callable[..., Tensor | None] | None:
        return self._images.fast_path(packed[0], bias, self._activation)

    def product(self, packed: Sequence[Tensor], bias: Tensor | None) -> Any:
        return self._images.product(packed[0], bias, self._activation)


class _CpuDenseConv(Implement):
    """Hand-written C++ kernels that skip nothing, compiled for this machine at their first use."""

    name = "cpu-dense"
    version = 4
    every_epilogue = True

    def supports(self, spec: KernelSpec) -> Support:
        """Weights with few zeros, and depthwise ones, on the CPU in fp32, bf16 and fp16, where there is a compiler."""
        weight = spec["weight"]
        if 0 in weight.shape:
            return Support.no("its weight is empty", Cause.SHAPE)
        if weight.density < _FEWEST_LIVE and weight.shape[1] > 1:
            why = f"only {weight.density:.0%} of the weight is live, and it would multiply with all of it"
            return Support.no(why, Cause.PATTERN)
        return runs_here(spec)

    def build(self, spec: KernelSpec, params: Params) -> ConvKernel:
        """Compile the library if it is not there yet."""
        del params
        return _CpuDenseKernel(spec)


class CpuDenseConv2d(_CpuDenseConv):
    """Hand-written C++ kernels for conv2d that skip nothing."""

    op = "conv2d"


class CpuDenseConv1d(_CpuDenseConv):
    """Hand-written C++ kernels for conv1d that skip nothing."""

    op = "conv1d"

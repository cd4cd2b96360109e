"""Dense convolutions: PyTorch's own kernels on the masked weight, implements like any other and the ones to beat.

Results are contiguous, whatever memory format comes in, as every implement gives them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparta.specialize.conv.spec import ConvGeometry, ConvKernel, dense_conv
from sparta.specialize.implement import DenseImplement, Params
from sparta.specialize.kernel_spec import KernelSpec
from sparta.specialize.linear.spec import apply_epilogue
from sparta.specialize.runtime.masked import Masked

__all__ = ["DenseConv1d", "DenseConv2d"]


class _DenseConvKernel(ConvKernel):
    def __init__(self, spec: KernelSpec) -> None:
        self._masked, self._epilogue = Masked(spec["weight"]), spec.epilogue
        self._geometry = ConvGeometry.from_dict(spec.attributes)

    def pack(self, operand: Tensor) -> tuple[Tensor, ...]:
        return (self._masked(operand),)

    def shared(self, packed: Sequence[Tensor], operand: Tensor) -> Sequence[Tensor]:
        return (operand.detach(),) if torch.equal(packed[0], operand) else packed

    def run(self, packed: Sequence[Tensor], *inputs: Tensor | None) -> Tensor:
        x, bias, residual = inputs
        assert x is not None  # noqa: S101 - the operation's convention
        y = dense_conv(x, packed[0], bias, self._geometry)
        return apply_epilogue(y, self._epilogue, residual).contiguous()


class _DenseConv(DenseImplement):
    """``torch.nn.functional.conv1d`` or ``conv2d`` on the masked weight."""

    every_epilogue = True

    def build(self, spec: KernelSpec, params: Params) -> ConvKernel:
        """Return the dense kernel."""
        del params
        return _DenseConvKernel(spec)


class DenseConv2d(_DenseConv):
    """``torch.nn.functional.conv2d`` on the masked weight."""

    op = "conv2d"


class DenseConv1d(_DenseConv):
    """``torch.nn.functional.conv1d`` on the masked weight."""

    op = "conv1d"

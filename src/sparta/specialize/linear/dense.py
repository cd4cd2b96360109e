"""Dense: PyTorch's own kernels on the masked weight, an implement like any other and the one to beat."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from sparta.specialize.implement import DenseImplement, Params
from sparta.specialize.kernel_spec import KernelSpec
from sparta.specialize.linear.spec import LinearKernel, apply_epilogue
from sparta.specialize.runtime.masked import Masked

__all__ = ["DenseLinear"]


class _DenseLinearKernel(LinearKernel):
    def __init__(self, spec: KernelSpec) -> None:
        self._masked, self._epilogue = Masked(spec["weight"]), spec.epilogue

    def pack(self, operand: Tensor) -> tuple[Tensor, ...]:
        return (self._masked(operand),)

    def shared(self, packed: Sequence[Tensor], operand: Tensor) -> Sequence[Tensor]:
        return (operand.detach(),) if torch.equal(packed[0], operand) else packed

    def run(self, packed: Sequence[Tensor], *inputs: Tensor | None) -> Tensor:
        x, bias, residual = inputs
        assert x is not None  # noqa: S101 - the operation's convention
        return apply_epilogue(functional.linear(x, packed[0], bias), self._epilogue, residual)

    def fast_path(self, packed: Sequence[Tensor], bias: Tensor | None) -> Callable[..., Tensor | None] | None:
        if self._epilogue.activation is not None or self._epilogue.residual:
            return None
        weight = packed[0]
        return lambda x, _no_residual=None: functional.linear(x, weight, bias)


class DenseLinear(DenseImplement):
    """``torch.nn.functional.linear`` on the masked weight."""

    op = "linear"
    every_epilogue = True

    def build(self, spec: KernelSpec, params: Params) -> LinearKernel:
        """Return the dense kernel."""
        del params
        return _DenseLinearKernel(spec)

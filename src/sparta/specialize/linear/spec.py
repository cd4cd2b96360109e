"""The operation ``linear``: ``activation(x W^T + bias) + residual`` with a sparse weight W of shape (N, K).

This file holds what every implement of it shares: how its kernel spec is made, the kernel's calling convention, and the
plain dense epilogue. A kernel takes x as (M, K) with any M, since M is the spec's dynamic dim.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from sparta.specialize.implement import Kernel
from sparta.specialize.kernel_spec import Epilogue, KernelSpec
from sparta.tesa.attribute import TeSA

__all__ = ["LinearKernel", "apply_epilogue", "linear_spec"]


class LinearKernel(Kernel):
    """A built kernel of ``linear``."""

    @abstractmethod
    def pack(self, operand: Tensor) -> tuple[Tensor, ...]:
        """Return the live values of the weight (N, K) in this kernel's layout."""

    @abstractmethod
    def run(self, packed: Sequence[Tensor], *inputs: Tensor | None) -> Tensor:
        """Return (M, N) for the inputs x (M, K), bias (N,) or None, residual (M, N) or None."""

    def pack_with_transpose(
        self, other: LinearKernel, operand: Tensor
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]] | None:
        """Return the weight (N, K) as packed by this kernel and its transpose as packed by another, in one go.

        None, as here, where that is no quicker than one after the other.
        """
        del other, operand
        return None

    def weight_gradient(
        self, grad: Tensor, x: Tensor, mask: Tensor, *, bias: bool = False
    ) -> tuple[Tensor, Tensor | None] | None:
        """Return the gradient (N, K) of the weight for grad (M, N) and x (M, K), exactly 0 where `mask` is False.

        With it comes the gradient (N,) of the bias, if it is asked for. None, as here, where the kernel has no better
        way than the dense product.
        """
        del grad, x, mask, bias
        return None


def linear_spec(
    weight: TeSA, rows: int, dtype: torch.dtype, *, epilogue: Epilogue | None = None, device: str = "cpu"
) -> KernelSpec:
    """Return the kernel spec of a linear operator.

    Parameters
    ----------
    weight
        TeSA of the weight, shape (N, K).
    rows
        The M that is measured; any other M runs as well.

    Examples
    --------
    >>> str(linear_spec(TeSA.dense((8, 4)), 16, torch.float32)["input"])
    'TeSA 16*×4, dense, density 1, fp32'
    """
    return KernelSpec(
        "linear",
        {"input": TeSA.dense((rows, weight.shape[1]), format=dtype, dynamic=[0]), "weight": weight.with_format(dtype)},
        epilogue=epilogue or Epilogue(),
        device=device,
    )


def apply_epilogue(y: Tensor, epilogue: Epilogue, residual: Tensor | None) -> Tensor:
    """Return ``activation(y) + residual``, or ``relu(y + residual)`` if that is first; the bias is in y."""
    if epilogue.residual_first and residual is not None:
        return functional.relu(y + residual)
    if epilogue.activation == "relu":
        y = functional.relu(y)
    elif epilogue.activation == "gelu":
        y = functional.gelu(y)
    elif epilogue.activation == "silu":
        y = functional.silu(y)
    elif epilogue.activation == "relu6":
        y = functional.relu6(y)
    return y + residual if residual is not None else y

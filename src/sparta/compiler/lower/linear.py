"""Linear layers: ``aten.linear`` and products with a fixed matrix become the operation ``linear``.

The graph's activations have any number of dims; kernels take rows (M, K). ``addmm`` and ``matmul`` with a fixed second
operand (K, N), as some language models write their layers, are the same operation with a transposed weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional

from sparta.aten import arguments_of
from sparta.compiler.lower.base import Anchor, Lowering
from sparta.specialize.implement import Kernel
from sparta.specialize.kernel_spec import Epilogue, KernelSpec
from sparta.specialize.linear.spec import linear_spec
from sparta.tesa.attribute import TeSA

__all__ = ["LinearLowering"]

_aten = torch.ops.aten


class LinearLowering(Lowering):
    """The operation ``linear``."""

    op = "linear"

    def match(self, node: fx.Node) -> Anchor | None:
        """Take ``linear``, and ``addmm``, ``mm`` and ``matmul`` whose second matrix is a tensor of the model."""
        if node.target is _aten.linear.default:
            call = arguments_of(node)
            return _anchor(call["input"], call["weight"], call["bias"])
        if node.target is _aten.addmm.default and not node.kwargs:
            bias, x, weight = node.args
            return _anchor(x, weight, bias, transposed=True)
        if node.target in (_aten.mm.default, _aten.matmul.default):
            x, weight = node.args
            return _anchor(x, weight, None, transposed=True)
        return None

    def fits(self, weight: Tensor, x: Tensor) -> bool:
        """Take a matrix, and activations with rows."""
        return weight.dim() == 2 and x.dim() >= 2

    def spec(
        self, weight: TeSA, x: Tensor, attributes: Mapping[str, Any], epilogue: Epilogue, *, device: str
    ) -> KernelSpec:
        """Return the kernel spec for M rows."""
        del attributes
        return linear_spec(weight, self.size(x), x.dtype, epilogue=epilogue, device=device)

    def size(self, x: Tensor) -> int:
        """Return M."""
        return x.numel() // max(1, x.shape[-1])

    def dense(self, weight: Tensor, x: Tensor, bias: Tensor | None, attributes: Mapping[str, Any]) -> Tensor:
        """Return ``x W^T + bias``."""
        del attributes
        return functional.linear(x, weight, bias)

    def inputs(self, x: Tensor, bias: Tensor | None, residual: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return x (M, K), bias (N,), residual (M, N)."""
        return self.flat(x), bias, None if residual is None else self.flat(residual)

    def result(self, y: Tensor, x: Tensor) -> Tensor:
        """Return (M, N) as (..., N)."""
        return y if x.dim() == 2 else y.reshape(*x.shape[:-1], y.shape[-1])

    def flat(self, y: Tensor) -> Tensor:
        """Return (..., N) as (M, N)."""
        return y if y.dim() == 2 else y.reshape(-1, y.shape[-1])

    def fast_path(
        self, kernel: Kernel, packed: Sequence[Tensor], bias: Tensor | None
    ) -> Callable[..., Tensor | None] | None:
        """Return the kernel's own."""
        return kernel.fast_path(packed, bias)

    def flops(self, weight: TeSA, x: Tensor, attributes: Mapping[str, Any], *, live: bool) -> int:
        """Return 2 M N K, or 2 M times the live weights."""
        del attributes
        return 2 * self.size(x) * (weight.count("live") if live else weight.numel)

    def sample(self, spec: KernelSpec) -> Tensor:
        """Return a random (M, K)."""
        return torch.randn(spec["input"].shape, device=spec.device)


def _anchor(x: object, weight: object, bias: object, *, transposed: bool = False) -> Anchor | None:
    fixed = all(isinstance(n, fx.Node) and n.op == "get_attr" for n in (weight, bias) if n is not None)
    if not fixed or not isinstance(x, fx.Node) or not isinstance(weight, fx.Node):
        return None
    return Anchor(x, str(weight.target), str(bias.target) if isinstance(bias, fx.Node) else None, transposed=transposed)

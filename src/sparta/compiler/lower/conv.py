"""Convolutions: ``aten.conv2d`` and ``aten.conv1d`` become the operations ``conv2d`` and ``conv1d``.

Kernels take and return batches of images (B, C, ...), as the graph does. Geometry (stride, padding, dilation, groups)
travels as the sub-graph's attributes, in the JSON form that kernel specs use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from sparta.aten import arguments_of
from sparta.compiler.lower.base import Anchor, Lowering
from sparta.specialize.conv.spec import ConvGeometry, conv_spec, dense_conv
from sparta.specialize.implement import Kernel
from sparta.specialize.kernel_spec import Epilogue, KernelSpec
from sparta.tesa.attribute import TeSA

__all__ = ["ConvLowering"]

_aten = torch.ops.aten
_CALLS = {"conv2d": (_aten.conv2d.default, 2), "conv1d": (_aten.conv1d.default, 1)}


class ConvLowering(Lowering):
    """The operation ``conv2d`` or ``conv1d``.

    Parameters
    ----------
    op
        Which of them.
    """

    def __init__(self, op: str) -> None:
        self.op = op
        self._target, self._dims = _CALLS[op]

    def match(self, node: fx.Node) -> Anchor | None:
        """Take a convolution with fixed weights and padding in numbers."""
        if node.target is not self._target:
            return None
        call = arguments_of(node)
        tensors = [call[name] for name in ("weight", "bias") if call[name] is not None]
        if not all(isinstance(n, fx.Node) and n.op == "get_attr" for n in tensors):
            return None
        numbers = {name: _spread(call[name], self._dims) for name in ("stride", "padding", "dilation")}
        if any(value is None for value in numbers.values()) or not isinstance(call["groups"], int):
            return None  # sizes that are computed at run time
        geometry = ConvGeometry.make(self._dims, **numbers, groups=call["groups"])  # type: ignore[arg-type]
        bias = None if call["bias"] is None else str(call["bias"].target)
        return Anchor(call["input"], str(call["weight"].target), bias, attributes=geometry.to_dict())

    def fits(self, weight: Tensor, x: Tensor) -> bool:
        """Take batches of images."""
        return weight.dim() == x.dim() == self._dims + 2

    def spec(
        self, weight: TeSA, x: Tensor, attributes: Mapping[str, Any], epilogue: Epilogue, *, device: str
    ) -> KernelSpec:
        """Return the kernel spec for images of this size."""
        return conv_spec(weight, x.shape, x.dtype, ConvGeometry.from_dict(attributes), epilogue=epilogue, device=device)

    def size(self, x: Tensor) -> int:
        """Return the positions of all images together."""
        return x.numel() // max(1, x.shape[1])

    def dense(self, weight: Tensor, x: Tensor, bias: Tensor | None, attributes: Mapping[str, Any]) -> Tensor:
        """Return the convolution."""
        return dense_conv(x, weight, bias, ConvGeometry.from_dict(attributes))

    def inputs(self, x: Tensor, bias: Tensor | None, residual: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return x (B, C, ...), bias (N,) and the residual, as they are."""
        return x, bias, residual

    def result(self, y: Tensor, x: Tensor) -> Tensor:
        """Return the images as they are."""
        del x
        return y

    def flat(self, y: Tensor) -> Tensor:
        """Return the images as they are."""
        return y

    def fast_path(
        self, kernel: Kernel, packed: Sequence[Tensor], bias: Tensor | None
    ) -> Callable[..., Tensor | None] | None:
        """Return the kernel's own."""
        return kernel.fast_path(packed, bias)

    def flops(self, weight: TeSA, x: Tensor, attributes: Mapping[str, Any], *, live: bool) -> int:
        """Return two operations a weight and output position."""
        positions = ConvGeometry.from_dict(attributes).output_size(x.shape[2:], weight.shape[2:])
        count = weight.count("live") if live else weight.numel
        return 2 * count * x.shape[0] * torch.Size(positions).numel()

    def sample(self, spec: KernelSpec) -> Tensor:
        """Return random images."""
        return torch.randn(spec["input"].shape, device=spec.device)


def _spread(value: object, dims: int) -> list[int] | None:
    """Return a number for each spatial dim, or None for anything else."""
    numbers = [value] * dims if isinstance(value, int) else list(value) if isinstance(value, (list, tuple)) else []
    numbers = numbers * dims if len(numbers) == 1 else numbers
    return [int(n) for n in numbers] if len(numbers) == dims and all(isinstance(n, int) for n in numbers) else None

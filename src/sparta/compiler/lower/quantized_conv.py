"""Quantised convolutions: a ``conv2d`` or ``conv1d`` whose weight lies on an int8 grid, and whose input has a grid.

No call of a graph is matched here: a convolution is recognised first, and takes this lowering when the spec says that
its weight is int8. Kernels are checked on images that lie on the grid, where real numbers and integers agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, fx

from sparta.compiler.lower.base import Anchor
from sparta.compiler.lower.conv import ConvLowering
from sparta.specialize.conv.int8 import CONV_OPS, residual_grid
from sparta.specialize.conv.spec import ConvGeometry, conv_spec
from sparta.specialize.int8_linear.quantization import Quantization
from sparta.specialize.kernel_spec import Epilogue, KernelSpec
from sparta.tesa.attribute import TeSA

__all__ = ["QuantizedConvLowering"]


class QuantizedConvLowering(ConvLowering):
    """The operation ``int8_conv2d`` or ``int8_conv1d``.

    Parameters
    ----------
    op
        The convolution in real numbers.
    """

    def __init__(self, op: str) -> None:
        super().__init__(op)
        self.op = CONV_OPS[op]

    def match(self, node: fx.Node) -> Anchor | None:
        """Match nothing: what is int8 is known from the spec, not from a call."""
        del node
        return None

    def spec(
        self, weight: TeSA, x: Tensor, attributes: Mapping[str, Any], epilogue: Epilogue, *, device: str
    ) -> KernelSpec:
        """Return the kernel spec for images of this size in real numbers and a weight in integers."""
        geometry, adding = ConvGeometry.from_dict(attributes), residual_grid(attributes)
        plain = conv_spec(weight, x.shape, x.dtype, geometry, epilogue=epilogue, device=device)
        return replace(
            plain,
            op=self.op,
            operands={"input": plain["input"], "weight": weight},
            attributes={
                **plain.attributes,
                **Quantization.from_dict(attributes).to_dict(),
                **({} if adding is None else adding.to_dict("residual")),
            },
        )

    def on_grid(self, x: Tensor, attributes: Mapping[str, Any]) -> Tensor:
        """Return images rounded to the grid of the input."""
        return Quantization.from_dict(attributes).rounded(x)

    def residual_on_grid(self, residual: Tensor | None, attributes: Mapping[str, Any]) -> Tensor | None:
        """Return a residual rounded to its grid, where it has one."""
        adding = residual_grid(attributes)
        return residual if adding is None or residual is None else adding.rounded(residual)

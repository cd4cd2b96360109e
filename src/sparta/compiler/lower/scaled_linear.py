"""Scaled linear layers: a ``linear`` whose weight is stored in fp8 with scales, on the GPU.

No call of a graph is matched here: a linear layer takes this lowering when the spec says that its weight is fp8.
Kernels that round their inputs to fp8 as well are compared on inputs that lie on that grid.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx

from sparta.compiler.lower.base import Anchor
from sparta.compiler.lower.linear import LinearLowering
from sparta.specialize.kernel_spec import Epilogue, KernelSpec
from sparta.specialize.scaled_linear.spec import OP, rounded_rows, scaled_linear_spec
from sparta.tesa.attribute import TeSA

__all__ = ["ScaledLinearLowering"]


class ScaledLinearLowering(LinearLowering):
    """The operation ``scaled_linear``; attributes are ``activations`` and ``input_scale``, as in its kernel spec."""

    op = OP

    def match(self, node: fx.Node) -> Anchor | None:
        """Match nothing: what is fp8 is known from the spec, not from a call."""
        del node
        return None

    def spec(
        self, weight: TeSA, x: Tensor, attributes: Mapping[str, Any], epilogue: Epilogue, *, device: str
    ) -> KernelSpec:
        """Return the kernel spec for M rows."""
        return scaled_linear_spec(
            weight,
            self.size(x),
            x.dtype,
            activations=attributes["activations"],
            input_scale=attributes["input_scale"],
            epilogue=epilogue,
            device=device,
        )

    def on_grid(self, x: Tensor, attributes: Mapping[str, Any]) -> Tensor:
        """Return x rounded to fp8, where kernels may round it."""
        return x if attributes["activations"] is None else rounded_rows(x, attributes["input_scale"])

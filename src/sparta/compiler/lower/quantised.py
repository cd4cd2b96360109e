"""Quantised linear layers: a ``linear`` whose weight lies on an int8 grid becomes the operation ``quantised_linear``.

No call of a graph is matched here: a linear layer is recognised first, and takes this lowering when the spec says that
its weight is int8 and the grid of its input is known. The one idea to know: kernels are checked on inputs that lie on
that grid, where real numbers and integers agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx

from sparta.compiler.int8 import OP, InputGrid
from sparta.compiler.lower.base import Anchor
from sparta.compiler.lower.linear import LinearLowering
from sparta.specialize.kernel_spec import Epilogue, KernelSpec
from sparta.tesa.attribute import TeSA

__all__ = ["QuantisedLinearLowering"]


class QuantisedLinearLowering(LinearLowering):
    """The operation ``quantised_linear``."""

    op = OP

    def match(self, node: fx.Node) -> Anchor | None:
        """Match nothing: what is int8 is known from the spec, not from a call."""
        del node
        return None

    def spec(
        self, weight: TeSA, x: Tensor, attributes: Mapping[str, Any], epilogue: Epilogue, *, device: str
    ) -> KernelSpec:
        """Return the kernel spec for M rows in real numbers and a weight in integers."""
        rows = TeSA.dense((self.size(x), weight.shape[1]), format=x.dtype, dynamic=[0])
        return KernelSpec(OP, {"input": rows, "weight": weight}, epilogue, attributes, device)

    def on_grid(self, x: Tensor, attributes: Mapping[str, Any]) -> Tensor:
        """Return x rounded to the grid of the input."""
        return InputGrid.from_dict(attributes).rounded(x)

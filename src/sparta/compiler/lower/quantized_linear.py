"""Quantised linear layers: a ``linear`` whose weight lies on an int8 grid becomes the operation ``int8_linear``.

No call of a graph is matched here: a linear layer is recognised first, and takes this lowering when the spec says that
its weight is int8 and the grid of its input is known. Kernels are checked on inputs that lie on that grid, where real
numbers and integers agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from sparta.compiler.lower.base import Anchor
from sparta.compiler.lower.linear import LinearLowering
from sparta.specialize.int8_linear.quantization import Quantization
from sparta.specialize.int8_linear.spec import OP
from sparta.specialize.kernel_spec import Epilogue, KernelSpec
from sparta.specialize.tuning.select import Problem
from sparta.tesa.attribute import TeSA

__all__ = ["QuantizedLinearLowering"]


class QuantizedLinearLowering(LinearLowering):
    """The operation ``int8_linear``."""

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

    def result_dtype(self, dtype: torch.dtype, attributes: Mapping[str, Any]) -> torch.dtype:
        """Return the dtype of the output's grid, where it has one."""
        output = Quantization.of_output(attributes)
        return dtype if output is None else output.dtype

    def problem(
        self, spec: KernelSpec, weight: Tensor, x: Tensor, bias: Tensor | None, residual: Tensor | None
    ) -> Problem:
        """Return what the tuner measures: the layer on its own, in real numbers, whatever it hands on."""
        alone = {name: value for name, value in spec.attributes.items() if not name.startswith("output_")}
        return super().problem(replace(spec, attributes=alone), weight, x, bias, residual)

    def on_grid(self, x: Tensor, attributes: Mapping[str, Any]) -> Tensor:
        """Return x rounded to the grid of the input."""
        return Quantization.from_dict(attributes).rounded(x)

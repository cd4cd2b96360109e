"""PackedLinear: a linear layer over a packed matrix, for the calls that a decode program leaves to the model's code.

It shares the matrix with the program, so both compute with one copy of the weights. Its state is that of the dense
layer, made when it is asked for, so that ``save_pretrained`` writes a model like any other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparta.generation.matrices import PackedMatrix

__all__ = ["PackedLinear", "dense_products"]

_UNPACKED = 2 << 30  # bytes of a model whose weights may all be unpacked at a time


class PackedLinear(nn.Module):
    """A linear layer without parameters of its own.

    >>> from sparta.generation.matrices import packed
    >>> PackedLinear(packed(torch.eye(2)))(torch.tensor([[1.0, 2.0]]))
    tensor([[1., 2.]])
    """

    def __init__(self, matrix: PackedMatrix) -> None:
        super().__init__()
        self.matrix = matrix
        self.out_features, self.in_features = matrix.shape
        self._dense: Tensor | bool = False

    @property
    def weight(self) -> PackedMatrix:
        """The packed weight, with the shape, dtype and device that code asks a weight for."""
        return self.matrix

    @property
    def bias(self) -> Tensor | None:
        """The bias, or None."""
        return self.matrix.bias

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., N) for x (..., K), in the dtype of x."""
        plain = self.matrix.plain()
        if plain is not None and x.dtype == torch.float32 and x.numel() > self.in_features:
            return functional.linear(x, plain, self.bias)
        if self._dense is not False:
            weight = self._dense if isinstance(self._dense, Tensor) else self.matrix.weight()
            return functional.linear(x, weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))
        return self.matrix.multiply(x).to(x.dtype)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:  # noqa: FBT001
        del keep_vars
        destination[f"{prefix}weight"] = self.matrix.weight()
        if self.bias is not None:
            destination[f"{prefix}bias"] = self.bias

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedLinear:
        return PackedLinear(self.matrix)

    def extra_repr(self) -> str:
        """Say the sizes and the form."""
        kind = "int8" if self.matrix.scales is not None else "fp32"
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.matrix.form} in {kind}"


@contextmanager
def dense_products(model: nn.Module) -> Iterator[None]:
    """Let the packed layers of a model multiply by PyTorch's own kernels, with what they stand for unpacked.

    Weights are unpacked once where there is memory to hold all of them, else for each call.
    """
    layers = [module for module in model.modules() if isinstance(module, PackedLinear)]
    small = sum(4 * layer.in_features * layer.out_features for layer in layers) < _UNPACKED
    for layer in layers:
        layer._dense = layer.matrix.weight() if small else True
    try:
        yield
    finally:
        for layer in layers:
            layer._dense = False

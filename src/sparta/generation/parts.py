"""A layer of a language model that is part of a product: the first of several layers computes it for all of them.

The layers stay where the model's own code calls them, one after the other with one tensor. What the first of them
computes is kept for the present call of the model, and each takes its outputs as a view.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

from sparta.compiler.run.kernel_module import Fused, KernelModule
from sparta.specialize.kernel_spec import KernelSpec
from sparta.specialize.scaled_linear.inputs import computed_once
from sparta.specialize.tuning.select import Choice

__all__ = ["PartOfProduct"]


class PartOfProduct:
    """What a layer runs that is part of a product: to the layer, kernels of its own.

    Parameters
    ----------
    product
        The kernels of all layers together.
    names
        Of these layers, in the order of the outputs.
    fused
        What the layer computes.
    outputs
        The first and the end of its outputs in the product.
    choices
        As :attr:`KernelModule.choices`, with the layer's share of the time.
    """

    def __init__(
        self,
        product: KernelModule,
        names: tuple[str, ...],
        fused: Fused,
        outputs: tuple[int, int],
        choices: Mapping[int, tuple[KernelSpec, Choice]],
    ) -> None:
        self.product, self.names, self.fused, self.choices = product, names, fused, dict(choices)
        self._first, self._end = outputs

    @property
    def live(self) -> Tensor:
        """The live weights of all layers."""
        return self.product.live

    @property
    def nbytes(self) -> int:
        """The layer's share of what the product holds."""
        return self.product.nbytes * (self._end - self._first) // self.product.fused.weight.shape[0]

    def __call__(self, x: Tensor) -> Tensor:
        """Return (..., N) for x (..., K): a view of the product."""
        if torch.compiler.is_compiling():
            y = self.product(x)
        else:
            y = computed_once(x, ("product", self.product.handle), self.product)
        return cast("Tensor", y[..., self._first : self._end])

    def choice_for(self, x: Tensor) -> Choice:
        """Return what was chosen for an activation of this size."""
        return self.product.choice_for(x)

    def extra_repr(self) -> str:
        """Say what runs."""
        return f"one product of {', '.join(self.names)}: {self.product.extra_repr()}"

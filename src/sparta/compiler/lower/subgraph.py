"""The sub-graph: the calls of a program that one fused kernel stands for, with their tensors.

Partition makes them, choosing measures them, and kernel modules run them; so what they are stands apart from
how they are found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor, fx

from sparta.compiler.lower.base import Anchor, Lowering
from sparta.specialize.kernel_spec import Epilogue, KernelSpec
from sparta.tesa.attribute import TeSA

__all__ = ["SubGraph", "is_joined", "joined_name"]

_AND = " + "


def joined_name(names: Sequence[str]) -> str:
    """Return the name of the product of several layers.

    >>> joined_name(["query", "key"])
    'query + key'
    """
    return _AND.join(names)


def is_joined(name: str) -> bool:
    """Whether a name is that of the product of several layers."""
    return _AND in name


@dataclass(frozen=True, eq=False)
class SubGraph:
    """One fused sub-graph: ``activation(layer(x) + bias) + residual``, or ``relu(layer(x) + bias + residual)``.

    Parameters
    ----------
    name
        The layer's name in the model.
    lowering
        The operation.
    anchor
        The layer's call, as the lowering read it.
    nodes
        The calls that the kernel stands for, in order; the last one's value is the result.
    residual
        The node that is added, or None.
    epilogue
        Bias, activation and residual.
    weight, bias
        The tensors, the weight as the operation takes it.
    scales, format
        (N,), of the output channels of a weight that lies on a grid of 8 bits, and its bits; None for one that does
        not.
    live
        Which weights are live, where the spec says so; None reads it from the weight. A live weight may be zero: then
        it keeps its place in its block.
    """

    name: str
    lowering: Lowering
    anchor: Anchor
    nodes: tuple[fx.Node, ...]
    residual: fx.Node | None
    epilogue: Epilogue
    weight: Tensor
    bias: Tensor | None
    scales: Tensor | None = None
    format: str = "int8"
    live: Tensor | None = None

    @cached_property
    def tesa(self) -> TeSA:
        """What is known of the weight: what is pruned, and its grid if it has one."""
        known = TeSA.from_zeros(self.weight) if self.live is None else TeSA.from_mask(self.live)
        return known if self.scales is None else known.with_format(self.format, scale=self.scales)

    def spec(self, x: Tensor) -> KernelSpec:
        """Return the kernel spec for an activation of this shape and dtype."""
        return self.lowering.spec(self.tesa, x, self.anchor.attributes, self.epilogue, device=self.weight.device.type)

    def to_dict(self) -> dict[str, Any]:
        """Return what the sub-graph is, as JSON values, without its tensors."""
        return {
            "name": self.name,
            "op": self.lowering.op,
            "calls": [str(node.target) for node in self.nodes],
            "epilogue": vars(self.epilogue).copy(),
            "attributes": dict(self.anchor.attributes),
            "weight": self.anchor.weight,
            "bias": self.anchor.bias,
            "transposed": self.anchor.transposed,
        }

"""Joined layers: linear layers that read one tensor, such as queries, keys and values, as one product.

Their weights are stacked along the outputs, so one kernel starts instead of several, x is read once, and a layer of few
outputs shares the device with its siblings. What followed the layers (an activation, a sum) stays outside: each layer's
outputs are a view of the result. Joining changes no number that is multiplied, and whether it pays is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, fx

from sparta.compiler.lower.base import Anchor
from sparta.compiler.lower.subgraph import SubGraph, joined_name
from sparta.specialize.kernel_spec import Epilogue
from sparta.tesa.attribute import TeSA
from sparta.tesa.grid import Grid

__all__ = ["JoinedSubGraph", "join", "siblings", "stacked"]

_OPS = ("linear", "scaled_linear")


@dataclass(frozen=True, eq=False)
class JoinedSubGraph(SubGraph):
    """The product of several layers that read one tensor; its nodes are their calls, without what follows these.

    Parameters
    ----------
    parts
        The layers, in the order of the graph and of the outputs.
    """

    parts: tuple[SubGraph, ...] = ()

    @cached_property
    def tesa(self) -> TeSA:
        """What is known of the weight, by what is known of the parts."""
        return stacked([part.tesa for part in self.parts])

    @property
    def outputs(self) -> list[tuple[fx.Node, int, int]]:
        """The calls of the layers, each with the first and the end of its outputs in the product."""
        found, first = [], 0
        for part in self.parts:
            end = first + part.weight.shape[0]
            found.append((part.nodes[0], first, end))
            first = end
        return found

    def with_parts(self, parts: Sequence[SubGraph]) -> JoinedSubGraph:
        """Return the same product where its parts stand elsewhere."""
        anchor = replace(self.anchor, x=parts[0].anchor.x)
        return replace(self, anchor=anchor, nodes=tuple(part.nodes[0] for part in parts), parts=tuple(parts))


def stacked(tesas: Sequence[TeSA]) -> TeSA:
    """Return what is known of weights (N, K) that are one after the other along their outputs.

    >>> print(stacked([TeSA.dense((2, 8)), TeSA.from_mask(torch.zeros(2, 8))]))
    TeSA 4×8, channel axis 0, density 0.5, any
    """
    return TeSA(
        state=Grid.cat([tesa.state for tesa in tesas], 0),
        value=Grid.cat([tesa.value for tesa in tesas], 0),
        code=Grid.cat([tesa.code for tesa in tesas], 0),
        scale=Grid.cat([tesa.scale for tesa in tesas], 0),
        zero_point=Grid.cat([tesa.zero_point for tesa in tesas], 0),
        dynamic=frozenset(),
    )


def siblings(subgraphs: Sequence[SubGraph]) -> list[tuple[SubGraph, ...]]:
    """Return the groups of linear layers that could be one product: of one tensor, operation, grid and dtype.

    A layer whose kernel adds a residual keeps to itself: as a part of a product it would leave that to another pass.
    """
    groups: dict[tuple[object, ...], list[SubGraph]] = {}
    for each in subgraphs:
        if each.lowering.op in _OPS and not each.epilogue.residual and len(each.nodes) <= 2:
            grid = None if each.scales is None else each.format
            attributes = tuple(sorted((name, repr(value)) for name, value in each.anchor.attributes.items()))
            kind = (each.anchor.x, each.lowering.op, attributes, grid, each.weight.dtype, each.weight.device)
            groups.setdefault(kind, []).append(each)
    return [tuple(group) for group in groups.values() if len(group) > 1]


def join(parts: Sequence[SubGraph]) -> JoinedSubGraph:
    """Return one product of the layers of a group of :func:`siblings`; those without a bias get one of zeros."""
    first = parts[0]
    biased = any(part.bias is not None for part in parts)
    known = [part.scales for part in parts if part.scales is not None]
    live = None if all(part.live is None for part in parts) else torch.cat([_live(part) for part in parts])
    return JoinedSubGraph(
        name=joined_name([part.name for part in parts]),
        lowering=first.lowering,
        anchor=Anchor(first.anchor.x, first.anchor.weight, None, attributes=first.anchor.attributes),
        nodes=tuple(part.nodes[0] for part in parts),
        residual=None,
        epilogue=Epilogue(bias=biased),
        weight=torch.cat([part.weight for part in parts]),
        bias=torch.cat([_bias(part) for part in parts]) if biased else None,
        scales=torch.cat(known) if known else None,
        format=first.format,
        live=live,
        parts=tuple(parts),
    )


def _live(part: SubGraph) -> Tensor:
    return part.weight != 0 if part.live is None else part.live


def _bias(part: SubGraph) -> Tensor:
    return part.weight.new_zeros(part.weight.shape[0]) if part.bias is None else part.bias

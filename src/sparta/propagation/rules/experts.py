"""Products of groups of rows with a matrix each, as mixtures of experts compute them.

Which rows meet which expert is decided at run time, so a zero counts where all experts have it, and a neuron can be cut
where it can be cut in every expert.
"""

from __future__ import annotations

import torch
from torch import fx

from sparta.propagation.axes import Axes
from sparta.propagation.constants import Known
from sparta.propagation.op import Op, shape_of
from sparta.propagation.registry import rule
from sparta.propagation.rules.linear import Letters, contraction, contraction_observed
from sparta.tesa.grid import Grid

__all__: list[str] = []

_GROUPED = (torch.ops.aten._grouped_mm.default, "transformers.grouped_mm_fallback.default")
_LETTERS = Letters("mk", "kn", "mn")


def _operands(op: Op) -> tuple[fx.Node, fx.Node] | None:
    """Return rows (M, K) and experts (E, K, N); None for another kind of grouping or with a bias."""
    rows, experts = op.inputs[:2]
    plain = op.arguments.get("bias") is None and len(shape_of(rows)) == 2 and len(shape_of(experts)) == 3
    return (rows, experts) if plain else None


def _common(op: Op, experts: fx.Node) -> Known:
    """Return what is known of all experts alike, (K, N)."""
    return op.known(experts).uniform_over([0]).map(lambda g: g.reshape(shape_of(experts)[1:]))


@rule("constants", *_GROUPED)
def grouped(op: Op) -> Known | None:
    """Know an output that meets only zeros in every expert."""
    found = _operands(op)
    if found is None:
        return None
    return contraction(op, op.known(found[0]), _common(op, found[1]), _LETTERS)


@rule("observed", *_GROUPED)
def grouped_observed(op: Op, seen: Grid) -> list[tuple[fx.Node, Grid]]:
    """Observe each side where the other is not 0 in every expert."""
    found = _operands(op)
    if found is None:
        return []
    rows, experts = found
    of_rows, of_common = contraction_observed(op, op.known(rows), _common(op, experts), _LETTERS, seen)
    return [(rows, of_rows), (experts, of_common.broadcast_to(shape_of(experts)))]


@rule("axes", *_GROUPED)
def grouped_axes(op: Op, axes: Axes) -> None:
    """Cut inputs and outputs in all experts together, never experts."""
    found = _operands(op)
    for node in op.inputs[2:]:
        axes.keep_all(node, "ends of groups")
    if found is None:
        for node in (op.node, *op.inputs):
            axes.keep_all(node, "grouped in another way")
        return
    rows, experts = found
    axes.keep(axes.of(experts, 0), "chosen at run time")
    axes.equal(axes.of(rows, 0), axes.of(op.node, 0))
    axes.equal(axes.of(rows, 1), axes.of(experts, 1))
    axes.equal(axes.of(experts, 2), axes.of(op.node, 1))
    axes.absorb_pair((rows, 1), (experts, 1), op.node)

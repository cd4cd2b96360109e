"""Light: a layer whose call takes long is measured on a part of its input, a few rows or images of many.

Which kernel is fastest hardly depends on how many rows there are once there are enough of them, and a search that sees
many candidates on a part chooses better than one that sees three on the whole. Times are scaled to the whole input.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torch import Tensor

from sparta.compiler.lower.subgraph import SubGraph
from sparta.specialize.tuning.select import DENSE, Choice

__all__ = ["Light", "lighter"]

_HEAVY = 2e9  # floating-point operations of a dense call: tens of milliseconds on a core or two
_LIGHT = 5e8


@dataclass(frozen=True)
class Light:
    """A part of what a layer gets.

    Parameters
    ----------
    x, residual
        As kernels take them.
    kept, all
        Rows or images, of how many.
    """

    x: Tensor
    residual: Tensor | None
    kept: int
    all: int

    def scaled(self, choice: Choice) -> Choice:
        """Return a choice that was measured on the part as one for the whole."""
        if choice.entry is None:
            return choice
        factor, entry = self.all / self.kept, choice.entry
        times = entry.milliseconds * factor, entry.dense_milliseconds * factor
        whole = replace(entry, milliseconds=times[0], dense_milliseconds=times[1], size=round(entry.size * factor))
        part = f"{self.kept} of {self.all} {'rows' if self.x.dim() == 2 else 'images'}"
        why = choice.reason if choice.implement == DENSE else f"{choice.reason}, on {part}"
        return replace(choice, entry=whole, reason=why)


def lighter(subgraph: SubGraph, x: Tensor, residual: Tensor | None) -> Light | None:
    """Return the part of a layer's input that it is measured on; None where that is all of it."""
    lowering = subgraph.lowering
    flops = lowering.flops(subgraph.tesa, x, subgraph.anchor.attributes, live=False)
    if flops <= _HEAVY or x.device.type != "cpu":
        return None
    flat, _, added = lowering.inputs(x, None, residual)
    if flat is None:
        return None
    rows = flat.shape[0]
    kept = 1 << math.ceil(math.log2(max(1.0, rows * _LIGHT / flops)))
    if 2 * kept > rows:
        return None
    return Light(flat[:kept], None if added is None else added[:kept], kept, rows)

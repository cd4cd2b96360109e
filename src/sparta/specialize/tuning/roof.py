"""Roof: how many times faster than dense a kernel can be at most, by the work that zeros and narrow formats save.

A kernel that skips zeros does the live share of the multiplications and reads the live share of the operand, as wide as
its format. So the gain is bounded, up to a generous factor for how well either kernel is written. A measured gain above
the roof is more likely to be noise than truth and is measured again.
"""

from __future__ import annotations

import math

from sparta.specialize.kernel_spec import KernelSpec

__all__ = ["roof"]

_GENEROUS = 4.0


def roof(spec: KernelSpec) -> float:
    """Return the largest gain over dense that is believed at once; infinite where densities do not bound it.

    That is so where no operand has zeros (what is skipped then shows in the inputs only), and where nothing is live.

    >>> from sparta.tesa.attribute import TeSA
    >>> import torch
    >>> tenth = TeSA.from_mask(torch.arange(100).reshape(10, 10) < 10).with_format("fp32")
    >>> roof(KernelSpec("linear", {"input": TeSA.dense((4, 10), format="fp32"), "weight": tenth}))
    40.0
    """
    live = math.prod(tesa.density for tesa in spec.operands.values())
    if live in (0.0, 1.0):
        return math.inf
    bits = [tesa.format.bits for tesa in spec.operands.values() if tesa.format is not None and tesa.format.bits]
    narrower = max(bits) / min(bits) if bits else 1.0
    return round(_GENEROUS * narrower / live, 6)

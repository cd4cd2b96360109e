"""Integers: int8 convolutions of a chain hand each other bytes, which no measurement of a layer alone can see.

Alone, a kernel of integers rounds its whole input first, and one of real numbers may win by that. In a chain the layer
before has rounded it. So the plan in which all such layers compute in integers is proposed as well; whether it pays is
measured end to end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from sparta.compiler.plan import LayerPlan
from sparta.specialize.conv.int8 import CONV_OPS, CpuInt8Conv2d
from sparta.specialize.implement import implement_named
from sparta.specialize.kernel_spec import KernelSpec
from sparta.specialize.tuning.select import Choice

__all__ = ["in_integers"]

_NAME = CpuInt8Conv2d.name
_REASON = "in integers, as its neighbours: they hand over bytes"


def in_integers(plans: Sequence[LayerPlan], specs: Mapping[str, Mapping[int, KernelSpec]]) -> tuple[LayerPlan, ...]:
    """Return the plans with kernels of integers for all quantised convolutions that have one.

    Parameters
    ----------
    specs
        The kernel specs of each layer by its name and size.
    """
    return tuple(
        replace(plan, choices={size: _whole(choice, specs[plan.name][size]) for size, choice in plan.choices.items()})
        if plan.op in CONV_OPS.values()
        else plan
        for plan in plans
    )


def _whole(choice: Choice, spec: KernelSpec) -> Choice:
    implement = implement_named(_NAME, spec.op)
    if choice.implement == _NAME or not implement.answer(spec):
        return choice
    return Choice(_NAME, implement.default(spec), _REASON, None, choice.refused)

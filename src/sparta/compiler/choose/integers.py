"""Short numbers: convolutions of a chain hand each other int8 or bf16, which no measurement of a layer alone can see.

Alone, a kernel of short numbers rounds its whole input first, and one of real numbers may win by that. In a chain the
layer before has rounded it. So the plan in which all such layers compute in short numbers is proposed as well; whether
it pays is measured end to end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sparta.compiler.plan import LayerPlan
from sparta.specialize.conv.cpu_bf16 import CpuBf16Conv2d
from sparta.specialize.conv.int8 import CONV_OPS, CpuInt8Conv2d
from sparta.specialize.implement import implement_named
from sparta.specialize.kernel_spec import KernelSpec
from sparta.specialize.tuning.select import Choice

__all__ = ["in_integers"]

# By the operation: the implement, and why it runs.
_SHORT = {
    **dict.fromkeys(CONV_OPS.values(), (CpuInt8Conv2d.name, "in integers, as its neighbours: they hand over bytes")),
    **dict.fromkeys(CONV_OPS, (CpuBf16Conv2d.name, "in bf16, as its neighbours: they hand over bf16")),
}


def in_integers(plans: Sequence[LayerPlan], specs: Mapping[str, Mapping[int, KernelSpec]]) -> tuple[LayerPlan, ...]:
    """Return the plans with kernels of integers for all quantised convolutions that have one, and of bf16 for others.

    Parameters
    ----------
    specs
        The kernel specs of each layer by its name and size.
    """
    return tuple(
        replace(plan, choices={size: _whole(choice, specs[plan.name][size]) for size, choice in plan.choices.items()})
        if plan.op in _SHORT
        else plan
        for plan in plans
    )


def _whole(choice: Choice, spec: KernelSpec) -> Choice:
    name, reason = _SHORT[spec.op]
    implement = implement_named(name, spec.op)
    if choice.implement == name or not implement.answer(spec):
        return choice
    params = _best_of(choice, name) or implement.default(spec)
    return Choice(name, params, reason, None, choice.refused)


def _best_of(choice: Choice, name: str) -> dict[str, Any]:
    """Return the parameters with which an implement was fastest where it lost to another; none if it was not timed."""
    trials = () if choice.result is None else choice.result.trials
    timed = [each for each in trials if each.value is not None and each.params.get("_name") == name]
    best = min(timed, key=lambda each: each.value or 0.0, default=None)
    return {} if best is None else {key: value for key, value in best.params.items() if key != "_name"}

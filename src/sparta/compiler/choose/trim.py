"""Trim: layers whose kernels win alone but not in the whole model run dense.

Groups of layers are taken out, large ones first, and the whole is timed with and without them, interleaved. Where the
whole gains about what its layers do, only the weakest are questioned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sparta.compiler.choose.timer import Timer
from sparta.compiler.choose.workshop import Plans, sparse_names
from sparta.compiler.clock import Call
from sparta.compiler.plan import LayerPlan
from sparta.compiler.run.host import Host
from sparta.compiler.variant import Base, Variant

__all__ = ["Trim", "made_dense"]

_GAIN = 1.01  # what leaving layers out must bring, so that noise does not choose
_AS_HOPED = 0.6  # the share of the layers' own gains that the whole should show
_VARIANTS = 5  # those of the contest that follows must still be possible


def made_dense(plans: Plans, names: frozenset[str], note: str) -> tuple[LayerPlan, ...]:
    """Return plans in which these layers run dense."""
    wanted = names & sparse_names(plans)
    return tuple(plan.made_dense(note) if plan.name in wanted else plan for plan in plans)


@dataclass(frozen=True)
class Trim:
    """What is needed to take layers out.

    Parameters
    ----------
    host
        The one that is quickest to prepare.
    call
        Returns a call of a variant.
    forget
        Told the variants that will not run.
    """

    timer: Timer
    host: Host
    call: Callable[[Variant, Plans], Call]
    forget: Callable[[Variant, Plans], None]

    def trimmed(self, plans: Plans) -> tuple[LayerPlan, ...]:
        """Return the plans, with layers dense where that makes the whole faster."""
        plans = tuple(plans)
        names = _weakest_first(plans)
        if not names or not self.timer.affords(_VARIANTS):
            return plans
        as_hoped = self._as_hoped(plans)
        tests = 2 if as_hoped else 12
        size = max(1, len(names) // (4 if as_hoped else 2))
        while True:
            for start in range(0, len(names), size):
                tests -= 1
                if tests < 0 or not self.timer.affords(_VARIANTS):
                    return plans
                plans = self._without(plans, frozenset(names[start : start + size]))
            names = _weakest_first(plans)
            if size == 1 or not names:
                return plans
            size //= 2

    def _as_hoped(self, plans: Plans) -> bool:
        """Whether the whole gains about what its layers gain one by one."""
        dense, sparse = self._with(frozenset()), self._with(sparse_names(plans))
        times = self.timer.rounds({each: self.call(each, plans) for each in (dense, sparse)})
        predicted = sum(_saved(plan) for plan in plans if plan.sparse)
        return times.median(dense) * (1 - 1 / times.ratio(dense, sparse).value) >= _AS_HOPED * predicted

    def _without(self, plans: tuple[LayerPlan, ...], names: frozenset[str]) -> tuple[LayerPlan, ...]:
        """Return plans with these layers dense if the whole is faster without their kernels."""
        now = sparse_names(plans)
        self.timer.session.show(f"end to end without {len(names)} of {len(now)} sparse layers")
        whole, rest = self._with(now), self._with(now - names)
        gain = self.timer.rounds({each: self.call(each, plans) for each in (whole, rest)}).ratio(whole, rest)
        lost = gain.value > _GAIN and gain.low > 1.0
        self.forget(whole if lost else rest, plans)
        return made_dense(plans, names, "dense: faster alone, but not in the whole model") if lost else plans

    def _with(self, names: frozenset[str]) -> Variant:
        return Variant(Base.REDUCED, names, self.host)


def _weakest_first(plans: Plans) -> list[str]:
    return [plan.name for plan in sorted(plans, key=_saved) if plan.sparse]


def _saved(plan: LayerPlan) -> float:
    """Return the milliseconds that a layer's kernel saves by its own measurement."""
    entry = plan.first.entry
    return 0.0 if entry is None else entry.dense_milliseconds - entry.milliseconds

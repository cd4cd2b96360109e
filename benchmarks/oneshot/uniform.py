"""Uniform models: one pattern, sparsity and precision for all layers, as fast as a plan that they are compared with.

For each family, a pattern with a precision, the sparsity is looked for at which the compiled model takes as long as the
planned one, within 3 %. Both are measured in the same way, beside the model as given. A family that is faster than the
plan before anything is pruned stands as it is: it is as fast as asked, and loses the least that it can.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from made import Made

from sparta.compiler.session import Session
from sparta.oneshot.calibrate import moved, quiet
from sparta.oneshot.targets import find_targets
from sparta.planning import Option, SparsityPlan
from sparta.planning.bench import CompilerBench
from sparta.planning.notebook import Notebook, Remembering
from sparta.planning.options import CHANNELS
from sparta.planning.table import Assignment

CLOSE = 0.03
TRIALS = 6  # for each family
ENDS = {True: (0.0, 0.75), False: (0.0, 0.95)}  # of sparsity, by whether channels go

Family = tuple[str, str | None]


@dataclass
class Uniform:
    """Uniform models beside plans; what was measured is kept in a folder.

    Parameters
    ----------
    families
        Patterns with their precisions; those that a plan uses are looked at in any case.
    seconds
        For compiling each model.
    """

    made: Made
    device: str
    families: list[Family]
    seconds: float
    folder: Path
    metrics: dict[Option, float] = field(default_factory=dict)
    ratios: dict[Family, dict[Option, float]] = field(default_factory=dict)  # of all plans so far

    def beside(self, plan: SparsityPlan) -> dict[Option, float]:
        """Return the option of each family that is as fast as the plan, or faster where it cannot be slower."""
        used = {(option.pattern, option.precision) for option in plan.assignment.values() if option.prunes}
        found: dict[Option, float] = {}
        with self._bench() as bench:
            for family in sorted({*self.families, *used}, key=str):
                known = self.ratios.setdefault(family, {})
                for option in _trials(family, plan.speedup, known):
                    known[option] = bench.whole(_masks(option, plan)).ratio
                    print(f"uniform {option}: {known[option]:.2f}x", flush=True)
                fast = [option for option in known if known[option] >= (1 - CLOSE) * plan.speedup]
                if fast:
                    best = min(fast, key=lambda option: option.sparsity or 0.0)
                    found[best] = known[best]
        return found

    def judged(self, plan: SparsityPlan) -> dict[str, Any] | None:
        """Return the best by the metric; None where nothing is as fast as the plan."""
        rows = [
            {"option": str(option), "speedup": ratio, "metric": self.made.sign * self._metric(option, plan)}
            for option, ratio in self.beside(plan).items()
        ]
        print(rows, flush=True)
        return max(rows, key=lambda row: self.made.sign * row["metric"], default=None)

    @contextmanager
    def _bench(self) -> Iterator[Remembering]:
        model = copy.deepcopy(self.made.model).eval().to(self.device)
        targets = {target.name: target for target in find_targets(model)}
        session = _Each(budget_s=self.seconds)
        bench = CompilerBench(model, moved(self.made.example, self.device), targets, session)
        with quiet(model):
            yield Remembering(bench, Notebook.opened(self.folder, ""))

    def _metric(self, option: Option, plan: SparsityPlan) -> float:
        if option not in self.metrics and self.made.metric is not None:
            same = replace(plan, assignment=_assigned(option, plan), whole=None, met=True, _spec=None, _pruned=None)
            model = copy.deepcopy(self.made.model)
            same.apply(model)
            self.metrics[option] = same.judged(model, self.made.metric)
            print(f"uniform {option}: {self.made.sign * self.metrics[option]:.4f}", flush=True)
        return self.metrics[option]


class _Each(Session):
    """A session in which every model that is compiled has a third of the whole budget."""

    @property
    def left(self) -> float:
        """Seconds that measuring may still take."""
        return 3 * (self.budget_s or 0.0)


def _trials(family: Family, speedup: float, known: dict[Option, float]) -> Iterator[Option]:
    """Give the options to measure; `known` is filled in by the caller after each."""
    pattern, precision = family
    low, high = ENDS[pattern == CHANNELS]
    for _ in range(TRIALS):
        times, aim = {option.sparsity or low: 1 / ratio for option, ratio in known.items()}, 1 / speedup
        if any(abs(aim / each - 1) <= CLOSE for each in times.values()):
            return
        if times.get(low, aim) < aim or times.get(high, aim) > aim:
            return  # it cannot be as slow, or as fast
        sparsity = _next(times, aim, low, high) if times else low if precision is not None else high
        if sparsity in times:
            return
        yield Option("dense", None, precision) if sparsity == low else Option(pattern, sparsity, precision)


def _next(times: dict[float, float], aim: float, low: float, high: float) -> float:
    """Return the sparsity between the nearest slower and the nearest faster one, by a straight line in between."""
    slower = max((s for s, time in times.items() if time > aim), default=None)
    faster = min((s for s, time in times.items() if time <= aim), default=None)
    if faster is None:
        return high
    start, first = (low, 1.0) if slower is None else (slower, times[slower])
    share = (first - aim) / (first - times[faster]) if first > times[faster] else 0.5
    return round(start + (faster - start) * min(max(share, 0.1), 0.95), 3)


def _assigned(option: Option, plan: SparsityPlan) -> dict[str, Option]:
    """Return what each layer becomes; where channels go, it is layers that read them, and all others are as given."""
    if option.pattern != CHANNELS:
        return dict.fromkeys(plan.table.times, option)
    plain = Option("dense", None, option.precision)
    others = dict.fromkeys(plan.table.times, plain) if option.precision is not None else {}
    return {**others, **{each.reader: option for group in plan.table.groups for each in group.channels}}


def _masks(option: Option, plan: SparsityPlan) -> dict[str, tuple[Option, Any]]:
    assigned: Assignment = _assigned(option, plan)
    return {name: (each, plan.table.pattern_of(name, each)) for name, each in assigned.items()}


def families(texts: Iterable[str]) -> list[Family]:
    """Return families from their names, such as ``4x1`` and ``4x1:int8``."""
    return [(pattern, precision or None) for pattern, _, precision in (text.partition(":") for text in texts)]

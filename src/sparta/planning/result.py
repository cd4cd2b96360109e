"""The sparsity plan: what each layer becomes, what the whole measured, and every other speed-up that could be asked.

It prints as a table. The table of options stays inside it, corrected by what was measured, so another speed-up is
answered in seconds without measuring.
"""

from __future__ import annotations

import copy
import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import nn

from sparta.compiler.api import compile_model
from sparta.errors import MissingPackageError, ValueRangeError, message
from sparta.files import write_atomic
from sparta.oneshot.api import prune
from sparta.oneshot.calibrate import moved
from sparta.oneshot.log import PruneLog
from sparta.planning.bench import Whole
from sparta.planning.options import CHANNELS, DENSE, Option
from sparta.planning.rounding import rounded
from sparta.planning.table import Assignment, Table, picked
from sparta.precision.api import Quantized
from sparta.tables import table
from sparta.tesa.patterns import Pattern
from sparta.tesa.spec import Spec

__all__ = ["CurvePoint", "Goal", "SparsityPlan"]

_CURVE_POINTS = 16
_CLOSE = 0.03


@dataclass(frozen=True)
class Goal:
    """What was asked: one of a speed-up, a latency, a memory, and a largest loss."""

    speedup: float | None = None
    latency_ms: float | None = None
    memory_mb: float | None = None
    max_loss: float | None = None

    def __str__(self) -> str:
        if self.speedup is not None:
            return f"{self.speedup:g}x"
        if self.latency_ms is not None:
            return f"{self.latency_ms:g} ms"
        return f"{self.memory_mb:g} MB" if self.memory_mb is not None else f"a loss of {self.max_loss:g}"

    def asked_ms(self, given_ms: float) -> float | None:
        """Return the latency that was asked for; None for other goals."""
        return given_ms / self.speedup if self.speedup is not None else self.latency_ms

    def reached(self, whole: Whole) -> float | None:
        """Return what was measured over what was asked: 1 is met; None where nothing of the kind was asked."""
        if self.speedup is not None:
            return whole.ratio / self.speedup
        if self.latency_ms is not None:
            return self.latency_ms / whole.ms
        return self.memory_mb / whole.memory_mb if self.memory_mb is not None else None

    def close(self, whole: Whole) -> bool:
        """Whether a measured whole is what was asked, within 3 %."""
        reached = self.reached(whole)
        return reached is None or abs(reached - 1) <= _CLOSE

    def met(self, whole: Whole) -> bool:
        """Whether a measured whole is at least what was asked, within 3 %."""
        reached = self.reached(whole)
        return reached is None or reached >= 1 - _CLOSE


@dataclass(frozen=True)
class CurvePoint:
    """One point of the front.

    Parameters
    ----------
    speedup, latency_ms
        Of the whole model: measured, or from the table as corrected by what was measured.
    loss
        The estimated relative change of the outputs.
    measured
        Whether this very model was measured.
    metric
        What the caller's metric says of it; None where it was not evaluated.
    """

    speedup: float
    latency_ms: float
    loss: float
    measured: bool = False
    metric: float | None = None


@dataclass(eq=False)
class SparsityPlan:
    """Which layers, how much, in which pattern, for an asked speed-up.

    Parameters
    ----------
    goal
        What was asked.
    assignment
        What each layer becomes; those that stay dense are left out.
    whole
        What the model measured with it; None where it was not measured.
    met
        Whether it is what was asked, by measurement.
    reason
        What came of it, in words.
    points
        Points that were measured.
    notes
        What could not be done or found out.
    example
        What the model was measured with.
    """

    goal: Goal
    assignment: Assignment
    whole: Whole | None
    met: bool
    reason: str
    table: Table
    model: nn.Module
    data: Sequence[Any]
    method: str
    loss: float = 0.0
    points: list[tuple[Assignment, Whole, float]] = field(default_factory=list)
    metrics: list[tuple[Assignment, float]] = field(default_factory=list)
    dense_metric: float | None = None
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    example: Any = None
    _spec: Spec | None = None
    _pruned: nn.Module | None = None

    # ------------------------------------------------------------------ what it says

    @property
    def latency_ms(self) -> float:
        """The latency with this plan: measured, or by the table."""
        if self.whole is not None:
            return self.whole.ms
        dense, sparse = self.table.sums(self.assignment)
        return self.table.rest_ms + dense + self.table.factor * sparse

    @property
    def speedup(self) -> float:
        """How many times faster than the model as given: measured, or by the table."""
        return self.whole.ratio if self.whole is not None else self.table.given_ms / self.latency_ms

    @property
    def curve(self) -> list[CurvePoint]:
        """The front of latency and estimated loss, from dense to the fastest; measured points are marked."""
        front, _ = self.table.front()
        times = self.table.rest_ms + front.times
        low, high = self.table.given_ms / float(times[-1]), self.table.given_ms / float(times[0])
        wanted = [low * (high / low) ** (i / (_CURVE_POINTS - 1)) for i in range(_CURVE_POINTS)]
        places = {front.within(self.table.given_ms / speedup - self.table.rest_ms) for speedup in wanted}
        points = [
            CurvePoint(self.table.given_ms / float(times[place]), float(times[place]), math.sqrt(front.costs[place]))
            for place in sorted(place for place in places if place is not None)
        ]
        points += [
            CurvePoint(whole.ratio, whole.ms, loss, measured=True, metric=self.metric_of(assignment))
            for assignment, whole, loss in self.points
        ]
        known = [assignment for assignment, _, _ in self.points]
        points += [self._by_table(each, metric) for each, metric in self.metrics if each not in known]
        return sorted(points, key=lambda point: point.speedup)

    def metric_of(self, assignment: Assignment) -> float | None:
        """Return what the caller's metric said of an assignment; None where it was not evaluated."""
        if not assignment:
            return self.dense_metric
        return next((metric for each, metric in self.metrics if each == assignment), None)

    def _by_table(self, assignment: Assignment, metric: float | None) -> CurvePoint:
        dense, sparse = self.table.sums(assignment)
        ms = self.table.rest_ms + dense + self.table.factor * sparse
        return CurvePoint(self.table.given_ms / ms, ms, self.table.loss(assignment), metric=metric)

    def at(self, speedup: float) -> SparsityPlan:
        """Return the plan for another speed-up, from the table, without measuring."""
        if not isinstance(speedup, int | float) or isinstance(speedup, bool) or not 1 <= speedup < math.inf:
            raise ValueRangeError(message(f"speedup={speedup!r}", "a number of 1 or more"))
        goal = Goal(speedup=float(speedup))
        front, bundles = self.table.front()
        place = front.within(self.table.given_ms / speedup - self.table.rest_ms)
        if place is None:
            raise ValueRangeError(
                message(
                    f"a speed-up of {speedup:g}x",
                    f"at most {self.table.given_ms / self.table.fastest_ms:.2f}x with these layers and patterns here",
                    "allow more patterns, or a smaller model",
                )
            )
        options = picked(bundles, front.chosen(place))
        plan = replace(self, goal=goal, assignment=options, whole=None, met=True, _spec=None, _pruned=None)
        plan.loss = self.table.loss(options)
        plan.reason = f"{plan.speedup:.2f}x by the table; not measured"
        return plan

    @property
    def patterns(self) -> dict[str, Pattern]:
        """The pattern of each layer that becomes sparse."""
        found = {name: self.table.pattern_of(name, option) for name, option in self.assignment.items()}
        return {name: pattern for name, pattern in found.items() if pattern is not None}

    @property
    def precisions(self) -> dict[str, str]:
        """The precision of each layer that is rounded."""
        return {name: option.precision for name, option in self.assignment.items() if option.precision is not None}

    @property
    def sparsities(self) -> dict[str, float]:
        """The sparsity of each layer that becomes sparse and whose pattern has none of its own."""
        return {name: option.sparsity for name, option in self.assignment.items() if option.sparsity is not None}

    # ------------------------------------------------------------------ what it does

    def apply(self, model: nn.Module | None = None, *, method: str | None = None, **more: Any) -> PruneLog:
        """Prune a model as planned, in place, and return what each layer lost; `spec` then says where the zeros are.

        Layers that are planned to be rounded are rounded by :meth:`compile`, so that the pruned model can be trained
        before.

        Parameters
        ----------
        model
            The model that was planned for, or one like it; None: that model.
        method
            As in :func:`sparta.prune`; None: as planned.
        more
            Further arguments of :func:`sparta.prune`: `refine`, `progress`, `checkpoint` ...
        """
        if not self.met:
            raise ValueRangeError(
                message(
                    f"a plan that does not reach {self.goal}: {self.reason}", fix="use `at` with what can be reached"
                )
            )
        chosen = self.model if model is None else model
        log, self._spec = PruneLog(method or self.method), Spec({})
        if self.patterns:
            self._spec, log = prune(
                chosen, self.data, self.patterns, self.sparsities, method=method or self.method, **more
            )
        self._pruned = chosen
        return log

    def compile(self, model: nn.Module | None = None, example_inputs: Any = None, **more: Any) -> Any:
        """Return the planned model, compiled: with its zeros, and its layers rounded where the plan says so.

        Parameters
        ----------
        model
            The model that :meth:`apply` has pruned, trained since or not. None: that model; if `apply` was not called,
            a copy of the model is pruned now.
        example_inputs
            As in :func:`sparta.compile`; None: what the plan was measured with.
        more
            Further arguments of :func:`sparta.compile`.
        """
        if self._pruned is None or self._spec is None:
            self.apply(copy.deepcopy(self.model) if model is None else model)
        pruned, spec = self._pruned if model is None else model, self.spec
        if pruned is None:
            raise ValueRangeError(message("a plan without a model", fix="pass the model that `apply` has pruned"))
        spec.check(pruned)
        example = self.example if example_inputs is None else example_inputs
        if not self.precisions:
            return compile_model(pruned, example, spec, **more)
        found = self._rounded(pruned, spec)
        fast = compile_model(found.model, example, found.spec, activations=found.activations, **more)
        fast.report = replace(fast.report, precision=found.report)
        return fast

    def judged(self, model: nn.Module, metric: Any) -> float:
        """Return the metric of a pruned model, its layers rounded where the plan says so."""
        return float(metric(self._rounded(model, self.spec).simulated if self.precisions else model))

    def _rounded(self, model: nn.Module, spec: Spec) -> Quantized:
        home = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        return rounded(model, [moved(batch, home) for batch in self.data], spec, self.precisions)

    def forget(self) -> None:
        """Forget what was applied."""
        self._spec = self._pruned = None

    @property
    def spec(self) -> Spec:
        """Where the zeros are: after :meth:`apply`, as it left them; before it, found on a copy of the model."""
        if self._spec is None:
            self.apply(copy.deepcopy(self.model))
        if self._spec is None:
            raise ValueRangeError(message("a plan without a spec", fix="call `apply`"))
        return self._spec

    # ------------------------------------------------------------------ for people and programs

    def rows(self) -> list[dict[str, Any]]:
        """Return a dict per layer: what it becomes, its time dense and so, its cost, and why."""
        return [self._row(name) for group in self.table.groups for name in group.names]

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain values."""
        return {
            "goal": {key: value for key, value in asdict(self.goal).items() if value is not None},
            "met": self.met,
            "reason": self.reason,
            "speedup": self.speedup,
            "latency_ms": self.latency_ms,
            "given_ms": self.table.given_ms,
            "bound": None if math.isinf(self.table.bound) else self.table.bound,
            "loss": self.loss,
            "measured": None if self.whole is None else {**asdict(self.whole), "dense": sorted(self.whole.dense)},
            "metric": {"dense": self.dense_metric, "planned": self.metric_of(self.assignment)},
            "layers": self.rows(),
            "curve": [asdict(point) for point in self.curve],
            "notes": list(self.notes),
            "seconds": self.seconds,
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write :meth:`to_dict` as JSON."""
        write_atomic(path, (json.dumps(self.to_dict(), indent=1) + "\n").encode())

    def report(self) -> str:
        """Return the plan, its curve and its notes as text."""
        columns = ["speed-up", "ms", "estimated loss", "metric", ""]
        rows: list[list[object]] = [
            [f"{p.speedup:.2f}x", f"{p.latency_ms:.4g}", f"{p.loss:.4f}", p.metric, "measured" if p.measured else ""]
            for p in self.curve
        ]
        dense = "" if self.dense_metric is None else f", metric of the dense model {self.dense_metric:.4g}"
        lines = [str(self), "", table(columns, rows, f"every speed-up{dense}")]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def plot(self, axes: Any = None) -> Any:
        """Draw the curve; return matplotlib's axes."""
        if axes is None:
            try:
                from matplotlib import pyplot as plt
            except ImportError as error:
                raise MissingPackageError(message("a plot needs matplotlib", fix="pip install matplotlib")) from error
            _, axes = plt.subplots()
        for measured, style in ((False, "-"), (True, "o")):
            points = [p for p in self.curve if p.measured == measured]
            label = "measured" if measured else "by the table"
            axes.plot([p.latency_ms for p in points], [p.loss for p in points], style, label=label)
        axes.set_xlabel("latency in ms")
        axes.set_ylabel("estimated change of the outputs")
        axes.legend()
        return axes

    def __str__(self) -> str:
        columns = ["layer", "becomes", "dense ms", "ms", "cost", "why"]
        rows = [
            [r["layer"], r["option"], _shown(r["dense_ms"]), _shown(r["ms"]), f"{r['cost']:.2e}", r["why"]]
            for r in self.rows()
        ]
        how = "measured" if self.whole is not None else "by the table"
        whole = f"{self.table.given_ms:.4g} ms -> {self.latency_ms:.4g} ms, {self.speedup:.2f}x {how}"
        loss = f"outputs change by about {self.loss:.3g} of their norm (estimated)"
        title = f"plan for {self.goal}: {'met' if self.met else 'NOT met'}"
        lines = [table(columns, rows, title), "", f"whole: {whole}; {loss}", self.reason]
        if self.precisions:
            kinds = ", ".join(sorted(set(self.precisions.values())))
            lines.append(f"{len(self.precisions)} layers are rounded to {kinds} by plan.compile(model)")
        return "\n".join(lines)

    def _row(self, name: str) -> dict[str, Any]:
        option: Option = self.assignment.get(name, DENSE)
        times = self.table.times.get(name)
        group = next(g for g in self.table.groups if name in g.names)
        narrower = any(name in each.writers and each.reader in self.assignment and
                       self.assignment[each.reader].pattern == CHANNELS for each in group.channels)  # fmt: skip
        dense = None if times is None else times[DENSE]
        ms = None if times is None else times.get(option, dense)
        if times is None:
            why = "no kernel can run it, or the data does not reach it"
        elif option.pattern == CHANNELS:
            ms, why = None, "its inputs are cut, with what makes them"
        elif narrower:
            ms, why = None, "its outputs that nobody reads are cut"
        elif option == DENSE:
            why = "nothing that was measured beats dense" if len(times) == 1 else "pruning others costs less"
        else:
            why = f"{dense / ms:.2f}x alone" if ms and dense else ""
        cost = self.table.costs.get(name, {}).get(option, 0.0)
        text = str(option)
        if narrower and not option.prunes:
            text = "narrower" if option.precision is None else f"narrower {option.precision}"
        return {"layer": name, "option": text, "dense_ms": dense, "ms": ms, "cost": cost, "why": why}


def _shown(milliseconds: float | None) -> str:
    return "" if milliseconds is None else f"{milliseconds:.4g}"

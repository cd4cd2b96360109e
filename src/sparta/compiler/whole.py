"""The whole model, measured end to end: wins of single layers can lose together, so the combination is timed too.

Graphs (original, or compact and folded) and hosts (eager, or Inductor for what lies between the kernels) compete with
the plan's kernels in and out, all in turns with the model as it was given. The one idea to know: the dense original
graph is always among the rivals, so the result is never chosen to be slower than it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from sparta.compiler.choose import Point
from sparta.compiler.combine import combined
from sparta.compiler.kernels import KernelModule
from sparta.compiler.partition import SubGraph
from sparta.compiler.plan import LayerPlan, Whole
from sparta.compiler.program import Program
from sparta.compiler.quick import quickened
from sparta.compiler.settings import Session
from sparta.specialize.kernel_spec import KernelSpec
from sparta.testing.timing import compare

__all__ = ["Contest", "hosted"]

_SECONDS = {"quick": 1.5, "full": 6.0, "off": 1.0}
_GAIN = 1.01  # what leaving a layer out must bring, so that noise does not choose
_LEAST_CALLS = 3  # of each variant: two to warm up and one that counts
_AS_HOPED = 0.6  # the share of the layers' own gains that the whole should show
GIVEN, REDUCED = "model as given", "reduced graph"
_ORIGINAL, _SPARSE = "original graph", "sparse"

Call = Callable[[], Any]


@dataclass
class Contest:
    """Everything that competes for one model.

    Parameters
    ----------
    given
        A call of the model as the user gave it.
    original, reduced
        The two graphs.
    groups, plans
        The sub-graphs of `reduced` and their plans.
    inputs
        The flat inputs, for each size that is measured.
    points
        The activations of the sub-graphs at these sizes.
    inductor
        Whether `torch.compile` competes as a host.
    call_seconds
        What one call of the model as given takes, about.
    """

    given: Call
    original: Program
    reduced: Program
    groups: Sequence[SubGraph]
    plans: list[LayerPlan]
    inputs: Sequence[Sequence[Any]]
    points: Sequence[Point]
    session: Session
    inductor: bool = False
    call_seconds: float = 0.0
    _kernels: dict[str, KernelModule] = field(default_factory=dict)

    # ------------------------------------------------------------------ the pieces

    def kernels(self, names: set[str] | None = None) -> dict[SubGraph, KernelModule]:
        """Return the kernel modules of the layers that run sparse: all, or those of these names."""
        found = {}
        for group, plan in zip(self.groups, self.plans, strict=True):
            if not plan.sparse or (names is not None and plan.name not in names):
                continue
            if plan.name not in self._kernels:
                self._kernels[plan.name] = kernel_module(group, plan, self.points)
            found[group] = self._kernels[plan.name]
        return found

    def built(self, base: str) -> fx.GraphModule:
        """Return the graph that runs, with its kernels."""
        return self.original.module() if base == "original" else combined(self.reduced, self.kernels())

    # ------------------------------------------------------------------ deciding

    def decide(self) -> Whole:
        """Time the variants, leave out layers that lose together, and return what runs."""
        try:
            return self._decided()
        except KeyboardInterrupt:
            self.session.interrupted = True
            return Whole(reason="interrupted: the best layer by layer, not timed end to end")

    def _decided(self) -> Whole:
        if not self._affords(2):
            why = "interrupted" if self.session.interrupted else "the budget was spent"
            return Whole(reason=f"not timed end to end: {why}")
        self._leave_out()
        times = self._times(self._variants())
        best = min((name for name in times if name != GIVEN), key=lambda name: times[name])
        base, host = _meaning(best)
        if base == "original" or best.startswith(REDUCED):
            lost = f"dense: end to end, the {best} took {times[best]:.4g} ms and the sparse plan {_of(times):.4g} ms"
            self.make_dense({plan.name for plan in self.plans if plan.sparse}, lost)
        self._other_sizes()
        return Whole(base, host, times, _reason(times, best), best)

    def again(self, base: str, host: str) -> Whole | None:
        """Time a remembered decision once more; None where it does not hold any more."""
        if not self._affords(2):
            return Whole(base, host, reason="remembered; not timed again, the budget was spent")
        call = self._call(self.built(base), host=host)
        times = self._times({GIVEN: self.given, _label(base, host, sparse=bool(self.kernels())): call})
        best = next(name for name in times if name != GIVEN)
        if self.kernels() and times[best] > 1.03 * times[GIVEN]:
            return None
        return Whole(base, host, times, "remembered: " + _reason(times, best), best)

    # ------------------------------------------------------------------ the steps

    def _variants(self) -> dict[str, Call]:
        calls = {GIVEN: self.given}
        modules: dict[str, fx.GraphModule] = {_ORIGINAL: self.original.module()}
        if self.reduced is not self.original:
            modules[REDUCED] = self.reduced.module()
        if self.kernels():
            modules[_SPARSE] = combined(self.reduced, self.kernels())
        for name, module in modules.items():
            calls[name] = self._call(module)
            if self.inductor and name != REDUCED and self.session.left > 0:
                self.session.show(f"torch.compile of the {name}")
                try:
                    call = self._call(module, host="inductor")
                    call()
                except Exception as error:  # noqa: BLE001 - whatever Inductor raises, eager remains
                    self.session.note(f"Inductor does not run the {name}: {str(error).strip().splitlines()[0]}")
                else:
                    calls[f"{name}, inductor"] = call
        return calls

    def _leave_out(self) -> None:
        """Make layers dense while that makes the whole faster: larger groups first, then ever smaller ones.

        Where the whole gains about what its layers do, only the weakest are questioned.
        """
        names = [plan.name for plan in sorted(self.plans, key=_saved) if plan.sparse]
        if not names or not self._affords(5):  # the contest of the variants must still be possible
            return
        dense, sparse = self.reduced.module(), combined(self.reduced, self.kernels())
        times = self._times({"dense": self._call(dense), "sparse": self._call(sparse)})
        predicted = sum(_saved(plan) for plan in self.plans if plan.sparse)
        as_hoped = times["dense"] - times["sparse"] >= _AS_HOPED * predicted
        tests = 2 if as_hoped else 12
        size = max(1, len(names) // (4 if as_hoped else 2))
        while True:
            for start in range(0, len(names), size):
                tests -= 1
                if tests < 0 or not self._affords(5):
                    return
                self._try_without(set(names[start : start + size]))
            names = [plan.name for plan in sorted(self.plans, key=_saved) if plan.sparse]
            if size == 1 or not names:
                return
            size //= 2

    def _try_without(self, names: set[str]) -> None:
        """Make these layers dense if the whole is faster without their kernels."""
        now = {plan.name for plan in self.plans if plan.sparse}
        self.session.show(f"end to end without {len(names)} of {len(now)} sparse layers")
        both = {
            "all": combined(self.reduced, self.kernels()),
            "rest": combined(self.reduced, self.kernels(now - names)),
        }
        times = self._times({name: self._call(module) for name, module in both.items()})
        if times["all"] > _GAIN * times["rest"]:
            self.make_dense(names, "dense: faster alone, but not in the whole model")

    def _other_sizes(self) -> None:
        """At the sizes beyond the first, keep the kernels only where they win together."""
        for inputs in self.inputs[1:]:
            kernels = self.kernels()
            if not kernels or not self._affords(2):
                return
            sparse, dense = combined(self.reduced, kernels), self.reduced.module()
            times = self._times({"dense": self._call(dense, inputs), "sparse": self._call(sparse, inputs)})
            if times["sparse"] > times["dense"]:
                seen = self.reduced.values(inputs, {group.anchor.x for group in kernels})
                sizes = {group.name: group.lowering.size(seen[group.anchor.x]) for group in kernels}
                first = {plan.name: next(iter(plan.choices)) for plan in self.plans}
                note = "dense at this size: sparse kernels lose together"
                self.plans[:] = [
                    plan.made_dense(note, sizes[plan.name])
                    if plan.name in sizes and sizes[plan.name] != first[plan.name]
                    else plan
                    for plan in self.plans
                ]
                self._kernels.clear()

    def make_dense(self, names: set[str], note: str) -> None:
        """Let these layers run dense."""
        self.plans[:] = [plan.made_dense(note) if plan.sparse and plan.name in names else plan for plan in self.plans]

    def _affords(self, variants: int) -> bool:
        """Whether what is left of the budget is enough to time this many variants at all."""
        return self.session.left > _LEAST_CALLS * variants * self.call_seconds

    def _call(self, module: fx.GraphModule, inputs: Sequence[Any] | None = None, host: str = "eager") -> Call:
        given = self.inputs[0] if inputs is None else inputs
        run = hosted(module, host)

        def call() -> Any:  # noqa: ANN401 - flat outputs
            with torch.no_grad():
                return run(*given)

        return call

    def _times(self, calls: Mapping[str, Call]) -> dict[str, float]:
        seconds = min(_SECONDS[self.session.tune], max(0.02, 0.5 * self.session.left))
        found = compare(calls, warmup=2, iters=50, max_seconds=seconds)
        return {name: timing.median for name, timing in found.timings.items()}


def kernel_module(group: SubGraph, plan: LayerPlan, points: Sequence[Point]) -> KernelModule:
    """Return the kernel module of a sub-graph by its plan."""
    specs: dict[int, KernelSpec] = {}
    for point in points:
        x, _ = point.values[group]
        specs.setdefault(group.lowering.size(x), group.spec(x))
    return KernelModule.of(group, {size: (specs[size], choice) for size, choice in plan.choices.items()})


def hosted(module: fx.GraphModule, host: str) -> Callable[..., Any]:
    """Return a graph as its host runs it."""
    if host != "inductor":
        return quickened(module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.compile(module)


def _saved(plan: LayerPlan) -> float:
    """Return the milliseconds that a layer's kernel saves by its own measurement."""
    entry = plan.first.entry
    return 0.0 if entry is None else entry.dense_milliseconds - entry.milliseconds


def _meaning(name: str) -> tuple[str, str]:
    """Return the graph and the host behind a variant's name."""
    host = "inductor" if name.endswith(", inductor") else "eager"
    return ("original" if name.startswith(_ORIGINAL) else "reduced"), host


def _label(base: str, host: str, *, sparse: bool) -> str:
    name = _ORIGINAL if base == "original" else _SPARSE if sparse else REDUCED
    return f"{name}, inductor" if host == "inductor" else name


def _of(times: Mapping[str, float]) -> float:
    return min((value for name, value in times.items() if name.startswith(_SPARSE)), default=float("nan"))


def _reason(times: Mapping[str, float], best: str) -> str:
    gain = times[GIVEN] / times[best]
    return f"{best}: {times[best]:.4g} ms, {gain:.2f}x the model as given ({times[GIVEN]:.4g} ms)"

"""The whole model, measured end to end: wins of single layers can lose together, so the combination is timed too.

Graphs (original, or compact and folded) and hosts (eager, Inductor for what lies between the kernels, either replayed
from a CUDA graph) compete with the plan's kernels in and out, all in turns with the model as it was given. The dense
original graph is always among the rivals, so the result is never chosen to be slower than it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from sparta.compiler.choose.layers import SizeSample
from sparta.compiler.graph.program import Program
from sparta.compiler.lower.subgraph import SubGraph
from sparta.compiler.plan import GIVEN, REDUCED, EndToEnd, LayerPlan
from sparta.compiler.run.combine import combined
from sparta.compiler.run.cuda_graph import Graphed, on_cuda
from sparta.compiler.run.host import EAGER, GRAPH, INDUCTOR, PANELS, hosted, without_graph
from sparta.compiler.run.kernel_module import KernelModule
from sparta.compiler.run.panels import aligned, panelled
from sparta.compiler.session import Session
from sparta.measure.timing import compare
from sparta.specialize.kernel_spec import KernelSpec

__all__ = ["Contest"]

_SECONDS = {"quick": 1.5, "full": 6.0, "off": 1.0}
_GAIN = 1.01  # what leaving a layer out must bring, so that noise does not choose
_LEAST_CALLS = 3  # of each variant: two to warm up and one that counts
_ROUNDS = 9  # of the contest that decides, where the budget allows
_HOST_GAIN = 1.02  # what a host other than eager must bring, so that noise does not choose
_CLOSE = 1.08  # within this, variants are timed once more
_ENOUGH = 0.5  # the share of the time for a comparison below which its outcome is not worth keeping
_AS_HOPED = 0.6  # the share of the layers' own gains that the whole should show
_INDUCTOR_SECONDS = 0.1  # for a call of the graph, about, before one was compiled here
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
    subgraphs, plans
        The sub-graphs of `reduced` and their plans.
    inputs
        The flat inputs, for each size that is measured.
    samples
        The activations of the sub-graphs at these sizes.
    inductor
        Whether `torch.compile` competes as a host. CUDA graphs do where the session says so.
    call_seconds
        What one call of the model as given takes, about.
    hurried
        Whether there was too little time for a decision that is worth remembering.
    """

    given: Call
    original: Program
    reduced: Program
    subgraphs: Sequence[SubGraph]
    plans: list[LayerPlan]
    inputs: Sequence[Sequence[Any]]
    samples: Sequence[SizeSample]
    session: Session
    inductor: bool = False
    call_seconds: float = 0.0
    hurried: bool = False
    _seconds_a_call: float = _INDUCTOR_SECONDS
    _kernels: dict[str, KernelModule] = field(default_factory=dict)
    _graphs: dict[tuple[str, frozenset[str]], fx.GraphModule] = field(default_factory=dict)
    _hosted: dict[tuple[str, frozenset[str], str], Callable[..., Any]] = field(default_factory=dict)

    # ------------------------------------------------------------------ the pieces

    def kernels(self, names: set[str] | None = None) -> dict[SubGraph, KernelModule]:
        """Return the kernel modules of the layers that run sparse: all, or those of these names."""
        found = {}
        for subgraph, plan in zip(self.subgraphs, self.plans, strict=True):
            if not plan.sparse or (names is not None and plan.name not in names):
                continue
            if plan.name not in self._kernels:
                self._kernels[plan.name] = kernel_module(subgraph, plan, self.samples)
            found[subgraph] = self._kernels[plan.name]
        return found

    def built(self, base: str, names: set[str] | None = None) -> fx.GraphModule:
        """Return a graph, the reduced one with its kernels: all, or those of these names; made once."""
        key = self._key(base, names)
        if key not in self._graphs:
            reduced = base != "original"
            self._graphs[key] = combined(self.reduced, self.kernels(names)) if reduced else self.original.module()
        return self._graphs[key]

    def hosted(self, base: str, host: str, names: set[str] | None = None) -> Callable[..., Any]:
        """Return a graph as its host runs it; made once, because compiling takes long."""
        key = (*self._key(base, names), host)
        if key not in self._hosted:
            graph, plain = self.built(base, names), without_graph(host)
            recorded = plain != host and on_cuda(graph)
            self._hosted[key] = (
                Graphed(self.hosted(base, plain, names), quiet=True, module=graph) if recorded else hosted(graph, plain)
            )
        return self._hosted[key]

    def _key(self, base: str, names: set[str] | None) -> tuple[str, frozenset[str]]:
        sparse = {plan.name for plan in self.plans if plan.sparse}
        return base, frozenset() if base == "original" else frozenset(sparse if names is None else sparse & names)

    # ------------------------------------------------------------------ deciding

    def decide(self) -> EndToEnd:
        """Time the variants, leave out layers that lose together, and return what runs."""
        try:
            return self._decided()
        except KeyboardInterrupt:
            self.session.interrupted = True
            return EndToEnd(reason="interrupted: the best layer by layer, not timed end to end")

    def _decided(self) -> EndToEnd:
        if not self._affords(2):
            why = "interrupted" if self.session.interrupted else "the budget was spent"
            base = "reduced" if self.kernels() else "original"  # without a kernel there is nothing to gain
            return EndToEnd(base, reason=f"not timed end to end: {why}")
        self._leave_out()
        times, best = self._fastest(self._variants())
        base, host = _meaning(best)
        if base == "original" or best.startswith(REDUCED):
            lost = f"dense: end to end, the {best} took {times[best]:.4g} ms and the sparse plan {_of(times):.4g} ms"
            self.make_dense({plan.name for plan in self.plans if plan.sparse}, lost)
        if host == PANELS:
            self._align()
        self._other_sizes()
        return EndToEnd(base, host, times, _reason(times, best), best)

    def again(self, base: str, host: str) -> EndToEnd | None:
        """Time a remembered decision once more; None where it does not hold any more."""
        if host == PANELS:
            self._align()
        if not self._affords(2):
            return EndToEnd(base, host, reason="remembered; not timed again, the budget was spent")
        call = self._call(base, host)
        times = self._times({GIVEN: self.given, _label(base, host, sparse=bool(self.kernels())): call})
        best = next(name for name in times if name != GIVEN)
        if times[best] > 1.03 * times[GIVEN]:
            return None
        return EndToEnd(base, host, times, "remembered: " + _reason(times, best), best)

    def _fastest(self, calls: Mapping[str, Call]) -> tuple[dict[str, float], str]:
        """Return the times of variants and the one that runs; where several are close they compete once more, alone."""
        times = self._times(calls, _ROUNDS)
        least = min(time for name, time in times.items() if name != GIVEN)
        close = [name for name, time in times.items() if name != GIVEN and time < _CLOSE * least]
        if len(close) == 1 or not self._affords(1 + len(close)):
            return times, _best(times)
        again = self._times({name: calls[name] for name in (GIVEN, *close)}, 2 * _ROUNDS)
        return {**times, **again}, _best(again)

    # ------------------------------------------------------------------ the steps

    def _variants(self) -> dict[str, Call]:
        calls = {GIVEN: self.given}
        bases: dict[str, tuple[str, set[str] | None]] = {_ORIGINAL: ("original", None)}
        if self.reduced is not self.original:
            bases[REDUCED] = ("reduced", set())
        if self.kernels():
            bases[_SPARSE] = ("reduced", None)
        for name, (base, names) in bases.items():
            for host in self._hosts(name):
                if host == EAGER:
                    calls[name] = self._call(base, host, names)
                elif self._affords_preparing(f"{name}, {host}", base, host, names):
                    self._add_hosted(calls, f"{name}, {host}", base, host, names)
        self._add_panels(calls)
        return calls

    def _add_panels(self, calls: dict[str, Call]) -> None:
        """Add the sparse graph with activations in panels, where neighbouring layers can hand them over."""
        if not self.kernels() or self.session.left <= 0:
            return
        plans = self._aligned()
        kernels = {
            subgraph: self._kernels[plan.name] if plan is now else kernel_module(subgraph, plan, self.samples)
            for subgraph, plan, now in zip(self.subgraphs, plans, self.plans, strict=True)
            if plan.sparse
        }
        plain = combined(self.reduced, kernels)
        if panelled(plain) is not plain:
            calls[f"{_SPARSE}, {PANELS}"] = _called(hosted(plain, PANELS), self.inputs[0])

    def _aligned(self) -> list[LayerPlan]:
        """Return the plans with tiles that let neighbours hand over panels."""
        sparse = {subgraph: plan for subgraph, plan in zip(self.subgraphs, self.plans, strict=True) if plan.sparse}
        first = self.samples[0].values
        return aligned(self.subgraphs, self.plans, {plan.name: g.spec(first[g][0]) for g, plan in sparse.items()})

    def _align(self) -> None:
        """Take those plans."""
        plans = self._aligned()
        for plan, now in zip(plans, self.plans, strict=True):
            if plan is not now:
                self._kernels.pop(plan.name, None)
        self.plans[:] = plans
        self._graphs.clear()
        self._hosted.clear()

    def _hosts(self, name: str) -> list[str]:
        """Return the hosts that compete for a variant."""
        hosts = [EAGER, *[INDUCTOR] * (self.inductor and name != REDUCED)]
        return hosts + [_in_graph(host) for host in hosts] if self.session.in_graphs else hosts

    def _affords_preparing(self, name: str, base: str, host: str, names: set[str] | None) -> bool:
        """Whether a host can be made ready in what is left of the budget: compiling cannot be cut short."""
        seconds = 0.0
        if host == INDUCTOR:
            graph = self.built(base, names).graph
            seconds = self._seconds_a_call * sum(node.op in ("call_function", "call_module") for node in graph.nodes)
        if host == _in_graph(INDUCTOR) and (*self._key(base, names), INDUCTOR) not in self._hosted:
            return False  # what is recorded is what was compiled just now
        if self.session.affords(seconds):
            return True
        if seconds and not self.session.interrupted:
            self.hurried = True
            self.session.note(
                f"{name} was not tried: compiling takes about {seconds:.0f} s, more than the budget has left"
            )
        return False

    def _add_hosted(self, calls: dict[str, Call], name: str, base: str, host: str, names: set[str] | None) -> None:
        """Add a variant with a host that has to prepare, unless that fails."""
        self.session.show(f"preparing {name}")
        before, graph = self.session.elapsed, self.built(base, names).graph
        try:
            call = self._call(base, host, names)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                call()
            problem = getattr(self.hosted(base, host, names), "problem", "")
        except Exception as error:  # noqa: BLE001 - whatever Inductor raises, eager remains
            problem = f"{str(error).strip().splitlines()[0]}"
        if host == INDUCTOR:
            self._seconds_a_call = max(1e-3, (self.session.elapsed - before) / max(1, len(graph.nodes)))
        if problem:
            self.session.note(f"{name} does not run: {problem}")
        else:
            calls[name] = call

    def _leave_out(self) -> None:
        """Make layers dense while that makes the whole faster: larger groups first, then ever smaller ones.

        Where the whole gains about what its layers do, only the weakest are questioned.
        """
        names = [plan.name for plan in sorted(self.plans, key=_saved) if plan.sparse]
        if not names or not self._affords(5):  # the contest of the variants must still be possible
            return
        times = self._times({"dense": self._quick_call(set()), "sparse": self._quick_call(None)})
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
        times = self._times({"all": self._quick_call(None), "rest": self._quick_call(now - names)})
        lost = times["all"] > _GAIN * times["rest"]
        self._forget(now if lost else now - names)
        if lost:
            self.make_dense(names, "dense: faster alone, but not in the whole model")

    def _forget(self, names: set[str]) -> None:
        """Let go of a combination that will not run, and of the memory that its CUDA graph holds."""
        key = ("reduced", frozenset(names))
        self._graphs.pop(key, None)
        for host in [each for *kind, each in self._hosted if tuple(kind) == key]:
            del self._hosted[*key, host]

    def _other_sizes(self) -> None:
        """At the sizes beyond the first, keep the kernels only where they win together."""
        for inputs in self.inputs[1:]:
            kernels = self.kernels()
            if not kernels or not self._affords(2):
                return
            both = {"dense": set[str](), "sparse": None}
            times = self._times({name: self._call("reduced", EAGER, names, inputs) for name, names in both.items()})
            if times["sparse"] > times["dense"]:
                seen = self.reduced.values(inputs, {subgraph.anchor.x for subgraph in kernels})
                sizes = {subgraph.name: subgraph.lowering.size(seen[subgraph.anchor.x]) for subgraph in kernels}
                first = {plan.name: next(iter(plan.choices)) for plan in self.plans}
                note = "dense at this size: sparse kernels lose together"
                self.plans[:] = [
                    plan.made_dense(note, sizes[plan.name])
                    if plan.name in sizes and sizes[plan.name] != first[plan.name]
                    else plan
                    for plan in self.plans
                ]
                for made in (self._kernels, self._graphs, self._hosted):
                    made.clear()

    def make_dense(self, names: set[str], note: str) -> None:
        """Let these layers run dense."""
        self.plans[:] = [plan.made_dense(note) if plan.sparse and plan.name in names else plan for plan in self.plans]

    def _affords(self, variants: int) -> bool:
        """Whether what is left of the budget is enough to time this many variants at all."""
        return self.session.affords(_LEAST_CALLS * variants * self.call_seconds)

    def _quick_call(self, names: set[str] | None) -> Call:
        """Return the reduced graph with some of its kernels, by the host that is quickest to prepare."""
        return self._call("reduced", GRAPH if self.session.in_graphs else EAGER, names)

    def _call(self, base: str, host: str, names: set[str] | None = None, inputs: Sequence[Any] | None = None) -> Call:
        return _called(self.hosted(base, host, names), self.inputs[0] if inputs is None else inputs)

    def _times(self, calls: Mapping[str, Call], rounds: int = 0) -> dict[str, float]:
        wanted = max(_SECONDS[self.session.tune], rounds * len(calls) * self.call_seconds)
        seconds = min(wanted, max(0.02, 0.5 * self.session.left))
        self.hurried |= seconds < _ENOUGH * wanted
        # By the clock, until the device is done: whoever waits for a result waits for the host as well.
        waiting = {name: _until_done(call) if self._cuda else call for name, call in calls.items()}
        found = compare(waiting, warmup=2, iters=50, max_seconds=seconds, device="cpu")
        return {name: timing.median for name, timing in found.timings.items()}

    @property
    def _cuda(self) -> bool:
        tensors = [*self.original.tensors.values(), *(x for x in self.inputs[0] if isinstance(x, torch.Tensor))]
        return any(t.is_cuda for t in tensors)


def _called(run: Callable[..., Any], inputs: Sequence[Any]) -> Call:
    def call() -> Any:
        with torch.no_grad():
            return run(*inputs)

    return call


def _until_done(call: Call) -> Call:
    def waiting() -> Any:
        result = call()
        torch.cuda.synchronize()
        return result

    return waiting


def kernel_module(subgraph: SubGraph, plan: LayerPlan, samples: Sequence[SizeSample]) -> KernelModule:
    """Return the kernel module of a sub-graph by its plan."""
    specs: dict[int, KernelSpec] = {}
    for sample in samples:
        x, _ = sample.values[subgraph]
        specs.setdefault(subgraph.lowering.size(x), subgraph.spec(x))
    return KernelModule.of(subgraph, {size: (specs[size], choice) for size, choice in plan.choices.items()})


def _in_graph(host: str) -> str:
    return GRAPH if host == EAGER else f"{host} {GRAPH}"


def _saved(plan: LayerPlan) -> float:
    """Return the milliseconds that a layer's kernel saves by its own measurement."""
    entry = plan.first.entry
    return 0.0 if entry is None else entry.dense_milliseconds - entry.milliseconds


def _meaning(name: str) -> tuple[str, str]:
    """Return the graph and the host behind a variant's name."""
    variant, _, host = name.partition(", ")
    return ("original" if variant == _ORIGINAL else "reduced"), host or EAGER


def _label(base: str, host: str, *, sparse: bool) -> str:
    name = _ORIGINAL if base == "original" else _SPARSE if sparse else REDUCED
    return name if host == EAGER else f"{name}, {host}"


def _best(times: Mapping[str, float]) -> str:
    """Return the variant that runs: the fastest, but an eager one where others are hardly faster."""
    rivals = sorted((name for name in times if name != GIVEN), key=lambda name: times[name])
    eager = next((name for name in rivals if _meaning(name)[1] == EAGER), rivals[0])
    return eager if times[eager] < _HOST_GAIN * times[rivals[0]] else rivals[0]


def _of(times: Mapping[str, float]) -> float:
    return min((value for name, value in times.items() if name.startswith(_SPARSE)), default=float("nan"))


def _reason(times: Mapping[str, float], best: str) -> str:
    gain = times[GIVEN] / times[best]
    return f"{best}: {times[best]:.4g} ms, {gain:.2f}x the model as given ({times[GIVEN]:.4g} ms)"

"""The tuner: measure the candidates for one kernel spec, dense among them, and keep the fastest that is right.

Each candidate is built, checked against a float64 reference and timed in turns with dense; a candidate that does not
compile or computes something else is a pruned trial, never a crash. The one idea to know: what is minimised is the
ratio to dense of interleaved medians, and the winner must beat dense once more in a longer run, so luck cannot choose.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sparta.common.tuning import PrunedTrial, TuningResult, search
from sparta.errors import CheckError, SpartaError, message
from sparta.specialize.implement import Kernel, implement_named, search_space, supported
from sparta.specialize.kernel_spec import KernelSpec
from sparta.specialize.store import Entry, TuningStore
from sparta.testing.checks import check
from sparta.testing.timing import compare

__all__ = ["Choice", "Problem", "choose", "tune_kernel"]

DENSE = "dense"
_MUST_WIN_BY = 1.03  # what the longer run must confirm; below it, dense runs
_QUICK_SECONDS, _LONG_SECONDS = 0.02, 0.1


@dataclass(frozen=True)
class Problem:
    """A kernel spec with the tensors to measure it on.

    Attributes
    ----------
    spec
        What is to be run.
    operand
        What the kernels pack: the sparse operand, dense, or the mask of one that is an input or a result; None where
        nothing is known beforehand.
    inputs
        What the kernels take beside it, by the operation's convention.
    expected
        The right result in float64.
    reduction
        How many terms the longest sum behind one element has.
    backward
        Whether the gradients of the inputs are measured too, by autograd through the kernel.
    """

    spec: KernelSpec
    operand: Tensor | None
    inputs: tuple[Tensor | None, ...]
    expected: Tensor
    reduction: int
    backward: bool = False


@dataclass(frozen=True)
class Choice:
    """Which implement runs a kernel spec, with which parameters, and why.

    Attributes
    ----------
    implement, params
        What runs.
    reason
        Why, in words: "2.1x dense", "dense: nothing was faster", "not tuned" ...
    entry
        The measured times; None when nothing was measured.
    refused
        For each implement that cannot run the spec, the reason.
    result
        All trials; None when the choice came from the store or from a default.
    """

    implement: str
    params: Mapping[str, Any]
    reason: str
    entry: Entry | None = None
    refused: Mapping[str, str] = field(default_factory=dict)
    result: TuningResult | None = None

    @property
    def config(self) -> dict[str, Any]:
        """The choice as the sample of the nested search space: what ``build`` takes."""
        return {"_name": self.implement, **self.params}

    def to_dict(self) -> dict[str, Any]:
        """Return the choice as JSON values, without the trials."""
        entry = None if self.entry is None else self.entry.to_dict()
        return {"config": self.config, "reason": self.reason, "entry": entry, "refused": dict(self.refused)}

    def __str__(self) -> str:
        params = ", ".join(f"{key}={value}" for key, value in self.params.items())
        return f"{self.implement}({params}): {self.reason}"


def choose(spec: KernelSpec, store: TuningStore | None = None) -> Choice:
    """Return the stored choice for `spec`, or dense where none is stored; measures nothing."""
    _, refused = supported(spec)
    entry = None if store is None else store.get(spec)
    if entry is None or entry.implement in refused:
        return Choice(DENSE, {}, "not tuned", None, refused)
    return Choice(entry.implement, entry.params, f"stored: {entry.speedup:.2f}x dense", entry, refused)


def tune_kernel(
    problem: Problem,
    *,
    algo: str = "tpe",
    max_trials: int | None = 40,
    max_seconds: float | None = 10.0,
    seed: int = 0,
    store: TuningStore | None = None,
    progress: Callable[..., None] | bool | None = None,
) -> Choice:
    """Return the fastest implement and parameters for a problem.

    A stored result is taken as it is. Interrupting keeps the best so far.

    Parameters
    ----------
    algo
        ``'grid'``, ``'rand'``, ``'tpe'`` or ``'evolution'``.
    max_trials, max_seconds
        Budgets for the whole search.
    store
        Where results are looked up and kept; None keeps nothing.
    """
    stored = choose(problem.spec, store)
    if stored.entry is not None:
        return stored
    _, refused = supported(problem.spec)
    dense = _callable(problem, build(problem.spec, {"_name": DENSE}))
    check(dense(), problem.expected, reduction=problem.reduction, what=DENSE)

    def objective(config: Mapping[str, Any]) -> float:
        if config["_name"] == DENSE:
            return 1.0
        return 1.0 / compare(
            {DENSE: dense, "candidate": _checked(problem, config)}, warmup=2, iters=50, max_seconds=_QUICK_SECONDS
        ).speedup("candidate")

    result = search(
        search_space(problem.spec),
        objective,
        algo=algo,
        max_trials=max_trials,
        max_seconds=max_seconds,
        seed=seed,
        initial=_starting_points(problem.spec),
        progress=progress if progress is not False else None,
    )
    choice = _confirmed(problem, dense, result, refused)
    if store is not None and choice.entry is not None and not result.interrupted:
        store.put(problem.spec, choice.entry)
    return choice


def build(spec: KernelSpec, config: Mapping[str, Any]) -> Kernel:
    """Build the kernel that a sample of the nested search space names."""
    params = {key: value for key, value in config.items() if key != "_name"}
    implement = implement_named(config["_name"], spec.op)
    answer = implement.supports(spec)
    if not answer:
        raise SpartaError(message(f"{implement.name} cannot run {spec}: {answer.reason}", fix="choose another one"))
    return implement.build(spec, params)


def _starting_points(spec: KernelSpec) -> list[dict[str, Any]]:
    """Return each implement with its default parameters: what a search should not miss."""
    return [{"_name": implement.name, **implement.default(spec)} for implement in supported(spec)[0]]


def _callable(problem: Problem, kernel: Kernel) -> Callable[[], Tensor]:
    packed = () if problem.operand is None else kernel.pack(problem.operand)
    if not problem.backward:

        def call() -> Tensor:
            with torch.no_grad():
                return kernel.run(packed, *problem.inputs)

        return call

    # A tensor without dims is a number, such as a temperature, and is not trained.
    inputs = [
        t.detach().requires_grad_() if t is not None and t.dim() and t.is_floating_point() else t
        for t in problem.inputs
    ]
    varied = [t for t in inputs if t is not None and t.requires_grad]

    def call_with_gradients() -> Tensor:
        with torch.enable_grad():
            result = kernel.run(packed, *inputs)
            torch.autograd.grad(result, varied, torch.ones_like(result))
        return result.detach()

    return call_with_gradients


def _checked(problem: Problem, config: Mapping[str, Any]) -> Callable[[], Tensor]:
    """Return a candidate ready to run; raises PrunedTrial when it does not build or computes something else."""
    try:
        call = _callable(problem, build(problem.spec, config))
        check(call(), problem.expected, reduction=problem.reduction, what=config["_name"])
    except CheckError as error:
        raise PrunedTrial(f"wrong result: {str(error).splitlines()[0]}") from error
    except SpartaError as error:
        raise PrunedTrial(str(error)) from error
    return call


def _confirmed(
    problem: Problem, dense: Callable[[], Tensor], result: TuningResult, refused: Mapping[str, str]
) -> Choice:
    """Time the winner against dense once more, longer; dense unless it wins again."""
    best = result.best
    if best is None or best["_name"] == DENSE:
        why = "nothing was faster" if best is not None else "no candidate worked"
        again = compare({DENSE: dense}, warmup=2, max_seconds=_QUICK_SECONDS)[DENSE].median
        return Choice(DENSE, {}, f"dense: {why}", Entry(DENSE, {}, again, again), refused, result)
    times = compare({DENSE: dense, "winner": _checked(problem, best)}, warmup=5, max_seconds=_LONG_SECONDS)
    dense_time, time, gain = times[DENSE].median, times["winner"].median, times.speedup("winner")
    if gain < _MUST_WIN_BY:
        reason = f"dense: the best candidate ({best['_name']}) reached {gain:.2f}x"
        return Choice(DENSE, {}, reason, Entry(DENSE, {}, dense_time, dense_time), refused, result)
    params = {key: value for key, value in best.items() if key != "_name"}
    return Choice(
        best["_name"], params, f"{gain:.2f}x dense", Entry(best["_name"], params, time, dense_time), refused, result
    )

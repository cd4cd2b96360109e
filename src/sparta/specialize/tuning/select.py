"""The tuner: measure the candidates for one kernel spec, dense among them, and keep the fastest that is right.

Each candidate is built, checked against a float64 reference and timed interleaved with dense; a candidate that does not
compile or computes something else is a pruned trial, never a crash. Several are compiled at the same time, one is timed
at a time. The best few are put in order once more, and the first of them must beat dense by 3 % in a longer run, so
that neither luck nor a busy machine can choose. What a stored result says of dense is timed again before it is used.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from sparta.common.tuning import PrunedTrial, Trial, TuningResult, search
from sparta.errors import CheckError, SpartaError, message
from sparta.specialize.implement import Kernel, Support, implement_named, search_space, supported
from sparta.specialize.kernel_spec import KernelSpec
from sparta.specialize.tuning.alone import fault_alone, is_builtin
from sparta.specialize.tuning.rivals import DENSE, QUICK_SECONDS, Problem, Rivals, build, call_of
from sparta.specialize.tuning.roof import roof
from sparta.specialize.tuning.shipped import misfit, shipped
from sparta.specialize.tuning.significance import LEAST_GAIN, pairs_of, ranked, settled, timed
from sparta.specialize.tuning.store import Entry, TuningStore

__all__ = ["DENSE", "Choice", "Problem", "build", "choose", "right_choice", "tune_kernel"]

_SEARCH_SHARE = 0.75  # of the seconds; the rest is for the longer run
_FINALISTS, _CLOSE = 4, 1.3  # the best of a search are put in order once more: two, or four if so near to the first
_RUNNERS_UP = 2  # how many candidates may try to beat dense in the longer run
_NEARLY = 1.15  # times dense, measured briefly: near enough to be looked at again
_AS_CLEARLY = 0.85  # of the gain of a like problem
_LOOK_SHARE = 0.25  # of the seconds, for what won for a like problem
_MOST_COMPILERS = 4
_DRIFT, _SLACK = 2.0, 0.05  # how far dense may be from its stored time: a factor, and milliseconds of the host's own


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
        For each implement that cannot run the spec, why not.
    result
        All trials; None when the choice came from the store, the shipped table or a default.
    """

    implement: str
    params: Mapping[str, Any]
    reason: str
    entry: Entry | None = None
    refused: Mapping[str, Support] = field(default_factory=dict)
    result: TuningResult | None = None

    @property
    def config(self) -> dict[str, Any]:
        """The choice as the sample of the nested search space: what ``build`` takes."""
        return {"_name": self.implement, **self.params}

    def to_dict(self) -> dict[str, Any]:
        """Return the choice as JSON values, without the trials."""
        entry = None if self.entry is None else self.entry.to_dict()
        refused = {name: why.to_dict() for name, why in self.refused.items()}
        return {"config": self.config, "reason": self.reason, "entry": entry, "refused": refused}

    def __str__(self) -> str:
        params = ", ".join(f"{key}={value}" for key, value in self.params.items())
        return f"{self.implement}({params}): {self.reason}"


def choose(spec: KernelSpec, store: TuningStore | None = None) -> Choice:
    """Return the stored choice for `spec`, else that of the shipped table, else dense; measures nothing."""
    _, refused = supported(spec)
    entry = None if store is None else store.get(spec)
    if entry is not None and not misfit(spec, entry):  # entries may come from a stranger's export
        return Choice(entry.implement, entry.params, f"stored: {entry.speedup:.2f}x dense", entry, refused)
    guess = shipped(spec)
    if guess is None:
        return Choice(DENSE, {}, "not tuned", None, refused)
    reason = f"shipped table: {guess.speedup:.2f}x dense on another machine, not tuned here"
    return Choice(guess.implement, guess.params, reason, None, refused)


def right_choice(problem: Problem, choice: Choice) -> Choice:
    """Return a choice if it computes what is expected; else dense if that does, else the next implement that does.

    No kernel is trusted unchecked, a library's neither. The reason tells what was wrong; raises CheckError where no
    implement is right.
    """
    fault = _fault(problem, choice.config)
    if not fault:
        return choice
    able = sorted(supported(problem.spec)[0], key=lambda implement: implement.name != DENSE)
    for implement in able:
        params = implement.default(problem.spec)
        if not _fault(problem, {"_name": implement.name, **params}):
            reason = f"{choice.implement} is wrong here, {implement.name} runs instead ({fault})"
            return Choice(implement.name, params, reason, None, choice.refused)
    raise CheckError(
        message(f"no implement of {problem.spec} is right here: {fault}", fix="pass sample inputs as they are in use")
    )


def _fault(problem: Problem, config: Mapping[str, Any]) -> str:
    """Return in words why the kernel of a config is not right on a problem; nothing where it is."""
    try:
        problem.check(call_of(problem, build(problem.spec, config))(), config["_name"])
    except (SpartaError, RuntimeError) as error:
        return str(error).splitlines()[0]
    return ""


def tune_kernel(  # noqa: PLR0913 - the budgets and ways of one search
    problem: Problem,
    *,
    algo: str = "tpe",
    max_trials: int | None = 40,
    max_seconds: float | None = 10.0,
    seed: int = 0,
    store: TuningStore | None = None,
    progress: Callable[..., object] | bool | None = None,
    in_graphs: bool = False,
    isolated: bool = False,
    like: Choice | None = None,
) -> Choice:
    """Return the fastest implement and parameters for a problem.

    A stored result is taken if it is right and dense still takes the time it took then, within a factor of 2; else it
    is measured again. Whatever wins the search must then beat dense by 3 % (see
    :mod:`sparta.specialize.tuning.significance`); otherwise dense runs. What could not be measured well is neither
    stored nor given a number. Dense is checked as well: where it is wrong, the fastest candidate that is right runs,
    and the reason says so. Interrupting keeps the best so far.

    Parameters
    ----------
    algo
        ``'grid'``, ``'rand'``, ``'tpe'`` or ``'evolution'``.
    max_trials, max_seconds
        Budgets: trials of the search, seconds for all of it. What is under way when the time is up is finished.
    store
        Where results are looked up and kept; None keeps nothing.
    progress
        True for a view on stderr, a callable that gets each trial and the best so far, None or False for nothing.
    in_graphs
        On CUDA, time kernels as CUDA graphs replay them, with operands that are not in the cache: without the host's
        share, as in a model that is replayed whole.
    isolated
        Try what others have registered in a process of its own before it is timed here: see
        :mod:`sparta.specialize.tuning.alone`.
    like
        What won for a problem of nearly the same sizes. Where it is right here and beats dense about as clearly, there
        is no search. The look at it takes a quarter of the time at most; if others have registered it, there is none
        with `isolated`.
    """
    stored = choose(problem.spec, store)
    deadline = math.inf if max_seconds is None else perf_counter() + max_seconds
    rivals = Rivals.of(problem, in_graphs=in_graphs and problem.spec.device == "cuda" and not problem.backward)
    if stored.entry is not None and not _fault(problem, stored.config) and _still_holds(rivals, stored.entry):
        return stored
    alike = None if like is None else _as_like(rivals, like, stored.refused, deadline, isolated=isolated)
    if alike is not None:
        if store is not None and alike.entry is not None:
            store.put(problem.spec, alike.entry)
        return alike

    def objective(config: Mapping[str, Any], kernel: Kernel) -> float:
        if config["_name"] == DENSE:
            if rivals.fault:
                raise PrunedTrial(f"wrong result: {rivals.fault}")
            return 1.0
        functions = {DENSE: rivals.dense, "candidate": rivals.candidate(config, kernel)}
        times = timed(functions, warmup=2, iters=50, seconds=QUICK_SECONDS)
        return 1.0 / pairs_of(times).likely_gain

    starting = _starting_points(problem.spec)
    result = search(
        search_space(problem.spec),
        objective,
        algo=algo,
        max_trials=max_trials,
        max_seconds=None if max_seconds is None else _SEARCH_SHARE * max(1e-3, deadline - perf_counter()),
        seed=seed,
        initial=starting,
        progress=progress or None,
        prepare=_compiler(problem, isolated=isolated),
        workers=min(_MOST_COMPILERS, os.cpu_count() or 1),
    )
    all_had_a_turn = len(result.trials) >= min(len(starting), max_trials or len(starting))
    choice = _confirmed(rivals, result, stored.refused, deadline, hurried=not all_had_a_turn)
    interrupted = choice.result is not None and choice.result.interrupted
    if store is not None and choice.entry is not None and not interrupted:
        store.put(problem.spec, choice.entry)
    return choice


def _still_holds(rivals: Rivals, entry: Entry) -> bool:
    """Return whether dense takes about the time that an entry says, which was measured at a size of the same bucket.

    On CUDA, where events time the device and not the machine around it, an entry is believed.
    """
    spec = rivals.problem.spec
    if spec.device == "cuda":
        return True
    now = rivals.dense_times().median
    grown = _size(spec) / entry.size if entry.size else 1.0  # a call may take as much longer, or as long as it did
    low = entry.dense_milliseconds * min(1.0, grown) / _DRIFT - _SLACK
    return low <= now <= entry.dense_milliseconds * max(1.0, grown) * _DRIFT + _SLACK


def _as_like(
    rivals: Rivals, like: Choice, refused: Mapping[str, Support], deadline: float, *, isolated: bool
) -> Choice | None:
    """Return what won for a like problem, timed on this one; None where it does not win here, or by much less."""
    spec = rivals.problem.spec
    if rivals.fault or like.entry is None or like.implement == DENSE or misfit(spec, like.entry):
        return None
    if isolated and not is_builtin(implement_named(like.implement, spec.op)):
        return None
    begin = perf_counter()
    end = begin + _LOOK_SHARE * (deadline - begin)  # a search comes after it where it does not win
    try:
        candidate = rivals.candidate(like.config, build(spec, like.config))
        verdict = settled(rivals.dense, candidate, end - perf_counter(), roof(spec))
    except (PrunedTrial, SpartaError, RuntimeError):
        return None
    if not (verdict.won and verdict.stable and verdict.gain >= _AS_CLEARLY * like.entry.speedup):
        return None
    dense_time = verdict.dense_milliseconds / rivals.calls
    entry = Entry(like.implement, like.params, dense_time / verdict.gain, dense_time, _size(spec))
    reason = f"{verdict.gain:.2f}x dense, by what won for nearly the same sizes"
    return Choice(entry.implement, entry.params, reason, entry, refused)


def _size(spec: KernelSpec) -> int:
    """Return the product of the dynamic sizes of a spec."""
    return math.prod(max(1, tesa.shape[dim]) for tesa in spec.operands.values() for dim in tesa.dynamic)


def _starting_points(spec: KernelSpec) -> list[dict[str, Any]]:
    """Return what a search should not miss: what the shipped table has, and each implement with its defaults.

    Dense ones come last, because a search that runs out of time ends with the first result.
    """
    guess = shipped(spec)
    names = (DENSE, f"{DENSE}-")  # also in fewer bits, such as dense-fp8
    implements = sorted(supported(spec)[0], key=lambda each: (each.name == DENSE, each.name.startswith(names)))
    defaults = [{"_name": implement.name, **implement.default(spec)} for implement in implements]
    return defaults if guess is None else [guess.config, *(point for point in defaults if point != guess.config)]


def _compiler(problem: Problem, *, isolated: bool) -> Callable[[Mapping[str, Any]], Kernel]:
    """Return what compiles one candidate, in any thread."""
    device = torch.device("cuda", torch.cuda.current_device()) if problem.spec.device == "cuda" else None

    def compile_one(config: Mapping[str, Any]) -> Kernel:
        if isolated and not is_builtin(implement_named(config["_name"], problem.spec.op)):
            fault = fault_alone(problem, config)
            if fault:
                raise PrunedTrial(fault)
        try:
            kernel = build(problem.spec, config)
            if implement_named(config["_name"], problem.spec.op).first_run_compiles:
                # The current device is each thread's own.
                with nullcontext() if device is None else torch.cuda.device(device):
                    call_of(problem, kernel)()
        except SpartaError as error:
            raise PrunedTrial(str(error)) from error
        return kernel

    return compile_one


def _confirmed(
    rivals: Rivals, result: TuningResult, refused: Mapping[str, Support], deadline: float, *, hurried: bool
) -> Choice:
    """Put the best few in order once more and time them against dense, longer, until one wins; dense if none does.

    After a hurried search, in which some implements had no turn, and after unstable timings that is not worth keeping.
    """
    complete = sorted((t.value, t.number, t) for t in result.trials if t.value is not None)
    if rivals.fault:
        return _instead_of_dense(rivals, [trial for _, _, trial in complete], result, refused)
    hopeful = _hopeful(complete)
    dense_time, best, stable, spec = 0.0, "", True, rivals.problem.spec
    doubtful: Choice | None = None  # the first that won, by how much is not known
    try:
        for trial, candidate in _finalists(rivals, hopeful, deadline)[:_RUNNERS_UP]:
            try:
                verdict = settled(rivals.dense, candidate, deadline - perf_counter(), roof(spec))
            except (SpartaError, RuntimeError):
                continue  # it worked once, and is not to be relied on
            stable, gain = stable and verdict.stable, verdict.gain
            dense_time = verdict.dense_milliseconds / rivals.calls
            best = best or f"({trial.params['_name']}) reached {gain:.2f}x"
            hurried |= not verdict.decided and perf_counter() >= deadline
            if verdict.won and verdict.stable:
                entry = Entry(trial.params["_name"], _params(trial), dense_time / gain, dense_time, _size(spec))
                return Choice(entry.implement, entry.params, f"{gain:.2f}x dense", entry, refused, result)
            if verdict.won:
                doubtful = doubtful or _unstable(trial, result, refused)
    except KeyboardInterrupt:
        return _unconfirmed(hopeful[0], replace(result, interrupted=True), refused)
    if not stable:
        return doubtful or Choice(DENSE, {}, "dense: timing unstable", None, refused, result)
    why = "nothing was faster" if complete else "no candidate worked"
    reason = f"dense: the best candidate {best}" if best else f"dense: {why}"
    if hurried:  # nothing that is worth keeping: more time may tell
        return Choice(DENSE, {}, f"{reason} when the time was up", None, refused, result)
    return Choice(DENSE, {}, reason, _dense_entry(rivals, dense_time), refused, result)


def _hopeful(complete: Sequence[tuple[float, int, Trial]]) -> list[Trial]:
    """Return the best of a search: what was faster than dense, and up to two that were nearly so: it may be chance."""
    others = [(ratio, trial) for ratio, _, trial in complete if trial.params["_name"] != DENSE]
    faster = [each for place, each in enumerate(others) if each[0] < (_NEARLY if place < _RUNNERS_UP else 1.0)]
    return [t for ratio, t in faster[:_FINALISTS] if ratio <= _CLOSE * faster[0][0] or ratio <= faster[1][0]]


def _dense_entry(rivals: Rivals, milliseconds: float) -> Entry:
    """Return the entry of dense, which is timed if no longer run has done so."""
    if not milliseconds:
        milliseconds = rivals.dense_times().median / rivals.calls
    return Entry(DENSE, {}, milliseconds, milliseconds, _size(rivals.problem.spec))


def _unstable(trial: Trial, result: TuningResult, refused: Mapping[str, Support]) -> Choice:
    return Choice(trial.params["_name"], _params(trial), "faster than dense, timing unstable", None, refused, result)


def _finalists(rivals: Rivals, hopeful: Sequence[Trial], deadline: float) -> list[tuple[Trial, Callable[[], Tensor]]]:
    """Return those of the best that still work, in the order that measuring them side by side gives."""
    found: list[tuple[Trial, Callable[[], Tensor]]] = []
    for trial in hopeful if perf_counter() < deadline else hopeful[:_RUNNERS_UP]:
        with suppress(SpartaError, RuntimeError):
            found.append((trial, rivals.candidate(trial.params, build(rivals.problem.spec, trial.params))))
    with suppress(SpartaError, RuntimeError):  # what fails is found out when it is confirmed
        order = ranked(rivals.dense, [candidate for _, candidate in found], deadline - perf_counter())
        return [found[number] for number in order]
    return found


def _instead_of_dense(
    rivals: Rivals, best: Sequence[Trial], result: TuningResult, refused: Mapping[str, Support]
) -> Choice:
    """Return the first of the candidates that is right, where dense is not; it is not kept: another torch may be."""
    for trial in best:
        if not _fault(rivals.problem, trial.params):
            reason = f"dense is wrong here, the fastest that is right runs ({rivals.fault})"
            return Choice(trial.params["_name"], _params(trial), reason, None, refused, result)
    return replace(right_choice(rivals.problem, Choice(DENSE, {}, "", None, refused)), result=result)


def _unconfirmed(best: Trial, result: TuningResult, refused: Mapping[str, Support]) -> Choice:
    """Return the best of a search that was interrupted before it could be timed longer; dense if it won by little."""
    gain = 1.0 / best.value if best.value else 0.0
    if gain < LEAST_GAIN:
        return Choice(DENSE, {}, "dense: interrupted", None, refused, result)
    return Choice(
        best.params["_name"], _params(best), f"{gain:.2f}x dense, unconfirmed (interrupted)", None, refused, result
    )


def _params(trial: Trial) -> dict[str, Any]:
    return {key: value for key, value in trial.params.items() if key != "_name"}

"""`plan`: a speed-up in, a sparsity plan out, measured on this machine.

The options of each layer are timed and costed, the best combination is computed exactly, compiled and measured as a
whole, and the table corrected until the asked speed-up is met within 3 %, or the plan says that it cannot be.
"""

from __future__ import annotations

import copy
import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from sparta.common.progress import Progress
from sparta.compiler.session import Session, shown
from sparta.errors import ArgumentError, ValueRangeError, message
from sparta.oneshot.calibrate import listed, moved, quiet
from sparta.oneshot.methods import find_method
from sparta.oneshot.resume import fingerprint
from sparta.oneshot.targets import find_targets
from sparta.planning.bench import Bench, CompilerBench
from sparta.planning.layers import groups_of
from sparta.planning.notebook import Notebook, Remembering
from sparta.planning.options import CHANNELS, options_of, precisions_of
from sparta.planning.result import Goal, SparsityPlan
from sparta.planning.search import Search
from sparta.planning.table import Table, picked
from sparta.propagation.capture import call_arguments
from sparta.tesa.patterns import Pattern

__all__ = ["plan", "plan_with"]

Metric = Callable[[nn.Module], float]
_METRIC_POINTS = 4
_FASTEST = 1000.0  # times: what is beyond is a slip of the keyboard


def plan(  # noqa: PLR0913 - one verb, and all but three of its arguments by name
    model: nn.Module,
    example_inputs: Any,
    data: Iterable[Any] | None = None,
    *,
    speedup: float | None = None,
    latency_ms: float | None = None,
    memory_mb: float | None = None,
    max_loss: float | None = None,
    patterns: Sequence[str | Pattern] | str | Pattern = "auto",
    precisions: Sequence[str] | str | None = "auto",
    device: torch.device | str | None = None,
    budget_s: float | None = None,
    method: str = "alps",
    metric: Metric | None = None,
    include: Sequence[str] | str | None = None,
    ignore: Sequence[str] | str | None = None,
    progress: Progress | bool | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
) -> SparsityPlan:
    """Find which layers to prune, how much and in which pattern, for a speed-up on this machine.

    The model is not changed; :meth:`SparsityPlan.apply` prunes it. Ctrl-C keeps the best so far.

    Parameters
    ----------
    example_inputs
        What the model is measured with: a tensor, a tuple of arguments or a dict of keyword arguments.
    data
        Batches for calibration, as in :func:`sparta.prune`. None takes the example, which is a poor substitute.
    speedup, latency_ms, memory_mb, max_loss
        The goal, one of them: so many times faster than the model as given; a latency; the megabytes of all weights of
        the compiled model; the fastest whose outputs change by no more than this share of their norm, or, with a
        `metric`, whose metric falls by no more than this.
    patterns
        What layers may become: ``"auto"`` for what kernels of the device are good at, or patterns, with ``"channels"``
        for whole inputs, neurons and attention heads.
    precisions
        What layers may be rounded to, dense or in a pattern: ``"auto"`` for 8 bits where the device has kernels for
        them (``"int8"`` on the CPU for float32, ``"fp8"`` on CUDA for 16 bits); ``["int8", "bf16"]`` for 16 bits as
        well, where the model is in float32 and the device computes in bfloat16; None for none.
        :meth:`SparsityPlan.compile` rounds.
    device
        Where to measure; None: where the model is.
    budget_s
        Seconds for measuring layers and whole models; estimating what each option costs in accuracy comes on top. What
        is in the tuning store costs next to nothing.
    method
        How :meth:`SparsityPlan.apply` prunes.
    metric
        A function of a model, larger is better; it is evaluated for the dense model, the plan and some points of the
        curve.
    include, ignore
        As in :func:`sparta.prune`.
    progress
        A callable that gets a :class:`~sparta.common.progress.Step` for each thing that is done; True for lines on
        stderr; None for stderr if it is a terminal.
    checkpoint
        A folder for what was measured. A run that was killed goes on from there.

    Examples
    --------
    >>> _ = torch.manual_seed(0)
    >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).eval()
    >>> found = plan(model, torch.randn(4, 64), [torch.randn(32, 64)], max_loss=0.1, patterns="4x1", budget_s=1)
    >>> found.loss <= 0.1
    True
    """
    goal = _goal(speedup, latency_ms, memory_mb, max_loss, metric=metric is not None)
    if not isinstance(model, nn.Module):
        raise ArgumentError(message(f"model is a {type(model).__name__}", "a torch.nn.Module"))
    find_method(method)
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    session = Session(budget_s=budget_s, show=shown(progress))
    placed = copy.deepcopy(model).eval()
    if device is not None:
        placed.to(device)
    where = next((p.device for p in placed.parameters()), torch.device("cpu"))
    example = moved(example_inputs, where)
    chosen = {target.name: target for target in find_targets(placed, include, ignore)}
    bench = CompilerBench(placed, example, chosen, session)
    with session.showing():
        return plan_with(
            bench,
            session,
            (model, placed),
            example,
            data,
            goal,
            patterns=patterns,
            precisions=precisions_of(precisions, where.type, dtypes),
            method=method,
            metric=metric,
            include=include,
            ignore=ignore,
            checkpoint=checkpoint,
        )


def plan_with(  # noqa: PLR0913 - as above
    bench: Bench,
    session: Session,
    models: tuple[nn.Module, nn.Module],
    example: Any,
    data: Iterable[Any] | None,
    goal: Goal,
    *,
    patterns: Sequence[str | Pattern] | str | Pattern = "auto",
    precisions: Sequence[str] = (),
    method: str = "alps",
    metric: Metric | None = None,
    include: Sequence[str] | str | None = None,
    ignore: Sequence[str] | str | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
) -> SparsityPlan:
    """Plan with a bench of the caller's; `models` are the user's and the copy that is looked at."""
    started = time.perf_counter()
    model, placed = models
    where = next((p.device for p in placed.parameters()), torch.device("cpu"))
    options = options_of(patterns, bench.device)
    targets = {target.name: target for target in find_targets(placed, include, ignore)}
    given = listed([example] if data is None else data)
    batches = [moved(batch, where) for batch in given]
    asked = f"{sorted(options)} {sorted(precisions)} {method} {bench.device}"
    question = fingerprint(list(targets.values()), [example, *batches], asked) if checkpoint is not None else ""
    notebook = Notebook.opened(checkpoint, question)
    with quiet(placed):
        groups, notes = groups_of(placed, list(targets.values()), batches[0], example, channels=CHANNELS in options)
        search = Search(
            placed,
            targets,
            groups,
            options,
            Remembering(bench, notebook),
            notebook,
            precisions=precisions,
            room=lambda: session.left > 0,
            room_for_layers=lambda: session.left_for_layers > 0,
            show=session.show,
            uncounted=session.uncounted,
            enough=lambda milliseconds: _is_met(goal, milliseconds, _megabytes(placed)),
            for_speed=goal.speedup is not None or goal.latency_ms is not None,
            begin=lambda: session.begin_measuring(0),  # what was captured and loaded by now cannot be cut short
            one_call=lambda: _one_call(placed, example),
            notes=notes,
        )
        if data is None:
            search.notes.append("no data: layers were calibrated on the example inputs alone")
        table = search.filled(batches, method, _megabytes(placed))
    known: dict[str, Any] = {"table": table, "model": model, "data": given, "method": method, "notes": search.notes}
    result = SparsityPlan(goal=goal, assignment={}, whole=None, met=False, reason="", example=example, **known)
    _answer(result, search, metric)
    result.seconds = time.perf_counter() - started
    return result


def _answer(result: SparsityPlan, search: Search, metric: Metric | None) -> None:
    """Find what layers become, and put it into the plan; the metric, where there is one, is evaluated."""
    goal = result.goal
    if goal.max_loss is not None and metric is not None:
        goal = Goal(max_loss=_loss_by_metric(result, metric))
    with quiet(search.model):
        result.assignment, result.whole, result.met, result.reason = search.answered(result.table, goal)
    result.points, result.loss = search.points, result.table.loss(result.assignment)
    if metric is not None and not search.interrupted:
        _evaluate(result, metric)


def _goal(
    speedup: float | None, latency_ms: float | None, memory_mb: float | None, max_loss: float | None, *, metric: bool
) -> Goal:
    asked = {"speedup": speedup, "latency_ms": latency_ms, "memory_mb": memory_mb, "max_loss": max_loss}
    given = {key: value for key, value in asked.items() if value is not None}
    if len(given) != 1:
        raise ValueRangeError(
            message(
                f"{len(given)} goals: {', '.join(given) or 'none'}",
                "one of speedup, latency_ms, memory_mb, max_loss",
                "pass speedup=2.0",
            )
        )
    ((key, value),) = given.items()
    low = 1.0 if key == "speedup" else 0.0
    high = _FASTEST if key == "speedup" else 1.0 if key == "max_loss" and not metric else math.inf
    if isinstance(value, bool) or not isinstance(value, int | float) or not low < value <= high or math.isinf(value):
        most = "" if math.isinf(high) else f" and at most {high:g}"
        raise ValueRangeError(message(f"{key}={value!r}", f"a number above {low:g}{most}"))
    return Goal(**{key: float(value)})


def _is_met(goal: Goal, milliseconds: float, megabytes: float) -> bool:
    """Whether the model as given, which takes so much, is what was asked, so that no option has to be measured."""
    fast = goal.latency_ms is not None and milliseconds <= goal.latency_ms
    return fast or (goal.memory_mb is not None and megabytes <= goal.memory_mb)


def _one_call(model: nn.Module, example: Any) -> float:
    """Return the milliseconds of one call of a model."""
    args, kwargs = call_arguments(example)
    before = time.perf_counter()
    with torch.no_grad():
        model(*args, **kwargs)
    if next((p.is_cuda for p in model.parameters()), False):
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - before)


def _megabytes(model: nn.Module) -> float:
    unique = {t.data_ptr(): t.numel() * t.element_size() for t in [*model.parameters(), *model.buffers()]}
    return sum(unique.values()) / 1e6


def _pruned_metric(result: SparsityPlan, metric: Metric) -> float:
    """Return the metric of a copy that is pruned as planned."""
    known = result.metric_of(result.assignment)
    if known is not None:
        return known
    model = copy.deepcopy(result.model)
    met, result.met = result.met, True
    try:
        result.apply(model)
    finally:
        result.met = met
    value = result.judged(model, metric)
    result.metrics.append((result.assignment, value))
    return value


def _places(table: Table) -> list[int]:
    """Return some points of the front, evenly spaced in time, the fastest first."""
    front, _ = table.front()
    low, high = float(front.times[0]), float(front.times[-1])
    steps = [low + (high - low) * i / (_METRIC_POINTS + 1) for i in range(_METRIC_POINTS + 1)]
    return sorted({place for step in steps if (place := front.within(step)) is not None})


def _evaluate(result: SparsityPlan, metric: Metric) -> None:
    """Evaluate the metric on the dense model, the plan and some points of the curve."""
    if result.dense_metric is None:
        result.dense_metric = float(metric(result.model))
    if result.assignment:
        _pruned_metric(result, metric)
    front, bundles = result.table.front()
    chosen = result.assignment
    for place in _places(result.table):
        result.assignment = picked(bundles, front.chosen(place))
        if result.assignment:
            _pruned_metric(result, metric)
    result.assignment = chosen
    result.forget()


def _loss_by_metric(result: SparsityPlan, metric: Metric) -> float:
    """Return the largest estimated loss at which the metric falls by no more than was asked, by bisection."""
    result.dense_metric = float(metric(result.model))
    front, bundles = result.table.front()
    places = _places(result.table)
    low, high = 0, len(places)  # the first that is good enough; fast ones stand first
    while low < high:
        middle = (low + high) // 2
        result.assignment = picked(bundles, front.chosen(places[middle]))
        fallen = result.dense_metric - (_pruned_metric(result, metric) if result.assignment else result.dense_metric)
        if fallen <= (result.goal.max_loss or 0.0):
            high = middle
        else:
            low = middle + 1
    result.forget()
    return 0.0 if low == len(places) else math.sqrt(float(front.costs[places[low]])) * (1 + 1e-9)

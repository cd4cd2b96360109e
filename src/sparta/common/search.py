"""The search: try points of a space until a budget is spent, and keep what every one of them came to.

The specialiser calls :func:`search` with an objective that measures one candidate kernel. Nothing a candidate does can
end the search. It may be pruned, crash or return nonsense, and is then a trial with a reason; only a spent budget, an
exhausted space or the user's interrupt ends it, and the best so far is always handed over.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal

from sparta.common.ledger import Ticket
from sparta.common.progress import Progress, Step, progress_view
from sparta.common.result import NoMoreTrial, PrunedTrial, Trial, TrialState, TuningResult
from sparta.common.sampler import Tuner
from sparta.common.space import Sample, Space, normalize
from sparta.errors import ValueRangeError, message

if TYPE_CHECKING:
    import optuna

__all__ = ["search"]


def search(  # noqa: PLR0913 - one call says all there is to say about a search
    space: Space,
    objective: Callable[..., float],
    *,
    algo: str = "tpe",
    max_trials: int | None = None,
    max_seconds: float | None = None,
    seed: int = 0,
    storage: str | Path | optuna.storages.BaseStorage | None = None,
    study_name: str | None = None,
    progress: Progress | Literal[True] | None = None,
    initial: Iterable[Sample] = (),
    prepare: Callable[[Sample], object] | None = None,
    workers: int = 1,
) -> TuningResult:
    """Search a space for the point with the lowest objective.

    Parameters
    ----------
    space
        A :class:`~sparta.common.space.TunableItemCfg`, or a dict of them. Every point of it is tried once at most; the
        search ends when all were.
    objective
        Called with a sample, and with what `prepare` made of it if there is a `prepare`; returns a float, lower is
        better. It raises :class:`~sparta.common.result.PrunedTrial` for a candidate of no use. Any other exception,
        and a value that is not a finite number, is a failed trial.
    algo
        ``'grid'``, ``'rand'``, ``'tpe'`` or ``'evolution'``.
    max_trials
        The most trials of the whole study: over all alternatives of the space, with those of earlier runs and of other
        machines. Needed, unless there is `max_seconds` or the space is finite.
    max_seconds
        No point is chosen after this long, except the very first; those already prepared are measured until one is
        complete.
    seed
        Same seed, same objective: same trials. Give machines that share a study different seeds.
    storage, study_name
        Where the study is kept: an Optuna storage or its URL, or the path of a journal file, and a name. A study that
        is there is continued. In memory by default. Processes of one machine share a journal file best (SQLite locks
        no rows, so they would repeat some of each other's trials), machines a server's database.
    progress
        A callable that gets a :class:`~sparta.common.progress.Step` for each finished
        :class:`~sparta.common.result.Trial`; True for a view on stderr.
    initial
        Samples to try first, such as the best of an earlier search.
    prepare
        Makes what the objective needs of a sample, such as a compiled kernel; what it raises counts as raised by the
        objective.
    workers
        How many samples are prepared at the same time, by threads. Measurements have the machine to themselves:
        the objective is called for one sample after the other, and never while something is prepared.

    Returns
    -------
    TuningResult
        With ``interrupted=True`` if a KeyboardInterrupt ended the search.

    Examples
    --------
    >>> from sparta.common.space import TunableItemCfg
    >>> space = {'x': TunableItemCfg('randint', [0, 10]), 'y': TunableItemCfg('choice', [1, 2, 3])}
    >>> result = search(space, lambda p: (p['x'] - 7) ** 2 + p['y'], algo='evolution')
    >>> result.best, result.best_value, len(result.trials)
    ({'x': 7, 'y': 1}, 1.0, 30)
    """
    _check_arguments(max_trials, max_seconds, prepare, workers)
    with contextlib.ExitStack() as stack:
        tuner = Tuner(space, algo, seed=seed, storage=storage, study_name=study_name)
        stack.callback(tuner.close)
        if tuner.size is None and max_trials is None and max_seconds is None:
            given = "a search without an end: the space is continuous, and there is no budget"
            raise ValueRangeError(message(given, "max_trials, max_seconds or both"))
        first = [normalize(tuner.space, sample) for sample in initial]
        limits = [limit for limit in (max_trials, tuner.size) if limit is not None]
        total = min(limits, default=None)
        show = stack.enter_context(progress_view(progress, total))
        deadline = math.inf if max_seconds is None else perf_counter() + max_seconds
        try:
            while not tuner.trials or perf_counter() < deadline:
                room = workers if max_trials is None else min(workers, max_trials - len(tuner.trials))
                tickets = list(islice(_tickets(tuner, first), max(room, 0)))
                if not tickets:
                    break
                for ticket, prepared in zip(tickets, _prepare_all(prepare, tickets), strict=True):
                    if perf_counter() >= deadline and tuner.best is not None:
                        break
                    trial = _measure(tuner, ticket, objective, prepared)
                    show(Step(f"trial {trial.number + 1}" + ("" if total is None else f"/{total}"), trial))
        except KeyboardInterrupt:
            return TuningResult(tuner.trials, interrupted=True)
        return TuningResult(tuner.trials)


@dataclass(frozen=True)
class _Attempt:
    """What came of calling one function for one candidate."""

    result: Any
    state: TrialState
    seconds: float
    reason: str = ""


def _attempt(function: Callable[..., Any], *arguments: object) -> _Attempt:
    """Call a function; whatever it raises, short of an interrupt, becomes a state and a reason."""
    start = perf_counter()
    try:
        result = function(*arguments)
    except PrunedTrial as verdict:
        return _Attempt(None, "pruned", perf_counter() - start, str(verdict) or "pruned without a reason")
    except Exception as error:  # noqa: BLE001 - a candidate may fail in any way, and the search goes on
        return _Attempt(None, "failed", perf_counter() - start, f"{type(error).__name__}: {error}")
    return _Attempt(result, "complete", perf_counter() - start)


def _tickets(tuner: Tuner, first: list[Sample]) -> Iterator[Ticket]:
    """Yield points to try, those in `first` before all others, until none is left; empties `first` on the way."""
    while first:
        ticket = tuner.ask_for(first.pop(0))
        if ticket is not None:
            yield ticket
    with contextlib.suppress(NoMoreTrial):
        while True:
            yield tuner.ask()


def _prepare_all(prepare: Callable[[Sample], object] | None, tickets: list[Ticket]) -> list[_Attempt | None]:
    """Prepare all candidates at the same time; returns when the last one is done, so that measuring is undisturbed."""
    if prepare is None:
        return [None] * len(tickets)
    samples = [ticket.sample for ticket in tickets]
    if len(samples) == 1:
        return [_attempt(prepare, samples[0])]
    with ThreadPoolExecutor(len(samples), thread_name_prefix="sparta-prepare") as pool:
        return list(pool.map(partial(_attempt, prepare), samples))


def _measure(tuner: Tuner, ticket: Ticket, objective: Callable[..., float], prepared: _Attempt | None) -> Trial:
    """Call the objective for one candidate, unless preparing it failed, and write down the outcome."""
    if prepared is None:
        attempt = _attempt(lambda sample: float(objective(sample)), ticket.sample)
    elif prepared.state == "complete":
        attempt = _attempt(lambda sample: float(objective(sample, prepared.result)), ticket.sample)
    else:
        return tuner.tell(ticket, prepared.state, seconds=prepared.seconds, reason=prepared.reason)
    seconds = attempt.seconds + (prepared.seconds if prepared else 0.0)
    if attempt.state == "complete" and not math.isfinite(attempt.result):
        return tuner.tell(ticket, "failed", seconds=seconds, reason=f"the value is {attempt.result}")
    return tuner.tell(ticket, attempt.state, value=attempt.result, seconds=seconds, reason=attempt.reason)


def _check_arguments(
    max_trials: int | None, max_seconds: float | None, prepare: Callable[[Sample], object] | None, workers: int
) -> None:
    for name, count in (("max_trials", max_trials), ("workers", workers)):
        if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
            raise ValueRangeError(message(f"{name} is {count!r}", "an integer, 1 or more"))
    if max_seconds is not None and not max_seconds > 0:
        raise ValueRangeError(message(f"max_seconds is {max_seconds!r}", "a number above 0, or None for no limit"))
    if workers > 1 and prepare is None:
        fix = "move compilation from the objective into prepare, or leave workers at 1"
        raise ValueRangeError(message(f"{workers} workers and nothing to prepare", "workers with prepare", fix))

"""The search: try points of a space until a budget is spent, and keep what every one of them came to.

The specialiser calls :func:`search` with an objective that measures one candidate kernel. The one idea to know: nothing
a candidate does can end the search. It may be pruned, crash or return nonsense, and is then a trial with a reason;
only a spent budget, an exhausted space or the user's interrupt ends it, and the best so far is always handed over.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from sparta.common.ledger import Ticket
from sparta.common.progress import Progress, progress_view
from sparta.common.result import NoMoreTrial, PrunedTrial, Trial, TrialState, TuningResult
from sparta.common.space import Sample, Space, normalize
from sparta.common.tuner import Tuner
from sparta.errors import ValueRangeError, message

if TYPE_CHECKING:
    import optuna

__all__ = ["search"]

_NOTHING = object()


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
    progress: Progress | bool | None = None,
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
        No trial begins after this long; but one trial is always completed if any can be.
    seed
        Same seed, same objective: same trials. Give machines that share a study different seeds.
    storage, study_name
        Where the study is kept: an Optuna storage or its URL, or the path of a journal file, and a name. A study that
        is there is continued. In memory by default.
    progress
        A callable that gets each finished :class:`~sparta.common.result.Trial` and the best so far; True for a view on
        stderr.
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
    _check_budget(max_trials, max_seconds, workers, prepare)
    with contextlib.ExitStack() as stack:
        tuner = Tuner(space, algo, seed=seed, storage=storage, study_name=study_name)
        stack.callback(tuner.close)
        if tuner.size is None and max_trials is None and max_seconds is None:
            given = "a search without an end: the space is continuous, and there is no budget"
            raise ValueRangeError(message(given, "max_trials, max_seconds or both"))
        totals = [total for total in (max_trials, tuner.size) if total is not None]
        run = _Run(
            tuner=tuner,
            objective=objective,
            prepare=prepare,
            deadline=math.inf if max_seconds is None else perf_counter() + max_seconds,
            show=stack.enter_context(progress_view(progress, min(totals, default=None))),
        )
        first = [normalize(tuner.space, sample) for sample in initial]
        try:
            for batch in run.batches(first, math.inf if max_trials is None else max_trials, workers):
                run.measure(batch)
        except KeyboardInterrupt:
            return TuningResult(tuner.trials, interrupted=True)
        return TuningResult(tuner.trials)


@dataclass
class _Run:
    """A search under way."""

    tuner: Tuner
    objective: Callable[..., float]
    prepare: Callable[[Sample], object] | None
    deadline: float
    show: Progress

    def batches(self, first: list[Sample], max_trials: float, workers: int) -> Iterator[list[_Candidate]]:
        """Yield the candidates, as many as are prepared at the same time, until a budget or the space is spent."""
        waiting = iter(first)
        while not self.late:
            room = min(workers, max_trials - len(self.tuner.trials))
            tickets: list[Ticket] = []
            with contextlib.suppress(NoMoreTrial):
                while len(tickets) < room:
                    ticket = next(filter(None, map(self.tuner.ask_for, waiting)), None)
                    tickets.append(ticket or self.tuner.ask())
            if not tickets:
                return
            yield self._prepared(tickets, workers)

    @property
    def late(self) -> bool:
        return perf_counter() >= self.deadline

    def measure(self, batch: list[_Candidate]) -> None:
        """Call the objective for each candidate; those that are left when time is up stay untried."""
        for candidate in batch:
            best = TuningResult(self.tuner.trials).best_trial
            if self.late and best is not None:
                return
            trial = self._measured(candidate)
            ...

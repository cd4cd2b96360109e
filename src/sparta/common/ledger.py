"""The ledger of a search: an Optuna study that keeps which points were asked for, and what became of each.

Samplers (:mod:`sparta.common.sampler`) decide what to try and write it here; the study may live in memory, in a file or
in a database that many machines share. The study is the only truth. Points already tried are read from it before each
new one, so a resumed search and a search on another machine are the same case.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from sparta.common.domains import Choices, Integers, Interval, Scalar, Steps
from sparta.common.result import Trial, TrialState
from sparta.common.space import Sample, Space, TunableItemCfg, coordinates, key_of, to_json, walk
from sparta.errors import MissingPackageError, ValueRangeError, message

if TYPE_CHECKING:
    import optuna

__all__ = ["Direction", "Key", "Ledger", "Ticket", "quiet_optuna"]

Key = frozenset[tuple[str, object]]
Direction = Literal["minimize", "maximize"]

_ATTRIBUTE = "sparta"  # of a trial: state, seconds, reason; of a study: its space
_POINT = "sparta point"  # of a trial that was chosen, not sampled: all its values, there from its first moment on
_NOT_TRIED = ("duplicate", "abandoned")
_REASON_LIMIT = 2000  # a compiler's complaint can be longer than a database's text column


@contextlib.contextmanager
def quiet_optuna() -> Iterator[None]:
    """Silence Optuna's log lines and its notes about experimental arguments; both are as before afterwards."""
    try:
        import optuna
    except ImportError as error:
        raise MissingPackageError(message("tuning needs the package optuna", fix="pip install optuna")) from error

    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(verbosity)


@dataclass(frozen=True)
class Ticket:
    """A point that was asked for and is not finished: what to try, and the study's trial that stands for it."""

    sample: Sample
    picks: dict[str, Scalar]
    trial: optuna.trial.Trial

    @property
    def key(self) -> Key:
        """The point as sets of points have it."""
        return key_of(self.picks)


class Ledger:
    """An Optuna study over one space.

    Parameters
    ----------
    space
        What may be tried.
    sampler
        Makes the sampler that :meth:`suggest` asks, given the number of trials there are.
    direction
        ``'minimize'`` or ``'maximize'``.
    storage
        None (in memory), an Optuna storage, a URL that Optuna knows (``sqlite:///tuning.db``), or the path of a
        journal file.
    study_name
        Which study of the storage; made if it is not there. Needed with a storage.

    Attributes
    ----------
    trials
        The finished trials in the order in which they became known here.
    tried
        Their points.
    best
        The best of them that is complete, the earliest of equals, or None.

    Examples
    --------
    >>> from optuna.samplers import RandomSampler
    >>> ledger = Ledger({"tile": TunableItemCfg("choice", [16, 32])}, RandomSampler)
    >>> ledger.finish(ledger.open({"tile": 32}), "complete", value=1.5)
    Trial(number=0, params={'tile': 32}, value=1.5, state='complete', seconds=0.0, reason='')
    """

    def __init__(
        self,
        space: Space,
        sampler: Callable[[int], optuna.samplers.BaseSampler],
        *,
        direction: Direction = "minimize",
        storage: str | Path | optuna.storages.BaseStorage | None = None,
        study_name: str | None = None,
    ) -> None:
        if storage is not None and not study_name:
            fix = "pass study_name, the same for all that share the study"
            raise ValueRangeError(message("a storage without a study_name", "both", fix))
        self.space = space
        self.trials: list[Trial] = []
        self.tried: set[Key] = set()
        self.best: Trial | None = None
        self._sign = 1.0 if direction == "minimize" else -1.0
        self._closed_numbers: set[int] = set()
        self._tickets: dict[int, Ticket] = {}
        self._elsewhere: dict[Key, int] = {}
        self._resources = contextlib.ExitStack()
        with contextlib.ExitStack() as unless_opened, quiet_optuna():
            unless_opened.push(self._resources)
            self._study = self._open_study(direction, storage, study_name)
            self.refresh()
            self._study.sampler = sampler(len(self.trials))
            unless_opened.pop_all()

    @property
    def open_here(self) -> set[Key]:
        """The points that were asked for here and are not finished."""
        return {ticket.key for ticket in self._tickets.values()}

    @property
    def open_elsewhere(self) -> set[Key]:
        """The points that others seem to be trying; a process that was killed leaves its points here for good."""
        return set(self._elsewhere)

    def cost(self, trial: Trial) -> float:
        """Return what a complete trial costs: its value, or minus its value if that is to be maximised."""
        return self._sign * cast("float", trial.value)

    def refresh(self) -> None:
        """Read what others have written since the last time."""
        with quiet_optuna():
            frozen_trials = self._study.get_trials(deepcopy=False)
        self._elsewhere = {}
        for frozen in frozen_trials:
            if frozen.number in self._closed_numbers or frozen.number in self._tickets:
                continue
            point = self._point_of(frozen)
            if frozen.state.is_finished():
                self._closed_numbers.add(frozen.number)
                if point is not None and (trial := self._outcome_of(frozen, point[0])) is not None:
                    self._enter(trial, point[1])
            elif point is not None:
                self._elsewhere.setdefault(point[1], frozen.number)

    def suggest(self) -> Ticket:
        """Open the point that comes next: one that is queued in the study, or else one from its sampler."""
        with quiet_optuna():
            trial = self._study.ask()
            picks: dict[str, Scalar] = {}

            def pick(path: str, item: TunableItemCfg) -> Scalar:
                picks[path] = _decode(item, _suggest(trial, path, item))
                return picks[path]

            sample = walk(self.space, pick)
        ticket = Ticket(sample, picks, trial)
        self._tickets[trial.number] = ticket
        return ticket

    def open(self, sample: Sample) -> Ticket:
        """Open a given point (or, if another process of the study was quicker to take it, one from the sampler)."""
        found = coordinates(self.space, sample)
        stored: dict[str, Any] = {}

        def note(path: str, item: TunableItemCfg) -> Scalar:
            stored[path] = _encode(item, found[path])
            return found[path]

        walk(self.space, note)
        with quiet_optuna():
            self._study.enqueue_trial(stored, user_attrs={_POINT: stored})
        return self.suggest()

    def finish(
        self, ticket: Ticket, state: TrialState, *, value: float | None = None, seconds: float = 0.0, reason: str = ""
    ) -> Trial:
        """Write down what became of a point."""
        reason = reason[:_REASON_LIMIT]
        self._close_trial(ticket, {"state": state, "seconds": seconds, "reason": reason}, value)
        # Made again, because an objective may have changed the dict it was given.
        sample = walk(self.space, lambda path, _: ticket.picks[path])
        trial = Trial(len(self.trials), sample, value, state, seconds, reason)
        self._enter(trial, ticket.key)
        return trial

    def drop(self, ticket: Ticket, why: Literal["duplicate", "abandoned"]) -> None:
        """Close a point that was not tried; it counts for nothing and may be tried later."""
        self._close_trial(ticket, {"state": why})

    def close(self) -> None:
        """Drop the points that are still open, and close the storage if it was opened here."""
        for ticket in list(self._tickets.values()):
            self.drop(ticket, "abandoned")
        self._resources.close()

    def _enter(self, trial: Trial, key: Key) -> None:
        self.trials.append(trial)
        self.tried.add(key)
        if trial.value is not None and (self.best is None or self.cost(trial) < self.cost(self.best)):
            self.best = trial

    def _close_trial(self, ticket: Ticket, note: dict[str, Any], value: float | None = None) -> None:
        from optuna.exceptions import UpdateFinishedTrialError
        from optuna.trial import TrialState as OptunaState

        # Samplers learn from pruned trials and overlook failed ones: a point that crashes should be learnt from like
        # one that is pruned, a point that was not tried should not.
        state = OptunaState.FAIL if note["state"] in _NOT_TRIED else OptunaState.PRUNED
        with quiet_optuna(), contextlib.suppress(UpdateFinishedTrialError):
            # SQLite locks no rows, so two processes may be given one trial; the study then keeps the first outcome.
            ticket.trial.set_user_attr(_ATTRIBUTE, note)
            self._study.tell(ticket.trial, value, None if value is not None else state, skip_if_finished=True)
        self._closed_numbers.add(ticket.trial.number)
        del self._tickets[ticket.trial.number]

    def _point_of(self, frozen: optuna.trial.FrozenTrial) -> tuple[Sample, Key] | None:
        """Return the sample of a stored trial and its key, or None if it is none (another is still picking it)."""
        stored = frozen.user_attrs.get(_POINT, frozen.params)
        found: dict[str, Scalar] = {}

        def pick(path: str, item: TunableItemCfg) -> Scalar:
            found[path] = _decode(item, stored[path])
            return found[path]

        try:
            return walk(self.space, pick), key_of(found)
        except (KeyError, ValueError):
            return None

    def _outcome_of(self, frozen: optuna.trial.FrozenTrial, sample: Sample) -> Trial | None:
        """Return a finished stored trial as ours; None if it was not tried."""
        note = frozen.user_attrs.get(_ATTRIBUTE, {})
        # Trials of other programs in the same study have no note; one that a dead process left says only "FAIL".
        state = note.get("state") or {"COMPLETE": "complete", "PRUNED": "pruned"}.get(frozen.state.name, "abandoned")
        if state in _NOT_TRIED:
            return None
        seconds = note.get("seconds", frozen.duration.total_seconds() if frozen.duration else 0.0)
        value = frozen.value if state == "complete" else None
        if value is not None and not math.isfinite(value):
            return Trial(len(self.trials), sample, None, "failed", seconds, f"the value is {value}")
        return Trial(len(self.trials), sample, value, cast("TrialState", state), seconds, note.get("reason", ""))

    def _open_study(self, direction: Direction, storage: object, study_name: str | None) -> optuna.study.Study:
        import optuna

        try:
            study = optuna.create_study(
                storage=self._open_storage(storage), study_name=study_name, direction=direction, load_if_exists=True
            )
        except Exception as error:  # each kind of storage has exceptions of its own
            allowed = "an Optuna storage or its URL, or the path of a journal file in a folder that exists"
            raise ValueRangeError(message(f"cannot open the storage {storage!r}: {error}", allowed)) from error
        text = to_json(self.space)
        if study.user_attrs.get(_ATTRIBUTE, text) != text:
            given = f"the study {study_name!r} searches another space: {study.user_attrs[_ATTRIBUTE]}"
            raise ValueRangeError(message(given, text, "use another study_name"))
        if study.direction.name.lower() != direction:
            given = f"the study {study_name!r} is to {study.direction.name.lower()}"
            raise ValueRangeError(message(given, f"a study to {direction}", "use another study_name"))
        study.set_user_attr(_ATTRIBUTE, text)
        return study

    def _open_storage(self, storage: Any) -> str | optuna.storages.BaseStorage | None:
        import optuna

        if isinstance(storage, str) and "://" in storage:
            database = optuna.storages.RDBStorage(storage)
            self._resources.callback(database.engine.dispose)
            self._resources.callback(database.remove_session)
            return database
        if isinstance(storage, str | Path):
            from optuna.storages.journal import JournalFileBackend

            return optuna.storages.JournalStorage(JournalFileBackend(str(storage)))
        return cast("optuna.storages.BaseStorage | None", storage)


def _suggest(trial: optuna.trial.Trial, path: str, item: TunableItemCfg) -> Any:
    """Let Optuna pick a value at a path, in the form that it stores."""
    domain = item.domain
    if isinstance(domain, Choices):
        return trial.suggest_categorical(path, domain.labels)
    if isinstance(domain, Interval):
        return trial.suggest_float(path, domain.low, domain.high, log=domain.log)
    if isinstance(domain, Integers):
        return trial.suggest_int(path, domain.low, domain.high - 1)
    return trial.suggest_int(path, 0, domain.count - 1)


def _encode(item: TunableItemCfg, value: Any) -> Any:
    """Return a value in the form that Optuna stores: JSON text of a choice, the position of a step, or a number."""
    domain = item.domain
    if isinstance(domain, Choices):
        return domain.labels[domain.position(value)]
    return domain.position(value) if isinstance(domain, Steps) else value


def _decode(item: TunableItemCfg, stored: Any) -> Scalar:
    """Return the value of an item that Optuna stores as `stored`."""
    domain = item.domain
    if isinstance(domain, Choices):
        return domain.values[domain.labels.index(stored)]
    return domain.at(stored) if isinstance(domain, Steps) else stored

"""Samplers: which point of a search space to try next, by grid, random, TPE or evolution.

:class:`Tuner` speaks NNI's tuner protocol and is what :func:`sparta.common.search.search` drives. Measuring costs far
more than choosing, so no point is proposed twice while there are points that nobody tried; where the algorithm would, a
neighbour of that point is taken instead, then any other.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparta.common.domains import Scalar
from sparta.common.ledger import Direction, Key, Ledger, Ticket
from sparta.common.result import NoMoreTrial, Trial, TrialState
from sparta.common.space import (
    Sample,
    Space,
    TunableItemCfg,
    checked,
    coordinates,
    draw,
    key_of,
    mutate,
    sample_at,
    size_of,
    walk,
)
from sparta.errors import NameNotFoundError, ValueRangeError, did_you_mean, message

if TYPE_CHECKING:
    import optuna

__all__ = ["Tunable", "Tuner"]

_ALIASES = {"random": "rand", "gridsearch": "grid"}
_SETTINGS: dict[str, dict[str, int]] = {
    "grid": {},
    "rand": {},
    "tpe": {"n_startup_trials": 10, "n_ei_candidates": 24},
    "evolution": {"population_size": 16},
}
_TOURNAMENT = 3
_NEIGHBOURS = 32  # neighbours to look at before any point will do
_DRAWS = 256


class Tunable:
    """What can tune: the base of every tuner, with the names of the algorithms, and a tuner of one of them."""

    @staticmethod
    def supported_tuners() -> set[str]:
        """Return the names of the algorithms.

        >>> sorted(Tunable.supported_tuners())
        ['evolution', 'grid', 'rand', 'tpe']
        """
        return set(_SETTINGS)

    @staticmethod
    def create_tuner(algo: str, search_space_cfg: Space, tuner_kw: Mapping[str, Any] | None = None) -> Tunable:
        """Return a tuner; every algorithm minimises unless told otherwise.

        Parameters
        ----------
        algo
            One of :meth:`supported_tuners`; ``'random'`` and ``'gridsearch'`` are understood too. ``'nni:TPE'`` and
            the like are tuners of NNI, where it is installed; `tuner_kw` are then its own.
        search_space_cfg
            A :class:`~sparta.common.space.TunableItemCfg`, or a dict of them.
        tuner_kw
            The keyword arguments of :class:`Tuner`: ``seed``, ``optimize_mode``, ``storage``, ``study_name``, and the
            settings of the algorithm.

        Examples
        --------
        >>> from sparta.common.space import TunableItemCfg
        >>> space = TunableItemCfg('choice', _is_nested=True, _value={'dense': {}})
        >>> Tunable.create_tuner('random', space, {'seed': 7}).generate_parameters(0)
        {'_name': 'dense'}
        """
        if isinstance(algo, str) and algo.startswith("nni:"):
            from sparta.common.nni import nni_tuner

            return nni_tuner(algo.removeprefix("nni:"), search_space_cfg, tuner_kw or {})
        return Tuner(search_space_cfg, algo, **(tuner_kw or {}))

    def generate_parameters(self, parameter_id: int) -> Sample:
        """Return a point to try; every tuner has its own way."""
        raise NotImplementedError

    def receive_trial_result(self, parameter_id: int, parameters: Sample, value: float) -> None:
        """Take what came of a point; every tuner has its own way."""
        raise NotImplementedError


class Tuner(Tunable):
    """Proposes points of a space and learns from their values.

    Parameters
    ----------
    space
        What may be tried.
    algo
        ``'grid'`` (every point in order; needs a finite space), ``'rand'``, ``'tpe'`` or ``'evolution'``.
    seed
        Same seed, same results told: same points. Give machines that share a study different seeds.
    optimize_mode
        ``'minimize'`` or ``'maximize'``.
    storage, study_name
        Where the trials are kept, see :class:`sparta.common.ledger.Ledger`; in memory by default.
    **settings
        ``n_startup_trials`` and ``n_ei_candidates`` of ``'tpe'``, ``population_size`` of ``'evolution'``.

    Examples
    --------
    >>> from sparta.common.space import TunableItemCfg
    >>> tuner = Tuner({'tile': TunableItemCfg('choice', _value=[16, 32])}, 'grid')
    >>> tuner.generate_parameters(0)
    {'tile': 16}
    >>> tuner.receive_trial_result(0, {'tile': 16}, 2.5)
    >>> tuner.generate_parameters(1)
    {'tile': 32}
    """

    def __init__(
        self,
        space: Space,
        algo: str = "tpe",
        *,
        seed: int = 0,
        optimize_mode: Direction = "minimize",
        storage: str | Path | optuna.storages.BaseStorage | None = None,
        study_name: str | None = None,
        **settings: int,
    ) -> None:
        self.space = checked(space)
        self.algo = _checked_algo(algo)
        self.size = size_of(self.space)
        self._seed = _checked_int("seed", seed, 0)
        self._settings = _checked_settings(self.algo, settings)
        if optimize_mode not in ("minimize", "maximize"):
            raise NameNotFoundError(did_you_mean(str(optimize_mode), ("minimize", "maximize"), "optimize_mode"))
        if self.algo == "grid" and self.size is None:
            fix = "use quniform instead of uniform, or another algorithm"
            raise ValueRangeError(message("a grid over a space with a continuous range", "a finite space", fix))
        self._grid_position = 0
        self._by_id: dict[int, Ticket] = {}
        self._ledger = Ledger(
            self.space, self._sampler, direction=optimize_mode, storage=storage, study_name=study_name
        )

    @property
    def trials(self) -> tuple[Trial, ...]:
        """The trials that are finished, also those of earlier runs and of other machines in the same study."""
        return tuple(self._ledger.trials)

    @property
    def best(self) -> Trial | None:
        """The best trial that is complete, the earliest of equals, or None."""
        return self._ledger.best

    def generate_parameters(self, parameter_id: int) -> Sample:
        """Return a point to try, to be known by `parameter_id`; raises :class:`NoMoreTrial` when all were tried."""
        if parameter_id in self._by_id:
            given = f"parameter_id {parameter_id} stands for a point that is being tried"
            raise ValueRangeError(message(given, "an id that is not in use", "tell its result first"))
        ticket = self.ask()
        self._by_id[parameter_id] = ticket
        return ticket.sample

    def receive_trial_result(self, parameter_id: int, parameters: Sample, value: float | Mapping[str, float]) -> None:
        """Learn what a point is worth; a value that is not finite counts as a failure.

        Parameters
        ----------
        parameter_id, parameters
            As :meth:`generate_parameters` took and returned them.
        value
            The measured value, or a mapping that has it under ``"default"``, as NNI's trials may report it.
        """
        number = float(value["default"] if isinstance(value, Mapping) else value)
        ticket = self._ticket(parameter_id)
        if key_of(coordinates(self.space, parameters)) != ticket.key:
            given = f"the result of {parameters!r} under parameter_id {parameter_id}"
            raise ValueRangeError(message(given, f"the result of {ticket.sample!r}"))
        del self._by_id[parameter_id]
        if math.isfinite(number):
            self.tell(ticket, "complete", value=number)
        else:
            self.tell(ticket, "failed", reason=f"the value is {number}")

    def trial_end(self, parameter_id: int, success: bool) -> None:  # noqa: FBT001 - NNI's protocol
        """Learn that a point's trial ended; without success, and without a result before, it failed."""
        if not success and parameter_id in self._by_id:
            self.tell(self._by_id.pop(parameter_id), "failed", reason="the trial ended without a result")

    def ask(self) -> Ticket:
        """Open the next point; raises :class:`NoMoreTrial` when all were tried."""
        self._ledger.refresh()
        return self._propose()

    def ask_for(self, sample: Sample) -> Ticket | None:
        """Open a given point, or return None if it was tried already."""
        self._ledger.refresh()
        key = key_of(coordinates(self.space, sample))
        return None if key in self._ledger.tried | self._ledger.open_here else self._ledger.open(sample)

    def tell(
        self, ticket: Ticket, state: TrialState, *, value: float | None = None, seconds: float = 0.0, reason: str = ""
    ) -> Trial:
        """Write down what became of a point."""
        return self._ledger.finish(ticket, state, value=value, seconds=seconds, reason=reason)

    def close(self) -> None:
        """Drop the points that are still open, and close the storage."""
        self._by_id.clear()
        self._ledger.close()

    def _propose(self) -> Ticket:
        """Open the point that the algorithm wants next, or one near it that was not tried."""
        ledger = self._ledger
        excluded = ledger.tried | ledger.open_here
        # Points that are open elsewhere may be those of a process that was killed: they come last, but they come.
        if len(excluded | ledger.open_elsewhere) != self.size:
            excluded |= ledger.open_elsewhere
        if len(excluded) == self.size:
            raise NoMoreTrial(
                message(f"all {self.size} points of the space were tried", fix="stop, or widen the space")
            )
        rng = random.Random(f"{self._seed}:{len(ledger.trials) + len(ledger.open_here)}")  # noqa: S311 - no secret
        if self.algo == "grid":
            return ledger.open(self._next_of_grid(excluded))
        parents: Iterator[Sample] = iter(())
        if self.algo == "tpe":
            ticket = ledger.suggest()
            if ticket.key not in excluded:
                return ticket
            ledger.drop(ticket, "duplicate")
            parents = iter([ticket.sample] * _NEIGHBOURS)
        elif self.algo == "evolution":
            parents = islice(self._tournaments(rng), _NEIGHBOURS)
        return ledger.open(self._unseen(parents, excluded, rng))

    def _ticket(self, parameter_id: int) -> Ticket:
        if parameter_id not in self._by_id:
            known = ", ".join(map(str, self._by_id)) or "none"
            raise NameNotFoundError(message(f"no point is being tried under parameter_id {parameter_id}", known))
        return self._by_id[parameter_id]

    def _sampler(self, count: int) -> optuna.samplers.BaseSampler:
        import optuna

        if self.algo != "tpe":
            return optuna.samplers.RandomSampler(seed=self._seed)
        # A study that is resumed must not repeat the draws it began with, hence the count.
        return optuna.samplers.TPESampler(
            seed=(self._seed + count) % 2**32,
            n_startup_trials=self._settings["n_startup_trials"],
            n_ei_candidates=self._settings["n_ei_candidates"],
            constant_liar=True,
        )

    def _next_of_grid(self, excluded: set[Key]) -> Sample:
        """Return the first point of the grid that is not excluded; there is one."""
        tried = self._ledger.tried
        while (sample := self._at(self._grid_position))[1] in tried:
            self._grid_position += 1
        position = self._grid_position
        while sample[1] in excluded:
            position += 1
            sample = self._at(position)
        return sample[0]

    def _at(self, position: int) -> tuple[Sample, Key]:
        sample = sample_at(self.space, position)
        return sample, key_of(coordinates(self.space, sample))

    def _tournaments(self, rng: random.Random) -> Iterator[Sample]:
        """Yield parents: each the best of a few among the best so far; none before there is a population."""
        size = self._settings["population_size"]
        complete = [trial for trial in self._ledger.trials if trial.value is not None]
        if len(self._ledger.trials) < size or not complete:
            return
        population = heapq.nsmallest(size, complete, key=self._ledger.cost)
        while True:
            rivals = rng.sample(population, min(_TOURNAMENT, len(population)))
            yield min(rivals, key=self._ledger.cost).params

    def _unseen(self, parents: Iterator[Sample], excluded: set[Key], rng: random.Random) -> Sample:
        """Return a neighbour of one of the parents that is not excluded, or else any point that is not."""
        for parent in parents:
            child = mutate(self.space, parent, rng)
            if key_of(coordinates(self.space, child)) not in excluded:
                return child
        for _ in range(_DRAWS):
            sample = draw(self.space, rng)
            if key_of(coordinates(self.space, sample)) not in excluded:
                return sample
        if self.size is None:
            return walk(self.space, lambda _, item: _draw_endless(item, rng))
        # Of len(excluded) + 1 points in a row at least one is not excluded.
        start = rng.randrange(self.size)
        points = (self._at((start + step) % self.size) for step in range(len(excluded) + 1))
        return next(sample for sample, key in points if key not in excluded)


def _draw_endless(item: TunableItemCfg, rng: random.Random) -> Scalar:
    """Draw a value; of a nested choice, an alternative with a continuous range if there is one: it never runs out."""
    endless = [name for name, params in (item.options or {}).items() if size_of(params) is None]
    return rng.choice(endless) if endless else item.domain.draw(rng)


def _checked_algo(algo: str) -> str:
    name = _ALIASES.get(algo, algo)
    if name not in _SETTINGS:
        raise NameNotFoundError(did_you_mean(str(algo), _SETTINGS, "tuning algorithm"))
    return name


def _checked_settings(algo: str, given: Mapping[str, int]) -> dict[str, int]:
    known = _SETTINGS[algo]
    for name in given:
        if name not in known:
            every = [*known, "seed", "optimize_mode", "storage", "study_name"]
            raise NameNotFoundError(did_you_mean(name, every, f"setting of the tuner {algo!r}"))
    return {name: _checked_int(name, given.get(name, default), 1) for name, default in known.items()}


def _checked_int(name: str, value: int, lowest: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < lowest:
        raise ValueRangeError(message(f"{name} is {value!r}", f"an integer, {lowest} or more"))
    return value

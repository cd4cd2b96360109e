"""The search: fill the table, solve it, measure the answer as a whole, correct the table, and solve again.

Every step may be cut short, by the budget or by Ctrl-C; what is known by then is what the plan is made of.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from sparta.oneshot.targets import Target
from sparta.planning.approach import Point, following, solved
from sparta.planning.bench import Bench, Whole
from sparta.planning.between import costs_between, times_between
from sparta.planning.cost import errors_of, grams_of, sensitivity_of
from sparta.planning.layers import Group
from sparta.planning.notebook import GIVEN, Notebook, narrow_key, option_key
from sparta.planning.options import CHANNELS, DENSE, MEASURED, Option
from sparta.planning.result import Goal
from sparta.planning.rounding import rounding_errors
from sparta.planning.table import Assignment, Table
from sparta.tesa.patterns import Pattern

__all__ = ["Search"]

_GAIN = 0.97  # of dense's time, which an option must not exceed
_ROUNDS = 12
_SPENT = "the budget was spent before all options were measured: the others were not considered"
_Costed = list[tuple[Option, Pattern | None]]


@dataclass(eq=False)
class Search:
    """One plan under way.

    Parameters
    ----------
    bench
        What measures.
    room, room_for_layers
        Return whether there is time for more: for wholes, and for layers, which leave some for wholes.
    show
        Called with a line about what is done.
    uncounted
        Makes what is done within not count as measuring.
    enough
        Returns whether a model that takes so many milliseconds is what was asked: no option is measured then.
    for_speed
        Whether a time was asked. Then the model that is compiled and nothing else is measured before any layer, while
        there is time for all that competes: every plan is seen from there.
    begin
        Called when a whole was measured just now, and layers come next.
    one_call
        Returns the milliseconds of one call of the model, for a table of what was interrupted before it was measured.
    given_ms
        Of the model as given; None before it is measured.
    exhausted
        Whether nothing was left to measure that could be nearer to the goal.
    """

    model: nn.Module
    targets: Mapping[str, Target]
    groups: Sequence[Group]
    options: Mapping[str, Sequence[Option]]
    bench: Bench
    notebook: Notebook
    precisions: Sequence[str] = ()
    room: Callable[[], bool] = lambda: True
    room_for_layers: Callable[[], bool] = lambda: True
    show: Callable[[str], object] = lambda _line: None
    uncounted: Callable[[], AbstractContextManager[None]] = nullcontext
    enough: Callable[[float], bool] = lambda _milliseconds: False
    for_speed: bool = False
    begin: Callable[[], object] = lambda: None
    one_call: Callable[[], float] = lambda: 1.0
    given_ms: float | None = None
    notes: list[str] = field(default_factory=list)
    interrupted: bool = False
    exhausted: bool = False
    points: list[Point] = field(default_factory=list)
    _alone: Whole | None = None  # compiled with nothing changed
    _timed: dict[str, dict[Option, float]] = field(default_factory=dict)
    _shares: dict[tuple[str, float, float], float] = field(default_factory=dict)

    # ------------------------------------------------------------------ the table

    def filled(self, batches: Sequence[Any], method: str, megabytes: float) -> Table:
        """Return the table of all options that beat dense, with their costs."""
        times: dict[str, dict[Option, float]] = {}
        narrow: dict[int, dict[Option, float]] = {}
        with self._interruptible("measuring layers was interrupted: what was not measured stays dense"):
            self._time(times, narrow)
        costs: dict[str, dict[Option, float]] = {}
        with (
            self._interruptible("estimating costs was interrupted: layers without a cost stay dense"),
            self.uncounted(),
        ):
            self._cost(batches, method, times, narrow, costs)
        for name, known in costs.items():
            costs[name] = costs_between(known) | known
        for number in [n for n in narrow if not all(c.reader in costs for c in self.groups[n].channels)]:
            del narrow[number]
        given_ms = self.one_call() if self.given_ms is None else self.given_ms
        return Table(self.groups, self.targets, times, costs, narrow, given_ms, megabytes)

    def _time(self, times: dict[str, dict[Option, float]], narrow: dict[int, dict[Option, float]]) -> None:
        self._time_given()
        for group in self.groups:
            for name in group.names:
                dense = self.bench.dense_ms(name)
                if dense is not None:
                    times[name] = {DENSE: dense}
        kinds: dict[str, list[str]] = {}
        for name in sorted(times, key=lambda name: -times[name][DENSE]):
            kinds.setdefault(self.bench.kind(name), []).append(name)
        slowest = sorted(kinds.values(), key=lambda names: -sum(times[name][DENSE] for name in names))
        patterns = {
            pattern: sorted((option for option in options if option.measured), key=_turn)
            for pattern, options in self.options.items()
            if pattern != CHANNELS
        }
        for precision in self.precisions:  # one each: they stand even where the budget ends before the patterns do
            self._time_plain(slowest, precision, times)
        self._time_patterns(slowest, {names[0]: patterns for names in slowest}, times)
        for precision in self.precisions:
            self._time_rounded(slowest, patterns, precision, times)
        for first, *alike in slowest:
            self._fill(first, times[first])
            for name in alike:
                times[name] = dict(times[first])
        if CHANNELS in self.options:
            for number, group in enumerate(self.groups):
                if group.channels and all(name in times for name in group.names):
                    narrow[number] = self._narrow(group, times)

    def _can_have(self, key: str) -> bool:
        """Whether a number is in the notebook, or there is time to measure it."""
        return key in self.notebook.entries or self.room_for_layers()

    def _time_given(self) -> None:
        """Time the model as given, also compiled; where it is what was asked, nothing else is considered."""
        known = GIVEN in self.notebook.entries
        self.given_ms = self.bench.given_ms()
        if not known:
            self.begin()
        if self.enough(self.given_ms):
            self.options, self.precisions = {}, ()
        elif self.for_speed and self.room():
            self.show("compiling and measuring the model with nothing changed")
            self._alone = self.bench.whole({})
            self.begin()

    def _fill(self, name: str, times: dict[Option, float]) -> None:
        """Put in the options between measured ones that beat dense as well."""
        for option, time in times_between(self._timed.get(name, {})).items():
            if time <= _GAIN * _limit(times, option.precision):
                times[option] = time

    def _time_rounded(
        self,
        kinds: Sequence[Sequence[str]],
        patterns: Mapping[str, Sequence[Option]],
        precision: str,
        times: Mapping[str, dict[Option, float]],
    ) -> None:
        """Time layers that are rounded, in the patterns that beat dense without rounding."""
        waiting = {
            name: {
                pattern: [replace(option, precision=precision) for option in options if option in times[name]]
                for pattern, options in patterns.items()
            }
            for name, *_ in kinds
        }
        self._time_patterns(kinds, waiting, times, precision)

    def _time_plain(
        self, kinds: Sequence[Sequence[str]], precision: str, times: Mapping[str, dict[Option, float]]
    ) -> None:
        """Time layers that are rounded and dense."""
        plain = Option("dense", precision=precision)
        for number, (name, *_) in enumerate(kinds):
            if not self._can_have(option_key(name, plain)):
                self._note(_SPENT)
                continue
            self.show(f"kind of layer {number + 1}/{len(kinds)} in {precision}: {name}")
            alone = self.bench.option_ms(name, plain)
            if alone <= _GAIN * times[name][DENSE]:
                times[name][plain] = alone

    def _time_patterns(
        self,
        kinds: Sequence[Sequence[str]],
        patterns: Mapping[str, Mapping[str, Sequence[Option]]],
        times: Mapping[str, dict[Option, float]],
        precision: str | None = None,
    ) -> None:
        """Time options of layers, one of each pattern per step; what is denser than one that lost is left out.

        So a budget that ends early has measured something of every kind of layer and of every pattern.
        """
        lost: dict[tuple[str, str], float] = {}  # the least density that does not beat dense
        words = "" if precision is None else f" in {precision}"
        steps = max((len(options) for each in patterns.values() for options in each.values()), default=0)
        for step in range(steps):
            for number, names in enumerate(kinds):
                first = names[0]
                self.show(f"kind of layer {number + 1}/{len(kinds)}{words}, step {step + 1}/{steps}: {first}")
                limit = _limit(times[first], precision)
                for pattern, options in patterns.get(first, {}).items():
                    if step >= len(options) or options[step].density >= lost.get((first, pattern), math.inf):
                        continue
                    if not self._can_have(option_key(first, options[step])):
                        self._note(_SPENT)
                        continue
                    if not self._beats(first, options[step], times[first], limit):
                        lost[first, pattern] = options[step].density

    def _beats(self, name: str, option: Option, times: dict[Option, float], limit: float) -> bool:
        """Time an option and keep it if it beats what it must."""
        try:
            option.made.check_shape(self.targets[name].layout.shape)
        except ValueError as error:
            self._note(f"{option.pattern} does not fit {name}: {str(error).splitlines()[0]}")
            return False
        time = self.bench.option_ms(name, option)
        self._timed.setdefault(name, {})[option] = time
        if time > _GAIN * limit:
            return False
        times[option] = time
        return True

    def _narrow(self, group: Group, times: Mapping[str, Mapping[Option, float]]) -> dict[Option, float]:
        """Return the time of a group for each share of its channels that goes, in each precision that all of it has."""
        found: dict[Option, float] = {}
        readers = {each.reader for each in group.channels}
        writers = {name for each in group.channels for name in each.writers}
        plain = {each: Option("dense", precision=each) for each in (None, *self.precisions)}
        able = [each for each, option in plain.items() if all(option in times[name] for name in group.names)]
        for option in self.options[CHANNELS]:
            shares: dict[str, float] = {}  # of its own time, that a layer takes when it is narrower
            for name in group.names:
                rows = option.density if name in writers else 1.0
                columns = option.density if name in readers else 1.0
                share = self._share(name, rows, columns, times[name][DENSE])
                if share is None:
                    self._note(_SPENT)
                    return found
                shares[name] = share
            for each in able:  # a narrower layer that is rounded takes the same share, about
                total = sum(share * times[name][plain[each]] for name, share in shares.items())
                found[replace(option, precision=each)] = total
        return found

    def _share(self, name: str, rows: float, columns: float, dense: float) -> float | None:
        """Return the share of its time that a layer takes when it is narrower; None where there is no time for it.

        Of layers alike one is timed.
        """
        if rows == columns == 1.0 or dense <= 0:
            return 1.0
        key = (self.bench.kind(name), rows, columns)
        if key not in self._shares:
            if not self._can_have(narrow_key(name, rows, columns)):
                return None
            self._shares[key] = self.bench.narrow_ms(name, rows=rows, columns=columns) / dense
        return self._shares[key]

    def _cost(
        self,
        batches: Sequence[Any],
        method: str,
        times: Mapping[str, Mapping[Option, float]],
        narrow: Mapping[int, Mapping[Option, float]],
        costs: dict[str, dict[Option, float]],
    ) -> None:
        wanted = {name: self._costed(name, options, narrow) for name, options in times.items()}
        wanted = {name: options for name, options in wanted.items() if options}
        for name, options in wanted.items():
            stored = self.notebook.entries.get(f"cost {name}", {})
            if all(str(option) in stored for option, _ in options):
                known = {option: stored[str(option)] for option, _ in options}
                costs[name] = {option: float(cost) for option, cost in known.items() if cost is not None}
        missing = [self.targets[name] for name in wanted if name not in costs]
        if not missing:
            return
        self.show("how the outputs react to each layer")
        sensitivity = sensitivity_of(self.model, missing, batches)
        names = [target.name for target in missing]
        errors = {each: rounding_errors(self.model, names, batches, each) for each in self.precisions}
        for target, gram in grams_of(self.model, missing, batches):
            self.show(f"cost of {target.name}")
            rounding = {each: known[target.name] for each, known in errors.items() if target.name in known}
            found = errors_of(target, gram, wanted[target.name], sensitivity, method, rounding)
            self.notebook.keep(
                f"cost {target.name}", {str(option): found.get(option) for option, _ in wanted[target.name]}
            )
            costs[target.name] = found

    def _costed(
        self, name: str, options: Mapping[Option, float], narrow: Mapping[int, Mapping[Option, float]]
    ) -> _Costed:
        """Return the options of a layer that need a cost, each with the pattern on its weight."""
        measured = sorted({option for option in options if option.measured} | self._ends(options), key=str)
        found: _Costed = [(option, option.made) for option in measured if option.prunes and option.precision is None]
        found += [(option, None) for option in measured if option.precision is not None]
        for number, times in narrow.items():
            cut = [each.pattern for each in self.groups[number].channels if each.reader == name]
            found += [(o, pattern if o.precision is None else None) for pattern in cut for o in times]
        return found

    def _ends(self, options: Iterable[Option]) -> set[Option]:
        """Return the measured options on the denser side of those that are not, and the same without rounding.

        They may have lost to dense themselves; their costs are needed all the same.
        """
        series = {(option.pattern, option.precision) for option in options if not option.measured}
        ends = {Option(pattern, level, precision) for pattern, precision in series for level in MEASURED}
        return ends | {option.unrounded for option in ends}

    # ------------------------------------------------------------------ the answer

    def answered(self, table: Table, goal: Goal) -> tuple[Assignment, Whole | None, bool, str]:
        """Return what layers become, what that measured, whether it is what was asked, and what came of it."""
        if self.given_ms is None:
            return {}, None, False, f"interrupted before anything was measured: {goal} was not looked for"
        with self._interruptible("measuring the whole was interrupted: the best so far"):
            for _ in range(_ROUNDS):
                assignment = following(table, goal, self.points)
                if assignment is None:
                    self.exhausted = True
                    break
                whole = self._whole(table, assignment, f"plan {len(self.points) + 1} for {goal}")
                self.points.append((assignment, whole, table.loss(assignment)))
                table.correct(assignment, whole.ms * table.given_ms / whole.given_ms, whole.memory_mb, whole.dense)
                if goal.close(whole) or (not assignment and goal.met(whole)):
                    break  # with nothing changed, nothing better can come
                if assignment and not self.room():
                    break
        return self._best(table, goal)

    def _whole(self, table: Table, assignment: Assignment, what: str) -> Whole:
        if self._alone is not None and not assignment:
            return self._alone
        self.show(f"compiling and measuring {what}")
        return self.bench.whole({name: (option, table.pattern_of(name, option)) for name, option in assignment.items()})

    def _best(self, table: Table, goal: Goal) -> tuple[Assignment, Whole | None, bool, str]:
        good = [point for point in self.points if goal.met(point[1])]
        if not good and not self.exhausted and not any(assignment for assignment, _, _ in self.points):
            return solved(table, goal), None, True, "by the table; not measured"
        if good:
            close = [point for point in good if goal.close(point[1])]
            assignment, whole, loss = min(close or good, key=lambda point: point[2])
            reason = f"measured {whole.ratio:.2f}x after {len(self.points)} rounds"
            return assignment, whole, True, reason if close else f"{reason}; {self._why_more(goal, loss)}"
        assignment, whole, _ = max(self.points, key=lambda point: goal.reached(point[1]) or 0.0)
        return assignment, whole, False, self._why_not(table, goal, whole)

    def _why_more(self, goal: Goal, loss: float) -> str:
        """Return why more than was asked is reached, and what the nearest with less loss is."""
        if not loss:
            return "compiling alone gives as much, and nothing is lost"
        slower = [whole for _, whole, other in self.points if other < loss]
        nearest = max(slower, key=lambda whole: goal.reached(whole) or 0.0, default=None)
        words = "no combination that was measured has less loss"
        if nearest is not None:
            reached = f"{nearest.memory_mb:.4g} MB" if goal.memory_mb is not None else f"{nearest.ratio:.2f}x"
            words = f"the nearest below is {reached}"
        return words if self.exhausted else f"{words}, and the time was up before others were tried"

    def _why_not(self, table: Table, goal: Goal, whole: Whole) -> str:
        if goal.memory_mb is not None:
            return f"{goal} cannot be reached: the smallest that was measured is {whole.memory_mb:.4g} MB"
        bound = f", and about {table.bound:.2f}x if these layers took no time" if table.bound > whole.ratio else ""
        bound = "" if math.isinf(table.bound) else bound
        if self.interrupted or not self.room():
            return f"{goal} was not reached when the time was up; the fastest that was measured is {whole.ratio:.2f}x"
        return f"{goal} cannot be reached here: the fastest that was measured is {whole.ratio:.2f}x{bound}"

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    @contextmanager
    def _interruptible(self, note: str) -> Iterator[None]:
        """End a step at Ctrl-C and keep what it has found."""
        try:
            yield
        except KeyboardInterrupt:
            self.interrupted = True
            self._note(note)


def _limit(times: Mapping[Option, float], precision: str | None) -> float:
    """Return what an option of a precision must beat: dense, and dense so rounded."""
    return min(times.get(Option("dense", precision=each), math.inf) for each in (None, precision))


def _turn(option: Option) -> int:
    """Return when an option is measured."""
    return MEASURED.index(option.sparsity) if option.sparsity is not None else 0

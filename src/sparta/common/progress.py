"""What is shown while something is measured: a live line in a terminal, plain lines anywhere else.

Every ``progress=`` of this package takes the same callable, which gets one :class:`Step` at a time: `sparta.compile`
reports its steps, `sparta.nn.tune` its modules, a search its trials. ``progress=print`` is a view like any other.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from sparta.common.result import Trial, shortened

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

__all__ = ["ManyView", "Progress", "Step", "many_view", "progress_view"]


@dataclass(frozen=True)
class Step:
    """One step of something that takes a while.

    Attributes
    ----------
    name
        What is done: a step of the compiler, the name of a module, ``trial 3/40``.
    outcome
        What came of it: a :class:`~sparta.specialize.tuning.select.Choice` for a module, a
        :class:`~sparta.common.result.Trial` for a trial; None where a step begins.

    Examples
    --------
    >>> print(Step("verifying against the original"))
    verifying against the original
    >>> print(Step("encoder.fc1", "2.1x dense"))
    encoder.fc1: 2.1x dense
    """

    name: str
    outcome: Any = None

    def __str__(self) -> str:
        return self.name if self.outcome is None else f"{self.name}: {self.outcome}"


Progress = Callable[[Step], object]


@contextlib.contextmanager
def progress_view(progress: Progress | Literal[True] | None, total: int | None) -> Iterator[Progress]:
    """Give the callable that shows the trials of one search.

    Parameters
    ----------
    progress
        A callable to use as it is; True for a live line if stderr is a terminal and plain lines if not; None for
        nothing.
    total
        How many trials there will be at most, or None if nobody knows.

    Examples
    --------
    >>> with progress_view(lambda step: print(step.outcome.value), 1) as show:
    ...     show(Step("trial 1", Trial(0, {"tile": 16}, 2.5, "complete")))
    2.5
    """
    if callable(progress):
        yield progress
    elif not progress:
        yield lambda _step: None
    elif sys.stderr.isatty():
        with _bar(total) as (bar, task):
            say = _saying_the_best()
            yield lambda step: bar.update(task, completed=step.outcome.number + 1, description=say(step))
    else:
        say = _saying_the_best()
        yield lambda step: sys.stderr.write(f"{step.name}: {say(step)}\n")


@dataclass(frozen=True)
class ManyView:
    """What shows several searches, one for each part of a model.

    Attributes
    ----------
    trials
        Given the name of the part whose search begins, returns what shows its trials; None where nothing does.
    done
        Called with the step of a part: its name, and what came of it.
    """

    trials: Callable[[str], Progress | None]
    done: Progress


@contextlib.contextmanager
def many_view(progress: Progress | bool | None, total: int) -> Iterator[ManyView]:  # noqa: FBT001
    """Give what shows several searches.

    Parameters
    ----------
    progress
        A callable that gets the step of each part; True for a live view if stderr is a terminal and plain lines if
        not; None for a live view in a terminal only; False for nothing.
    total
        How many parts there are.

    Examples
    --------
    >>> with many_view(print, 1) as view:
    ...     view.done(Step("fc", "2.1x dense"))
    fc: 2.1x dense
    """
    if callable(progress):
        yield ManyView(lambda _name: None, progress)
    elif progress is not False and sys.stderr.isatty():
        with _bar(total) as (bar, task):
            yield _live_parts(bar, task)
    elif progress:
        finished: list[str] = []

        def line(step: Step) -> None:
            finished.append(step.name)
            sys.stderr.write(f"{len(finished)}/{total} {step}\n")

        yield ManyView(lambda _name: None, line)
    else:
        yield ManyView(lambda _name: None, lambda _step: None)


def _live_parts(bar: RichProgress, task: Any) -> ManyView:
    def trials(name: str) -> Progress:
        part = name or "model"
        bar.update(task, description=part)
        say = _saying_the_best()
        return lambda step: bar.update(task, description=f"{part}, {step.name}: {say(step)}")

    def done(step: Step) -> None:
        bar.update(task, advance=1)
        bar.console.print(str(step), markup=False, highlight=False)

    return ManyView(trials, done)


@contextlib.contextmanager
def _bar(total: int | None) -> Iterator[tuple[RichProgress, Any]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    text = TextColumn("{task.description}", markup=False)
    columns = (TextColumn("tuning"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn(), text)
    with Progress(*columns, console=Console(stderr=True)) as bar:
        yield bar, bar.add_task("", total=total)


def _saying_the_best() -> Callable[[Step], str]:
    """Return what gives one line about a trial and the best of all that it was called for."""
    best: list[Trial] = []

    def say(step: Step) -> str:
        trial: Trial = step.outcome
        if trial.value is not None and (not best or trial.value < (best[0].value or 0.0)):
            best[:] = [trial]
        what = f"{trial.value:.4g}" if trial.value is not None else f"{trial.state} ({shortened(trial.reason, 60)})"
        if not best:
            return f"{what}, nothing works so far"
        return f"{what}, best {best[0].value:.4g} with {shortened(best[0].params_text, 60)}"

    return say

"""What is shown while something is measured: a live line in a terminal, plain lines anywhere else.

Every ``progress=`` of this package takes the same callable, which gets one :class:`Step` at a time: `sparta.compile`
reports its steps, `sparta.nn.tune` its modules, a search its trials. ``progress=print`` is a view like any other.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TextIO

from sparta.common.result import Trial, shortened

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

__all__ = ["LiveLine", "ManyView", "Progress", "Step", "many_view", "progress_view"]

_COUNTED = re.compile(r"(\d+)/(\d+)")
_BAR = 24
_CLEAR = "\r\x1b[2K"


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


@dataclass(eq=False)
class LiveLine:
    """The one line of a terminal that says what is done now; gone when it is closed.

    A line that counts, ``layer 3/12: fc1``, has a bar and, from the second step on, the time that is left. The cursor
    stays at its beginning, so that what is printed next takes its place.

    Examples
    --------
    >>> import io
    >>> stream = io.StringIO()
    >>> line = LiveLine(stream, clock=iter([0.0, 0.0, 5.0, 10.0]).__next__, width=80)
    >>> for step in (1, 2, 3):
    ...     line(f"layer {step}/4: fc{step}")
    >>> stream.getvalue().split(chr(27))[-1].strip()
    '[2Ksparta ############------------ 0:10 (0:10 left) layer 3/4: fc3'
    """

    stream: TextIO
    clock: Callable[[], float] = time.monotonic
    width: int | None = None
    _started: float = field(init=False)
    _counting: tuple[int, float] = (0, 0.0)

    def __post_init__(self) -> None:
        self._started = self.clock()

    def __call__(self, text: str) -> None:
        """Show what is done now."""
        now = self.clock()
        found = _COUNTED.search(text)
        bar = left = ""
        if found is not None:
            done, total = max(0, int(found[1]) - 1), max(1, int(found[2]))
            if self._counting[0] != total or not done:
                self._counting = total, now
            filled = min(_BAR, _BAR * done // total)
            full, empty = "━─" if _takes(self.stream, "━─") else "#-"
            bar = full * filled + empty * (_BAR - filled) + " "
            if done:
                left = f" ({_minutes((now - self._counting[1]) * (total - done) / done)} left)"
        columns = (self.width or shutil.get_terminal_size().columns) - 1
        line = f"sparta {bar}{_minutes(now - self._started)}{left} {text}"
        self.stream.write(f"{_CLEAR}{line[:columns]}\r")
        self.stream.flush()

    def close(self) -> None:
        """Leave an empty line."""
        self.stream.write(_CLEAR)
        self.stream.flush()


def _takes(stream: TextIO, characters: str) -> bool:
    try:
        characters.encode(getattr(stream, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


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
        with _bar(total, "tuning") as (bar, task):
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
def many_view(
    progress: Progress | bool | None,  # noqa: FBT001 - as people pass it
    total: int,
    what: str = "tuning",
) -> Iterator[ManyView]:
    """Give what shows several searches.

    Parameters
    ----------
    progress
        A callable that gets the step of each part; True for a live view if stderr is a terminal and plain lines if
        not; None for a live view in a terminal only; False for nothing.
    total
        How many parts there are.
    what
        What is done to them, in one word.

    Examples
    --------
    >>> with many_view(print, 1) as view:
    ...     view.done(Step("fc", "2.1x dense"))
    fc: 2.1x dense
    """
    if callable(progress):
        yield ManyView(lambda _name: None, progress)
    elif progress is not False and sys.stderr.isatty():
        with _bar(total, what) as (bar, task):
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
def _bar(total: int | None, what: str) -> Iterator[tuple[RichProgress, Any]]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    text = TextColumn("{task.description}", markup=False)
    times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    columns = (TextColumn(what), BarColumn(bar_width=_BAR), MofNCompleteColumn(), *times, text)
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

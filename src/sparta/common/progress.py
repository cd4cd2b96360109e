"""What a search shows while it runs: a live line in a terminal, plain lines anywhere else.

:func:`progress_view` shows one search, :func:`many_view` a row of them, one for each part of a model. A view of one
search is a callable that gets each finished trial and the best so far, so any function of these two can stand in for
the views here.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from sparta.common.result import Trial, shortened

__all__ = ["ManyView", "Progress", "many_view", "progress_view"]

Progress = Callable[[Trial, Trial | None], object]


@contextlib.contextmanager
def progress_view(progress: Progress | Literal[True] | None, total: int | None) -> Iterator[Progress]:
    """Give the callable that shows each finished trial.

    Parameters
    ----------
    progress
        A callable to use as it is; True for a live line if stderr is a terminal and plain lines if not; None for
        nothing.
    total
        How many trials there will be at most, or None if nobody knows.

    Examples
    --------
    >>> with progress_view(lambda trial, best: print(trial.value), 1) as show:
    ...     show(Trial(0, {"tile": 16}, 2.5, "complete"), None)
    2.5
    """
    if callable(progress):
        yield progress
    elif not progress:
        yield lambda _trial, _best: None
    elif sys.stderr.isatty():
        with _live_line(total) as show:
            yield show
    else:
        yield lambda trial, best: sys.stderr.write(f"trial {_position(trial, total)}: {_outcome(trial, best)}\n")


@dataclass(frozen=True)
class ManyView:
    """What shows a row of searches.

    Attributes
    ----------
    trials
        Given the name of the part whose search begins, returns what shows its trials; None where nothing does.
    done
        Called with the name of a part and what came of it.
    """

    trials: Callable[[str], Progress | None]
    done: Callable[[str, object], object]


@contextlib.contextmanager
def many_view(progress: Callable[[str, object], object] | bool | None, total: int) -> Iterator[ManyView]:  # noqa: FBT001
    """Give what shows a row of searches.

    Parameters
    ----------
    progress
        A callable that gets the name of each part and what came of it; True for a live view if stderr is a terminal
        and plain lines if not; None for a live view in a terminal only; False for nothing.
    total
        How many parts there are.

    Examples
    --------
    >>> with many_view(print, 1) as view:
    ...     view.done("fc", "2.1x dense")
    fc 2.1x dense
    """
    if callable(progress):
        yield ManyView(lambda _name: None, progress)
    elif progress is not False and sys.stderr.isatty():
        with _live_parts(total) as view:
            yield view
    elif progress:
        finished: list[str] = []

        def line(name: str, outcome: object) -> None:
            finished.append(name)
            sys.stderr.write(f"{len(finished)}/{total} {name or 'model'}: {outcome}\n")

        yield ManyView(lambda _name: None, line)
    else:
        yield ManyView(lambda _name: None, lambda _name, _outcome: None)


@contextlib.contextmanager
def _live_parts(total: int) -> Iterator[ManyView]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as RichProgress

    text = TextColumn("{task.description}", markup=False)
    columns = (TextColumn("tuning"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn(), text)
    with RichProgress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total)

        def trials(name: str) -> Progress:
            part = name or "model"
            bar.update(task, description=part)
            return lambda trial, best: bar.update(
                task, description=f"{part}, trial {trial.number + 1}: {_outcome(trial, best)}"
            )

        def done(name: str, outcome: object) -> None:
            bar.update(task, advance=1)
            bar.console.print(f"{name or 'model'}: {outcome}", markup=False, highlight=False)

        yield ManyView(trials, done)


@contextlib.contextmanager
def _live_line(total: int | None) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as RichProgress

    text = TextColumn("{task.description}", markup=False)
    columns = (TextColumn("tuning"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn(), text)
    with RichProgress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total)

        def show(trial: Trial, best: Trial | None) -> None:
            bar.update(task, completed=trial.number + 1, description=_outcome(trial, best))

        yield show


def _position(trial: Trial, total: int | None) -> str:
    return f"{trial.number + 1}" if total is None else f"{trial.number + 1}/{total}"


def _outcome(trial: Trial, best: Trial | None) -> str:
    """Return one line about a trial and the best so far."""
    what = f"{trial.value:.4g}" if trial.value is not None else f"{trial.state} ({shortened(trial.reason, 60)})"
    if best is None or best.value is None:
        return f"{what}, nothing works so far"
    return f"{what}, best {best.value:.4g} with {shortened(best.params_text, 60)}"

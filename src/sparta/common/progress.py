"""What a search shows while it runs: a live line in a terminal, plain lines anywhere else.

The one idea to know: a view is a callable that gets each finished trial and the best so far, so any function of these
two can stand in for the views here.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Literal

from sparta.common.result import Trial, shortened

__all__ = ["Progress", "progress_view"]

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

"""What the CPU benchmarks share: medians of calls that are interleaved in one run, and runs that are made in pieces."""

from __future__ import annotations

import functools
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sparta.testing import compare

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "oneshot"))
from rows import keep, stored

__all__ = ["TARGETS", "UNFINISHED", "Call", "Row", "calls_for", "in_pieces", "median_ms", "repeated", "without"]

Call = Callable[[], Any]
Row = dict[str, Any]
UNFINISHED = 3
"""The status of a script that has not measured all of its rows yet."""
# What a linear layer is to reach, packed at both ends or cold, by tokens and block height, for the three sparsities: a
# geometric mean over the shapes. A whole chain is to reach the same.
TARGETS = {
    (1, 1): (4, 7.5, 12),
    (1, 16): (6, 15, 30),
    (16, 1): (2.2, 4.2, 8),
    (16, 4): (4, 7.5, 14),
    (16, 8): (4, 7.5, 14),
    (128, 1): (2, 4, 8),
    (128, 4): (4.6, 8.7, 15.5),
    (128, 8): (4.6, 8.7, 15.5),
    (1024, 1): (2, 3.8, 6.7),
    (1024, 8): (4.2, 7.2, 11.5),
}


def repeated(functions: Mapping[str, Call], calls: int) -> dict[str, Call]:
    """Return functions that make so many calls in a row, each finding its caches warm from the second on."""
    return {name: functools.partial(_repeat, function, calls) for name, function in functions.items()}


def median_ms(functions: Mapping[str, Call], calls: int, max_seconds: float = 1.2) -> dict[str, float]:
    """Return median milliseconds of one call; rivals are interleaved, each with so many calls in a row."""
    timings = compare(repeated(functions, calls), warmup=3 if calls == 1 else 1, iters=31, max_seconds=max_seconds)
    return {name: timing.median / calls for name, timing in timings.timings.items()}


def calls_for(repeated_ms: float, median: float) -> int:
    """Return how many calls in a row take about so long, given the median of one: 2 to 50."""
    return max(2, min(50, math.ceil(repeated_ms / median)))


def without(rows: Iterable[Mapping[str, Any]], *names: str) -> list[dict[str, Any]]:
    """Return rows without some keys: what a run prints and no table reads is not kept.

    >>> without([{"speedup": 2.0, "tiles": "4x1"}], "tiles")
    [{'speedup': 2.0}]
    """
    return [{name: value for name, value in row.items() if name not in names} for row in rows]


def in_pieces(
    wanted: Sequence[tuple[Row, Callable[[], Row]]], path: Path, machine: str, about: Row, limit: float
) -> int:
    """Measure the rows that a file of results does not have yet and store each at once.

    Parameters
    ----------
    wanted
        What tells each row from the others, with values as JSON has them, and what measures the rest of it.
    about
        Further results, which all rows share.
    limit
        Seconds after which no other row is begun.

    Returns
    -------
    int
        0 when all rows are there, :data:`UNFINISHED` before.
    """
    begin, names = time.perf_counter(), tuple(wanted[0][0])
    order = [which for which, _ in wanted]

    def place(row: Row) -> int:
        which = {name: row[name] for name in names}
        return order.index(which) if which in order else len(order)

    done = [place(row) for row in stored(path)]
    for at, (which, measured) in enumerate(wanted):
        if at in done:
            continue
        if time.perf_counter() - begin > limit:
            return UNFINISHED
        row = {**which, **measured()}
        print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
        keep(row, names, place, path, machine, about)
    return 0


def _repeat(function: Call, calls: int) -> Any:
    for _ in range(calls):
        y = function()
    return y

"""Plain-text tables: how every result object of this package prints itself.

It stands on the ground floor, next to :mod:`sparta.errors`, so that any module may use it. A table is a string, aligned
with spaces and free of colour codes, so it reads the same in a terminal, a log and a test.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from sparta.errors import ShapeError, message

__all__ = ["table"]

_NUMBER = re.compile(r"[-+]?\d[\d.,_]*(e[-+]?\d+)?\s?(%|x|ms|us|s|[KMGT]i?B|B)?", re.IGNORECASE)
_GAP = "  "


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], title: str | None = None) -> str:
    """Return an aligned plain-text table; columns of numbers are right-aligned, all others left-aligned.

    Parameters
    ----------
    columns
        The headings, one a column.
    rows
        The cells, one sequence per row, each as long as ``columns``. Floats are shown with four significant
        digits, ``None`` as an empty cell, anything else as ``str`` shows it, on one line.
    title
        A line to put above the table.

    Examples
    --------
    >>> print(table(["layer", "density"], [["fc1", 0.25], ["fc2", 1.0]], title="model"))
    model
    layer  density
    -----  -------
    fc1       0.25
    fc2          1
    """
    if not columns:
        raise ShapeError(message("a table without columns", "one heading or more"))
    texts = [[_text(cell) for cell in row] for row in rows]
    for row in texts:
        if len(row) != len(columns):
            given = f"a row of {len(row)} cells under {len(columns)} columns: {row}"
            raise ShapeError(message(given, f"{len(columns)} cells a row"))
    heads = [_text(column) for column in columns]
    widths = [max(map(len, column)) for column in zip(heads, *texts, strict=True)]
    numeric = [_all_numbers(row[index] for row in texts) for index in range(len(heads))]

    def line(cells: Sequence[str]) -> str:
        aligned = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(cells, widths, numeric, strict=True)
        ]
        return _GAP.join(aligned).rstrip()

    lines = [] if title is None else [title]
    lines += [line(heads), _GAP.join("-" * width for width in widths)]
    lines += [line(row) for row in texts]
    return "\n".join(lines)


def _text(cell: object) -> str:
    """Return a cell as one line of text."""
    if cell is None:
        return ""
    if isinstance(cell, float):
        return f"{cell:.4g}"
    return " ".join(str(cell).split())


def _all_numbers(cells: Iterable[str]) -> bool:
    """Tell whether a column holds numbers, perhaps with a unit, and at least one of them."""
    filled = [cell for cell in cells if cell]
    return bool(filled) and all(_NUMBER.fullmatch(cell) for cell in filled)

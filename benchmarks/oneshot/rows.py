"""Rows of results that several processes write into one file, each as soon as it has one."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import save

Row = dict[str, Any]


def stored(path: Path) -> list[Row]:
    """Return the rows of a file of results; none where it is not there."""
    rows: list[Row] = json.loads(path.read_text())["results"]["rows"] if path.exists() else []
    return rows


def keep(
    row: Row, key: Sequence[str], order: Callable[[Row], Any], path: Path, where: str, about: Mapping[str, Any]
) -> None:
    """Put a row into a file of results; what another process has found out of the same row stays.

    Parameters
    ----------
    key
        The entries that say which row it is.
    order
        What rows are sorted by.
    about
        Further results, which all rows share.
    """
    with FileLock(Path(tempfile.gettempdir()) / f"{path.name}.lock"):
        rows = stored(path)
        same = [each for each in rows if all(each[name] == row[name] for name in key)]
        known = {name: value for each in same for name, value in each.items() if row.get(name) is None}
        rows = [each for each in rows if each not in same]
        question = path.name.partition(".")[0]
        save(question, where, {**about, "rows": sorted([*rows, {**row, **known}], key=order)}, path.parent)

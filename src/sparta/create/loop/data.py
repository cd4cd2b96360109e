"""Data that several modifiers read: batches of an iterator, kept as they come."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

__all__ = ["Kept"]


class Kept:
    """Batches of an iterator that can be read from the start again; nothing is read before it is asked for.

    Examples
    --------
    >>> batches = Kept(iter([1, 2, 3]))
    >>> next(iter(batches)), list(batches), list(batches)
    (1, [1, 2, 3], [1, 2, 3])
    """

    def __init__(self, source: Iterable[Any]) -> None:
        self._source, self._seen = iter(source), list[Any]()

    def __iter__(self) -> Iterator[Any]:
        place = 0
        while True:
            if place == len(self._seen):
                try:
                    self._seen.append(next(self._source))
                except StopIteration:
                    return
            yield self._seen[place]
            place += 1

"""What renderers share: their registry, Markdown tables, and the sentence on where a result comes from.

A renderer turns all results of one question, one a device, into Markdown. It reads nothing but the saved JSON, so a
table says only what was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Record = dict[str, Any]
Render = Callable[[Sequence[Record]], str]
RENDERERS: dict[str, tuple[str, Render]] = {}


def renderer(name: str, question: str) -> Callable[[Render], Render]:
    """Decorate a function from the results of `question` to Markdown: it makes the table `name`."""

    def register(function: Render) -> Render:
        RENDERERS[name] = (question, function)
        return function

    return register


def markdown(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table; None is an empty cell.

    >>> print(markdown(["layer", "density"], [["fc", 0.25], ["head", None]]))
    | layer | density |
    |---|---|
    | fc | 0.25 |
    | head |  |
    """
    lines = [list(columns), ["---"] * len(columns), *rows]
    texts = [["" if cell is None else str(cell).replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join(
        "|" + "|".join(line) + "|" if place == 1 else "| " + " | ".join(line) + " |" for place, line in enumerate(texts)
    )


def source(record: Record) -> str:
    """Return one sentence on where and with what a result was measured."""
    environment = record["environment"]
    where = record["device"]
    if "cpu" in where.lower().split():
        where = f"{environment['cpu']['model']}, {environment['torch_threads']} threads"
    return f"{where}, PyTorch {environment['torch']}, {record['date'][:10]}."

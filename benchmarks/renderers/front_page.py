"""The reports that the samples of the README and of the quickstart print."""

from __future__ import annotations

from collections.abc import Sequence

from renderers.registry import Record, renderer, source


@renderer("front-page", "front_page")
def front_page(found: Sequence[Record]) -> str:
    """Return the report that the README's sample printed."""
    return _shown(found[0], "readme")


@renderer("quickstart", "front_page")
def quickstart(found: Sequence[Record]) -> str:
    """Return the report that the quickstart's sample printed."""
    return _shown(found[0], "quickstart")


def _shown(record: Record, name: str) -> str:
    return f"It prints ({source(record).rstrip('.')}):\n\n```text\n{record['results']['reports'][name]}\n```"

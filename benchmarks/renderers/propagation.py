"""The table of models that propagation and compaction were tried on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from renderers.registry import Record, markdown, renderer, source


@renderer("propagate-zoo", "propagate_zoo")
def propagate_zoo(found: Sequence[Record]) -> str:
    """Return a row for each model: parameters, what is kept, the error, and what could not be done."""
    parts = []
    for record in found:
        models = record["results"]["models"]
        good = [row for row in models if "failed" not in row]
        exact = sum(row["error"] < 1e-4 for row in good)
        loaded = sum(isinstance(row.get("loaded"), float) and row["loaded"] < 1e-6 for row in good)
        title = (
            f"{len(models)} models: {len(good)} captured and compact, {exact} of them exact (a relative error below "
            f"1e-4), {loaded} pickled and loaded in a new process. {source(record)}"
        )
        heads = [
            "model",
            "from",
            "parameters",
            "kept",
            "error",
            "with one sample more",
            "pruned by half",
            "ops without a rule",
        ]
        rows = [_row(row) for row in models]
        parts.append(f"{title}\n\n{markdown(heads, rows)}")
    return "\n\n".join(parts)


def _row(row: dict[str, Any]) -> list[str]:
    if "failed" in row:
        return [row["model"], row["source"], row["failed"].replace("|", "/"), *[""] * 5]
    other = row["any_batch"]
    pruned = f"{row['pruned']:.0%}" if "pruned" in row else ""
    size = f"{row['parameters'] / 1e3:.0f} k"
    more = other if isinstance(other, str) else f"{other:.0e}"
    return [
        *(row["model"], row["source"], size, f"{row['kept']:.0%}", f"{row['error']:.0e}", more, pruned),
        ", ".join(row["notes"]),
    ]

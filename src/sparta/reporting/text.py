"""The report in a terminal: one headline, at most ten layers, and what to know of the rest.

Tables fit 80 columns: a layer's name and its reason are shortened first. The long form is ``report.full``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sparta.tables import table

__all__ = ["gained", "headline", "short"]

WIDTH = 80
ROWS = 10
_NAME = 28
_PATTERN = 14


def headline(facts: Mapping[str, Any]) -> str:
    """Return the one sentence that says what was gained: speed, size, and how well it agrees.

    >>> whole = {"milliseconds": {"model as given": 0.071, "sparse": 0.027}, "chosen": "sparse", "reason": ""}
    >>> totals = {"memory": 800, "compiled_memory": 100}
    >>> checked = {"passed": True, "error": 2.5e-07}
    >>> headline({"speedup": 2.63, "plan": {"whole": whole}, "totals": totals, "certificate": checked})
    '2.6x faster (0.071 -> 0.027 ms), 8.0x smaller, verified to 2.5e-07'
    """
    return ", ".join([_speed(facts), *_size(facts["totals"]), _agreement(facts["certificate"])])


def _speed(facts: Mapping[str, Any]) -> str:
    whole, ratio = facts["plan"]["whole"], facts["speedup"]
    if ratio is None:
        return "timing unstable, no speed-up is claimed" if "unstable" in whole["reason"] else "speed not measured"
    before, after = whole["milliseconds"].get("model as given"), whole["milliseconds"].get(whole["chosen"])
    times = "" if before is None or after is None else f" ({before:.3g} -> {after:.3g} ms)"
    return f"as fast as before{times}" if 0.97 <= ratio < 1.05 else f"{gained(ratio)} faster{times}"


def gained(ratio: float) -> str:
    """Return a ratio as people read it.

    >>> gained(2.634), gained(1.18), gained(31.4)
    ('2.6x', '1.18x', '31x')
    """
    return f"{ratio:.2f}x" if ratio < 2 else f"{ratio:.1f}x" if ratio < 10 else f"{ratio:.0f}x"


def _size(totals: Mapping[str, Any]) -> list[str]:
    before, after = totals["memory"], totals["compiled_memory"]
    if not before or not after or before / after < 1.05:
        return []
    return [f"{before / after:.1f}x smaller"]


def _agreement(certificate: Mapping[str, Any]) -> str:
    return f"verified to {certificate['error']:.2g}" if certificate["passed"] else "not verified"


def short(facts: Mapping[str, Any]) -> str:
    """Return the report as a terminal shows it: the headline, the layers that take most time, and the notes."""
    layers = facts["layers"]
    lines = [headline(facts), ""]
    if layers:
        lines += [_layers(_longest(layers)), *_rest(layers)]
    else:
        lines.append("no layer that a kernel could run")
    whole = facts["plan"]["whole"]
    where = "loaded; where it was compiled: " if whole["loaded"] else ""
    lines.append(f"runs: {where}{whole['reason']}")
    lines += facts.get("accuracy", ())
    lines += [f"note: {note}" for note in facts["notes"]]
    return "\n".join(lines)


def _longest(layers: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the layers that take most time, in the order of the model; those without a time come last."""
    by_time = sorted(range(len(layers)), key=lambda index: -(layers[index]["ms"] or 0.0))
    return [layers[index] for index in sorted(by_time[:ROWS])]


def _layers(layers: Sequence[Mapping[str, Any]]) -> str:
    columns = ["layer", "pattern", "sparsity", "speed-up", "why"]
    rows: list[list[str]] = []
    for layer in layers:
        before, after = layer["dense_ms"], layer["ms"]
        ratio = "" if not before or not after or layer["implement"] == "dense" else gained(before / after)
        name = _shortened(str(layer["layer"]), _NAME, keep_end=True)
        pattern = _shortened(str(layer["pattern"]), _PATTERN)
        rows.append([name, pattern, f"{1 - layer['density']:.0%}", ratio, str(layer["why"])])
    taken = sum(max(len(row[at]) for row in [*rows, columns]) + 2 for at in range(4))
    for row in rows:
        row[4] = _shortened(row[4], max(10, WIDTH - taken))
    return table(columns, rows)


def _rest(layers: Sequence[Mapping[str, Any]]) -> list[str]:
    sparse = sum(row["implement"] != "dense" for row in layers)
    hidden = max(0, len(layers) - ROWS)
    more = f"; {hidden} more in report.full" if hidden else "; details in report.full"
    return [f"{sparse} of {len(layers)} layers run sparse{more}"]


def _shortened(text: str, width: int, *, keep_end: bool = False) -> str:
    if len(text) <= width:
        return text
    return "…" + text[1 - width :] if keep_end else text[: width - 1] + "…"

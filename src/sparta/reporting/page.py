"""The report as a page: one self-contained HTML file, for people who would rather look than read.

Every string of the report is escaped; style and script are two files beside this one, written into the page, so that
it opens anywhere without a network. What a report does not know (a curve, pictures, a roof) is left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from sparta.reporting import charts
from sparta.reporting.text import gained, headline

__all__ = ["page"]

_WORTH_A_LOOK = 5
_PICTURES = 24


def page(
    facts: Mapping[str, Any],
    *,
    title: str = "SparTA report",
    curve: Sequence[Mapping[str, float]] = (),
    history: Sequence[Mapping[str, float]] = (),
    roof: Mapping[str, float] | None = None,
) -> str:
    """Return a report as the text of an HTML page.

    Parameters
    ----------
    facts
        What ``Report.to_dict()`` returns.
    title
        Of the page.
    curve
        Points of a plan: ``latency_ms`` and ``loss`` each, and ``chosen`` for the one that was taken.
    history
        Steps of a training: ``step`` and any of ``loss``, ``sparsity``, ``accuracy``.
    roof
        What the machine reaches: ``flops_per_second`` and ``bytes_per_second``.
    """
    parts = [
        _top(facts, title),
        _curve(curve),
        _layers(facts["layers"]),
        _to_gain(facts["layers"]),
        _pictures(facts["layers"]),
        _history(history),
        _roof(facts, roof),
        _measured(facts),
        _data(facts),
    ]
    here = files("sparta.reporting")
    style, script = (here.joinpath(name).read_text("utf-8") for name in ("style.css", "script.js"))
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{escape(title)}</title>\n'
        f'<link rel="icon" href="data:,">\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n'
        + "\n".join(part for part in parts if part)
        + f"\n</main>\n<script>\n{script}</script>\n</body>\n</html>\n"
    )


def _top(facts: Mapping[str, Any], title: str) -> str:
    totals, certificate = facts["totals"], facts["certificate"]
    sparse = sum(row["implement"] != "dense" for row in facts["layers"])
    ratio = facts["speedup"]
    cards = [
        ("speed", "not claimed" if ratio is None else gained(ratio), _times(facts)),
        ("memory", f"{totals['compiled_memory'] / 2**20:.3g} MiB", f"{totals['memory'] / 2**20:.3g} MiB as given"),
        ("parameters", f"{totals['live_parameters']:,}", f"of {totals['parameters']:,}"),
        ("layers that run sparse", str(sparse), f"of {len(facts['layers'])}"),
        (
            "verified" if certificate["passed"] else "not verified",
            f"{certificate['error']:.2g}",
            f"relative error, {certificate['tolerance']:.2g} allowed in {certificate['dtype']}",
        ),
    ]
    items = "".join(
        f"<li>{escape(name)}<b>{escape(value)}</b><span class='soft'>{escape(more)}</span></li>"
        for name, value, more in cards
    )
    return f'<p class="soft">{escape(title)}</p>\n<h1>{escape(headline(facts))}</h1>\n<ul class="cards">{items}</ul>'


def _times(facts: Mapping[str, Any]) -> str:
    whole = facts["plan"]["whole"]
    before, after = whole["milliseconds"].get("model as given"), whole["milliseconds"].get(whole["chosen"])
    return str(whole["reason"]) if before is None or after is None else f"{before:.4g} ms -> {after:.4g} ms"


def _curve(points: Sequence[Mapping[str, float]]) -> str:
    if not points:
        return ""
    ordered = sorted(points, key=lambda point: point["latency_ms"])
    line = [(point["latency_ms"], point["loss"]) for point in ordered]
    marked = [(point["latency_ms"], point["loss"]) for point in ordered if point.get("chosen")]
    rows = [[_number(x, "{:.4g}"), _number(y, "{:.4g}")] for x, y in line]
    drawn = charts.curve(line, "latency in ms", "estimated loss", marked=marked)
    body = _table(["latency in ms", "estimated loss"], rows)
    details = f"<details><summary>the points as a table</summary>{body}</details>"
    return f"<h2>Speed against loss</h2>\n{drawn}\n{details}"


def _layers(layers: Sequence[Mapping[str, Any]]) -> str:
    if not layers:
        return "<h2>Layers</h2>\n<p>No layer that a kernel could run.</p>"
    longest = max((max(row["dense_ms"] or 0.0, row["ms"] or 0.0) for row in layers), default=0.0) or 1.0
    rows = []
    for row in sorted(layers, key=lambda row: -(row["ms"] or 0.0)):
        before, after = row["dense_ms"], row["ms"]
        ratio = before / after if before and after and row["implement"] != "dense" else None
        bars = "".join(
            f'<span class="bar {kind}" style="width:{100 * (time or 0.0) / longest:.2f}%"></span>'
            for kind, time in (("before", before), ("after", after))
        )
        rows.append(
            [
                f'<td class="name">{escape(str(row["layer"]))}</td>',
                f"<td>{escape(str(row['pattern']))}</td>",
                _number(1 - row["density"], "{:.1%}"),
                f'<td class="bars" data-value="{after or 0.0}">{bars}</td>',
                _number(before, "{:.4g}"),
                _number(after, "{:.4g}"),
                _number(ratio, "{:.2f}x"),
                f"<td>{escape(str(row['runs']))}</td>",
                f'<td class="why">{escape(str(row["why"]))}</td>',
            ]
        )
    columns = ["layer", "pattern", "sparsity", "time", "dense ms", "ms now", "gain", "runs", "why"]
    key = (
        '<p class="key soft">time per call:<span class="bar before"></span>dense<span class="bar after"></span>now</p>'
    )
    return f'<h2>Layers, the slowest first</h2>\n{key}\n<div class="wide">{_table(columns, rows)}</div>'


def _to_gain(layers: Sequence[Mapping[str, Any]]) -> str:
    open_ones = [row for row in layers if row["advice"] and row["ms"]]
    if not open_ones:
        return ""
    rows = [
        [
            f'<td class="name">{escape(str(row["layer"]))}</td>',
            _number(row["ms"], "{:.4g}"),
            f'<td class="why">{escape(str(row["advice"]))}</td>',
        ]
        for row in sorted(open_ones, key=lambda row: -row["ms"])[:_WORTH_A_LOOK]
    ]
    shown = _table(["layer", "ms now", "what would help"], rows)
    return f'<h2>Where most is left to gain</h2>\n<div class="wide">{shown}</div>'


def _pictures(layers: Sequence[Mapping[str, Any]]) -> str:
    drawn = [row for row in layers if row.get("picture")][:_PICTURES]
    if not drawn:
        return ""
    items = "".join(
        f"<li>{charts.picture(row['picture'])}<span>{escape(str(row['layer']))}</span>"
        f'<br><span class="soft">{escape(str(row["pattern"]))}, {1 - row["density"]:.0%} pruned</span></li>'
        for row in drawn
    )
    return f'<h2>What is left of the weights</h2>\n<ul class="masks">{items}</ul>'


def _history(history: Sequence[Mapping[str, float]]) -> str:
    parts = []
    for name in ("loss", "accuracy", "sparsity"):
        line = [(float(step["step"]), float(step[name])) for step in history if name in step]
        if line:
            parts.append(f"<h3>{name}</h3>\n{charts.curve(line, 'step', name)}")
    return "<h2>Training</h2>\n" + "\n".join(parts) if parts else ""


def _roof(facts: Mapping[str, Any], roof: Mapping[str, float] | None) -> str:
    points = []
    for row, layer in zip(facts["layers"], facts["plan"]["layers"], strict=True):
        moved = row["density"] * _elements(row["shape"]) * 4
        if row["ms"] and layer["live_flops"] and moved:
            points.append((str(row["layer"]), layer["live_flops"] / moved, layer["live_flops"] / row["ms"] * 1e3))
    if roof is None or not points:
        return ""
    drawn = charts.roofline(points, roof["flops_per_second"], roof["bytes_per_second"])
    reached = (
        f"This machine reached {roof['flops_per_second'] / 1e9:.4g} GFLOP/s in a dense product and "
        f"{roof['bytes_per_second'] / 1e9:.3g} GB/s in a copy. A dot is a layer: the work on its live weights per "
        "second, over that work per byte of live weights."
    )
    return f'<h2>Layers under the roof of the machine</h2>\n<p class="soft">{escape(reached)}</p>\n{drawn}'


def _elements(shape: Sequence[int]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


def _measured(facts: Mapping[str, Any]) -> str:
    whole, totals = facts["plan"]["whole"], facts["totals"]
    lines = [f"runs: {whole['reason']}"]
    if whole["interval"] is not None:
        low, high = whole["interval"]
        lines.append(f"The median of the rounds' ratios lies between {low:.2f}x and {high:.2f}x (95 %).")
    if facts["amdahl_bound"] is not None:
        lines.append(f"If the sparse layers took no time at all, it would be {facts['amdahl_bound']:.2f}x (Amdahl).")
    if whole["beyond"]:
        lines.append(f"Beyond the sparse layers: {whole['beyond']}")
    lines.append(f"Compiled in {totals['compile_seconds']:.1f} s.")
    machine = facts.get("machine") or {}
    lines += [f"{name}: {value}" for name, value in machine.items()]
    lines += [f"Note: {note}" for note in facts["notes"]]
    items = "".join(f"<li>{escape(str(line))}</li>" for line in lines)
    times = [
        [f"<td>{escape(str(name))}</td>", _number(value, "{:.4g}")] for name, value in whole["milliseconds"].items()
    ]
    tried = f'<div class="wide">{_table(["whole model", "ms"], times)}</div>' if times else ""
    return f"<h2>How it was measured</h2>\n<ul>{items}</ul>\n{tried}"


def _data(facts: Mapping[str, Any]) -> str:
    text = json.dumps({name: value for name, value in facts.items() if name != "layers"}, indent=1)
    return f"<h2>The data</h2>\n<details><summary>the report as JSON</summary><pre>{escape(text)}</pre></details>"


def _number(value: float | None, form: str) -> str:
    if value is None:
        return '<td class="number"></td>'
    return f'<td class="number" data-value="{value!r}">{escape(form.format(value))}</td>'


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    heads = "".join(f'<th scope="col"><button type="button">{escape(column)}</button></th>' for column in columns)
    body = "\n".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    return f"<table>\n<thead><tr>{heads}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"

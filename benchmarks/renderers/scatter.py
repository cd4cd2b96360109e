"""The drawing of what patterns cost: the metric over the measured speed-up, a line per pattern, a panel per task."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

COLOURS = {
    "unstructured": "#c05621", "4x1": "#0b6e4f", "16x1": "#2b6cb0", "2:4": "#97266d", "channels": "#7a5c00",
    "int8": "#4a5568",
}  # fmt: skip
WIDTH, HEIGHT, LEFT, TOP, APART = 360, 230, 58, 64, 70
_STEPS = 4


def drawn(rows: Sequence[dict[str, Any]], where: str) -> str:
    """Return the drawing as SVG, of the rows that have a metric and a latency."""
    whole = [row for row in rows if row["metric"] is not None and row["ms"] is not None]
    tasks = list(dict.fromkeys(row["task"] for row in whole))
    width, full = LEFT + max(len(tasks) * (WIDTH + APART), 108 * len(COLOURS)), TOP + HEIGHT + 74
    parts = [_legend([name for name in COLOURS if any(row["pattern"] == name for row in whole)])]
    for place, task in enumerate(tasks):
        parts += _panel([row for row in whole if row["task"] == task], task, LEFT + place * (WIDTH + APART))
    title = "What each pattern costs at the speed-up that it is measured to give"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {full}" role="img" '
        f'font-family="system-ui, sans-serif" font-size="12" fill="#7a828c">\n<title>{escape(title)}</title>\n'
        f'<text x="{LEFT}" y="18" font-weight="600">{escape(title)}</text>\n'
        + "\n".join(parts)
        + f'\n<text x="{LEFT}" y="{full - 8}" font-size="11">{escape(where)}</text>\n</svg>\n'
    )


def _legend(names: Sequence[str]) -> str:
    return "\n".join(
        f'<circle cx="{LEFT + 6 + at * 108}" cy="36" r="5" fill="{COLOURS[name]}"/>'
        f'<text x="{LEFT + 16 + at * 108}" y="40">{escape(name)}</text>'
        for at, name in enumerate(names)
    )


def _panel(rows: Sequence[dict[str, Any]], task: str, left: float) -> list[str]:
    dense = rows[0]["dense"]
    gains = [row["dense_ms"] / row["ms"] for row in rows]
    low = min(row["metric"] for row in rows)
    high = max(dense, *(row["metric"] for row in rows))
    span, most = max(high - low, 1e-9), max(*gains, 1.0) * 1.05

    def x(gain: float) -> float:
        return left + WIDTH * gain / most

    def y(metric: float) -> float:
        return TOP + HEIGHT * (1 - (metric - low + 0.04 * span) / (1.1 * span))

    parts = [
        f'<text x="{left}" y="{TOP - 6}" font-weight="600">{escape(task)}: {escape(rows[0]["metric_name"])}</text>'
    ]
    for step in range(_STEPS + 1):
        value = low + span * step / _STEPS
        parts.append(f'<path d="M{left} {y(value):.1f}h{WIDTH}" stroke="#8884"/>')
        parts.append(f'<text x="{left - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.3g}</text>')
    parts += [
        f'<text x="{x(tick):.1f}" y="{TOP + HEIGHT + 18}" text-anchor="middle">{tick}x</text>'
        for tick in range(int(most) + 1)
    ]
    parts.append(f'<path d="M{left} {y(dense):.1f}h{WIDTH}" stroke="#7a828c" stroke-dasharray="5 4"/>')
    parts.append(f'<text x="{left + WIDTH}" y="{y(dense) - 5:.1f}" text-anchor="end">dense</text>')
    middle = left + WIDTH / 2
    parts.append(f'<text x="{middle}" y="{TOP + HEIGHT + 38}" text-anchor="middle">times faster than dense</text>')
    for name, colour in COLOURS.items():
        points = [
            (x(gain), y(row["metric"]), row) for gain, row in zip(gains, rows, strict=True) if row["pattern"] == name
        ]
        if len(points) > 1:
            line = " ".join(f"{px:.1f},{py:.1f}" for px, py, _ in points)
            parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        for px, py, row in points:
            zeros = "" if row["sparsity"] is None else f" {100 * row['sparsity']:g} %"
            parts.append(
                f'<circle cx="{px:.1f}" cy="{py:.1f}" r="4.5" fill="{colour}"><title>{name}{zeros}</title></circle>'
            )
    return parts

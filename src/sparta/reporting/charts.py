"""Charts as SVG text: a curve, a mask as a picture, a roofline. Sizes are fixed, colours are those of the page.

Every number that a chart shows also stands in a table of the page, so charts are hidden from screen readers that read
the table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

__all__ = ["curve", "picture", "roofline"]

_WIDTH, _HEIGHT, _EDGE = 640, 320, 48


def curve(
    points: Sequence[tuple[float, float]], x_label: str, y_label: str, *, marked: Sequence[tuple[float, float]] = ()
) -> str:
    """Return a line through points, with some of them marked."""
    scale = _Scale([*points, *marked])
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(scale, points))
    dots = "".join(f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in map(scale, points))
    marks = "".join(f'<circle class="mark" cx="{x:.1f}" cy="{y:.1f}" r="6"/>' for x, y in map(scale, marked))
    return _svg(f'{scale.axes(x_label, y_label)}<polyline class="line" points="{path}"/>{dots}{marks}')


def roofline(points: Sequence[tuple[str, float, float]], flops_per_second: float, bytes_per_second: float) -> str:
    """Return the roof of a machine and layers under it: (name, FLOP per byte, FLOP per second), on logarithmic axes."""
    ridge = flops_per_second / bytes_per_second
    left = min([ridge / 100, *(x for _, x, _ in points)])
    right = max([ridge * 10, *(x for _, x, _ in points)])
    roof = [(left, left * bytes_per_second), (ridge, flops_per_second), (right, flops_per_second)]
    logs = [(math.log10(x), math.log10(y)) for x, y in [*roof, *((x, y) for _, x, y in points)] if x > 0 and y > 0]
    scale = _Scale(logs)
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(scale, logs[:3]))
    dots = []
    for name, x, y in points:
        at_x, at_y = scale((math.log10(x), math.log10(y)))
        title = f"{name}: {y / 1e9:.3g} GFLOP/s, {x:.3g} FLOP per byte"
        dots.append(
            f'<circle class="dot" cx="{at_x:.1f}" cy="{at_y:.1f}" r="4"><title>{escape(title)}</title></circle>'
        )
    axes = scale.axes("FLOP per byte (logarithmic)", "FLOP/s (logarithmic)", power=True)
    return _svg(f'{axes}<polyline class="roof" points="{path}"/>{"".join(dots)}')


def picture(cells: Sequence[Sequence[float]]) -> str:
    """Return a grid of densities as a picture: full colour is dense, the background is empty."""
    rows, columns = len(cells), max((len(row) for row in cells), default=0)
    parts = []
    for i, row in enumerate(cells):
        for j, density in enumerate(row):
            if density > 0:
                parts.append(f'<rect x="{j}" y="{i}" width="1" height="1" fill-opacity="{min(1.0, density):.2f}"/>')
    return (
        f'<svg class="mask" viewBox="0 0 {columns} {rows}" preserveAspectRatio="none" aria-hidden="true" '
        f'shape-rendering="crispEdges">{"".join(parts)}</svg>'
    )


class _Scale:
    """From values to places in the picture."""

    def __init__(self, points: Sequence[tuple[float, float]]) -> None:
        xs, ys = [x for x, _ in points] or [0.0], [y for _, y in points] or [0.0]
        self.x0, self.x1 = min(xs), max(xs)
        self.y0, self.y1 = min(ys), max(ys)
        self.dx = (self.x1 - self.x0) or 1.0
        self.dy = (self.y1 - self.y0) or 1.0

    def __call__(self, point: tuple[float, float]) -> tuple[float, float]:
        x = _EDGE + (point[0] - self.x0) / self.dx * (_WIDTH - 1.5 * _EDGE)
        y = _HEIGHT - _EDGE - (point[1] - self.y0) / self.dy * (_HEIGHT - 1.5 * _EDGE)
        return x, y

    def axes(self, x_label: str, y_label: str, *, power: bool = False) -> str:
        """Return both axes with their ends and names."""

        def label(value: float) -> str:
            return f"{10**value:.2g}" if power else f"{value:.3g}"

        low, right, top = _HEIGHT - _EDGE, _WIDTH - _EDGE / 2, _EDGE / 2
        return (
            f'<path class="axis" d="M{_EDGE} {top}V{low}H{right}"/>'
            f'<text x="{_EDGE}" y="{low + 16}">{label(self.x0)}</text>'
            f'<text x="{right}" y="{low + 16}" text-anchor="end">{label(self.x1)}</text>'
            f'<text x="{_EDGE - 6}" y="{low}" text-anchor="end">{label(self.y0)}</text>'
            f'<text x="{_EDGE - 6}" y="{top + 10}" text-anchor="end">{label(self.y1)}</text>'
            f'<text x="{(right + _EDGE) / 2}" y="{_HEIGHT - 10}" text-anchor="middle">{escape(x_label)}</text>'
            f'<text x="14" y="{_HEIGHT / 2}" text-anchor="middle" '
            f'transform="rotate(-90 14 {_HEIGHT / 2})">{escape(y_label)}</text>'
        )


def _svg(inside: str) -> str:
    return f'<svg class="chart" viewBox="0 0 {_WIDTH} {_HEIGHT}" aria-hidden="true">{inside}</svg>'

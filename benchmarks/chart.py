"""The charts of the README and the docs, drawn from the saved results.

Run with ``python benchmarks/chart.py`` after ``benchmarks/compiler/models.py``, which writes
``docs/_static/speedups.svg``, or after ``benchmarks/oneshot/encoder.py``, which writes ``docs/_static/loss.svg``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from record import RESULTS
from renderers import scatter

STATIC = Path(__file__).parents[1] / "docs" / "_static"
MODELS = {"bert-base": "BERT-base", "resnet50": "ResNet-50", "minilm": "MiniLM", "mobilenetv2": "MobileNetV2"}
SPARSITIES = (0.8, 0.9, 0.95)
COLOURS = ("#8fcfb4", "#2f9e74", "#0b6e4f")
BAR, GAP, HEIGHT, LEFT, TOP = 34, 40, 240, 56, 56


def drawn(cases: Sequence[dict[str, Any]], where: str) -> str:
    """Return the chart as SVG: times faster than the best dense, one group of bars per model."""
    found = {
        (case["model"], case["sparsity"]): case for case in cases if case["batch"] == 1 and case["pattern"] == "4x1"
    }
    groups = [(name, label) for name, label in MODELS.items() if all((name, s) in found for s in SPARSITIES)]
    most = max(_gain(found[name, s]) for name, _ in groups for s in SPARSITIES)
    width = LEFT + len(groups) * (len(SPARSITIES) * BAR + GAP) + GAP
    scale = HEIGHT / (most * 1.08)
    parts = []
    for tick in range(int(most) + 1):
        y = TOP + HEIGHT - tick * scale
        dense = ' stroke-dasharray="5 4"' if tick == 1 else ""
        parts.append(f'<path d="M{LEFT} {y:.1f}H{width - 12}" stroke="#8884"{dense}/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick}x</text>')
    for at, (name, label) in enumerate(groups):
        x = LEFT + GAP / 2 + at * (len(SPARSITIES) * BAR + GAP)
        for place, sparsity in enumerate(SPARSITIES):
            gain = _gain(found[name, sparsity])
            height, left = gain * scale, x + place * BAR
            parts.append(
                f'<rect x="{left:.1f}" y="{TOP + HEIGHT - height:.1f}" width="{BAR - 4}" height="{height:.1f}" '
                f'fill="{COLOURS[place]}"/>'
            )
            parts.append(
                f'<text x="{left + BAR / 2 - 2:.1f}" y="{TOP + HEIGHT - height - 5:.1f}" '
                f'text-anchor="middle">{gain:.1f}</text>'
            )
        middle = x + len(SPARSITIES) * BAR / 2
        parts.append(f'<text x="{middle:.1f}" y="{TOP + HEIGHT + 20}" text-anchor="middle">{escape(label)}</text>')
    for place, sparsity in enumerate(SPARSITIES):
        x = LEFT + place * 110
        parts.append(f'<rect x="{x}" y="30" width="12" height="12" fill="{COLOURS[place]}"/>')
        parts.append(f'<text x="{x + 18}" y="41">{sparsity:.0%} pruned</text>')
    title = "Times faster than the best dense PyTorch, one input, 4x1 blocks"
    full = TOP + HEIGHT + 54
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {full}" role="img" '
        f'font-family="system-ui, sans-serif" font-size="13" fill="#7a828c">\n<title>{escape(title)}</title>\n'
        f'<text x="{LEFT}" y="18" font-weight="600">{escape(title)}</text>\n'
        + "\n".join(parts)
        + f'\n<text x="{LEFT}" y="{full - 10}" font-size="11">{escape(where)}</text>\n</svg>\n'
    )


def _gain(case: dict[str, Any]) -> float:
    return float(case["speedup"])


def charts() -> dict[Path, str]:
    """Return the charts of the saved results, by the files that they belong into."""
    found: dict[Path, str] = {}
    for question, key, name, draw in (
        ("compiler_models", "cases", "speedups.svg", drawn),
        ("oneshot_encoder", "rows", "loss.svg", scatter.drawn),
    ):
        path = RESULTS / f"{question}.x86-64-cpu.json"
        if path.exists():
            saved = json.loads(path.read_text())
            found[STATIC / name] = draw(saved["results"][key], _where(saved))
    return found


def _where(saved: dict[str, Any]) -> str:
    environment = saved["environment"]
    threads = environment["torch_threads"]
    return f"{environment['cpu']['model']}, {threads} threads, PyTorch {environment['torch']}, {saved['date'][:10]}"


def main() -> None:
    """Write the charts."""
    STATIC.mkdir(exist_ok=True)
    for path, text in charts().items():
        path.write_text(text, "utf-8")
        print(f"wrote {path}")


if __name__ == "__main__":
    main()

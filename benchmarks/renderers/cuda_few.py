"""Tables of the CUDA kernels for few tokens, with what their parts take at the least beside them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from renderers.bounds import floor_bound
from renderers.registry import Record, markdown, renderer, source

_KERNELS = ("cuda-banks", "cuda-24-twice", "cuda-lanes", "cuda-bitmap", "cuda-gather")


def _means(rows: Sequence[Record], title: str, what: str, targets: dict[float, float]) -> str:
    """Return ratios by tokens, geometric means over the shapes, and targets where there are some."""
    tokens = sorted({row["tokens"] for row in rows})
    cells: dict[tuple[float, int], list[float]] = {}
    for row in rows:
        cells.setdefault((row["sparsity"], row["tokens"]), []).append(row["ratio"])
    lines = [
        [f"{100 * s:g} %", *(f"{statistics.geometric_mean(cells[s, m]):.2f}" for m in tokens)]
        + ([targets.get(s)] if targets else [])
        for s in sorted({key[0] for key in cells})
    ]
    return f"{title}\n\n{markdown([what, *map(str, tokens), *(['target'] if targets else [])], lines)}"


def _parts(rows: Sequence[Record], targets: dict[float, float]) -> str:
    """Return every kernel of the cases whose parts were measured alone."""
    lines = []
    names = [name for name in _KERNELS if any(name in row["us"] for row in rows)]
    for row in (row for row in rows if "floors" in row):
        us, parts = row["us"], row["floors"]
        dense = min(value for name, value in us.items() if name.startswith("dense"))
        taken = [f"{us[name]:.1f}" if name in us else None for name in names]
        alone = [f"{parts[name]:.1f}" if name in parts else None for name in ("launch", "stream", "look", "expand")]
        size = f"{row['bytes'] / 1e6:.0f} ({parts['bytes'] / 1e6:.0f})"
        case = [f"{row['shape'][0]}×{row['shape'][1]}", f"{100 * row['sparsity']:g} %", row["tokens"]]
        ends = [f"{row['ratio']:.2f}", targets.get(row["sparsity"]), f"{floor_bound(parts, dense):.1f}"]
        lines.append([*case, f"{dense:.1f}", *taken, *ends, size, *alone])
    title = (
        "The same by kernel, in µs. The bound is dense over the longest of the parts, each of which was measured alone "
        "by a kernel that does nothing else: a launch, reading the fewest bytes (in brackets; MB) that live values and "
        "where they are can be stored in, looking up one input for each, expanding them to what the matrix unit "
        "takes, a bit at a time as `cuda-lanes` does; another way to expand would have another bound."
    )
    heads = ["weight", "pruned", "tokens", "dense", *names, "× dense", "target", "bound", "MB"]
    return f"{title}\n\n{markdown([*heads, 'launch', 'bytes', 'looks', 'expanding'], lines)}"


@renderer("cuda-decode", "decode")
def decode(found: Sequence[Record]) -> str:
    """Return layers with few tokens: unstructured weights, and small inputs that are skipped."""
    parts = []
    for record in found:
        results = record["results"]
        targets = dict(results["targets"])
        for kind, what in (("weights", "weights pruned"), ("threshold", "inputs skipped")):
            shapes = len({tuple(row["shape"]) for row in results[kind]})
            name = {"weights": "Unstructured weights, by the fastest kernel", "threshold": "`ThresholdLinear`"}[kind]
            title = (
                f"{name}: times faster than the best dense in {results['dtype']}, by the number of tokens; geometric "
                f"means over {shapes} shapes. {source(record)}"
            )
            parts.append(_means(results[kind], title, what, targets if kind == "weights" else {}))
        parts.insert(-1, _parts(results["weights"], targets))
    return "\n\n".join(parts)

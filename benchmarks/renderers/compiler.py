"""Tables of compiled models, end to end."""

from __future__ import annotations

from collections.abc import Sequence

from renderers.registry import Record, markdown, renderer, source


@renderer("compiler-models", "compiler_models")
def models(found: Sequence[Record]) -> str:
    """Return whole models on the CPU: a row for each model, batch and pattern, a column for each sparsity."""
    parts = []
    for record in found:
        cells = {(r["model"], r["batch"], _pattern(r), r["sparsity"]): r for r in record["results"]["cases"]}
        sparsities = sorted({key[3] for key in cells if key[3]})
        rows = []
        order = {name: place for place, name in enumerate(("dense", "u", "4x1"))}
        kinds = sorted({key[:3] for key in cells}, key=lambda kind: (kind[0], kind[1], order.get(kind[2], len(order))))
        for model, batch, pattern in kinds:
            wanted = sparsities if pattern != "dense" else [0.0]
            line = [_cell(cells.get((model, batch, pattern, sparsity))) for sparsity in wanted]
            rows.append([model, batch, pattern, *line, *[None] * (len(sparsities) - len(line))])
        title = (
            "Times faster than the best of PyTorch eager and `torch.compile`; in brackets the bound of Amdahl's law: "
            f"what eager PyTorch would gain if pruned layers took no time. {source(record)}"
        )
        heads = ["model", "batch", "pattern", *(f"{100 * sparsity:g} %" for sparsity in sparsities)]
        parts.append(f"{title}\n\n{markdown(heads, rows)}")
    return "\n\n".join(parts)


def _pattern(row: Record) -> str:
    return str(row["pattern"]) if row["sparsity"] else "dense"


def _cell(row: Record | None) -> str | None:
    if row is None:
        return None
    bound = row["amdahl_bound"] if row["sparsity"] else None
    return f"{row['speedup']:.2f}" + ("" if bound is None else f" ({bound:.1f})")


@renderer("compiler-stacks", "compiler_stacks")
def stacks(found: Sequence[Record]) -> str:
    """Return stacks of transformer layers on a GPU: a row for each stack and step."""
    parts = []
    for record in found:
        rows = []
        for row in record["results"]["cases"]:
            step = f"decode, {row['rows']} tokens" if row["rows"] else "prefill"
            weights = f"{row['pattern']}, {100 * row['sparsity']:g} %" if row["sparsity"] else "dense"
            times = row["median_ms"]
            runs = ", ".join(f"{count} {name}" for name, count in row["implements"].items())
            line = [
                row["model"],
                step,
                weights,
                f"{times[row['best_dense']]:.3g}",
                f"{times['sparta']:.3g}",
                _cell(row),
            ]
            rows.append([*line, f"{row['host']}: {runs}"])
        shapes = record["results"]["shapes"]
        sizes = "; ".join(f"{name}, {shape['layers']} layers" for name, shape in shapes.items())
        title = (
            f"Milliseconds of the best dense (eager, `torch.compile`, each also in a CUDA graph) and of the compiled "
            f"model, and times faster, with Amdahl's bound in brackets. {sizes}; bf16. {source(record)}"
        )
        heads = ["stack", "step", "weights", "best dense ms", "sparta ms", "times faster", "runs in, by"]
        parts.append(f"{title}\n\n{markdown(heads, rows)}")
    return "\n\n".join(parts)


@renderer("compiler-precision", "compiler_precision")
def precision(found: Sequence[Record]) -> str:
    """Return a sentence encoder in several precisions: accuracy beside time and size."""
    parts = []
    for record in found:
        results = record["results"]
        rows = [
            [
                row["name"],
                f"{row['spearman']:.4f}",
                f"{row['one_ms']:.2f}",
                f"{row['per_second']:.0f}",
                f"{row['mib']:.1f}",
                None if row["change"] is None else f"{row['change']:.3f}",
            ]
            for row in results["rows"]
        ]
        how = "pruned and trained" if results["sparse"]["trained"] else "pruned in one shot, not trained on"
        title = (
            "all-MiniLM-L6-v2 with its real weights on STS-B: Spearman's correlation of "
            f"{results['pairs']} pairs, milliseconds of a sentence alone, sentences a second in batches of 32, MiB of "
            f"the file, and how much rounding changes the outputs (of their norm). Sparse models were {how}. "
            f"{source(record)}"
        )
        heads = ["variant", "Spearman", "ms alone", "sentences/s", "MiB", "change"]
        parts.append(f"{title}\n\n{markdown(heads, rows)}")
    return "\n\n".join(parts)

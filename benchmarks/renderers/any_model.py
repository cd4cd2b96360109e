"""Tables of models as they come: what is compiled of each, at all sizes, and real sentences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from renderers.registry import Record, markdown, renderer, source

_EXACT = 1e-4


@renderer("compiler-zoo", "compiler_zoo")
def zoo(found: Sequence[Record]) -> str:
    """Return a row for each model: how much is compiled and kept, the errors here and from a file, the tokens."""
    parts = []
    for record in found:
        models = record["results"]["models"]
        good = [row for row in models if "failed" not in row]
        whole = sum(not row["compiled"].startswith(("in ", "as ")) for row in good)
        exact = sum(row["error"] < _EXACT for row in good)
        loaded = sum(isinstance(row.get("loaded"), float) and row["loaded"] < _EXACT for row in good)
        tokens = [row["tokens"] for row in good if "tokens" in row]
        title = (
            f"{len(models)} models: {len(good)} compiled, {whole} of them whole, {exact} exact (a relative error below "
            f"1e-4), {loaded} saved, and loaded exactly in a new process; of {len(tokens)} that generate, "
            f"{tokens.count('equal')} give the same tokens, here and from the file. {source(record)}"
        )
        heads = ["model", "from", "compiled", "parameters", "kept", "sparse layers", "error", "with one sample more"]
        heads += ["from a file, in a new process", "tokens"]
        parts.append(f"{title}\n\n{markdown(heads, [_zoo_row(row) for row in models])}")
    return "\n\n".join(parts)


def _zoo_row(row: dict[str, Any]) -> list[str]:
    if "failed" in row:
        return [row["model"], row["source"], row["failed"].replace("|", "/"), *[""] * 7]
    numbers = [row["error"], row["any_batch"], row.get("loaded", "")]
    texts = [number if isinstance(number, str) else f"{number:.0e}" for number in numbers]
    size = f"{row['parameters'] / 1e3:.0f} k"
    head = [row["model"], row["source"], row["compiled"], size, f"{row['kept']:.0%}", f"{row['kernels']}"]
    return [*head, *texts, row.get("tokens", "")]


@renderer("compiler-sentences", "compiler_sentences")
def sentences(found: Sequence[Record]) -> str:
    """Return sentences per second of each runner, by batch size."""
    parts = []
    for record in found:
        for case in record["results"]["cases"]:
            rates = case["sentences_per_second"]
            sizes = list(next(iter(rates.values())))
            rows = [
                [name, *(f"{rates[name][size]:.0f}" for size in sizes), f"{case['difference'][name]:.0e}"]
                for name in rates
            ]
            title = (
                f"Sentences per second of {case['model']}, {100 * case['sparsity']:g} % of its linear layers pruned in "
                f"blocks 4x1, one compile, {case['batches']} batches of {case['shapes']} shapes, {case['threads']} "
                f"threads. {source(record)}"
            )
            heads = ["", *(size if size == "all" else f"batch {size}" for size in sizes), "difference from eager"]
            parts.append(f"{title}\n\n{markdown(heads, rows)}")
    return "\n\n".join(parts)


@renderer("compiler-sizes", "compiler_sizes")
def sizes(found: Sequence[Record]) -> str:
    """Return a row for each model and sparsity: sizes, failures, and the ratios to eager."""
    parts = []
    for record in found:
        results = record["results"]
        rows = [
            [
                case["model"],
                f"{100 * case['sparsity']:g} %",
                case["sizes"],
                case["failed"],
                None if case["difference"] is None else f"{case['difference']:.0e}",
                None if case["least"] is None else f"{case['least']:.2f} {_at(case)}",
                None if case["median"] is None else f"{case['median']:.2f}",
                case["slower"],
            ]
            for case in results["cases"]
        ]
        title = (
            f"{results['pairs']} pairs of a model and a size: {results['failed']} exceptions, {results['wrong']} wrong "
            f"outputs, {results['slower']} below 0.97 of eager after tuning. {source(record)}"
        )
        heads = ["model", "pruned", "sizes", "exceptions", "difference", "least ratio", "median ratio", "below 0.97"]
        parts.append(f"{title}\n\n{markdown(heads, rows)}")
    return "\n\n".join(parts)


def _at(case: dict[str, Any]) -> str:
    """Return the size of the least ratio, in words."""
    shapes = case["worst"][0]["size"]
    return "at " + ", ".join("×".join(map(str, shape)) for shape in shapes)

"""Tables of one-shot pruning and plans: what methods and patterns cost, and how plans keep their word."""

from __future__ import annotations

from collections.abc import Sequence

from renderers.registry import Record, markdown, renderer, source

_MODELS = {"prompt": "llama, 2,048 tokens", "llama": "llama, 16 tokens"}


@renderer("oneshot-language-model", "oneshot_language_model")
def language_model(found: Sequence[Record]) -> str:
    """Return perplexities, a row a method, a column a pattern; then what the same costs on a CPU."""
    parts = []
    for record in found:
        if any("processor_seconds" in run for run in record["results"]["runs"]):
            parts.append(_on_a_cpu(record))
            continue
        results = record["results"]
        cells = {(run["method"], run["pattern"]): run for run in results["runs"]}
        methods, patterns = (list(dict.fromkeys(key[place] for key in cells)) for place in range(2))
        rows = [[method, *(_perplexity(cells.get((method, pattern))) for pattern in patterns)] for method in methods]
        seconds = {method: [run["seconds"] for (m, _), run in cells.items() if m == method] for method in methods}
        for row, method in zip(rows, methods, strict=True):
            row.append(f"{sum(seconds[method]) / len(seconds[method]):.0f}")
        title = (
            f"Perplexity on {results['held_out_tokens']:,} tokens of a book that was not calibrated on "
            f"({results['calibration_tokens']:,} tokens of another one were); dense "
            f"{results['perplexity_dense']:.1f}. At most {results['peak_mib']:,} MiB in use."
        )
        parts.append(f"{title} {source(record)}\n\n{markdown(['method', *patterns, 'seconds to prune'], rows)}")
    return "\n\n".join(parts)


def _on_a_cpu(record: Record) -> str:
    results = record["results"]
    cells = [
        [run["method"], run["pattern"], f"{run['processor_seconds'] / 60:.1f}", f"{run['grown_mib']:,}"]
        for run in results["runs"]
    ]
    part = f"; the first {results['blocks']} blocks" if results.get("blocks") else ""
    title = (
        f"The cost on 2 cores, {results['calibration_tokens']:,} tokens read{part}. Minutes are processor time, summed "
        "over both cores, and an upper bound: other programs ran beside it, and threads that wait for others count. "
        "Memory is by how much the process grew beyond the model "
        "and a copy of it."
    )
    heads = ["method", "pattern", "processor minutes", "MiB more"]
    return f"{title} {source(record)}\n\n{markdown(heads, cells)}"


def _perplexity(run: Record | None) -> str:
    return "" if run is None else f"{run['perplexity']:.1f}" if run["perplexity"] < 1e4 else f"{run['perplexity']:.0e}"


@renderer("oneshot-encoder", "oneshot_encoder")
def encoder(found: Sequence[Record]) -> str:
    """Return the metric and the measured latency of each pattern, one table a task."""
    parts = []
    for record in found:
        results = record["results"]
        for task in dict.fromkeys(row["task"] for row in results["rows"]):
            rows = [row for row in results["rows"] if row["task"] == task]
            cells = [
                [row["pattern"], _percent(row["sparsity"]), _number(row["metric"]), *_latency(row)] for row in rows
            ]
            dense = _number(next((row["dense"] for row in rows if row["dense"] is not None), None))
            title = f"{task}, pruned by {results['method']}: {rows[0]['metric_name']}; dense {dense}."
            parts.append(
                f"{title} {source(record)}\n\n{markdown(['pattern', 'zeros', 'metric', 'ms', 'x dense'], cells)}"
            )
    if any(row["ms"] is not None and row["metric"] is not None for each in found for row in each["results"]["rows"]):
        parts.insert(0, "![What each pattern costs at the speed-up that it is measured to give](../_static/loss.svg)")
    return "\n\n".join(parts)


@renderer("oneshot-plan", "oneshot_plan")
def plans(found: Sequence[Record]) -> str:
    """Return asked and measured speed-ups, and the metric beside uniform pruning."""
    parts = []
    for record in found:
        rows = [
            [
                _planned(row),
                f"{row['asked']:g}x",
                f"{row['speedup']:.2f}x" + ("" if row["met"] else " (not met)"),
                f"{100 * (row['speedup'] / row['asked'] - 1):+.1f} %",
                f"{row['given_ms']:.3g} → {row['ms']:.3g}",
                row["rounds"],
                f"{row['loss']:.3f}",
                _beside(row),
                ", ".join(row["options"]),
                "" if row["seconds"] is None else f"{row['seconds']:.0f}",
            ]
            for row in record["results"]["rows"]
        ]
        heads = ["model", "asked", "measured", "error", "ms", "rounds", "estimated loss"]
        heads += ["metric (dense; uniform)", "options", "s"]
        parts.append(f"{source(record)}\n\n{markdown(heads, rows)}")
    return "\n\n".join(parts)


@renderer("oneshot-memory", "oneshot_memory")
def memory(found: Sequence[Record]) -> str:
    """Return one sentence on the largest model that was pruned under a cap."""
    parts = []
    for record in found:
        results = record["results"]
        grown = f"{results['grown_gib']:.2f} GiB, to {results['process_gib']:.2f} GiB"
        parts.append(
            f"A model of {results['weights_gib']:.1f} GiB under a cap of {results['cap_gib']:g} GiB: the process grew "
            f"by {grown}, in {results['minutes']:.0f} minutes ({results['method']}, 2:4, random weights). "
            f"{source(record)}"
        )
    return "\n\n".join(parts)


def _planned(row: Record) -> str:
    name = _MODELS.get(row["model"], row["model"])
    if not row["metric_name"]:
        return name
    plain = "" if row.get("rounds_layers", True) else ", nothing rounded"
    return f"{name} ({row['metric_name']}, by {row['method']}{plain})"


def _beside(row: Record) -> str:
    if row["metric"] is None:
        return ""
    digits = 1 if row["dense_metric"] > 10 else 3
    other = row["uniform"]
    text = "" if other is None else f"; {other['metric']:.{digits}f} by {other['option']}, {other['speedup']:.2f}x"
    return f"{row['metric']:.{digits}f} ({row['dense_metric']:.{digits}f}{text})"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:g} %"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _latency(row: Record) -> list[str]:
    if row["ms"] is None:
        return ["", ""]
    return [f"{row['ms']:.3g}", f"{row['dense_ms'] / row['ms']:.2f}"]

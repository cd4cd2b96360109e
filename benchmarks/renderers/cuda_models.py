"""Tables of whole models and of trust on CUDA: stacks, the paper's grid, training, choices that hold and repeat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from renderers.registry import Record, markdown, renderer, source


@renderer("cuda-stacks-fp8", "stacks_fp8")
def stacks_fp8(found: Sequence[Record]) -> str:
    """Return whole stacks in fp8: a row for each stack and pattern."""
    parts = []
    for record in found:
        rows = []
        for row in record["results"]["cases"]:
            times = [f"{row['ms'][name]:.3f}" if name in row["ms"] else None for name in ("bf16", "fp8", "sparta")]
            over = [None if row[f"ratio_{name}"] is None else f"{row[f'ratio_{name}']:.2f}" for name in ("fp8", "bf16")]
            runs = ", ".join(f"{count} {name}" for name, count in row["implements"].items())
            runs += f" ({row['joined']} products of several)" if row.get("joined") else ""
            change = None if row["change"] is None else f"{100 * row['change']:.1f} %"
            own = f"{row['products']:.3f}" if row.get("products") else None
            least, bound = _at_best(row)
            reached = [over[0], row["over_fp8"], over[1], row["over_bf16"]]
            line = [row["case"], row["layers"], *times, own, least, *reached]
            rows.append([*line, bound, runs, change])
        title = (
            "Milliseconds of a whole stack: dense in bf16 (the best of eager, `torch.compile`, and both replayed from "
            "CUDA graphs) and in fp8 (`torch.compile`, replayed from a CUDA graph), and after `sparta.compile` in fp8, "
            "or in bf16 where the row says so, with the sum of its linear layers, each alone with its rounding, and "
            "what they take at least, by what memory, the L2 cache and the matrix unit were measured to give; times "
            "faster than both, beside the aims and the bound, with linear layers at that least and all else as it is; "
            "how far rounding changes the outputs. "
            f"{source(record)}"
        )
        heads = [
            "stack",
            "layers",
            "bf16",
            "fp8",
            "sparta",
            "linear",
            "at least",
            "× fp8",
            "aim",
            "× bf16",
            "aim",
            "bound",
            "runs",
            "change",
        ]
        parts.append(f"{title}\n\n{markdown(heads, rows)}")
    return "\n\n".join(parts)


def _at_best(row: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Return the least that linear layers take, and times dense in bf16 with that; None where it was not measured."""
    least, products, times = row.get("least"), row.get("products"), row["ms"]
    if not least or not products:
        return None, None
    return f"{least:.3f}", f"{times['bf16'] / (times['sparta'] - products + least):.2f}"


@renderer("cuda-generate", "generate")
def generate(found: Sequence[Record]) -> str:
    """Return how long a prompt and a token take: a row for each pattern."""
    parts = []
    for record in found:
        rows = record["results"]["rows"]
        rivals = list(dict.fromkeys(name for row in rows for name in row["milliseconds"]))
        lines = []
        for row in rows:
            for what in ("prompt", "token"):
                times = {name: row["milliseconds"][name][what] for name in rivals if name in row["milliseconds"]}
                size = f"prompt of {row['prompt_tokens']}" if what == "prompt" else "a token"
                lines.append([row["pattern"], size, *(f"{times[n]:.3f}" if n in times else None for n in rivals)])
        title = (
            "Milliseconds of four layers of Llama-8B's shape through transformers, batch 1, the pruned model: eager, "
            "with a static cache and `torch.compile`, and after `sparta.compile`, in bf16 and in fp8; a token is what "
            f"`generate` takes more for a longer answer. {source(record)}"
        )
        parts.append(f"{title}\n\n{markdown(['pattern', 'what', *rivals], lines)}")
    return "\n\n".join(parts)


_BANDWIDTH = 4.26e9  # bytes per millisecond of an H200, as fp8.py measures it
_VIT_B = (*[(768, 768)] * 4, (3072, 768), (768, 3072))  # linear layers of an encoder layer
_PATCHES = 196


def _memory_bound(row: Record) -> float:
    """Return how much faster a step can be whose linear layers do nothing but move activations and their gradients."""
    moved = sum(3 * row["batch"] * _PATCHES * (n + k) * 2 for n, k in _VIT_B)  # by three products, in bf16
    least = max(row["layers"] * moved / _BANDWIDTH, (1 - row["sparsity"]) * row["linear_ms"])
    dense: float = row["graphed_dense_ms"]
    return dense / (dense - row["linear_ms"] + least)


@renderer("training-model", "training_model")
def training_model(found: Sequence[Record]) -> str:
    """Return training steps of a whole model."""
    parts = []
    for record in found:
        rows = []
        for row in record["results"]["steps"]:
            times = [f"{row[name]:.2f}" for name in ("dense_ms", "ms", "graphed_dense_ms", "graphed_ms", "linear_ms")]
            ratios = [f"{row[name]:.2f}" for name in ("ratio", "graphed_ratio", "target", "bound")]
            ratios.append(f"{_memory_bound(row):.2f}")
            rows.append(
                [f"{row['layers']} layers, batch {row['batch']}", f"{100 * row['sparsity']:g} %", *times, *ratios]
            )
        title = (
            "A training step of ViT-B in bf16 with blocks of 64 in its linear layers: milliseconds and times faster "
            "than dense, eagerly and replayed from CUDA graphs. The bound is Amdahl's, with linear layers that take "
            "their density of the time that they take densely; the target is 85 % of it. The bound by memory lets them "
            "take what moving their inputs, outputs and gradients once for each of three products takes at 4.3 TB/s. "
            f"{source(record)}"
        )
        heads = ["model", "sparsity", "dense", "sparse", "dense, graph", "sparse, graph", "of it linear layers"]
        heads += ["over dense", "over dense, graph", "target", "bound", "bound by memory"]
        parts.append(f"{title}\n\n{markdown(heads, rows)}")
    return "\n\n".join(parts)


@renderer("cuda-never-slower", "never_slower")
def never_slower(found: Sequence[Record]) -> str:
    """Return how random layers fared that were measured again."""
    parts = []
    for record in found:
        results = record["results"]
        layers, rows = results["layers"], []
        for pattern in sorted({each["pattern"] for each in layers}):
            for graph in (False, True):
                ratios = [each["ratio"] for each in layers if each["pattern"] == pattern and each["graph"] == graph]
                if ratios:
                    slower = sum(ratio < results["least"] for ratio in ratios)
                    mode = "graph" if graph else "eager"
                    rows.append([pattern, mode, len(ratios), f"{min(ratios):.2f}", f"{max(ratios):.2f}", slower])
        title = (
            f"{len(layers)} random layers, chosen by tuning and measured again in a process of its own: times faster "
            f"than dense. Of all of them, {sum(each['ratio'] < results['least'] for each in layers)} fell below "
            f"{results['least']}. {source(record)}"
        )
        heads = ["pattern", "mode", "layers", "lowest", "highest", f"below {results['least']}"]
        parts.append(f"{title}\n\n{markdown(heads, rows)}")
    return "\n\n".join(parts)


@renderer("cuda-stability", "stability")
def stability(found: Sequence[Record]) -> str:
    """Return how far choices of several processes are apart."""
    parts = []
    for record in found:
        rows = [
            [
                f"{row['n']}×{row['k']}, {row['pattern']}, {100 * row['sparsity']:g} %",
                row["tokens"],
                len(row["over_best"]),
                row["choices"],
                f"{row['best_us']:.1f}",
                f"{max(row['over_best']):.3f}",
            ]
            for row in record["results"]["layers"]
        ]
        title = (
            "Layers tuned again and again in fresh processes: how many different choices there were, and how long the "
            f"slowest of them takes, over the fastest; {record['results']['allowed']} is allowed. {source(record)}"
        )
        heads = ["layer", "tokens", "tunings", "different choices", "best µs", "slowest over best"]
        parts.append(f"{title}\n\n{markdown(heads, rows)}")
    return "\n\n".join(parts)


@renderer("cuda-paper-grid", "paper_grid")
def paper_grid(found: Sequence[Record]) -> str:
    """Return the models and patterns of the paper: a row for each, rivals first, then our steps."""
    parts = []
    for record in found:
        results = record["results"]
        names = list(dict.fromkeys(name for row in results["cases"] for name in row["ms"]))
        rows = [
            [
                row["model"],
                row["pattern"],
                *(f"{row['ms'][name]:.3f}" if name in row["ms"] else None for name in names),
                f"{row['ratio']:.2f}",
            ]
            for row in results["cases"]
        ]
        title = (
            f"Milliseconds with a batch of {results['batch']} in bf16, replayed from CUDA graphs: dense models, and "
            "the pruned one step by step, when what was pruned is cut out, with kernels for the rest, and in fewer "
            f"bits; times faster than the best dense model. {source(record)}"
        )
        parts.append(f"{title}\n\n{markdown(['model', 'pattern', *names, 'over the best'], rows)}")
    return "\n\n".join(parts)

"""Tables of compiled models, end to end."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from renderers.registry import Record, markdown, renderer, source

_STEPS = ("dense", "propagation", "kernels", "sparta", "full search")  # of the paper's grid


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
        names = {"inductor": "`torch.compile`", "onnxruntime": "ONNX Runtime", "openvino": "OpenVINO"}
        there = {name for row in record["results"]["cases"] for name in row.get("median_ms", ())}
        others = [said for name, said in names.items() if name in there] or [names["inductor"]]
        title = (
            f"Times faster than the best of PyTorch eager and {' and '.join(others)}; in brackets the bound of "
            f"Amdahl's law: what eager PyTorch would gain if pruned layers took no time. {source(record)}"
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


# How many times faster than the best dense runtime at the same precision; dense models are to lose no more than 3 %.
_GOALS = {
    "bert-base": {"dense fp32": 0.97, "4x1 80% fp32": 4.0, "4x1 90% fp32": 6.0, "4x1 80% bf16": 2.0}
    | {"4x4 80% int8": 2.5, "4x4 90% int8": 3.5},
    "resnet50": {
        "dense fp32": 0.97,
        "4x1 80% fp32": 4.0,
        "4x1 90% fp32": 5.0,
        "4x4 80% int8": 1.8,
        "4x4 90% int8": 2.5,
    },
    "mobilenetv2": {"dense fp32": 0.97, "4x1 80% fp32": 2.0, "4x1 90% fp32": 3.0},
}


@renderer("compiler-quantized", "compiler_quantized")
def quantized(found: Sequence[Record]) -> str:
    """Return whole models in several precisions: milliseconds of the best dense runtime in each, and of ours."""
    parts = []
    for record in found:
        rows = []
        for row in record["results"]["rows"]:
            times = row["median_ms"]
            for name, ms in times.items():
                if not name.startswith("sparta"):
                    continue
                precision = name.split()[-1]
                rivals = {n: t for n, t in times.items() if not n.startswith("sparta") and n.endswith(precision)}
                best = min(rivals, key=rivals.__getitem__)
                change, variant = row["change"].get(name), name.removeprefix("sparta ")
                line = [row["model"], row["batch"], variant, f"{ms:.2f}", best, f"{rivals[best]:.2f}"]
                target, bound = _GOALS.get(row["model"], {}).get(variant), row.get("bound_ms", {}).get(name)
                rows.append(
                    [
                        *line,
                        f"{rivals[best] / ms:.2f}",
                        None if target is None else f"{target:g}",
                        None if bound is None else f"{rivals[best] / (bound['empty'] + bound['least']):.2f}",
                        None if change is None else f"{change:.3f}",
                    ]
                )
        title = (
            "Milliseconds of compiled models and of the best dense runtime at the same precision (eager PyTorch, "
            "ONNX Runtime, OpenVINO), how many times faster, and how much rounding changes the outputs (of their "
            "norm). The bound is of the same model without its live weights, plus what these need at the full rate of "
            "all cores, both measured in the same run. "
            f"{record['results']['threads']} threads. {source(record)}"
        )
        heads = ["model", "batch", "weights", "ms", "best dense", "its ms", "times faster", "target", "bound", "change"]
        parts.append(f"{title}\n\n{markdown(heads, rows)}")
    return "\n\n".join(parts)


_SLOW = 10.0  # times eager: who takes longer is no rival, as the benchmark has it


@renderer("compiler-paper-grid", "compiler_paper_grid")
def paper_grid(found: Sequence[Record]) -> str:
    """Return the paper's grid: times faster than each rival, what each step brings, and memory."""
    parts = []
    for record in found:
        results = record["results"]["rows"]
        timed = list(dict.fromkeys(name for row in results for name in row["median_ms"] if name != "sparta"))
        rivals = [name for name in timed if any(_is_rival(row["median_ms"], name) for row in results)]
        ratios = {name: [_over(row, name) for row in results] for name in rivals}
        means = [statistics.geometric_mean([each for each in ratios[name] if each is not None]) for name in rivals]
        speeds = [
            [row["model"], row["pattern"], f"{row['median_ms']['sparta']:.1f}"]
            + [None if ratios[name][at] is None else f"{ratios[name][at]:.2f}" for name in rivals]
            for at, row in enumerate(results)
        ]
        speeds.append(["geometric mean", "", "", *(f"{mean:.2f}" for mean in means)])
        title = (
            "Milliseconds, and how many times faster than dense models in other runtimes. "
            f"{record['results']['threads']} threads. {source(record)}"
        )
        parts.append(f"{title}\n\n{markdown(['model', 'pattern', 'ms', *rivals], speeds)}")
        left_out = dict.fromkeys(f"{row['model']}: {row['left_out']}." for row in results if row.get("left_out"))
        slow = [name for name in timed if name not in rivals]
        left_out |= dict.fromkeys(f"{name} is left out: more than {_SLOW:g} times slower than eager." for name in slow)
        parts += [" ".join(left_out)] if left_out else []
        names = [name for name in _STEPS if any(name in row["ablation_ms"] for row in results)]
        steps = [[row["model"], row["pattern"], *_in_columns(row["ablation_ms"], names, ".1f")] for row in results]
        parts.append(
            "What each step brings, in milliseconds: the dense model, cut by propagation, with sparse kernels in its "
            "graph, as the compiler hosts it, and after the full search:\n\n"
            + markdown(["model", "pattern", *names], steps)
        )
        held = list(dict.fromkeys(name for row in results for name in row["held_mib"]))
        sizes = [
            [
                *(row["model"], row["pattern"]),
                *_in_columns(row["mib"], ("dense", "sparta"), ".0f"),
                *_in_columns(row["held_mib"], held, ".0f"),
            ]
            for row in results
        ]
        parts.append(
            "MiB of the dense weights and of the compiled file, and what a process holds at most while it calls the "
            "model:\n\n" + markdown(["model", "pattern", "weights", "compiled", *held], sizes)
        )
    return "\n\n".join(parts)


def _is_rival(times: Mapping[str, float], name: str) -> bool:
    return name in times and times[name] <= _SLOW * times["eager"]


def _over(row: Record, name: str) -> float | None:
    """Return how many times faster ours is than a rival, where that was timed."""
    times = row["median_ms"]
    return times[name] / times["sparta"] if name in times else None


def _in_columns(values: Record, names: Sequence[str], form: str) -> list[str | None]:
    return [f"{values[name]:{form}}" if name in values else None for name in names]

"""What does each pattern cost, at the latency that it is measured to give? A real encoder and a real CNN, one-shot.

Run with ``python benchmarks/oneshot/encoder.py --phase accuracy --minilm FOLDER --sts FOLDER --mnist FOLDER``, which
prunes by ALPS in every pattern and takes the metric, and then on a quiet machine with ``--phase latency``, which
compiles each model again and times it beside the dense one. Both phases write the same file and skip what stands in it.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from tasks import Task, digits, minilm

import sparta
from record import RESULTS, save
from sparta.tables import table
from sparta.testing import compare

QUESTION, DEVICE = "oneshot_encoder", f"{platform.machine()} CPU"
CASES: tuple[tuple[str, float | None], ...] = (
    *((pattern, sparsity) for pattern in ("unstructured", "4x1", "16x1") for sparsity in (0.5, 0.7, 0.9)),
    ("2:4", None),
    *(("channels", sparsity) for sparsity in (0.25, 0.5)),
)


def patterns_of(task: Task, pattern: str) -> Any:
    """Return a pattern for all layers that it fits, or those that remove channels."""
    if pattern == "channels":
        return task.channels
    fitting = {}
    for name, parameter in task.model.named_parameters():
        if parameter.dim() > 1 and name.endswith("weight") and "embed" not in name and "pooler" not in name:
            try:
                sparta.tesa.patterns.as_pattern(pattern).check_shape(tuple(parameter.shape))
            except sparta.errors.ShapeError:
                continue
            fitting[name] = pattern
    return fitting


def pruned(task: Task, pattern: str, sparsity: float | None, method: str) -> torch.nn.Module:
    """Return a copy of the model, pruned; its first layer that reads one channel, and its last one, stay dense."""
    model = copy.deepcopy(task.model)
    found = patterns_of(task, pattern)
    sparta.prune(model, task.data, found, sparsity, method=method)
    return model


def latency(task: Task, model: torch.nn.Module, seconds: float) -> tuple[float, float]:
    """Return the milliseconds of the dense model as given and of the compiled sparse one, interleaved."""
    fast = sparta.compile(model, task.example)
    call = (lambda m: m(**task.example)) if isinstance(task.example, dict) else (lambda m: m(task.example))
    with torch.no_grad():
        found = compare({"dense": lambda: call(task.model), "sparse": lambda: call(fast)}, max_seconds=seconds)
    return found["dense"].median, found["sparse"].median


def stored(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of an earlier run."""
    path = folder / f"{QUESTION}.{platform.machine().replace('_', '-').lower()}-cpu.json"
    rows: list[dict[str, Any]] = json.loads(path.read_text())["results"]["rows"] if path.exists() else []
    return rows


def tasks_of(given: argparse.Namespace) -> list[Task]:
    """Return the tasks whose data was named."""
    found = []
    if given.minilm is not None and given.sts is not None:
        found.append(minilm(given.minilm, given.sts, given.pairs))
    if given.mnist is not None or given.digits:
        found.append(digits(given.mnist))
    return found


def main() -> None:
    """Fill in one phase of every case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--phase", choices=("accuracy", "latency"), required=True)
    parser.add_argument("--minilm", type=Path)
    parser.add_argument("--sts", type=Path)
    parser.add_argument("--mnist", type=Path)
    parser.add_argument("--digits", action="store_true", help="the small digits of scikit-learn for a quick check")
    parser.add_argument("--pairs", type=int, default=1379)
    parser.add_argument("--method", default="alps")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    rows = stored(given.results)
    for task in tasks_of(given):
        dense: float | None = None
        for pattern, sparsity in CASES:
            key = {"task": task.name, "pattern": pattern, "sparsity": sparsity}
            row = next((row for row in rows if key.items() <= row.items()), None)
            if row is None:
                row = {
                    **key,
                    "metric": None,
                    "metric_name": task.metric_name,
                    "dense": None,
                    "ms": None,
                    "dense_ms": None,
                }
                rows.append(row)
            if row["metric" if given.phase == "accuracy" else "ms"] is not None:
                continue
            if given.phase == "accuracy":
                dense = task.metric(task.model) if dense is None else dense
                row["dense"], row["metric"] = dense, task.metric(pruned(task, pattern, sparsity, given.method))
            else:
                model = pruned(task, pattern, sparsity, "magnitude")  # the values do not change the time
                row["dense_ms"], row["ms"] = latency(task, model, given.seconds)
            print(row, flush=True)
            save(QUESTION, DEVICE, {"method": given.method, "rows": rows}, given.results)
    shown = [[r["task"], r["pattern"], r["sparsity"], r["metric"], r["dense"], r["ms"], r["dense_ms"]] for r in rows]
    print(table(["task", "pattern", "sparsity", "metric", "dense", "ms", "dense ms"], shown))


if __name__ == "__main__":
    main()

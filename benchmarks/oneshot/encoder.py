"""What does each pattern cost, at the latency that it is measured to give? A real encoder and a real CNN, one-shot.

Run with ``python benchmarks/oneshot/encoder.py --phase accuracy --minilm FOLDER --sts FOLDER --mnist FOLDER``, which
prunes by ALPS in every pattern and takes the metric (``--device cuda`` is quicker), and then on a quiet machine with
``--phase latency``, which compiles each model again and times it beside the dense one. Dense int8 stands beside them.
Both phases write the same file, also at once, and skip what stands in it. ``python benchmarks/chart.py`` then draws it.
"""

from __future__ import annotations

import argparse
import copy
import platform
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from rows import keep, stored
from tasks import Task, digits, minilm

import sparta
from record import RESULTS, path_of
from sparta.tables import table
from sparta.testing import compare

QUESTION, DEVICE = "oneshot_encoder", f"{platform.machine()} CPU"
TASKS, KEY = ("MiniLM", "MNIST CNN"), ("task", "pattern", "sparsity")
CASES: tuple[tuple[str, float | None], ...] = (
    ("int8", None),
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
    if pattern != "int8":
        sparta.prune(model, task.data, patterns_of(task, pattern), sparsity, method=method)
    return model


def metric(task: Task, pattern: str, sparsity: float | None, method: str) -> float:
    """Return the metric of a pruned model, or of the dense one in int8."""
    if pattern == "int8":
        return task.metric(sparta.precision.quantize(task.model, task.data, "int8").simulated)
    return task.metric(pruned(task, pattern, sparsity, method))


def latency(task: Task, pattern: str, sparsity: float | None, seconds: float, budget: float) -> tuple[float, float]:
    """Return the milliseconds of the dense model as given and of the compiled sparse one, interleaved."""
    model = pruned(task, pattern, sparsity, "magnitude")  # the values do not change the time
    more = {"precision": "int8", "calibration": task.data} if pattern == "int8" else {}
    fast = sparta.compile(model, task.example, budget_s=budget, **more)
    call = (lambda m: m(**task.example)) if isinstance(task.example, dict) else (lambda m: m(task.example))
    with torch.no_grad():
        found = compare({"dense": lambda: call(task.model), "sparse": lambda: call(fast)}, max_seconds=seconds)
    return found["dense"].median, found["sparse"].median


def tasks_of(given: argparse.Namespace) -> list[Task]:
    """Return the tasks whose data was named."""
    found = []
    if given.minilm is not None and given.sts is not None:
        found.append(minilm(given.minilm, given.sts, given.pairs, given.device))
    if given.mnist is not None or given.digits:
        found.append(digits(given.mnist, given.device))
    return found


def in_order(row: dict[str, Any]) -> Any:
    """Return what rows are sorted by."""
    return TASKS.index(row["task"]), CASES.index((row["pattern"], row["sparsity"]))


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
    parser.add_argument("--device", default="cpu", help="for the phase of accuracy")
    parser.add_argument("--seconds", type=float, default=5.0, help="for timing each model")
    parser.add_argument("--budget", type=float, default=45.0, help="seconds for compiling each model")
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    if given.phase == "latency":
        given.device = "cpu"
    path = path_of(QUESTION, DEVICE, given.results)
    for task in tasks_of(given):
        dense: float | None = None
        for pattern, sparsity in CASES:
            row: dict[str, Any] = {"task": task.name, "pattern": pattern, "sparsity": sparsity}
            known = next((each for each in stored(path) if row.items() <= each.items()), {})
            if known.get("metric" if given.phase == "accuracy" else "ms") is not None:
                continue
            row |= {"metric": None, "metric_name": task.metric_name, "dense": None, "ms": None, "dense_ms": None}
            if given.phase == "accuracy":
                dense = task.metric(task.model) if dense is None else dense
                row["dense"], row["metric"] = dense, metric(task, pattern, sparsity, given.method)
            else:
                row["dense_ms"], row["ms"] = latency(task, pattern, sparsity, given.seconds, given.budget)
            print(row, flush=True)
            keep(row, KEY, in_order, path, DEVICE, {"method": given.method})
    rows = stored(path)
    shown = [[r["task"], r["pattern"], r["sparsity"], r["metric"], r["dense"], r["ms"], r["dense_ms"]] for r in rows]
    print(table(["task", "pattern", "sparsity", "metric", "dense", "ms", "dense ms"], shown))


if __name__ == "__main__":
    main()

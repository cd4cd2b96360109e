"""Is what is claimed beside busy processes true? Models are compiled beside them, and timed again when it is quiet.

Run with ``python benchmarks/compiler/claims.py`` on a quiet machine (about 7 minutes). The kernels are compiled;
then eight processes that do nothing but multiply are started, each model is compiled beside them with an empty store,
and what its report claims is kept.
Then they are stopped, and the same compiled models are timed beside the models as given. A claim holds if the quiet
ratio is within 20 % of it; a report that claims no ratio claims nothing wrong.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "cpu"))
from networks import encoder, resnet
from noise import busy

import sparta
from record import save
from sparta.specialize.cpu.library import load
from sparta.tables import table
from sparta.testing import compare

WITHIN = 0.2
CASES = [(name, sparsity) for name in ("perceptron", "encoder", "resnet") for sparsity in (0.0, 0.5, 0.8, 0.95)]


def made(name: str, sparsity: float) -> tuple[nn.Module, torch.Tensor]:
    """Return a model, pruned in 4x1 blocks, and its input."""
    torch.manual_seed(0)
    if name == "perceptron":
        layers = [nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 512)]
        model, x = nn.Sequential(*layers), torch.randn(16, 512)
    elif name == "encoder":
        model, x = encoder(4, 384, 12), torch.randn(1, 64, 384)
    else:
        model, x = resnet((1, 1, 1, 1), 32), torch.randn(1, 3, 96, 96)
    if sparsity:
        sparta.Spec.from_pattern(model, "4x1", sparsity).apply(model)
    return model.eval(), x


def quiet_ratio(model: nn.Module, fast: Any, x: torch.Tensor) -> float:
    """Return how many times faster the compiled model is: the median over rounds in which both ran."""
    with torch.inference_mode():
        times = compare({"given": lambda: model(x), "fast": lambda: fast(x)}, iters=300, max_seconds=3.0)
    pairs = zip(times["given"].samples, times["fast"].samples, strict=True)
    return statistics.median(given / fast for given, fast in pairs)


def main() -> None:
    """Compile beside the noise, time when it is quiet, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=None, help="folder of the results")
    parser.add_argument("--budget", type=float, default=8.0, help="seconds to compile one model")
    parser.add_argument("--processes", type=int, default=8, help="that are busy beside it")
    parser.add_argument("--threads", type=int, default=2, help="of PyTorch, in the process that compiles")
    parser.add_argument("--cases", type=int, default=len(CASES), help="fewer, to see that it runs")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    compiled, started = [], time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SPARTA_CACHE"] = folder
        load()
        with busy(options.processes):
            for name, sparsity in CASES[: options.cases]:
                model, x = made(name, sparsity)
                fast = sparta.compile(model, x, budget_s=options.budget)
                claimed = "no ratio" if fast.report.speedup is None else f"{fast.report.speedup:.2f}x"
                print(f"{time.perf_counter() - started:.0f} s: {name} {sparsity:g}: {claimed}", flush=True)
                compiled.append((name, sparsity, model, x, fast))
        rows = []
        for name, sparsity, model, x, fast in compiled:
            claimed, measured = fast.report.speedup, quiet_ratio(model, fast, x)
            holds = claimed is None or abs(measured / claimed - 1) <= WITHIN
            rows.append({"model": name, "sparsity": sparsity, "claimed": claimed, "measured": measured, "holds": holds})
    heads = ["model", "sparsity", "claimed", "measured", "holds"]
    print(table(heads, [[row[head] for head in heads] for row in rows]))
    results = {"processes": options.processes, "cores": os.cpu_count(), "cases": rows}
    print(save("compiler_claims", f"{platform.machine()} cpu", results, options.results))
    if not all(row["holds"] for row in rows):
        raise SystemExit("a claim does not hold")


if __name__ == "__main__":
    main()

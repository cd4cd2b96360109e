"""Does a busy machine change what is chosen? Layers are tuned quietly and beside busy processes, then compared.

Run with ``python benchmarks/cpu/noise.py`` on a quiet machine (about 4 minutes). Ten layers are tuned without a store;
then eight processes that do nothing but multiply are started and the same layers are tuned again. What was chosen
quietly and what was chosen beside the noise are timed against each other when it is quiet again.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

import sparta
from record import save
from sparta.nn import SparseLinear
from sparta.tables import table
from sparta.testing import compare

# A busy process ends with the one that started it, however that ended.
BUSY = """
import os, sys, torch
torch.set_num_threads(1)
x = torch.randn(512, 512)
while os.getppid() == int(sys.argv[1]):
    x = (x @ x).tanh()
"""
LAYERS = [
    (tokens, k, n, pattern, sparsity)
    for tokens, k, n in ((1, 768, 3072), (128, 768, 768))
    for pattern, sparsity in (("unstructured", 0.9), ("unstructured", 0.5), ("4x1", 0.8), ("4x1", 0.3), ("8x1", 0.95))
]
PATTERNS = {"unstructured": sparta.Unstructured(), "4x1": sparta.Block(4, 1), "8x1": sparta.Block(8, 1)}


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Run so many processes beside this one that never rest."""
    command = [sys.executable, "-c", BUSY, str(os.getpid())]
    started = [subprocess.Popen(command) for _ in range(count)]  # noqa: S603 - our own text
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def layers() -> list[tuple[SparseLinear, torch.Tensor]]:
    """Return the layers with an input each, the same in every call."""
    torch.manual_seed(0)
    found = []
    for tokens, k, n, pattern, sparsity in LAYERS:
        linear = nn.Linear(k, n).requires_grad_(requires_grad=False)
        mask = PATTERNS[pattern].project(linear.weight.abs(), sparsity)
        found.append((SparseLinear(linear, weight_mask=mask).eval(), torch.randn(tokens, k)))
    return found


def tuned(budget_s: float) -> list[tuple[SparseLinear, torch.Tensor, Any]]:
    """Return the layers as they are tuned now."""
    return [(layer, x, layer.tune(x, store=False, budget_s=budget_s)) for layer, x in layers()]


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None, help="folder of the results")
    parser.add_argument("--budget", type=float, default=6.0, help="seconds to tune one layer")
    parser.add_argument("--processes", type=int, default=8, help="that are busy beside it")
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch, in the process that tunes")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    quiet = tuned(options.budget)
    with busy(options.processes):
        noisy = tuned(options.budget)
    rows = []
    for case, (first, x, calm), (second, _, disturbed) in zip(LAYERS, quiet, noisy, strict=True):
        with torch.inference_mode():
            times = compare(
                {"quiet": lambda _l=first, _x=x: _l(_x), "noisy": lambda _l=second, _x=x: _l(_x)}, iters=300
            )
        rows.append(
            {
                "layer": f"{case[0]}×{case[1]}×{case[2]}",
                "pattern": f"{case[3]} {100 * case[4]:g} %",
                "quiet": calm.implement,
                "noisy": disturbed.implement,
                "time_ratio": times["noisy"].median / times["quiet"].median,
                "claim": disturbed.reason,
            }
        )
    print(table(list(rows[0]), [[*list(row.values())[:4], f"{row['time_ratio']:.2f}", row["claim"]] for row in rows]))
    same = sum(row["quiet"] == row["noisy"] for row in rows)
    print(f"{same} of {len(rows)} layers run the same implement, beside {options.processes} busy processes")
    results = {"processes": options.processes, "cores": os.cpu_count(), "layers": rows}
    print(save("cpu_noise", f"{platform.machine()} cpu", results, options.out))


if __name__ == "__main__":
    main()

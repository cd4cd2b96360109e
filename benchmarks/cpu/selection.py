"""Is a tuned layer ever slower than dense? Patterns that hardly pay, what is chosen for them, and what tuning takes.

Run with ``python benchmarks/cpu/selection.py`` (about 2 minutes on a quiet machine). Layers that are little pruned, or
2:4, which no CPU multiplies faster, are tuned as a user tunes them and then take turns with the dense layer, call by
call; where dense is chosen the ratio shows what the module itself costs. Packing is timed on 10 million weights.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

import sparta
from record import save
from sparta.nn import SparseConv2d, SparseLinear
from sparta.specialize.linear.cpu_packed import PackedLinear
from sparta.tables import table
from sparta.testing import block_mask, compare

FLOOR = 0.97
SECONDS = 0.8  # for tuning one layer
PACKED_WEIGHTS = (2560, 4096)
PATTERNS: dict[str, tuple[sparta.Pattern, tuple[float, ...]]] = {
    "unstructured": (sparta.Unstructured(), (0.3, 0.5, 0.7)),
    "2:4": (sparta.NM(2, 4), (0.5,)),
    "4x1": (sparta.Block(4, 1), (0.2, 0.5)),
}


@dataclass(frozen=True)
class Case:
    """One layer: ``sizes`` are tokens, K and N, or channels in and out, kernel and size of the image."""

    layer: str
    sizes: tuple[int, ...]
    pattern: str
    sparsity: float


def cases() -> Iterator[Case]:
    """Yield the layers, each with every pattern."""
    linear = [("linear", (tokens, k, n)) for tokens in (1, 16, 128) for k, n in ((768, 768), (768, 3072))]
    conv = [("conv", (64, 256, 1, 56)), ("conv", (128, 128, 3, 28))]
    for layer, sizes in (*linear, *conv):
        for pattern, (_, sparsities) in PATTERNS.items():
            for sparsity in sparsities:
                yield Case(layer, sizes, pattern, sparsity)


def layer_of(case: Case) -> tuple[nn.Module, SparseLinear | SparseConv2d, Tensor]:
    """Return the dense layer, the sparse one, and an input."""
    pattern, _ = PATTERNS[case.pattern]
    if case.layer == "linear":
        tokens, k, n = case.sizes
        linear = nn.Linear(k, n).requires_grad_(requires_grad=False)
        mask = pattern.project(linear.weight.abs(), case.sparsity)
        return linear, SparseLinear(linear, weight_mask=mask).eval(), torch.randn(tokens, k)
    inputs, outputs, kernel, size = case.sizes
    conv = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2).requires_grad_(requires_grad=False)
    flat = pattern.project(conv.weight.abs().flatten(1), case.sparsity)
    return conv, SparseConv2d(conv, weight_mask=flat.view_as(conv.weight)).eval(), torch.randn(1, inputs, size, size)


def measure(case: Case) -> dict[str, Any]:
    """Tune one layer and time it against dense."""
    dense, sparse, x = layer_of(case)
    begin = time.perf_counter()
    choice = sparse.tune((x,), budget_s=SECONDS, store=False)
    seconds = time.perf_counter() - begin
    with torch.no_grad():
        timings = compare({"dense": dense, "chosen": sparse}, x, warmup=5, iters=300, max_seconds=2.0)
    return {
        **asdict(case),
        "chosen": choice.implement,
        "reason": choice.reason,
        "tuning_seconds": seconds,
        "median_ms": {name: timing.median for name, timing in timings.timings.items()},
        "ratio": timings.speedup("chosen"),
    }


def packing() -> list[dict[str, Any]]:
    """Time the packing of 10 million weights, a tenth of them live, in the layouts that kernels read."""
    n, k = PACKED_WEIGHTS
    weight = torch.randn(n, k)
    found = []
    for form, block in (("panel", 1), ("panel", 4), ("permuted", 16)):
        mask = block_mask((n, k), (block, 1), 0.9, seed=0)
        packed = PackedLinear(weight, mask, form=form, block=block)
        whole = compare({"pack": lambda m=mask, f=form, b=block: PackedLinear(weight, m, form=f, block=b)}, iters=5)
        values = compare({"pack": lambda p=packed: p.pack(weight)}, iters=5)
        found.append({"form": form, "block": block, "ms": whole["pack"].median, "values_ms": values["pack"].median})
    return found


def show(results: list[dict[str, Any]]) -> str:
    """Return the cases as a table."""
    lines = [
        [
            r["layer"],
            "×".join(map(str, r["sizes"])),
            r["pattern"],
            r["sparsity"],
            r["chosen"],
            f"{r['ratio']:.2f}",
            f"{r['tuning_seconds']:.2f}",
        ]
        for r in results
    ]
    heads = ["layer", "sizes", "pattern", "sparsity", "chosen", "over dense", "tuned in s"]
    return table(heads, lines, title="tuned layers over dense ones")


def main() -> None:
    """Measure every case and save the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="folder for the JSON instead of benchmarks/results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    load_before, results = os.getloadavg()[0], []
    for case in cases():
        results.append(measure(case))
        last = results[-1]
        print(f"{case}: {last['ratio']:.2f}, {last['tuning_seconds']:.2f} s, {last['reason']}", flush=True)
    below = sum(r["ratio"] < FLOOR for r in results)
    record = {"cases": results, "packing": packing(), "floor": FLOOR, "load": [load_before, os.getloadavg()[0]]}
    path = save("cpu_selection", f"{platform.machine()} cpu", record, folder=options.out)
    print(show(results))
    print(f"{below} of {len(results)} below {FLOOR}; packing: {record['packing']}")
    print(f"saved {path}")


if __name__ == "__main__":
    main()

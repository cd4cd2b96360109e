"""How fast is a training step of one sparse layer? Forward and both gradients, beside the dense layer.

Run with ``python benchmarks/gpu/training_step.py``; ``--only`` takes the patterns with some text, and what an earlier
run has found of the others is kept. Rounds of steps of the sparse and of the dense layer are
interleaved and timed by the clock, as an eager training loop sees them, and again replayed from CUDA graphs, where the
host costs nothing; the median of the paired ratios counts. The weight counts as changed before every step, so it is
packed in every step. In eager mode one layer is bound by the host: the products are done before Python is. The bound is
what the same run says of the products: dense time times the density of kept blocks, or, for 2:4, half of the forward
product, since neither gradient of a fixed 2:4 mask is 2:4 along the axis that tensor cores skip. A mask that is 2:4
along both axes halves the gradient of the input as well.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from ceilings import ceilings
from sparse_rates import sparse_limits

from record import RESULTS, path_of, save
from sparta.nn import SparseLinear
from sparta.tables import table
from sparta.testing import block_mask

TOKENS, OUTPUTS, INPUTS = 8192, 4096, 4096
DTYPE = torch.bfloat16
_ROUNDS, _STEPS = 15, 10
_BOTH_WAYS = "2:4 both ways"  # along the inputs and along the outputs, so that the gradient of the input is sparse too
TARGETS = {"128×128": (3.0, 5.0, 7.0), "64×64": (2.3, 4.0, 5.0), "2:4": (1.3,), _BOTH_WAYS: (1.3,)}
SPARSITIES = (0.8, 0.9, 0.95)


def masks() -> dict[tuple[str, float], Tensor]:
    """Return the masks by pattern and sparsity."""
    found = {
        (f"{size}×{size}", sparsity): block_mask((OUTPUTS, INPUTS), (size, size), sparsity, seed=0, device="cuda")
        for size in (128, 64, 32)
        for sparsity in SPARSITIES
    }
    found["2:4", 0.5] = torch.tensor([True, False, False, True], device="cuda").repeat(OUTPUTS, INPUTS // 4)
    pairs = torch.eye(2, dtype=torch.bool, device="cuda").repeat_interleave(2, 0).repeat_interleave(2, 1)
    found[_BOTH_WAYS, 0.5] = pairs.repeat(OUTPUTS // 4, INPUTS // 4)
    return found


def step_of(layer: nn.Module, x: Tensor, grad: Tensor) -> Callable[[], None]:
    """Return one step without the optimizer: forward, and the gradients of input, weight and bias."""

    def step() -> None:
        torch.autograd.graph.increment_version(layer.weight)
        layer.zero_grad(set_to_none=True)
        x.grad = None
        layer(x).backward(grad)

    return step


def graphed(step: Callable[[], None]) -> Callable[[], None]:
    """Return the replay of a recorded step."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def paired(ours: Callable[[], None], dense: Callable[[], None]) -> tuple[float, float, list[float]]:
    """Return the median milliseconds of both steps, and the ratio of every round."""
    samples: list[tuple[float, float]] = []
    for turn in range(_ROUNDS + 2):
        seconds = []
        for step in (ours, dense) if turn % 2 else (dense, ours):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(_STEPS):
                step()
            torch.cuda.synchronize()
            seconds.append((time.perf_counter() - begin) / _STEPS)
        samples.append((seconds[0], seconds[1]) if turn % 2 else (seconds[1], seconds[0]))
    kept = samples[2:]
    ratios = [there / here for here, there in kept]
    return statistics.median(s[0] for s in kept) * 1e3, statistics.median(s[1] for s in kept) * 1e3, ratios


def measured(pattern: str, sparsity: float, mask: Tensor, budget_s: float) -> dict[str, Any]:
    """Measure one layer."""
    dense = nn.Linear(INPUTS, OUTPUTS).to("cuda", DTYPE)
    layer = SparseLinear(nn.Linear(INPUTS, OUTPUTS).to("cuda", DTYPE), weight_mask=mask).train()
    x = torch.randn(TOKENS, INPUTS, device="cuda", dtype=DTYPE).requires_grad_()
    grad = torch.randn(TOKENS, OUTPUTS, device="cuda", dtype=DTYPE)
    choice = layer.tune(x.detach(), backward=True, store=False, budget_s=budget_s)
    ours, theirs, ratios = paired(step_of(layer, x, grad), step_of(dense, x, grad))
    replays = paired(graphed(step_of(layer, x, grad)), graphed(step_of(dense, x, grad)))
    density = float(mask.float().mean())
    bound = {"2:4": 3 / (2 + density), _BOTH_WAYS: 3 / (1 + 2 * density)}.get(pattern, 1 / density)
    row = {
        "pattern": pattern,
        "sparsity": sparsity,
        "runs": choice.implement,
        "ms": ours,
        "dense_ms": theirs,
        "ratio": statistics.median(ratios),
        "graphed_ms": replays[0],
        "graphed_dense_ms": replays[1],
        "graphed_ratio": statistics.median(replays[2]),
        "bound": bound,
    }
    targets = dict(zip((0.5,) if pattern.startswith("2:4") else SPARSITIES, TARGETS.get(pattern, ()), strict=False))
    return row | {"target": targets.get(sparsity)}


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None, help="folder of the results")
    parser.add_argument("--budget", type=float, default=8.0, help="seconds to tune one layer")
    parser.add_argument("--only", default="", help="patterns with this text")
    options = parser.parse_args()
    device, found, limits = torch.cuda.get_device_name(), {}, ceilings() | sparse_limits("bf16")
    del limits["cache"]  # its bound is of products alone
    earlier = path_of("training_step", device, options.out or RESULTS)
    if earlier.exists():
        kept = json.loads(earlier.read_text(encoding="utf-8"))["results"]["steps"]
        found = {(row["pattern"], row["sparsity"]): row for row in kept}
    found |= {key: measured(*key, mask, options.budget) for key, mask in masks().items() if options.only in key[0]}
    rows = list(found.values())
    head = ["pattern", "sparsity", "runs", "ms", "dense ms", "ratio", "in a graph", "target", "bound"]
    cells = []
    for row in rows:
        times = [f"{row[name]:.3f}" for name in ("ms", "dense_ms")]
        ratios = [f"{row['ratio']:.2f}", f"{row['graphed_ratio']:.2f}", row["target"], f"{row['bound']:.2f}"]
        cells.append([row["pattern"], row["sparsity"], row["runs"], *times, *ratios])
    print(table(head, cells))
    results = {"shape": [TOKENS, OUTPUTS, INPUTS], "dtype": "bfloat16", "ceilings": limits, "steps": rows}
    print(save("training_step", device, results, options.out))


if __name__ == "__main__":
    main()

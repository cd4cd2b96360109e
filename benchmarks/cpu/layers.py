"""How much faster are sparse linear layers on the CPU? Each shape, pattern and sparsity against dense, one thread.

Run with ``python benchmarks/cpu/layers.py``; ``--quick`` takes a subset. The best of the candidate tiles is chosen by a
short round of timing, then competes with dense, call by call in turns. Panels are kept at both ends (as between
neighbouring sparse layers); the drop-in with token-major ends is timed beside it. One token is timed cold: a row of
copies of the layer that no cache holds, because in a model the other layers' weights come in between.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import save
from sparta.specialize.cpu import PackedLinear, Panel, candidates
from sparta.tables import table
from sparta.testing import block_mask, check, compare, linear_reference

SHAPES = ((768, 768), (768, 3072), (3072, 768), (1024, 1024), (4096, 4096))  # (K, N)
HEIGHTS = (1, 4, 8)
SPARSITIES = (0.8, 0.9, 0.95)
TOKENS = (1, 16, 128, 1024)
# What one is to reach, by tokens and block height, for the three sparsities; a geometric mean over the shapes.
TARGETS = {
    (1, 1): (4, 7.5, 12),
    (1, 16): (6, 15, 30),
    (16, 1): (2.2, 4.2, 8),
    (16, 4): (4, 7.5, 14),
    (16, 8): (4, 7.5, 14),
    (128, 1): (2, 4, 8),
    (128, 4): (4.6, 8.7, 15.5),
    (128, 8): (4.6, 8.7, 15.5),
    (1024, 1): (2, 3.8, 6.7),
    (1024, 8): (4.2, 7.2, 11.5),
}
# Weights that one pass must touch to be cold.
COLD_BYTES = 100 * 2**20
PASSES = 24


@dataclass(frozen=True)
class Layer:
    """One layer to time: M tokens, K inputs, N outputs, blocks of ``height`` x 1, a sparsity."""

    tokens: int
    inputs: int
    outputs: int
    height: int
    sparsity: float


def layers(tokens: tuple[int, ...], *, quick: bool) -> Iterator[Layer]:
    """Yield the layers, the regimes in order."""
    for count in tokens:
        heights = (*HEIGHTS, 16) if count == 1 else HEIGHTS
        for height in heights:
            for sparsity in SPARSITIES[1:2] if quick else SPARSITIES:
                for inputs, outputs in SHAPES[:3] if quick else SHAPES:
                    if count < 1024 or inputs < 4096:
                        yield Layer(count, inputs, outputs, height, sparsity)


def dense_functions(weight: torch.Tensor, x: torch.Tensor, *, compiled: bool) -> dict[str, Callable[[], torch.Tensor]]:
    """Return the dense rivals; others (ONNX Runtime) would be added here."""
    functions: dict[str, Callable[[], torch.Tensor]] = {"eager": lambda: functional.linear(x, weight)}
    if compiled:
        fast = torch.compile(lambda v: functional.linear(v, weight), dynamic=False)
        fast(x)
        functions["compile"] = lambda: fast(x)
    return functions


def best_tile(
    layer: Layer, weight: torch.Tensor, mask: torch.Tensor, x: torch.Tensor, *, panels: bool
) -> dict[str, Any]:
    """Return the candidate with the lowest median of a few calls, after checking it against float64."""
    found = candidates(layer.tokens, layer.outputs, layer.inputs, 1 - layer.sparsity, (layer.height, 1))
    truth = linear_reference(x[:64], weight, weight_mask=mask)
    functions = {}
    for index, tile in enumerate(found):
        packed = PackedLinear(weight, mask, **tile)
        check(packed(x[:64], threads=1), truth, reduction=layer.inputs, what=str(tile))
        functions[str(index)] = panel_call(packed, x) if panels else token_call(packed, x)
    timings = compare(functions, warmup=2, iters=9, max_seconds=2.0)
    return found[int(timings.fastest)]


def panel_call(packed: PackedLinear, x: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return a call with panels at both ends."""
    panel = Panel.pack(x, packed.tile.mv, packed.library)
    return lambda: packed.to_panel(panel, threads=1).data


def token_call(packed: PackedLinear, x: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return a call with token-major ends."""
    return lambda: packed(x, threads=1)


def measure(layer: Layer, *, compiled: bool) -> dict[str, Any]:
    """Time one layer; returns medians in ms and speedups over the best dense."""
    weight = torch.randn(layer.outputs, layer.inputs)
    mask = block_mask(weight.shape, (layer.height, 1), layer.sparsity, seed=0)
    x = torch.randn(layer.tokens, layer.inputs)
    if layer.tokens == 1:
        return _measure_cold(layer, weight, mask, x)
    functions = dense_functions(weight * mask, x, compiled=compiled)
    rivals = len(functions)
    tiles = {
        "drop-in": best_tile(layer, weight, mask, x, panels=False),
        "panel": best_tile(layer, weight, mask, x, panels=True),
    }
    functions["drop-in"] = token_call(PackedLinear(weight, mask, **tiles["drop-in"]), x)
    functions["panel"] = panel_call(PackedLinear(weight, mask, **tiles["panel"]), x)
    timings = compare(functions, warmup=3, iters=41, max_seconds=3.0)
    medians = {name: timing.median for name, timing in timings.timings.items()}
    dense = min(list(medians.values())[:rivals])
    speedup = {name: dense / medians[name] for name in ("drop-in", "panel")}
    return {**asdict(layer), "median_ms": medians, "speedup": speedup, "tiles": tiles}


def _measure_cold(layer: Layer, weight: torch.Tensor, mask: torch.Tensor, x: torch.Tensor) -> dict[str, Any]:
    """Time passes over so many copies of the layer that no cache holds the dense ones.

    Each call makes several passes, as a model that decodes one token after the other does: where the packed copies
    together fit a cache they may stay there, which is part of what sparsity gives.
    """
    copies = max(2, math.ceil(COLD_BYTES / (4 * layer.inputs * layer.outputs)))
    dense = [(weight * mask).clone() for _ in range(copies)]
    functions = {"eager": _passes([functools.partial(functional.linear, x, copy) for copy in dense])}
    found = candidates(1, layer.outputs, layer.inputs, 1 - layer.sparsity, (layer.height, 1))
    found = [tile for tile in found if tile["prefetch"]]  # from memory, prefetching always pays
    truth = linear_reference(x, weight, weight_mask=mask)
    for index, tile in enumerate(found):
        packed = [PackedLinear(weight, mask, **tile) for _ in range(copies)]
        check(packed[0](x), truth, reduction=layer.inputs, what=str(tile))
        functions[str(index)] = _passes([token_call(copy, x) for copy in packed])
    timings = compare(functions, warmup=1, iters=5, max_seconds=6.0)
    eager = timings["eager"].median
    best = min(range(len(found)), key=lambda index: timings[str(index)].median)
    cold = timings[str(best)].median
    return {
        **asdict(layer),
        "median_ms": {"eager": eager / copies / PASSES, "cold": cold / copies / PASSES},
        "speedup": {"cold": eager / cold},
        "tiles": {"cold": found[best]},
    }


def _passes(calls: list[Callable[[], torch.Tensor]]) -> Callable[[], torch.Tensor]:
    """Return a function that makes every call in turn, several times over."""

    def run() -> torch.Tensor:
        for _ in range(PASSES):
            for call in calls:
                y = call()
        return y

    return run


def summary(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return geometric means over the shapes, with the target."""
    rows = []
    for tokens in TOKENS:
        for height in (*HEIGHTS, 16):
            for index, sparsity in enumerate(SPARSITIES):
                cells = [
                    cell["speedup"]
                    for cell in results
                    if (cell["tokens"], cell["height"], cell["sparsity"]) == (tokens, height, sparsity)
                ]
                if not cells:
                    continue
                means = {name: statistics.geometric_mean(cell[name] for cell in cells) for name in cells[0]}
                target = TARGETS.get((tokens, height), (None,) * 3)[index]
                rows.append({"tokens": tokens, "height": height, "sparsity": sparsity, **means, "target": target})
    return rows


def show(rows: list[dict[str, Any]]) -> str:
    """Return the summary as a table."""
    names = ["panel", "drop-in", "cold"]
    lines = [
        [row["tokens"], f"{row['height']}x1" if row["height"] > 1 else "u", row["sparsity"]]
        + [f"{row[name]:.2f}" if name in row else "" for name in names]
        + [row["target"] or ""]
        for row in rows
    ]
    return table(["M", "pattern", "sparsity", *names, "target"], lines, title="times faster than dense, geometric mean")


def main() -> None:
    """Time every layer and save the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="three shapes at one sparsity")
    parser.add_argument("--compile", action="store_true", help="torch.compile as a rival too")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--out", type=Path, help="folder for the JSON instead of benchmarks/results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    load_before = os.getloadavg()[0]
    results = []
    for layer in layers(tuple(options.tokens), quick=options.quick):
        results.append(measure(layer, compiled=options.compile))
        shown = ", ".join(f"{name} {speedup:.2f}x" for name, speedup in results[-1]["speedup"].items())
        print(f"{layer}: {shown}", flush=True)
    rows = summary(results)
    # Processes beside this one, before and after: with more than cores to run on, the medians mean little.
    found = {"summary": rows, "layers": results, "load": [load_before, os.getloadavg()[0]]}
    path = save("cpu_layers", f"{platform.machine()} cpu", found, folder=options.out)
    print(show(rows))
    print(f"saved {path}")


if __name__ == "__main__":
    main()

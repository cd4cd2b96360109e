"""How much faster are sparse linear layers on the CPU? Each shape, pattern and sparsity against dense, one thread.

Run with ``python benchmarks/cpu/layers.py`` (about 8 minutes on a quiet machine); ``--quick`` takes a subset. The best
of the candidate tiles is chosen by a short round of timing, then competes with PyTorch eager, ``torch.compile`` and
ONNX Runtime: interleaved call by call, where each finds its weights and inputs driven out of the near caches by the
others, and by several calls, where each repeats itself with its caches warm. Panels are kept at both ends (as between
neighbouring sparse layers); the drop-in with token-major ends is timed beside it. One token is timed cold: a row of
copies of the layer that no cache holds, because in a model the other layers' weights come in between. The share of the
roof is that of :mod:`roofline`.
"""

from __future__ import annotations

import argparse
import copy
import functools
import math
import os
import platform
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[1]))
from rivals import RIVALS, best, dense_calls, onnx_chain, onnxruntime_call
from roofline import Roof, measured_roof

from common import TARGETS, Call, calls_for, median_ms, without
from record import save
from sparta.specialize.cpu import Panel, candidates
from sparta.specialize.linear.cpu_packed import PackedLinear
from sparta.tables import table
from sparta.testing import block_mask, check, compare, linear_reference

SHAPES = ((768, 768), (768, 3072), (3072, 768), (1024, 1024), (4096, 4096))  # (K, N)
HEIGHTS = (1, 4, 8)
SPARSITIES = (0.8, 0.9, 0.95)
TOKENS = (1, 16, 128, 1024)
# Weights that one pass must touch to be cold.
COLD_BYTES = 100 * 2**20
PASSES = 8
REPEATED_MS = 2.0  # of dense, about, in one turn of several calls


@dataclass(frozen=True)
class Layer:
    """One layer to time: M tokens, K inputs, N outputs, blocks of ``height`` x 1, a sparsity."""

    tokens: int
    inputs: int
    outputs: int
    height: int
    sparsity: float


@dataclass(frozen=True)
class Shape:
    """Sizes with what all patterns of them share: the weight, the input and the dense rivals."""

    tokens: int
    weight: torch.Tensor
    x: torch.Tensor
    rivals: dict[str, Call]

    def layers(self, *, quick: bool) -> Iterator[Layer]:
        """Yield the patterns and sparsities."""
        for height in (1, 16) if self.tokens == 1 else HEIGHTS:
            for sparsity in SPARSITIES[1:2] if quick else SPARSITIES:
                yield Layer(self.tokens, *reversed(self.weight.shape), height, sparsity)


def shapes(tokens: Sequence[int], without: Sequence[str], *, quick: bool) -> Iterator[Shape]:
    """Yield the sizes with their rivals, the regimes in order."""
    for count in tokens:
        for inputs, outputs in SHAPES[:1] if quick else SHAPES:
            if count >= 1024 and inputs >= 4096:
                continue
            weight, x = torch.randn(outputs, inputs), torch.randn(count, inputs)
            rivals = cold_rivals(weight, x, without) if count == 1 else dense_calls(dense_layer(weight), x, without)
            yield Shape(count, weight, x, rivals)


def dense_layer(weight: torch.Tensor) -> nn.Sequential:
    """Return the dense layer."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    with torch.no_grad():
        layer.weight.copy_(weight)
    return nn.Sequential(layer)


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
    timings = compare(functions, warmup=2, iters=9, max_seconds=0.6)
    return found[int(timings.fastest)]


def panel_call(packed: PackedLinear, x: torch.Tensor) -> Call:
    """Return a call with panels at both ends."""
    panel = Panel.pack(x, packed.tile.mv, packed.library)
    return lambda: packed.to_panel(panel, threads=1).data


def token_call(packed: PackedLinear, x: torch.Tensor) -> Call:
    """Return a call with token-major ends."""
    return lambda: packed(x, threads=1)


def measure(layer: Layer, shape: Shape, roof: Roof) -> dict[str, Any]:
    """Time one layer; returns medians in ms, speedups over the best dense and the share of the roof."""
    mask = block_mask(shape.weight.shape, (layer.height, 1), layer.sparsity, seed=0)
    if layer.tokens == 1:
        return _measure_cold(layer, shape, mask, roof)
    weight, x = shape.weight, shape.x
    tiles = {
        "drop-in": best_tile(layer, weight, mask, x, panels=False),
        "panel": best_tile(layer, weight, mask, x, panels=True),
    }
    packed = {name: PackedLinear(weight, mask, **tile) for name, tile in tiles.items()}
    functions = dict(shape.rivals)
    functions["drop-in"] = token_call(packed["drop-in"], x)
    functions["panel"] = panel_call(packed["panel"], x)
    medians = median_ms(functions, 1)
    dense = best(medians)
    again = median_ms(functions, calls_for(REPEATED_MS, medians[dense]))
    dense_again = best(again)
    ours = {name: medians[name] for name in packed} | {f"{name} repeated": again[name] for name in packed}
    gains = {name: medians[dense] / medians[name] for name in packed}
    return {
        **asdict(layer),
        "median_ms": medians,
        "repeated_ms": again,
        "best_dense": dense,
        "speedup": gains | {f"{name} repeated": again[dense_again] / again[name] for name in packed},
        "roof": {
            name: _reached(layer, mask, packed[name.removesuffix(" repeated")].nbytes, milliseconds, roof)
            for name, milliseconds in ours.items()
        },
        "tiles": tiles,
    }


def _reached(
    layer: Layer, mask: torch.Tensor, nbytes: int, milliseconds: float, roof: Roof, copies: int = 1
) -> dict[str, Any]:
    """Return the share of the roof: multiply-adds of live weights; packed weights, inputs and outputs moved once."""
    live = int(mask.sum())
    moved = nbytes + 4 * layer.tokens * (layer.inputs + layer.outputs)
    return roof.reached(layer.tokens * live, moved, milliseconds, used=copies * moved)


def copies_of(weight: torch.Tensor) -> int:
    """Return how many copies of a weight no cache holds."""
    return max(2, math.ceil(COLD_BYTES / (4 * weight.numel())))


def cold_rivals(weight: torch.Tensor, x: torch.Tensor, without: Sequence[str]) -> dict[str, Call]:
    """Return passes over so many copies of the layer that no cache holds them."""
    copies = [weight.clone() for _ in range(copies_of(weight))]
    rivals = {"eager": passes([functools.partial(functional.linear, x, each) for each in copies])}
    if "compile" not in without:
        torch.compiler.reset()
        fast = torch.compile(functional.linear, dynamic=False)
        rivals["compile"] = passes([functools.partial(fast, x, each) for each in copies])
    if "onnxruntime" not in without:
        model = onnx_chain(dense_layer(weight), x)
        rivals["onnxruntime"] = passes([onnxruntime_call(model, x) for _ in copies])
    return rivals


def _measure_cold(layer: Layer, shape: Shape, mask: torch.Tensor, roof: Roof) -> dict[str, Any]:
    """Time passes over so many copies of the layer that no cache holds the dense ones.

    Each call makes several passes, as a model that decodes one token after the other does: where the packed copies
    together fit a cache they may stay there, which is part of what sparsity gives.
    """
    copies, x = copies_of(shape.weight), shape.x
    functions = dict(shape.rivals)
    found = candidates(1, layer.outputs, layer.inputs, 1 - layer.sparsity, (layer.height, 1))
    found = [tile for tile in found if tile["prefetch"]]  # from memory, prefetching always pays
    truth = linear_reference(x, shape.weight, weight_mask=mask)
    sizes = []
    for index, tile in enumerate(found):
        packed = PackedLinear(shape.weight, mask, **tile)
        check(packed(x), truth, reduction=layer.inputs, what=str(tile))
        sizes.append(packed.nbytes)
        many = [packed, *(copy.deepcopy(packed) for _ in range(copies - 1))]
        functions[str(index)] = passes([token_call(each, x) for each in many])
    timings = compare(functions, warmup=1, iters=5, max_seconds=3.0)
    medians = {name: timing.median / copies / PASSES for name, timing in timings.timings.items()}
    dense = best(medians)
    chosen = min(range(len(found)), key=lambda index: medians[str(index)])
    cold = medians[str(chosen)]
    return {
        **asdict(layer),
        "median_ms": {**{name: medians[name] for name in RIVALS if name in medians}, "cold": cold},
        "best_dense": dense,
        "speedup": {"cold": medians[dense] / cold},
        "roof": {"cold": _reached(layer, mask, sizes[chosen], cold, roof, copies)},
        "tiles": {"cold": found[chosen]},
    }


def passes(calls: list[Call]) -> Call:
    """Return a function that makes every call in turn, several times over."""

    def run() -> Any:
        for _ in range(PASSES):
            for call in calls:
                y = call()
        return y

    return run


def summary(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return geometric means over the shapes, with the target."""
    rows = []
    keys = dict.fromkeys((cell["tokens"], cell["height"], cell["sparsity"]) for cell in results)
    for tokens, height, sparsity in sorted(keys):
        cells = [c for c in results if (c["tokens"], c["height"], c["sparsity"]) == (tokens, height, sparsity)]
        names = list(cells[0]["speedup"])
        means = {name: statistics.geometric_mean(cell["speedup"][name] for cell in cells) for name in names}
        roof = {name: statistics.geometric_mean(cell["roof"][name]["share"] for cell in cells) for name in names}
        target = TARGETS.get((tokens, height), (None,) * 3)[SPARSITIES.index(sparsity)]
        key = {"tokens": tokens, "height": height, "sparsity": sparsity}
        rows.append({**key, **means, "roof_share": roof, "target": target})
    return rows


def show(rows: list[dict[str, Any]]) -> str:
    """Return the summary as a table."""
    names = ["panel", "drop-in", "panel repeated", "drop-in repeated", "cold"]
    lines = []
    for row in rows:
        line = [row["tokens"], f"{row['height']}x1" if row["height"] > 1 else "u", row["sparsity"]]
        line += [f"{row[name]:.2f}" if name in row else "" for name in names]
        share = max(row["roof_share"].values())
        lines.append([*line, row["target"] or "", f"{share:.0%}"])
    heads = ["M", "pattern", "sparsity", *names, "target", "share of roof"]
    return table(heads, lines, title="times faster than the best dense, geometric mean")


def main() -> None:
    """Time every layer and save the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one shape at one sparsity")
    parser.add_argument("--without", nargs="*", default=(), choices=RIVALS[1:], help="rivals to leave out")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--out", type=Path, help="folder for the JSON instead of benchmarks/results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    load_before, roof, results = os.getloadavg()[0], measured_roof(), []
    print(roof, flush=True)
    for shape in shapes(tuple(options.tokens), options.without, quick=options.quick):
        for layer in shape.layers(quick=options.quick):
            results.append(measure(layer, shape, roof))
            last = results[-1]
            shown = ", ".join(
                f"{name} {gain:.2f}x at {last['roof'][name]['share']:.0%} of {last['roof'][name]['bound']}"
                for name, gain in last["speedup"].items()
            )
            print(f"{layer}: {shown} (over {last['best_dense']})", flush=True)
    rows = summary(results)
    # Processes beside this one, before and after: with more than cores to run on, the medians mean little.
    load = [load_before, os.getloadavg()[0]]
    found = {
        "summary": rows,
        "layers": without(results, "roof"),
        "roof": roof.to_dict(),
        "rivals": sorted(_timed(results)),
        "load": load,
    }
    path = save("cpu_layers", f"{platform.machine()} cpu", found, folder=options.out)
    print(show(rows))
    print(f"saved {path}")


def _timed(results: list[dict[str, Any]]) -> set[str]:
    return {name for cell in results for name in cell["median_ms"] if name in RIVALS}


if __name__ == "__main__":
    main()

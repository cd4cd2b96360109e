"""How much faster are sparse int8 linear layers on the CPU? Blocks of 4x4 against dense int8 and fp32, one thread.

Run with ``python benchmarks/cpu/int8.py`` (about 3 minutes on a quiet machine); ``--quick`` takes a subset. Both start
from quantised token-major activations and requantise to int8 in the call. Dense int8 is the faster of oneDNN's
quantised linear and ``torch._int_mm``; results are checked to be equal to the integer product before anything is timed.
The share of the roof is that of :mod:`roofline`.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[1]))
from roofline import Roof, measured_roof

from record import save
from sparta.specialize.implement import implement_named
from sparta.specialize.int8 import int8_linear_spec
from sparta.specialize.kernel_spec import Epilogue
from sparta.specialize.tuner import build
from sparta.tables import table
from sparta.tesa.attribute import TeSA
from sparta.testing import block_mask, compare

SHAPES = ((768, 768), (768, 3072), (3072, 768))  # (K, N)
TOKENS = (16, 128, 1024)
PATTERNS = ((1, 4), (4, 4), (16, 4))
SPARSITIES = (0.8, 0.9, 0.95)
TARGETS = (6, 10, 18)  # 128 tokens, blocks of 4x4


@dataclass(frozen=True)
class Layer:
    """One layer to time."""

    tokens: int
    inputs: int
    outputs: int
    block: tuple[int, int]
    sparsity: float


def layers(*, quick: bool) -> Iterator[Layer]:
    """Yield the layers."""
    for tokens in TOKENS[1:2] if quick else TOKENS:
        for block in PATTERNS[1:2] if quick else PATTERNS:
            for sparsity in SPARSITIES[1:2] if quick else SPARSITIES:
                for inputs, outputs in SHAPES[:1] if quick else SHAPES:
                    yield Layer(tokens, inputs, outputs, block, sparsity)


def measure(layer: Layer, roof: Roof) -> dict[str, Any]:
    """Time one layer; returns medians in ms, the speedup over dense int8 and over fp32, the share of the roof."""
    weight = torch.randint(-127, 128, (layer.outputs, layer.inputs), dtype=torch.int8)
    mask = block_mask(weight.shape, layer.block, layer.sparsity, seed=0)
    # Without a sign, as oneDNN wants it; ours takes either.
    x = torch.randint(0, 256, (layer.tokens, layer.inputs), dtype=torch.uint8)
    multiplier, offset = torch.full((layer.outputs,), 1e-4), torch.zeros(layer.outputs)
    epilogue = Epilogue(bias=True, activation="relu")
    formats = {"input_format": "uint8", "output_format": "int8", "input_zero_point": 128}
    spec = int8_linear_spec(TeSA.from_mask(mask), layer.tokens, **formats, epilogue=epilogue)
    kernels = {name: build(spec, {"_name": name}) for name in ("dense", "onednn")}
    own = implement_named("cpu-int8", "int8_linear")
    for tile in own.space(spec)["tile"]._value:
        kernels[str(tile)] = build(spec, {"_name": own.name, "tile": tile})
    functions: dict[str, Any] = {}
    truth = None
    for name, kernel in kernels.items():
        packed = kernel.pack(weight)
        functions[name] = lambda kernel=kernel, packed=packed: kernel.run(packed, x, multiplier, offset)
        result = functions[name]()
        truth = result if truth is None else truth
        if name != "onednn" and not torch.equal(result, truth):
            raise SystemExit(f"{name} computes something else than the integer product")
    real, real_weight = x.float(), (weight * mask).float()
    functions["fp32"] = lambda: functional.linear(real, real_weight)
    timings = compare(functions, warmup=3, iters=21, max_seconds=1.5)
    medians = {name: timing.median for name, timing in timings.timings.items()}
    tiles = [name for name in kernels if name not in ("dense", "onednn")]
    best = min(tiles, key=lambda name: medians[name])
    dense = min(medians["dense"], medians["onednn"])
    layout = kernels[best].layout()
    moved = (0 if layout is None else layout.nbytes) + layer.tokens * (layer.inputs + layer.outputs)
    reached = roof.reached(layer.tokens * int(mask.sum()), moved, medians[best], int8=True)
    return {
        **asdict(layer),
        "median_ms": {**{name: medians[name] for name in ("dense", "onednn", "fp32")}, "sparse": medians[best]},
        "speedup": {"int8": dense / medians[best], "fp32": medians["fp32"] / medians[best]},
        "roof": reached,
        "tile": best,
    }


def summary(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return geometric means over the shapes."""
    rows = []
    keys = dict.fromkeys((cell["tokens"], cell["block"], cell["sparsity"]) for cell in results)
    for tokens, block, sparsity in keys:
        cells = [c for c in results if (c["tokens"], c["block"], c["sparsity"]) == (tokens, block, sparsity)]
        means = {name: statistics.geometric_mean(c["speedup"][name] for c in cells) for name in ("int8", "fp32")}
        target = TARGETS[SPARSITIES.index(sparsity)] if (tokens, block) == (128, (4, 4)) else None
        means["roof_share"] = statistics.geometric_mean(cell["roof"]["share"] for cell in cells)
        rows.append({"tokens": tokens, "block": block, "sparsity": sparsity, **means, "target": target})
    return rows


def show(rows: list[dict[str, Any]]) -> str:
    """Return the summary as a table."""
    lines = []
    for row in rows:
        figures = (f"{row['int8']:.2f}", f"{row['fp32']:.2f}", row["target"] or "", f"{row['roof_share']:.0%}")
        lines.append([row["tokens"], "x".join(map(str, row["block"])), row["sparsity"], *figures])
    heads = ["M", "pattern", "sparsity", "x dense int8", "x dense fp32", "target", "share of roof"]
    return table(heads, lines, title="times faster than dense, geometric mean")


def main() -> None:
    """Time every layer and save the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one layer")
    parser.add_argument("--out", type=Path, help="folder for the JSON instead of benchmarks/results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    load_before, roof, results = os.getloadavg()[0], measured_roof(), []
    print(roof, flush=True)
    for layer in layers(quick=options.quick):
        results.append(measure(layer, roof))
        last = results[-1]
        reached = f"{last['roof']['share']:.0%} of {last['roof']['bound']}"
        print(f"{layer}: {last['speedup']['int8']:.2f}x int8, {reached} ({last['tile']})", flush=True)
    rows = summary(results)
    found = {"summary": rows, "layers": results, "roof": roof.to_dict(), "load": [load_before, os.getloadavg()[0]]}
    path = save("cpu_int8", f"{platform.machine()} cpu", found, folder=options.out)
    print(show(rows))
    print(f"saved {path}")


if __name__ == "__main__":
    main()

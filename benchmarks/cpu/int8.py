"""How much faster are sparse int8 linear layers on the CPU? Blocks of 4x4 against dense int8 and fp32, one thread.

Run with ``python benchmarks/cpu/int8.py`` (about 4 minutes on a quiet machine); ``--quick`` takes one layer. Every
call brings quantised inputs, adds a bias, takes ReLU and requantises to int8: token-major at both ends as a drop-in,
which is what dense int8 has, and with bytes packed at both ends (``panel``), as between neighbouring sparse layers.
``real`` is as a model in fp32 calls it: inputs are rounded in the call and results are fp32, for dense int8 as well.
Dense int8 is the fastest of ``torch._int_mm``, oneDNN's quantised linear (where it is exact), ONNX Runtime and, where
it is installed, OpenVINO (fp32 ends only, as its graphs have them); ours are checked to be equal to the integer product
before anything is timed. It runs with and without VNNI. As in :mod:`layers`, rivals are interleaved call by call and by
several calls; the share of the roof is that of :mod:`roofline`.

What bounds it beside multiply-adds: each 16 results cost about five instructions to requantise whatever the sparsity
is, and the call from Python does not shrink either. Tried without gain: tiles of 2 and 3 vectors (more loads for a
multiply-add), prefetching rows while packing. What paid: weights broadcast to a register, not as an operand in memory
(half the rate); sums that stay in registers; requantising there; leaving as bytes, four channels together, which
moves a quarter of fp32.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[1]))
from int8_rivals import quantized_layer_calls
from roofline import Roof, measured_roof

from common import Call, calls_for, median_ms, without
from record import save
from sparta.specialize.cpu.tile import Tile
from sparta.specialize.implement import implement_named, supported
from sparta.specialize.int8_linear.cpu import Int8Options, Int8Panel, PackedInt8Linear
from sparta.specialize.int8_linear.quantization import Quantization
from sparta.specialize.int8_linear.spec import OP, int8_linear_spec
from sparta.specialize.kernel_spec import Epilogue, KernelSpec
from sparta.specialize.tuning.select import build
from sparta.tables import table
from sparta.tesa.attribute import TeSA
from sparta.testing import block_mask, compare

SHAPES = ((768, 768), (768, 3072), (3072, 768))  # (K, N)
TOKENS = (16, 128, 1024)
PATTERNS = ((1, 4), (4, 4), (16, 4))
SPARSITIES = (0.8, 0.9, 0.95)
TARGETS = (6, 10, 18)  # 128 tokens, blocks of 4x4, packed at both ends
SCALE, ZERO = 0.02, 128  # of the input
WEIGHT_SCALE = 5e-3
GRID, OUTPUT = Quantization(SCALE, ZERO, "uint8"), Quantization(1.0)
DENSE, OWN = ("torch-int8", "onednn-int8"), ("drop-in", "panel")
REPEATED_MS = 2.0  # of dense, about, in one turn of several calls


@dataclass(frozen=True)
class Layer:
    """One layer to time."""

    tokens: int
    inputs: int
    outputs: int
    block: tuple[int, int]
    sparsity: float

    def mask(self) -> Tensor:
        """Return the mask (N, K)."""
        return block_mask((self.outputs, self.inputs), self.block, self.sparsity, seed=0)

    def spec(self, output: str) -> KernelSpec:
        """Return the kernel spec with this output format."""
        weight = TeSA.from_mask(self.mask()).with_format("int8", scale=WEIGHT_SCALE)
        epilogue = Epilogue(bias=True, activation="relu")
        given = OUTPUT if output == "int8" else None
        return int8_linear_spec(weight, self.tokens, GRID, output=given, epilogue=epilogue)


@dataclass(frozen=True)
class Data:
    """The tensors of one layer."""

    weight: Tensor
    real: Tensor  # x in real numbers
    x: Tensor
    multiplier: Tensor
    offset: Tensor

    @staticmethod
    def of(layer: Layer) -> Data:
        """Return random tensors."""
        weight = torch.randint(-127, 128, (layer.outputs, layer.inputs), dtype=torch.int8)
        # Without a sign, as oneDNN wants it; ours takes either.
        x = torch.randint(0, 256, (layer.tokens, layer.inputs), dtype=torch.uint8)
        scales = torch.full((layer.outputs,), WEIGHT_SCALE * SCALE), torch.zeros(layer.outputs)
        return Data(weight, (x.float() - ZERO) * SCALE, x, *scales)


def layers(tokens: list[int], *, quick: bool) -> Iterator[Layer]:
    """Yield the layers."""
    for count in tokens:
        for block in PATTERNS[1:2] if quick else PATTERNS:
            for sparsity in SPARSITIES[1:2] if quick else SPARSITIES:
                for inputs, outputs in SHAPES[:1] if quick else SHAPES:
                    yield Layer(count, inputs, outputs, block, sparsity)


def dense_calls(layer: Layer, data: Data, output: str) -> dict[str, Call]:
    """Return the dense rivals with this output; those in fp32 round their input in the call."""
    spec, calls = layer.spec(output), {}
    able = {implement.name for implement in supported(spec)[0]}
    for name in DENSE:
        if name not in able:
            continue
        kernel = build(spec, {"_name": name})
        packed = kernel.pack(data.weight)

        def call(kernel: Any = kernel, packed: Any = packed) -> Tensor:
            x = data.x
            if output == "fp32":  # PyTorch's fastest way
                x = torch.quantize_per_tensor(data.real, SCALE, ZERO, torch.quint8).int_repr()
            result: Tensor = kernel.run(packed, x, data.offset, None)
            return result

        calls[name] = call
    live = data.weight * layer.mask()
    calls |= quantized_layer_calls(
        live, data.offset, (SCALE, ZERO), WEIGHT_SCALE, data.x, data.real, real=output == "fp32"
    )
    return calls


def own_calls(tile: Tile, mask: Tensor, data: Data) -> dict[str, Call]:
    """Return the ways to call a sparse layer with this tile."""
    packed = PackedInt8Linear(mask, block=tile.block, mv=tile.mv)
    values, scales = packed.pack(data.weight), (data.multiplier, data.offset)
    bytes_ = Int8Options(ZERO, "relu", output=(torch.int8, 0))
    real = Int8Options(ZERO, "relu", rounded_to=(torch.uint8, SCALE))
    panel = Int8Panel.pack(data.x, tile.mv, packed.library)
    return {
        "drop-in": lambda: packed.run(data.x, values, scales, bytes_),
        "panel": lambda: packed.to_panel(panel, values, scales, bytes_),
        "real": lambda: packed.run(data.real, values, scales, real),
        "unpacked": lambda: packed.to_panel(panel, values, scales, bytes_).unpack(packed.library),
    }


def fastest(layer: Layer, data: Data, truths: dict[str, Tensor]) -> dict[str, tuple[str, Call]]:
    """Return the best tile and its call for every way, after checking that all compute the integer product."""
    tiles = implement_named("cpu-int8", OP).space(layer.spec("int8"))["tile"]._value
    calls = {str(tile): own_calls(Tile.parse(str(tile)), layer.mask(), data) for tile in tiles}
    for tile, ways in calls.items():
        for way, truth in (("drop-in", "int8"), ("unpacked", "int8"), ("real", "fp32")):
            if not torch.equal(ways[way](), truths[truth]):
                raise SystemExit(f"{way} with {tile} computes something else than the integer product")
    found = {}
    for way in (*OWN, "real"):
        timings = compare({tile: ways[way] for tile, ways in calls.items()}, warmup=2, iters=9, max_seconds=0.5)
        found[way] = (timings.fastest, calls[timings.fastest][way])
    return found


def measure(layer: Layer, roof: Roof) -> dict[str, Any]:
    """Time one layer; returns medians in ms, speedups over dense int8 and fp32, and the share of the roof."""
    data = Data.of(layer)
    rivals = {output: dense_calls(layer, data, output) for output in ("int8", "fp32")}
    found = fastest(layer, data, {output: calls["torch-int8"]() for output, calls in rivals.items()})
    masked = (data.weight * layer.mask()).float()
    functions = {**rivals["int8"], **{f"{name} real": call for name, call in rivals["fp32"].items()}}
    functions["fp32"] = lambda: functional.linear(data.real, masked)
    functions |= {way: call for way, (_, call) in found.items()}
    medians = median_ms(functions, 1, 1.5)
    calls = calls_for(REPEATED_MS, _dense(medians, rivals["int8"]))
    times = {"": medians, " repeated": median_ms(functions, calls, 1.5)}
    speedup = {}
    for end, took in times.items():
        speedup |= {f"{way}{end}": _dense(took, rivals["int8"]) / took[way] for way in OWN}
        speedup[f"real{end}"] = _dense(took, [f"{name} real" for name in rivals["fp32"]]) / took["real"]
        speedup[f"fp32{end}"] = took["fp32"] / took["real"]
    live = layer.tokens * int(layer.mask().sum())
    moved = int(live / layer.tokens * 1.25) + layer.tokens * (layer.inputs + layer.outputs)  # an index for four bytes
    return {
        **asdict(layer),
        "median_ms": medians,
        "repeated_ms": times[" repeated"],
        "speedup": speedup,
        "roof": {f"{way}{end}": roof.reached(live, moved, times[end][way], int8=True) for end in times for way in OWN},
        "rivals": sorted({*rivals["int8"], *rivals["fp32"]}),
        "tiles": {way: tile for way, (tile, _) in found.items()},
    }


def _dense(medians: dict[str, float], names: Iterable[str]) -> float:
    return min(medians[name] for name in names)


def summary(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return geometric means over the shapes."""
    rows = []
    keys = dict.fromkeys((cell["tokens"], cell["block"], cell["sparsity"]) for cell in results)
    for tokens, block, sparsity in keys:
        cells = [c for c in results if (c["tokens"], c["block"], c["sparsity"]) == (tokens, block, sparsity)]
        means = {name: statistics.geometric_mean(c["speedup"][name] for c in cells) for name in cells[0]["speedup"]}
        roof = {name: statistics.geometric_mean(c["roof"][name]["share"] for c in cells) for name in cells[0]["roof"]}
        target = TARGETS[SPARSITIES.index(sparsity)] if (tokens, block) == (128, (4, 4)) else None
        key = {"tokens": tokens, "block": block, "sparsity": sparsity}
        rows.append({**key, **means, "roof_share": roof, "target": target})
    return rows


def show(rows: list[dict[str, Any]]) -> str:
    """Return the summary as a table."""
    names = [f"{way}{end}" for end in ("", " repeated") for way in (*OWN, "real", "fp32")]
    lines = []
    for row in rows:
        figures = [
            *(f"{row[name]:.2f}" for name in names),
            row["target"] or "",
            f"{max(row['roof_share'].values()):.0%}",
        ]
        lines.append([row["tokens"], "x".join(map(str, row["block"])), row["sparsity"], *figures])
    heads = ["M", "pattern", "sparsity", *names, "target", "share of roof"]
    return table(heads, lines, title="times faster than dense int8 (fp32: than dense fp32), geometric mean")


def main() -> None:
    """Time every layer and save the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one layer")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--out", type=Path, help="folder for the JSON instead of benchmarks/results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokens = [128] if options.quick else list(options.tokens)
    load_before, roof, results = os.getloadavg()[0], measured_roof(), []
    print(roof, flush=True)
    for layer in layers(tokens, quick=options.quick):
        results.append(measure(layer, roof))
        last = results[-1]
        gains = ", ".join(f"{name} {gain:.2f}x" for name, gain in last["speedup"].items())
        reached = last["roof"]["panel repeated"]
        print(f"{layer}: {gains}; {reached['share']:.0%} of {reached['bound']} ({last['tiles']})", flush=True)
    rows = summary(results)
    found = {
        "summary": rows,
        "rivals": results[0]["rivals"],
        "layers": without(results, "roof", "rivals", "tiles"),
        "roof": roof.to_dict(),
        "load": [load_before, os.getloadavg()[0]],
    }
    path = save("cpu_int8", f"{platform.machine()} cpu", found, folder=options.out)
    print(show(rows))
    print(f"saved {path}")


if __name__ == "__main__":
    main()

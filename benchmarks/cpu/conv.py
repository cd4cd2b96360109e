"""How much faster are sparse convolutions on the CPU? ResNet's 1x1 and 3x3 layers against dense, one image, one thread.

Run with ``python benchmarks/cpu/conv.py``; ``--quick`` takes one sparsity and a subset of the layers. The best of the
candidate tiles and image layouts is chosen by a short round of timing, then competes with PyTorch, eager, in
channels-last and (with ``--compile``) compiled, call by call in turns. GFLOP/s count live weights only; beside them
stands their share of what a large dense product reaches in the same process, which is the roof.
"""

from __future__ import annotations

import argparse
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
from sparta.specialize.conv import ConvGeometry, conv_spec
from sparta.specialize.cpu import PackedConv
from sparta.specialize.cpu.conv_image import IMAGES
from sparta.specialize.cpu.conv_implement import conv_tiles
from sparta.tables import table
from sparta.tesa.attribute import TeSA
from sparta.testing import block_mask, check, compare, conv_reference

# Input channels, output channels, kernel, size of the image.
LAYERS = (
    (64, 256, 1, 56),
    (256, 64, 1, 56),
    (512, 128, 1, 28),
    (1024, 256, 1, 14),
    (2048, 512, 1, 7),
    (64, 64, 3, 56),
    (128, 128, 3, 28),
    (256, 256, 3, 14),
    (512, 512, 3, 7),
)
HEIGHTS = (1, 4, 8)
SPARSITIES = (0.8, 0.9, 0.95)
# What one is to reach, by kernel and block height, for the three sparsities; a geometric mean over the layers.
TARGETS = {(1, 1): (1.8, 3.5, 5.6), (1, 8): (3.4, 5.7, 10), (3, 1): (1.7, 3, 5.5), (3, 8): (4, 7.5, 13)}
Call = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Layer:
    """One layer to time, with blocks of ``height`` output channels."""

    inputs: int
    outputs: int
    kernel: int
    size: int
    height: int
    sparsity: float

    @property
    def live_flops(self) -> float:
        """Operations that the live weights need."""
        return 2 * self.inputs * self.outputs * self.kernel**2 * self.size**2 * (1 - self.sparsity)


def layers(*, quick: bool) -> Iterator[Layer]:
    """Yield the layers."""
    for fields in LAYERS[3::4] if quick else LAYERS:
        for height in HEIGHTS:
            for sparsity in SPARSITIES[1:2] if quick else SPARSITIES:
                yield Layer(*fields, height, sparsity)


def dense_functions(x: torch.Tensor, weight: torch.Tensor, *, compiled: bool) -> dict[str, Call]:
    """Return the dense rivals."""
    padding = weight.shape[-1] // 2
    wide, wide_weight = (t.contiguous(memory_format=torch.channels_last) for t in (x, weight))
    functions: dict[str, Call] = {
        "eager": lambda: functional.conv2d(x, weight, padding=padding),
        "channels last": lambda: functional.conv2d(wide, wide_weight, padding=padding),
    }
    if compiled:
        fast = torch.compile(lambda v: functional.conv2d(v, weight, padding=padding), dynamic=False)
        fast(x)
        functions["compile"] = lambda: fast(x)
    return functions


def best_kernel(layer: Layer, x: torch.Tensor, weight: torch.Tensor, mask: torch.Tensor) -> PackedConv:
    """Return the candidate with the lowest median of a few calls; each is checked against float64 first."""
    geometry = ConvGeometry.make(2, padding=layer.kernel // 2)
    spec = conv_spec(TeSA.from_mask(mask), x.shape, x.dtype, geometry)
    truth = conv_reference(x, weight, weight_mask=mask, padding=layer.kernel // 2)
    images = ("flat", "taps") if layer.kernel == 1 else IMAGES
    found = [PackedConv(weight, mask, geometry, image=i, **t.to_dict()) for t in conv_tiles(spec) for i in images]
    for packed in found:
        check(packed(x, threads=1), truth, reduction=weight[0].numel(), what=repr(packed))
    functions = {str(index): _call(packed, x) for index, packed in enumerate(found)}
    return found[int(compare(functions, warmup=2, iters=9, max_seconds=2.0).fastest)]


def _call(packed: PackedConv, x: torch.Tensor) -> Call:
    return lambda: packed(x, threads=1)


def measure(layer: Layer, roof: float, *, compiled: bool) -> dict[str, Any]:
    """Time one layer; returns medians in ms, the speedup over the best dense, and the share of the roof."""
    weight = torch.randn(layer.outputs, layer.inputs, layer.kernel, layer.kernel)
    mask = block_mask((layer.outputs, weight[0].numel()), (layer.height, 1), layer.sparsity, seed=0).view_as(weight)
    x = torch.randn(1, layer.inputs, layer.size, layer.size)
    functions = dense_functions(x, weight * mask, compiled=compiled)
    rivals = list(functions)
    packed = best_kernel(layer, x, weight, mask)
    functions["sparse"] = _call(packed, x)
    timings = compare(functions, warmup=3, iters=41, max_seconds=2.0)
    medians = {name: timing.median for name, timing in timings.timings.items()}
    rate = layer.live_flops / medians["sparse"] / 1e6
    return {
        **asdict(layer),
        "median_ms": medians,
        "speedup": min(medians[name] for name in rivals) / medians["sparse"],
        "gflops": rate,
        "roof_share": rate / roof,
        "tile": str(packed.tile),
        "image": packed.image,
    }


def measured_roof() -> float:
    """Return the GFLOP/s of a dense product that fits the caches."""
    a, b = torch.randn(512, 512), torch.randn(512, 512)
    return 2 * 512**3 / compare({"mm": lambda: a @ b}, warmup=5, iters=41, max_seconds=2.0)["mm"].median / 1e6


def summary(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return geometric means over the layers, with the target."""
    rows = []
    for kernel in (1, 3):
        for height in HEIGHTS:
            for index, sparsity in enumerate(SPARSITIES):
                key = (kernel, height, sparsity)
                cells = [cell for cell in results if (cell["kernel"], cell["height"], cell["sparsity"]) == key]
                if not cells:
                    continue
                target = TARGETS.get((kernel, height), (None,) * 3)[index]
                means = {name: statistics.geometric_mean(c[name] for c in cells) for name in ("speedup", "roof_share")}
                rows.append({"kernel": kernel, "height": height, "sparsity": sparsity, **means, "target": target})
    return rows


def show(rows: list[dict[str, Any]]) -> str:
    """Return the summary as a table."""
    lines = []
    for row in rows:
        pattern = f"{row['height']}x1" if row["height"] > 1 else "u"
        figures = (f"{row['speedup']:.2f}", f"{row['roof_share']:.0%}", row["target"] or "")
        lines.append([f"{row['kernel']}x{row['kernel']}", pattern, row["sparsity"], *figures])
    heads = ["kernel", "pattern", "sparsity", "speedup", "share of roof", "target"]
    return table(heads, lines, title="times faster than the best dense, geometric mean")


def main() -> None:
    """Time every layer and save the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two layers at one sparsity")
    parser.add_argument("--compile", action="store_true", help="torch.compile as a rival too")
    parser.add_argument("--out", type=Path, help="folder for the JSON instead of benchmarks/results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    load_before, roof = os.getloadavg()[0], measured_roof()
    print(f"a dense product reaches {roof:.0f} GFLOP/s")
    results = []
    for layer in layers(quick=options.quick):
        results.append(measure(layer, roof, compiled=options.compile))
        last = results[-1]
        shown = f"{last['speedup']:.2f}x, {last['gflops']:.0f} GFLOP/s, {last['roof_share']:.0%} of the roof"
        print(f"{layer}: {shown} ({last['tile']} {last['image']})", flush=True)
    rows = summary(results)
    found = {"summary": rows, "layers": results, "roof_gflops": roof, "load": [load_before, os.getloadavg()[0]]}
    path = save("cpu_conv", f"{platform.machine()} cpu", found, folder=options.out)
    print(show(rows))
    print(f"saved {path}")


if __name__ == "__main__":
    main()

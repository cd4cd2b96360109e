"""How much faster are sparse convolutions on the CPU? ResNet's 1x1 and 3x3 layers against dense, one image, one thread.

Run with ``python benchmarks/cpu/conv.py`` (about 5 minutes on a quiet machine); ``--quick`` takes one sparsity and a
subset of the layers. The best of the candidate tiles and image layouts is chosen by a short round of timing, then
competes with PyTorch (eager, in channels-last, compiled) and ONNX Runtime, call by call in turns. Operations count live
weights only; the share of the roof is that of :mod:`roofline`.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from rivals import RIVALS, dense_calls
from roofline import Roof, measured_roof

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
CHANNELS_LAST = "channels last"
Call = Callable[[], Any]


@dataclass(frozen=True)
class Layer:
    """One layer to time, with blocks of ``height`` output channels."""

    inputs: int
    outputs: int
    kernel: int
    size: int
    height: int
    sparsity: float


@dataclass(frozen=True)
class Image:
    """Sizes with what all patterns of them share: the weight, the input and the dense rivals."""

    weight: torch.Tensor
    x: torch.Tensor
    rivals: dict[str, Call]

    def layers(self, *, quick: bool) -> Iterator[Layer]:
        """Yield the patterns and sparsities."""
        outputs, inputs, kernel, _ = self.weight.shape
        for height in HEIGHTS:
            for sparsity in SPARSITIES[1:2] if quick else SPARSITIES:
                yield Layer(inputs, outputs, kernel, self.x.shape[-1], height, sparsity)


def images(without: Sequence[str], *, quick: bool) -> Iterator[Image]:
    """Yield the sizes with their rivals."""
    for inputs, outputs, kernel, size in LAYERS[3::4] if quick else LAYERS:
        conv = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False)
        x = torch.randn(1, inputs, size, size)
        rivals: dict[str, Call] = dict(dense_calls(nn.Sequential(conv), x, without))
        wide = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False)
        wide.load_state_dict(conv.state_dict())
        wide = wide.requires_grad_(requires_grad=False).to(memory_format=torch.channels_last)
        rivals[CHANNELS_LAST] = _bound(wide, x.contiguous(memory_format=torch.channels_last))
        yield Image(conv.weight.detach().clone(), x, rivals)


def _bound(module: nn.Module, x: torch.Tensor) -> Call:
    return lambda: module(x)


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
    return found[int(compare(functions, warmup=2, iters=9, max_seconds=1.0).fastest)]


def _call(packed: PackedConv, x: torch.Tensor) -> Call:
    return lambda: packed(x, threads=1)


def measure(layer: Layer, image: Image, roof: Roof) -> dict[str, Any]:
    """Time one layer; returns medians in ms, the speedup over the best dense, and the share of the roof."""
    weight, x = image.weight, image.x
    mask = block_mask((layer.outputs, weight[0].numel()), (layer.height, 1), layer.sparsity, seed=0).view_as(weight)
    packed = best_kernel(layer, x, weight, mask)
    functions = {**image.rivals, "sparse": _call(packed, x)}
    timings = compare(functions, warmup=3, iters=31, max_seconds=1.2)
    medians = {name: timing.median for name, timing in timings.timings.items()}
    dense = min(image.rivals, key=medians.__getitem__)
    pixels = layer.size**2
    moved = packed.layout.nbytes + 4 * pixels * (layer.inputs + layer.outputs)
    return {
        **asdict(layer),
        "median_ms": medians,
        "best_dense": dense,
        "speedup": medians[dense] / medians["sparse"],
        "roof": roof.reached(pixels * int(mask.sum()), moved, medians["sparse"]),
        "tile": str(packed.tile),
        "image": packed.image,
    }


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
                means = {
                    "speedup": statistics.geometric_mean(cell["speedup"] for cell in cells),
                    "roof_share": statistics.geometric_mean(cell["roof"]["share"] for cell in cells),
                }
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
    parser.add_argument("--without", nargs="*", default=(), choices=RIVALS[1:], help="rivals to leave out")
    parser.add_argument("--out", type=Path, help="folder for the JSON instead of benchmarks/results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    load_before, roof, results = os.getloadavg()[0], measured_roof(), []
    print(roof, flush=True)
    for image in images(options.without, quick=options.quick):
        for layer in image.layers(quick=options.quick):
            results.append(measure(layer, image, roof))
            last = results[-1]
            reached = f"{last['roof']['share']:.0%} of {last['roof']['bound']}"
            shown = f"{last['speedup']:.2f}x {last['best_dense']}, {reached}"
            print(f"{layer}: {shown} ({last['tile']} {last['image']})", flush=True)
    rows = summary(results)
    load = [load_before, os.getloadavg()[0]]
    timed = sorted({name for cell in results for name in cell["median_ms"]} - {"sparse"})
    found = {"summary": rows, "layers": results, "roof": roof.to_dict(), "rivals": timed, "load": load}
    path = save("cpu_conv", f"{platform.machine()} cpu", found, folder=options.out)
    print(show(rows))
    print(f"saved {path}")


if __name__ == "__main__":
    main()

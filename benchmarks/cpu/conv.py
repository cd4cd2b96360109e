"""How much faster are sparse convolutions on the CPU? ResNet's 1x1 and 3x3 layers against dense, one image, one thread.

Run with ``python benchmarks/cpu/conv.py`` (about 5 minutes on a quiet machine); ``--quick`` takes one sparsity and a
subset of the layers. The best of the candidate tiles and image layouts is chosen by a short round of timing, then
competes with PyTorch (eager, in channels-last, compiled) and ONNX Runtime: interleaved call by call, where each finds
its input driven out of the near caches by the others, and by several calls, where each repeats itself with its caches
warm, as where the layer before has just written the input. Operations count live weights only; the share of the
roof is that of :mod:`roofline`.

Where a target is missed, one of three things bounds it. Bytes: the roof in the results
says what moves beyond the second level of caches, and 256 channels of 56x56 are 3.2 MB. Loads: an unstructured weight
needs one for each multiplication, as many as the roof's bytes from the second level allow. What does not shrink with
the weight: padding the image, writing the output, and the call. Asking for the next tile's input during this one,
masked stores from registers, stores past the caches and rows of equal length were tried, and gained nothing.
"""

from __future__ import annotations

import argparse
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

sys.path.insert(0, str(Path(__file__).parents[1]))
from rivals import RIVALS, dense_calls
from roofline import Roof, measured_roof

from common import Call, calls_for, median_ms, repeated, without
from record import save
from sparta.specialize.conv.cpu import conv_layouts, conv_tiles
from sparta.specialize.conv.cpu_packed import PackedConv
from sparta.specialize.conv.spec import ConvGeometry, conv_spec
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
REPEATED_MS = 8.0  # of dense, about, in one turn of several calls


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
    for sizes in LAYERS[3::4] if quick else LAYERS:
        yield image_of(*sizes, without)


def image_of(inputs: int, outputs: int, kernel: int, size: int, without: Sequence[str]) -> Image:
    """Return one size with its rivals."""
    conv = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False)
    x = torch.randn(1, inputs, size, size)
    rivals: dict[str, Call] = dict(dense_calls(nn.Sequential(conv), x, without))
    wide = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False)
    wide.load_state_dict(conv.state_dict())
    wide = wide.requires_grad_(requires_grad=False).to(memory_format=torch.channels_last)
    rivals[CHANNELS_LAST] = _bound(wide, x.contiguous(memory_format=torch.channels_last))
    return Image(conv.weight.detach().clone(), x, rivals)


def _bound(module: nn.Module, x: torch.Tensor) -> Call:
    return lambda: module(x)


def best_kernels(layer: Layer, x: torch.Tensor, weight: torch.Tensor, mask: torch.Tensor) -> dict[str, PackedConv]:
    """Return the fastest candidate interleaved, and repeated; each is checked against float64 first."""
    geometry = ConvGeometry.make(2, padding=layer.kernel // 2)
    spec = conv_spec(TeSA.from_mask(mask), x.shape, x.dtype, geometry)
    truth = conv_reference(x, weight, weight_mask=mask, padding=layer.kernel // 2)
    ways = [(tile, image) for tile in conv_tiles(spec) for image in conv_layouts(spec)]
    found = [PackedConv(weight, mask, geometry, image=image, **tile.to_dict()) for tile, image in ways]
    for packed in found:
        check(packed(x, threads=1), truth, reduction=weight[0].numel(), what=repr(packed))
    functions = {str(index): _call(packed, x) for index, packed in enumerate(found)}
    best = {}
    for how, calls in (("interleaved", 1), ("repeated", 4)):
        turns = repeated(functions, calls)
        best[how] = found[int(compare(turns, warmup=2, iters=9, max_seconds=1.0).fastest)]
    return best


def _call(packed: PackedConv, x: torch.Tensor) -> Call:
    return lambda: packed(x, threads=1)


def measure(layer: Layer, image: Image, roof: Roof) -> dict[str, Any]:
    """Time one layer; returns medians in ms, speedups over the best dense and shares of the roof, for both ways."""
    weight, x = image.weight, image.x
    mask = block_mask((layer.outputs, weight[0].numel()), (layer.height, 1), layer.sparsity, seed=0).view_as(weight)
    kernels = best_kernels(layer, x, weight, mask)
    medians = {"interleaved": median_ms({**image.rivals, "sparse": _call(kernels["interleaved"], x)}, 1)}
    shortest = min(medians["interleaved"][name] for name in image.rivals)
    calls = calls_for(REPEATED_MS, shortest)
    medians["repeated"] = median_ms({**image.rivals, "sparse": _call(kernels["repeated"], x)}, calls)
    dense = {how: min(image.rivals, key=found.__getitem__) for how, found in medians.items()}
    pixels = layer.size**2
    moved = {how: packed.layout.nbytes + 4 * pixels * (layer.inputs + layer.outputs) for how, packed in kernels.items()}
    return {
        **asdict(layer),
        "median_ms": medians["interleaved"],
        "repeated_ms": medians["repeated"],
        "best_dense": dense,
        "speedup": {how: found[dense[how]] / found["sparse"] for how, found in medians.items()},
        "roof": {
            how: roof.reached(pixels * int(mask.sum()), moved[how], found["sparse"]) for how, found in medians.items()
        },
        "tiles": {how: f"{packed.tile} {packed.image}" for how, packed in kernels.items()},
    }


def summary(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return geometric means over the layers, with the target; a row for each way in which calls follow one another."""
    rows = []
    keys = dict.fromkeys(
        (cell["kernel"], cell["height"], how, cell["sparsity"]) for cell in results for how in cell["speedup"]
    )
    for kernel, height, how, sparsity in sorted(keys):
        cells = [c for c in results if (c["kernel"], c["height"], c["sparsity"]) == (kernel, height, sparsity)]
        means = {
            "speedup": statistics.geometric_mean(cell["speedup"][how] for cell in cells),
            "roof_share": statistics.geometric_mean(cell["roof"][how]["share"] for cell in cells),
        }
        target = TARGETS.get((kernel, height), (None,) * 3)[SPARSITIES.index(sparsity)]
        key = {"kernel": kernel, "height": height, "how": how, "sparsity": sparsity}
        rows.append({**key, **means, "target": target})
    return rows


def show(rows: list[dict[str, Any]]) -> str:
    """Return the summary as a table."""
    lines = []
    for row in rows:
        pattern = f"{row['height']}x1" if row["height"] > 1 else "u"
        figures = (f"{row['speedup']:.2f}", f"{row['roof_share']:.0%}", row["target"] or "")
        lines.append([f"{row['kernel']}x{row['kernel']}", pattern, row["how"], row["sparsity"], *figures])
    heads = ["kernel", "pattern", "caches", "sparsity", "speedup", "share of roof", "target"]
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
            shown = ", ".join(
                f"{how} {gain:.2f}x {last['best_dense'][how]}, {last['roof'][how]['share']:.0%} of "
                f"{last['roof'][how]['bound']} ({last['tiles'][how]})"
                for how, gain in last["speedup"].items()
            )
            print(f"{layer}: {shown}", flush=True)
    rows = summary(results)
    load = [load_before, os.getloadavg()[0]]
    timed = sorted({name for cell in results for name in cell["median_ms"]} - {"sparse"})
    found = {
        "summary": rows,
        "layers": without(results, "roof", "tiles"),
        "roof": roof.to_dict(),
        "rivals": timed,
        "load": load,
    }
    path = save("cpu_conv", f"{platform.machine()} cpu", found, folder=options.out)
    print(show(rows))
    print(f"saved {path}")


if __name__ == "__main__":
    main()

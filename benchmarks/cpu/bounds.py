"""What is possible on this core? Layers whose targets are far, beside the least time that anything could take.

Run with ``python benchmarks/cpu/bounds.py`` (about 6 minutes on a quiet machine, one thread). The bound of a layer is
the sum of two times measured in the same run. One is a call of the same kernel with the same shapes and *no* live
weight: what Python, adding a bias, requantising and storing cost, which no sparsity takes away. The other is what the
live weights need at the rates of :mod:`roofline`: their multiply-adds in registers, or their bytes from the level of
caches that holds them, whichever takes longer. Layouts are kept at both ends, as the targets ask, and calls are
repeated, but for one token, which reads its weights from memory. Convolutions of one tap are the layers of ResNet, one
image; without a live weight nothing of the image is read. Every row is stored as soon as it is measured:
``--limit`` ends a run after so many seconds, the same command goes on, and its status is 3 until all is there.
"""

from __future__ import annotations

import argparse
import copy
import functools
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import conv
import int8
import layers
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from rivals import dense_calls
from roofline import Roof, measured_roof

from common import TARGETS, Call, Row, calls_for, in_pieces, median_ms
from record import RESULTS, path_of
from sparta.specialize.conv.cpu_packed import PackedConv
from sparta.specialize.conv.spec import ConvGeometry
from sparta.specialize.cpu import candidates
from sparta.specialize.cpu.tile import Tile
from sparta.specialize.implement import implement_named
from sparta.specialize.linear.cpu_packed import PackedLinear
from sparta.testing import block_mask, compare

QUESTION, DEVICE = "cpu_bounds", f"{platform.machine()} cpu"
SHAPES = ((768, 768), (768, 3072), (3072, 768))  # (K, N)
SPARSITIES = layers.SPARSITIES
REPEATED_MS = 2.0
# Tokens and blocks of fp32, and of int8.
REAL, INTEGERS = ((1, (16, 1)), (16, (4, 1)), (128, (4, 1))), ((128, (4, 4)),)
IMAGES = tuple(sizes for sizes in conv.LAYERS if sizes[2] == 1)
HEIGHTS = (1, 8)  # of the blocks of convolutions that have a target


@dataclass(frozen=True)
class Timed:
    """Milliseconds of the best dense, of ours, and of ours without a live weight; what the live ones need."""

    dense: float
    ours: float
    empty: float
    multiply_adds: float
    nbytes: float  # of live weights and their indices
    used: float  # bytes that are read between two calls of the same layer

    def row(self, roof: Roof, target: float, *, bytewise: bool) -> Row:
        """Return what is stored."""
        peak = (roof.byte_multiply_adds if bytewise else None) or roof.multiply_adds
        least = 1e3 * max(self.multiply_adds / peak, self.nbytes / roof.bandwidth(self.used))
        times = {"dense": self.dense, "ours": self.ours, "empty": self.empty, "least": least}
        return {"target": target, "ms": times}


def of_integers(roof: Roof, tokens: int, shape: tuple[int, int], block: tuple[int, int], sparsity: float) -> Row:
    """Time a layer of 8-bit integers, packed at both ends."""
    layer = int8.Layer(tokens, *shape, block, sparsity)
    data = int8.Data.of(layer)
    none = functools.partial(torch.zeros, shape[1], shape[0], dtype=torch.bool)
    tiles = [
        Tile.parse(str(tile)) for tile in implement_named("cpu-int8", int8.OP).space(layer.spec("int8"))["tile"]._value
    ]
    ours = {str(tile): int8.own_calls(tile, layer.mask(), data)["panel"] for tile in tiles}
    best = compare(ours, warmup=2, iters=9, max_seconds=0.5).fastest
    calls = int8.dense_calls(layer, data, "int8")
    rivals = list(calls)
    calls["ours"] = ours[best]
    calls["empty"] = int8.own_calls(Tile.parse(best), none(), data)["panel"]
    times = _repeated(calls, rivals)
    live = int(layer.mask().sum())
    moved = 1.25 * live  # an index for four bytes
    timed = Timed(
        _least(times, rivals), times["ours"], times["empty"], tokens * live, moved, moved + tokens * sum(shape)
    )
    return timed.row(roof, int8.TARGETS[SPARSITIES.index(sparsity)], bytewise=True)


def of_numbers(roof: Roof, tokens: int, shape: tuple[int, int], block: tuple[int, int], sparsity: float) -> Row:
    """Time a layer in fp32: in panels, or for one token from memory."""
    weight, x = torch.randn(shape[1], shape[0]), torch.randn(tokens, shape[0])
    masks = {
        "ours": block_mask((shape[1], shape[0]), block, sparsity, seed=0),
        "empty": torch.zeros(shape[::-1]).bool(),
    }
    found = candidates(tokens, shape[1], shape[0], 1 - sparsity, block)
    # From memory prefetching always pays; and what is tried here needs no checks, which other scripts make.
    found = [tile for tile in found if tile["prefetch"]] if tokens == 1 else found
    copies = layers.copies_of(weight) if tokens == 1 else 1
    make = functools.partial(_calls, weight, x, copies)
    best = compare(
        {str(n): make(masks["ours"], tile) for n, tile in enumerate(found)}, warmup=1, iters=5, max_seconds=1.0
    )
    tile = found[int(best.fastest)]
    calls = (
        layers.cold_rivals(weight, x, ("compile",))
        if tokens == 1
        else dense_calls(layers.dense_layer(weight), x, ("compile",))
    )
    rivals = list(calls)
    calls |= {name: make(mask, tile) for name, mask in masks.items()}
    times = _repeated(calls, rivals) if tokens > 1 else median_ms(calls, 1, 3.0)
    times = {name: took / (copies * layers.PASSES if tokens == 1 else 1) for name, took in times.items()}
    nbytes, live = PackedLinear(weight, masks["ours"], **tile).nbytes, int(masks["ours"].sum())
    used = copies * nbytes + 4 * tokens * sum(shape)
    timed = Timed(_least(times, rivals), times["ours"], times["empty"], tokens * live, nbytes, used)
    return timed.row(roof, TARGETS[tokens, block[0]][SPARSITIES.index(sparsity)], bytewise=False)


def of_images(roof: Roof, sizes: tuple[int, int, int, int], height: int, sparsity: float) -> Row:
    """Time a convolution of one image in fp32."""
    given = conv.image_of(*sizes, ("compile",))
    inputs, outputs, kernel, size = sizes
    layer = conv.Layer(inputs, outputs, kernel, size, height, sparsity)
    mask = block_mask((outputs, given.weight[0].numel()), (height, 1), sparsity, seed=0).view_as(given.weight)
    best = conv.best_kernels(layer, given.x, given.weight, mask)["repeated"]
    empty = PackedConv(
        given.weight,
        torch.zeros_like(mask),
        ConvGeometry.make(2, padding=kernel // 2),
        image=best.image,
        **best.tile.to_dict(),
    )
    calls = dict(given.rivals)
    calls |= {
        name: functools.partial(packed, given.x, threads=1) for name, packed in (("ours", best), ("empty", empty))
    }
    times = _repeated(calls, list(given.rivals))
    nbytes, live = best.layout.nbytes, int(mask.sum())
    used = nbytes + 4 * size**2 * (inputs + outputs)
    timed = Timed(_least(times, list(given.rivals)), times["ours"], times["empty"], size**2 * live, nbytes, used)
    return timed.row(roof, conv.TARGETS[kernel, height][SPARSITIES.index(sparsity)], bytewise=False)


def _calls(weight: Tensor, x: Tensor, copies: int, mask: Tensor, tile: Row) -> Call:
    packed = PackedLinear(weight, mask, **tile)
    if copies == 1:
        return layers.panel_call(packed, x)
    return layers.passes(
        [layers.token_call(each, x) for each in (packed, *(copy.deepcopy(packed) for _ in range(copies - 1)))]
    )


def _repeated(calls: dict[str, Call], rivals: list[str]) -> dict[str, float]:
    once = median_ms(calls, 1, 0.4)
    return median_ms(calls, calls_for(REPEATED_MS, _least(once, rivals)), 1.2)


def _least(times: dict[str, float], names: list[str]) -> float:
    return min(times[name] for name in names)


def rows(roof: Roof) -> list[tuple[Row, Callable[[], Row]]]:
    """Return every row: what it is, and what measures it."""
    found: list[tuple[Row, Callable[[], Row]]] = []
    for kind, cases, measured in (("int8", INTEGERS, of_integers), ("fp32", REAL, of_numbers)):
        for tokens, block in cases:
            for sparsity in SPARSITIES:
                for shape in SHAPES:
                    which = {
                        "kind": kind,
                        "tokens": tokens,
                        "block": list(block),
                        "sparsity": sparsity,
                        "shape": list(shape),
                    }
                    found.append((which, functools.partial(measured, roof, tokens, shape, block, sparsity)))
    for height in HEIGHTS:
        for sparsity in SPARSITIES:
            for sizes in IMAGES:
                which = {
                    "kind": "conv 1×1",
                    "tokens": None,
                    "block": [height, 1],
                    "sparsity": sparsity,
                    "shape": list(sizes),
                }
                found.append((which, functools.partial(of_images, roof, sizes, height, sparsity)))
    return found


def main() -> int:
    """Measure every row that is not stored yet, or as many as there is time for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds for this run")
    parser.add_argument("--machine", default=DEVICE, help="a name, for results that stand beside those of other ones")
    parser.add_argument("--out", type=Path, help="folder for the JSON instead of benchmarks/results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    roof = measured_roof()
    print(roof, flush=True)
    path = path_of(QUESTION, options.machine, options.out or RESULTS)
    return in_pieces(rows(roof), path, options.machine, {"roof": roof.to_dict()}, options.limit)


if __name__ == "__main__":
    raise SystemExit(main())

"""How fast is decoding on CUDA with unstructured weights or skipped inputs? Against the fastest dense layer.

Run with ``python benchmarks/gpu/decode.py``. Calls are graphed over rotated weights and graphs take turns; ratios
refer to the dense layer on the random or the pruned weight, whichever is faster. The limit is the time that the bytes
which a kernel must read take at the rate that a copy reaches.

What should bound the bitmap kernel, by arithmetic: 4 x 132 schedulers that issue one instruction a cycle at 1.98 GHz
make 33 T lane instructions a second. With a bit an element the kernel spends 5.3-5.8 of them on an element (test, load
and step are 3; the rest is heads, counts, packing and the matrix unit): about 6 T elements a second, which is 2.8 times
what dense reads at 4.3 TB/s. Bytes, 2 d + 0.19 an element, allow 1.7x, 2.5x, 5.2x at 50, 70, 90 %. With a bit for two
neighbours it is 3.2-3.7 instructions and 2 (1 - s s) + 0.09 bytes for a sparsity s, which allow 1.25x, 1.8x, 4.2x.

What was measured on an H200: 1.1-1.4x, 1.5-1.7x, 2.1-2.5x at 50, 70, 90 % for one token, and 0.9-1.1x, 1.1-1.3x,
1.6-1.8x for 16. The aims 1.35x, 2.0x, 3.5x for all up to 16 tokens are missed, except at 50 % on 4096 x 11008 with one
token. At 70 and 80 % on 8192 x 8192 with one token it reads at 74-78 % of the limit, in pairs; single elements, which
are fewer bytes, were slower. At 90 % it reads at 31-52 %, and every further token costs time; x going through the L1
cache once for every 16 or 32 outputs and bank conflicts are suspected, but no counters of this version were taken. An
earlier version, with x through shared memory by bulk copies of 256 bytes, reached 0.7-0.9x at 50 % with 16 tokens: 8
warps on a multiprocessor, 30 % of issue slots used, 1.8 wavefronts a load. There, clusters of two blocks along K and
four slabs a warp were seldom the fastest, and are not among the tiles any more.

The kernel that skips small inputs wins with one token (1.2-1.45x with half of them small, 1.8-3x with 90 %) and loses
with four, where few inputs are small for all and each weight takes four multiplications on the ordinary cores; what
makes it as slow as it is there is not known.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[1]))

from graphed import rotated

from record import save
from sparta.errors import SpartaError
from sparta.specialize.kernel_spec import KernelSpec
from sparta.specialize.linear.cuda_bitmap import CudaBitmap
from sparta.specialize.linear.spec import linear_spec
from sparta.specialize.linear.threshold import threshold_linear
from sparta.tables import table
from sparta.tesa.attribute import TeSA
from sparta.testing import check, compare, linear_reference

DTYPE = torch.bfloat16
SHAPES = ((4096, 4096), (11008, 4096), (4096, 11008), (8192, 8192))
SPARSITIES = (0.5, 0.6, 0.7, 0.8, 0.9)
TOKENS = (1, 4, 8, 16)
BETWEEN = (0.6, 0.8)  # take over the tiles that were the best at the sparsity before
SKIPPED = (0.5, 0.7, 0.9)  # of the inputs
_COUNT = 20  # calls of a graph
_RATE = 4.3e12  # bytes a second that a copy reaches on an H200


def quickest(
    spec: KernelSpec, x: Tensor, weight: Tensor, tiles: list[str], *, verbose: bool
) -> tuple[list[str], int, Callable[[], None]]:
    """Try tiles; return them by their speed, the bytes that the fastest reads, and its graph."""
    expected, found = linear_reference(x, weight), []
    packed_by: dict[tuple[str, ...], tuple[Tensor, ...]] = {}
    for tile in tiles:
        kernel = CudaBitmap().build(spec, {"tile": tile})
        kind = tuple(part for part in tile.split(",") if part.startswith(("group", "run")))
        try:
            packed_by[kind] = packed = packed_by.get(kind) or kernel.pack(weight)
            check(kernel.run(packed, x, None, None), expected, reduction=x.shape[1])
        except SpartaError as error:
            print(f"  {tile}: {error}", flush=True)
            continue
        replay = rotated(lambda *p, kernel=kernel: kernel.run(p, x, None, None), packed, _COUNT)
        took = compare({"it": replay}, warmup=1, iters=4, max_seconds=0.02, device="cuda")["it"].median
        if verbose:
            print(f"    {tile}: {took * 1e3 / _COUNT:.2f} us", flush=True)
        found.append((took, tile, sum(t.numel() * t.element_size() for t in packed), replay))
    if not found:
        raise SpartaError("no tile ran")
    found.sort(key=lambda each: each[0])
    return [tile for _, tile, *_ in found], *found[0][2:]


def summary(shape: tuple[int, int], tokens: int, sparsity: float, us: dict[str, float], size: float) -> dict[str, Any]:
    """Return one record: the ratio to the fastest dense, the rate, and how near the memory limit that is."""
    ours = next(value for name, value in us.items() if not name.startswith("dense"))
    dense = min(value for name, value in us.items() if name.startswith("dense"))
    rate = size / ours * 1e6
    return {
        "shape": shape, "tokens": tokens, "sparsity": sparsity, "us": us, "ratio": dense / ours,
        "bytes": size, "gigabytes_a_second": rate / 1e9, "of_limit": rate / _RATE,
    }  # fmt: skip


def measure_bitmap(
    weight: Tensor, tesa: TeSA, sparsity: float, known: list[str], *, verbose: bool
) -> tuple[list[dict[str, Any]], list[str]]:
    """Time one pruned weight, microseconds a call; all tiles are tried for one token, the best of them for more.

    Returns the records and the tiles by their speed; if some are `known`, only these are tried.
    """
    pruned, records = tesa.apply(weight), []
    best = known
    for m in TOKENS:
        x = torch.randn(m, weight.shape[1], device="cuda", dtype=DTYPE)
        spec = linear_spec(tesa, m, DTYPE, device="cuda")
        tiles = best[:4] if m > 8 else best[:2]
        tiles = [tile.replace("tokens=8", "tokens=16") for tile in tiles] if m > 8 else tiles
        ranked, size, replay = quickest(
            spec, x, pruned, tiles or CudaBitmap().space(spec)["tile"].domain.values, verbose=verbose
        )
        best = best or ranked
        graphs = {
            "dense": rotated(lambda w: functional.linear(x, w), (weight,), _COUNT),  # noqa: B023 - used at once
            "dense pruned": rotated(lambda w: functional.linear(x, w), (pruned,), _COUNT),  # noqa: B023
            "cuda-bitmap": replay,
        }
        times = compare(graphs, warmup=2, iters=10, max_seconds=0.05, device="cuda")
        us = {name: times[name].median * 1e3 / _COUNT for name in graphs}
        records.append({"tile": ranked[0], **summary((weight.shape[0], weight.shape[1]), m, sparsity, us, size)})
        show("bitmap", records[-1])
    return records, best


def measure_threshold(weight: Tensor, sparsity: float, tokens: tuple[int, ...]) -> list[dict[str, Any]]:
    """Time the layer that skips small inputs; with several tokens, only what is small for all of them is skipped."""
    (n, k), records = weight.shape, []
    for m in tokens:
        x = torch.randn(m, k, device="cuda", dtype=DTYPE)
        threshold = x.abs().float().flatten().kthvalue(round(sparsity * x.numel())).values.item()
        small = x.abs().float() <= threshold
        stored = weight.t().contiguous()
        expected = linear_reference(torch.where(small, 0, x), weight)
        check(threshold_linear(x, stored, None, threshold), expected, reduction=k)
        graphs = {
            "dense": rotated(lambda w: functional.linear(x, w), (weight,), _COUNT),  # noqa: B023 - used at once
            "dense by input": rotated(lambda w: x @ w, (stored,), _COUNT),  # noqa: B023
            "threshold": rotated(lambda w: threshold_linear(x, w, None, threshold), (stored,), _COUNT),  # noqa: B023
        }
        times = compare(graphs, warmup=2, iters=10, max_seconds=0.06, device="cuda")
        us = {name: times[name].median * 1e3 / _COUNT for name in graphs}
        size = int((~small.all(0)).sum()) * n * 2
        records.append(summary((n, k), m, sparsity, us, size))
        show("threshold", records[-1])
    return records


def show(what: str, record: dict[str, Any]) -> None:
    """Print one record as it is measured."""
    times = ", ".join(f"{name} {value:.2f}" for name, value in record["us"].items())
    print(
        f"{what} {record['shape']} M={record['tokens']} {record['sparsity']:.0%}: {record['ratio']:.2f}x, "
        f"{record['gigabytes_a_second']:.0f} GB/s, {record['of_limit']:.0%} of the limit ({times} us) "
        f"{record.get('tile', '')}",
        flush=True,
    )


def rows_of(records: list[dict[str, Any]]) -> list[list[str]]:
    """Return a table: shape and sparsity down, tokens across."""
    found: dict[tuple[str, str], list[str]] = {}
    for r in records:
        key = (f"{r['shape'][0]}x{r['shape'][1]}", f"{r['sparsity']:.0%}")
        found.setdefault(key, []).append(f"{r['ratio']:.2f} ({r['of_limit']:.0%})")
    return [[*key, *cells] for key, cells in found.items()]


def main() -> None:
    """Measure all cases, print the ratios, save the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=None, help="folder of the results")
    parser.add_argument("--tiles", action="store_true", help="print the time of every tile that is tried")
    options = parser.parse_args()
    torch.manual_seed(0)
    bitmap: list[dict[str, Any]] = []
    threshold: list[dict[str, Any]] = []
    for shape in SHAPES:
        weight = torch.randn(shape, device="cuda", dtype=DTYPE)
        best: list[str] = []
        for sparsity in SPARSITIES:
            tesa = TeSA.from_mask(torch.rand(shape, device="cuda") >= sparsity)
            try:
                records, best = measure_bitmap(
                    weight, tesa, sparsity, best if sparsity in BETWEEN else [], verbose=options.tiles
                )
                bitmap += records
                if sparsity in SKIPPED:
                    threshold += measure_threshold(weight, sparsity, (1, 4))
            except (SpartaError, RuntimeError) as error:
                print(f"{shape} {sparsity:.0%}: {type(error).__name__}: {error}", flush=True)
            torch.cuda.empty_cache()
    print(table(["N x K", "sparsity", *(f"M = {m}" for m in TOKENS)], rows_of(bitmap)))
    print(table(["N x K", "inputs skipped", "M = 1", "M = 4"], rows_of(threshold)))
    results = {"dtype": "bf16", "unit": "us a call", "bitmap": bitmap, "threshold": threshold}
    print(save("decode", torch.cuda.get_device_name(), results, options.out))


if __name__ == "__main__":
    main()

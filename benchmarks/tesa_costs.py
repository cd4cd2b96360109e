"""What do patterns, detection, formats, covers and specs cost? Milliseconds on large weights, on one device.

Run with ``make bench``, or ``python benchmarks/tesa_costs.py --device cuda``. These are costs of preparing a model,
not of running it, so there is no dense baseline; a plain read of the weight is timed beside them as the yardstick.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable
from pathlib import Path

import torch

import sparta
from record import save
from sparta.tables import table
from sparta.tesa import BCSR, BCSRC, Bitmap, NMPacked, Packed24, block_cover
from sparta.testing import profile

COVER_COSTS = {
    (1, 1): 0.0064,
    (32, 32): 6.25,
    (32, 64): 8.59,
    (32, 128): 16.02,
    (64, 64): 50.0,
    (64, 128): 96.8,
}


def jobs(device: str, rows: int, columns: int) -> dict[str, Callable[[], object]]:
    """Return what is timed, by name."""
    generator = torch.Generator(device).manual_seed(0)
    weight = torch.randn(rows, columns, device=device, generator=generator)
    score = weight.abs()
    two_four = sparta.TeSA.from_pattern(sparta.NM(2, 4), score)
    blocks = sparta.TeSA.from_pattern(sparta.Block(32, 32), score, 0.8)
    random = sparta.TeSA.from_pattern(sparta.Unstructured(), score, 0.9)
    small = torch.rand(1024, 1024, device=device, generator=generator) < 0.1
    pruned = random.apply(weight)
    random_mask, two_four_mask = random.mask(device), two_four.mask(device)
    return {
        "read the weight (yardstick)": lambda: weight.abs().sum().item(),
        "project unstructured 90 %": lambda: sparta.Unstructured().project(score, 0.9),
        "project block 32x32 80 %": lambda: sparta.Block(32, 32).project(score, 0.8),
        "project 2:4": lambda: sparta.NM(2, 4).project(score),
        "project 2:4 gradual 30 %": lambda: sparta.NM(2, 4).project(score, 0.3),
        "project 4:32": lambda: sparta.NM(4, 32).project(score),
        "project 64:2:8": lambda: sparta.VNM(64, 2, 8).project(score),
        "project channel 50 %": lambda: sparta.Channel(0).project(score, 0.5),
        "detect unstructured": lambda: sparta.detect(random_mask),
        "detect 2:4": lambda: sparta.detect(two_four_mask),
        "TeSA.from_zeros": lambda: sparta.TeSA.from_zeros(pruned),
        "join": lambda: two_four | random,
        "pack BCSR 32x32 80 %": lambda: BCSR.pack(weight, blocks, block=(32, 32)),
        "pack BCSRC 32x32 80 %": lambda: BCSRC.pack(weight, blocks, block=(32, 32)),
        "pack bitmap 90 %": lambda: Bitmap.pack(weight, random),
        "pack N:M 2:4": lambda: NMPacked.pack(weight, two_four, n=2, m=4),
        "pack 2:4": lambda: Packed24.pack(weight, two_four),
        "cover 1024x1024 90 %": lambda: block_cover(small, COVER_COSTS),
    }


def main() -> None:
    """Time every job and save the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--columns", type=int, default=11008)
    parser.add_argument("--out", type=Path, help="folder for the JSON instead of benchmarks/results")
    options = parser.parse_args()
    results = {}
    for name, job in jobs(options.device, options.rows, options.columns).items():
        timing = profile(job, warmup=1, iters=5)
        results[name] = {"median_ms": timing.median, "spread_ms": timing.spread}
        print(f"{name:32} {timing.median:9.1f} ms", flush=True)
    shape = f"{options.rows}x{options.columns} fp32"
    device = torch.cuda.get_device_name() if options.device.startswith("cuda") else f"{platform.machine()} cpu"
    path = save("tesa_costs", device, {"shape": shape, "timings": results}, folder=options.out)
    print(table(["job", "median ms"], [[n, f"{r['median_ms']:.1f}"] for n, r in results.items()], title=shape))
    print(f"saved {path}")


if __name__ == "__main__":
    main()

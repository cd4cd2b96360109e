"""A thousand pairs of a model and a size: no exception, no wrong output, and never slower than eager after tuning.

Run with ``python benchmarks/compiler/sizes.py``; ``--pairs 20`` takes fewer, ``--workers 8`` runs as many models at a
time, each on two cores of its own, ``--continue`` leaves out models that have a row. Each model is compiled once, for
one size; each size is then drawn, tuned for a second, compared with the model, and timed beside it, interleaved.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
import sparta
from processes import Failed, Pool
from record import RESULTS, save
from sparta.measure.timing import compare_own_time

Draw = Callable[[random.Random], tuple[Tensor, ...]]


class Block(nn.Module):
    """A transformer's encoder over tokens, with a padding mask."""

    def __init__(self, width: int = 192, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.tokens, self.places, self.heads = nn.Embedding(500, width), nn.Embedding(256, width), heads
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "qkv": nn.Linear(width, 3 * width),
                    "out": nn.Linear(width, width),
                    "up": nn.Linear(width, 4 * width),
                    "down": nn.Linear(4 * width, width),
                    "one": nn.LayerNorm(width),
                    "two": nn.LayerNorm(width),
                }
            )
            for _ in range(layers)
        )

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return (B, T, E) for ids and mask (B, T)."""
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        for layer in self.layers:
            b, t, w = x.shape
            qkv = layer["qkv"](layer["one"](x)).reshape(b, t, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
            y = nn.functional.scaled_dot_product_attention(*qkv.unbind(0), attn_mask=mask[:, None, None, :])
            x = x + layer["out"](y.transpose(1, 2).reshape(b, t, w))
            x = x + layer["down"](nn.functional.gelu(layer["up"](layer["two"](x))))
        return x


def convolutional(width: int = 32) -> nn.Module:
    """Return a small network for images."""
    return nn.Sequential(
        nn.Conv2d(3, width, 3, 2, 1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, 2, 1, bias=False),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.Conv2d(2 * width, 2 * width, 3, 1, 1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * width, 10),
    )


def _rows(draw: random.Random) -> tuple[Tensor, ...]:
    return (torch.randn(draw.choice([1, draw.randint(1, 16), draw.randint(1, 512)]), 256),)


def _text(draw: random.Random) -> tuple[Tensor, ...]:
    batch, length = draw.choice([1, 2, draw.randint(1, 16)]), draw.randint(1, 128)
    mask = torch.arange(length) < torch.randint(1, length + 1, (batch, 1))
    return torch.randint(0, 500, (batch, length)), mask


def _images(draw: random.Random) -> tuple[Tensor, ...]:
    return (torch.randn(draw.choice([1, draw.randint(1, 8)]), 3, draw.randint(8, 96), draw.randint(8, 96)),)


def layers() -> nn.Module:
    """Return three linear layers."""
    return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 64))


MODELS: dict[str, tuple[Callable[[], nn.Module], Draw]] = {
    "mlp": (layers, _rows),
    "encoder": (Block, _text),
    "convolutions": (convolutional, _images),
}
SPARSITIES = (0.5, 0.8, 0.9, 0.95)
_SLOWER, _WRONG = 0.97, 1e-3


def pairs(name: str, sparsity: float, count: int, seconds: float) -> dict[str, Any]:
    """Return what was found at some sizes of one model."""
    torch.manual_seed(0)
    draw = random.Random(f"{name} {sparsity}")  # noqa: S311 - sizes that are the same in every run
    make, inputs = MODELS[name]
    model = make().eval()
    sparta.Spec.from_pattern(model, sparta.Block(4, 1), sparsity).apply(model)
    fast = sparta.compile(model, inputs(draw), budget_s=15)
    rows = [_pair(model, fast, inputs(draw), seconds) for _ in range(count)]
    ratios = sorted(row["speedup"] for row in rows if "speedup" in row)
    return {
        "model": name,
        "sparsity": sparsity,
        "sizes": count,
        "failed": sum("failed" in row for row in rows),
        "wrong": sum(row.get("difference", 0.0) > _WRONG for row in rows),
        "difference": max((row["difference"] for row in rows if "difference" in row), default=None),
        "least": ratios[0] if ratios else None,
        "median": ratios[len(ratios) // 2] if ratios else None,
        "slower": sum(ratio < _SLOWER for ratio in ratios),
        "worst": sorted((row for row in rows if "speedup" in row), key=lambda row: row["speedup"])[:3]
        + [row for row in rows if "failed" in row][:3],
    }


def _pair(model: nn.Module, fast: Any, given: tuple[Tensor, ...], seconds: float) -> dict[str, Any]:
    """Return what was found at one size."""
    row: dict[str, Any] = {"size": [list(t.shape) for t in given]}
    try:
        with torch.no_grad():
            expected = model(*given)
            before = float((fast(*given) - expected).abs().max())
            fast.tune(*given, budget_s=seconds)
            row["difference"] = max(before, float((fast(*given) - expected).abs().max()))
            calls = {"eager": lambda: model(*given), "sparta": lambda: fast(*given)}
            times = compare_own_time(calls, max_seconds=0.5 * seconds)
        row["speedup"] = times["eager"].median / times["sparta"].median
    except Exception as failed:  # noqa: BLE001 - which is what is looked for
        row["failed"] = f"{type(failed).__name__}: {str(failed).splitlines()[0][:200]}"
    return row


def main() -> None:
    """Measure and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=1.0, help="to tune a size")
    parser.add_argument("--workers", type=int, default=1, help="models at a time, on two cores each")
    parser.add_argument("--limit", type=float, default=1200.0, help="seconds for all sizes of a model")
    parser.add_argument("--continue", dest="go_on", action="store_true", help="leave out models that have a row")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
    options = parser.parse_args()
    kinds = [(name, sparsity) for name in MODELS for sparsity in SPARSITIES]
    count = max(1, -(-options.pairs // len(kinds)))
    old = options.out / f"compiler_sizes.{platform.machine().replace('_', '-')}-cpu.json"
    cases: dict[tuple[str, float], dict[str, Any]] = {}
    if options.go_on and old.exists():
        stored = json.loads(old.read_text())["results"]["cases"]
        cases = {(case["model"], case["sparsity"]): case for case in stored if case["sizes"] >= count}
    pool, start = Pool(options.workers, options.limit, cores=2), time.perf_counter()
    for kind in kinds:
        if kind not in cases:
            pool.add(kind, "spawn", pairs, *kind, count, options.seconds)
    for kind, found in pool.answers():
        if isinstance(found, Failed):
            print(kind, found.how, found.log[-2000:])
            continue
        cases[kind] = found
        print(json.dumps(found), flush=True)
        _save([cases[kind] for kind in kinds if kind in cases], options.out)
    print(f"{time.perf_counter() - start:.0f} s")


def _save(cases: list[dict[str, Any]], folder: Path) -> None:
    totals = {key: sum(case[key] for case in cases) for key in ("failed", "wrong", "slower")}
    found = {"cases": cases, "pairs": sum(case["sizes"] for case in cases), **totals}
    save("compiler_sizes", f"{platform.machine()} cpu", found, folder=folder)


if __name__ == "__main__":
    main()

"""Layers and an encoder in bf16 on the CPU: ours by pairs and by blocks, ours in fp32, PyTorch in bf16 and fp32.

Run with ``python benchmarks/cpu/bf16.py`` (about 4 minutes on a quiet machine with AVX-512 BF16 or AMX; elsewhere the
kernels of bf16 have no instructions for it and only show that they are right); ``--quick`` takes one layer and two
layers of the encoder. The encoder has BERT-base's shape, 12 layers, one text of 128 tokens. Results are checked first,
and rivals are interleaved call by call.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[1]))
import sparta
from common import Call, median_ms
from record import save
from sparta.compiler.run.chain.chained import Chained
from sparta.specialize.cpu.bf16 import Bf16Tile, PackedBf16
from sparta.specialize.cpu.candidates import candidates
from sparta.specialize.cpu.library import load
from sparta.specialize.linear.cpu_packed import PackedLinear
from sparta.tables import table
from sparta.testing import block_mask, compare

LINEAR = ((768, 768), (768, 3072), (3072, 768))  # (K, N)
TOKENS, SPARSITIES, BLOCK = (128, 1024), (0.0, 0.8, 0.9), (4, 1)
PAIRS, BLOCKS = (64, 128), (64, 128, 256)
WIDTH, HEADS, HIDDEN, LENGTH = 768, 12, 3072, 128


def fastest(calls: dict[str, Call]) -> tuple[str, Call]:
    """Return the fastest of several calls, with its name."""
    name = next(iter(calls)) if len(calls) == 1 else compare(calls, warmup=1, iters=5, max_seconds=0.3).fastest
    return name, calls[name]


def layer_calls(tokens: int, inputs: int, outputs: int, sparsity: float) -> dict[str, Call]:
    """Return ours and PyTorch's calls of one layer, all checked."""
    mask = block_mask((outputs, inputs), BLOCK, sparsity, seed=0)
    weight = torch.where(mask, torch.randn(outputs, inputs) / inputs**0.5, 0).bfloat16().float()
    x = torch.randn(tokens, inputs).bfloat16().float()
    truth = x.double() @ weight.double().t()
    short, narrow = x.bfloat16(), weight.bfloat16()
    found: dict[str, Call] = {
        "torch bf16": lambda: functional.linear(short, narrow),
        "torch fp32": lambda: functional.linear(x, weight),
    }

    def ours(tile: Bf16Tile) -> Call:
        packed = PackedBf16(mask, tile)
        values = packed.pack(weight)
        return lambda: packed(x, values)

    real = {}
    for fields in candidates(tokens, outputs, inputs, 1 - sparsity, BLOCK)[:6]:
        packed = PackedLinear(weight, mask, **fields)
        real[str(fields)] = lambda packed=packed: packed(x)
    found["fp32"] = fastest(real)[1]
    found["pairs"] = fastest({str(n): ours(Bf16Tile("pairs", 4, n)) for n in PAIRS if n <= tokens})[1]
    found["blocks"] = fastest({str(n): ours(Bf16Tile("blocks", 16, n)) for n in BLOCKS if n <= tokens})[1]
    for name, call in found.items():
        error = float((call().double() - truth).norm() / truth.norm())
        if error > (5e-3 if name == "torch bf16" else 1e-5):
            raise SystemExit(f"{name} is off by {error:.2g}")
    return found


class Layer(nn.Module):
    """A layer of an encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, T, C) for (B, T, C)."""
        b, t, c = x.shape
        q, k, v = (f(x).reshape(b, t, HEADS, -1).transpose(1, 2) for f in (self.query, self.key, self.value))
        y = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, c)
        x = self.first(x + self.out(y))
        return self.second(x + self.down(functional.gelu(self.up(x))))


def model_calls(depth: int, seconds: float) -> Iterator[tuple[str, Call]]:
    """Yield calls of the encoder, dense and with 80 % of its weights pruned in blocks of 4x1."""
    x = torch.randn(1, LENGTH, WIDTH)
    model = nn.Sequential(*(Layer() for _ in range(depth))).eval()
    sparse = nn.Sequential(*(Layer() for _ in range(depth))).eval()
    for seed, layer in enumerate(each for each in sparse.modules() if isinstance(each, nn.Linear)):
        mask = block_mask(tuple(layer.weight.shape), BLOCK, 0.8, seed=seed)
        layer.weight.data.mul_(mask)
    short = x.bfloat16()
    chain = Chained(sparta.compile(model.bfloat16(), short, tune="off").graph)
    real = sparta.compile(sparse, x, budget_s=seconds)
    print(real.report, flush=True)
    fast = sparta.compile(sparse.bfloat16(), short, budget_s=seconds)
    print(fast.report, flush=True)
    yield "eager bf16", lambda: model(short)
    yield "dense bf16", lambda: chain(short)
    yield "80 % fp32", lambda: real(x)
    yield "80 % bf16", lambda: fast(short)


def main() -> None:
    """Time layers and the encoder, and save the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one layer, and two layers of the encoder")
    parser.add_argument("--seconds", type=float, default=40.0, help="budget of a compilation")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="folder for the JSON instead of benchmarks/results")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    before, units, rows = os.getloadavg()[0], sorted(load().bf16_units), []
    print(f"bf16 by instructions: {units}", flush=True)
    for tokens in TOKENS[:1] if options.quick else TOKENS:
        for inputs, outputs in LINEAR[:1] if options.quick else LINEAR:
            for sparsity in SPARSITIES[1:2] if options.quick else SPARSITIES:
                took = median_ms(layer_calls(tokens, inputs, outputs, sparsity), 1)
                rows.append({"tokens": tokens, "shape": [inputs, outputs], "sparsity": sparsity, "median_ms": took})
                print(rows[-1], flush=True)
    with torch.no_grad():
        model = median_ms(dict(model_calls(2 if options.quick else 12, options.seconds)), 1, 6.0)
    print(model, flush=True)
    found = {"layers": rows, "model": model, "units": units, "load": [before, os.getloadavg()[0]]}
    path = save("cpu_bf16", f"{platform.machine()} cpu", found, folder=options.out)
    heads = ["tokens", "shape", "sparsity", *rows[0]["median_ms"]]
    lines = [_line(row) for row in rows]
    print(table(heads, lines, title="milliseconds"))
    print(f"saved {path}")


def _line(row: dict[str, Any]) -> list[Any]:
    shape = "x".join(map(str, row["shape"]))
    return [row["tokens"], shape, row["sparsity"], *(f"{took:.3f}" for took in row["median_ms"].values())]


if __name__ == "__main__":
    main()

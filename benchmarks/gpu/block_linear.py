"""How fast is a block-sparse linear layer on CUDA? Times of ``triton-block`` over those of the fastest dense layer.

Run with ``python benchmarks/gpu/block_linear.py``. Each case is a CUDA graph of many calls over rotated weights, so
that neither the host nor the L2 cache flatters anyone, and graphs take turns. Dense is timed eager and compiled, on a
random and on the pruned weight, since a GPU multiplies zeros faster; the fastest of them is what ratios refer to.

What was measured on an H200, against the aims (d is the density):

- Blocks of 128 from 4096 tokens on, aims 0.80/d down to 80 %, 6.5x at 90 %, 9x at 95 %: 1.7-1.85x at 50 % (met),
  3.4-4.1x at 80 % (met on 8192 x 8192 only), 4.8-6.6x at 90 % (likewise), 6.8-8.7x at 95 % (missed). At 95 % of 4096
  x 4096 with 16384 tokens, reading x and writing y once are 268 MB, 62 us at the 4.3 TB/s of a copy, of 86 us that
  the kernel takes.
- Blocks of 64, aims 0.65/d, 5.5x, 8x: 1.2-1.3x, 2.4-2.95x, 3.9-5.2x, 5.7-8.0x at 50, 80, 90, 95 %; met nowhere but at
  50 % with 16384 tokens, where it is 1.31x. Every live block reads its columns of x again: at 90 % with 16384 tokens
  that is 0.86 GB from the L2 cache, 107 us at its 8 TB/s, of 143 us.
- Blocks of 32 and 16, aims 0.40/d and 0.28/d: 1.4-1.7x and 0.9-1.0x at 80 %, 2.6-3.2x and 1.0-1.1x at 90 %; missed by
  15 to 65 %. Here the same traffic is 1.7 GB, 215 us of 233 us, and 3.4 GB: the cache is the bound. Larger tiles of
  tokens do not help, for every byte of x meets as many outputs as a block is high. Nor does it help to store several
  block rows as one: at 80 % two rows of blocks of 32 keep 36 % of the columns between them, four 59 %, and what is read
  of x stays the same. Below dense, dense is chosen.
- Up to 128 tokens, aims 2.6x at 80 % and 4x at 90 % for blocks of any size: blocks of 64 and 128 reach 1.8-3.0x and
  2.3-4.9x; the layers of 11008 meet them up to 16 tokens, 4096 x 4096 does not: there dense takes 11-14 us and no
  kernel took less than 3 us, however little it reads. Blocks of 32 and 16 are below: 1.4-2.7x and 2.0-3.8x, 0.8-1.7x
  and 1.3-2.4x.

Tried and not kept: warp specialisation by Triton 3.6, which gave wrong results with deep pipelines.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[1]))

from ceilings import ceilings
from graphed import rotated

from record import save
from sparta.errors import SpartaError
from sparta.specialize.kernel_spec import KernelSpec
from sparta.specialize.linear.spec import linear_spec
from sparta.specialize.linear.triton_block.implement import TritonBlock
from sparta.tables import table
from sparta.tesa.attribute import TeSA
from sparta.testing import block_mask, check, compare, linear_reference

DTYPE = torch.bfloat16
TOKENS = (1, 16, 64, 128, 1024, 4096, 16384)
# (N, K), tokens, blocks, sparsities: one layer in full, others where they may differ.
PLAN = [
    ((4096, 4096), TOKENS, (16, 32, 64, 128), (0.5, 0.8, 0.9, 0.95)),
    ((11008, 4096), (1, 16, 128, 4096), (32, 64, 128), (0.5, 0.8, 0.9)),
    ((4096, 11008), (1, 16, 64, 1024), (64, 128), (0.5, 0.8, 0.9)),
    ((8192, 8192), (16, 128, 4096), (64, 128), (0.8, 0.9)),
]
_BSR = {(4096, 64), (4096, 128), (1024, 64)}  # (tokens, block) at which torch's BSR is timed too


@dataclass(frozen=True)
class Case:
    """One layer, mask and batch."""

    shape: tuple[int, int]
    tokens: int
    block: int
    sparsity: float


def cases(plan: Iterable[Any]) -> list[Case]:
    """Return all cases, those that share a mask side by side."""
    return [
        Case(shape, tokens, block, sparsity)
        for shape, batches, blocks, sparsities in plan
        for block, sparsity, tokens in itertools.product(blocks, sparsities, batches)
    ]


def mask_of(case: Case) -> Tensor:
    """Return the mask of a case, uniformly random."""
    return block_mask(case.shape, (case.block, case.block), case.sparsity, seed=0)


def compile_one(tile: str) -> None:
    """Compile one tile into Triton's cache on disk; runs in a process of its own."""
    mask = block_mask((256, 256), (128, 128), 0.5, seed=0)
    kernel = TritonBlock().build(linear_spec(TeSA.from_mask(mask), 64, DTYPE, device="cuda"), {"tile": tile})
    weight = torch.randn(256, 256, device="cuda", dtype=DTYPE)
    kernel.run(kernel.pack(weight), torch.randn(64, 256, device="cuda", dtype=DTYPE), None, None)


@dataclass(frozen=True)
class Quickest:
    """The fastest tile, its graph and its result; and how much slower the first guess was."""

    milliseconds: float
    tile: str
    replay: Callable[[], None]
    y: Tensor
    first_guess: float = 1.0
    tried: dict[str, float] = field(default_factory=dict)


def quickest(spec: KernelSpec, x: Tensor, weight: Tensor, count: int) -> Quickest:
    """Try all candidates."""
    implement, found = TritonBlock(), []
    for tile in implement.space(spec)["tile"].domain.values:
        kernel = implement.build(spec, {"tile": tile})
        packed = kernel.pack(weight)
        try:
            y = kernel.run(packed, x, None, None)
        except SpartaError as error:
            print(f"  {tile}: {error}")
            continue
        replay = rotated(lambda *p, kernel=kernel: kernel.run(p, x, None, None), packed, count)
        took = compare({"tile": replay}, warmup=1, iters=5, max_seconds=0.02, device="cuda")["tile"].median
        found.append(Quickest(took, tile, replay, y))
    best = min(found, key=lambda each: each.milliseconds)
    tried = {each.tile: each.milliseconds * 1e3 / count for each in found}
    return replace(best, first_guess=found[0].milliseconds / best.milliseconds, tried=tried)


def measure(case: Case, tesa: TeSA, weight: Tensor, compiled: Callable[..., Tensor]) -> dict[str, Any]:
    """Time one case; microseconds a call."""
    n, k = case.shape
    x = torch.randn(case.tokens, k, device="cuda", dtype=DTYPE)
    pruned = tesa.apply(weight)
    count = 40 if case.tokens <= 128 else 10 if case.tokens <= 1024 else 4
    spec = linear_spec(tesa, case.tokens, DTYPE, device="cuda")
    contenders = {
        "dense": rotated(lambda w: functional.linear(x, w), (weight,), count),
        "dense pruned": rotated(lambda w: functional.linear(x, w), (pruned,), count),
        "dense compiled": rotated(lambda w: compiled(x, w), (pruned,), count),
    }
    found = quickest(spec, x, pruned, count) if TritonBlock().supports(spec) else None
    if found is not None:
        contenders["triton-block"] = found.replay
        check(found.y[:256], linear_reference(x[:256], pruned), reduction=k)
    times = compare(contenders, warmup=2, iters=20, max_seconds=0.15, device="cuda")
    record: dict[str, Any] = vars(case).copy()
    record["us"] = {name: times[name].median * 1e3 / count for name in contenders}
    if (case.tokens, case.block) in _BSR:
        record["us"]["torch BSR (eager)"] = bsr(x, pruned, case.block)
    dense = min(value for name, value in record["us"].items() if name.startswith("dense"))
    if found is not None:
        ours = record["us"]["triton-block"]
        record["tile"], record["first_guess"], record["ratio"] = found.tile, found.first_guess, dense / ours
        record["tried"] = found.tried
        record["of_limit"] = record["ratio"] * tesa.density
        record["tflops"] = 2e-6 * case.tokens * n * k * tesa.density / ours
    return record


def bsr(x: Tensor, pruned: Tensor, block: int) -> float | None:
    """Return the time of torch's BSR linear in microseconds, eager; None where it does not run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            weight = pruned.to_sparse_bsr((block, block))
            times = compare({"bsr": lambda: functional.linear(x, weight)}, warmup=2, iters=10, device="cuda")
        # A rival that cannot run this case is printed with its reason and recorded as None.
        except (RuntimeError, ValueError, NotImplementedError) as error:
            print(f"  torch BSR: {str(error).splitlines()[0]}")
            return None
    return times["bsr"].median * 1e3


def show(records: Sequence[dict[str, Any]]) -> str:
    """Return the ratios as a table, one row a layer and batch."""
    columns = sorted({(r["block"], r["sparsity"]) for r in records})
    rows: dict[tuple[Any, int], dict[tuple[int, float], dict[str, Any]]] = {}
    for r in records:
        rows.setdefault((r["shape"], r["tokens"]), {})[r["block"], r["sparsity"]] = r
    body = []
    for (shape, tokens), found in sorted(rows.items()):
        dense = min(v for r in found.values() for name, v in r["us"].items() if name.startswith("dense"))
        ratios = [found.get(column, {}).get("ratio") for column in columns]
        cells = ["" if ratio is None else f"{ratio:.2f}" for ratio in ratios]
        body.append([f"{shape[0]}x{shape[1]}", tokens, f"{dense:.1f}", *cells])
    return table(["N x K", "M", "dense us", *(f"{block}@{sparsity:g}" for block, sparsity in columns)], body)


def main() -> None:
    """Measure all cases, print the ratios, save the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=None, help="folder of the results")
    parser.add_argument("--seconds", type=float, default=600.0, help="stop after this time with what there is")
    options = parser.parse_args()
    begin = time.monotonic()
    todo = cases(PLAN)
    tesas = {}
    for case in todo:
        key = (case.shape, case.block, case.sparsity)
        tesas.setdefault(key, TeSA.from_mask(mask_of(case)))
    specs = [linear_spec(tesas[c.shape, c.block, c.sparsity], c.tokens, DTYPE, device="cuda") for c in todo]
    able = [spec for spec in specs if TritonBlock().supports(spec)]
    tiles = sorted({tile for spec in able for tile in TritonBlock().space(spec)["tile"].domain.values})
    with ProcessPoolExecutor(12, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_one, tiles, chunksize=2))
    print(f"{len(todo)} cases, {len(tiles)} tiles compiled, {time.monotonic() - begin:.0f} s")
    torch._dynamo.config.recompile_limit = 64
    compiled = torch.compile(functional.linear, dynamic=False)
    records = []
    for case in todo:
        if time.monotonic() - begin > options.seconds:
            print(f"stopped after {len(records)} cases")
            break
        weight = torch.randn(case.shape, device="cuda", dtype=DTYPE)
        records.append(measure(case, tesas[case.shape, case.block, case.sparsity], weight, compiled))
        torch.cuda.empty_cache()
    print(show(records))
    guesses = sorted(r["first_guess"] for r in records if "first_guess" in r)
    print(f"first guess: median {guesses[len(guesses) // 2]:.2f}, worst {guesses[-1]:.2f} times the best tile")
    results = {"dtype": "bf16", "unit": "us a call", "ceilings": ceilings(), "linear": records}
    print(save("block_linear", torch.cuda.get_device_name(), results, options.out))


if __name__ == "__main__":
    main()

"""How fast are sparse layers in fp8 and int4 on CUDA? Against the dense product in fp8 that a user would take instead.

Run with ``python benchmarks/gpu/fp8.py`` (two minutes). Calls are graphed over rotated weights, so neither the host nor
the L2 cache flatters anyone. Dense is PyTorch's product in fp8 with fast sums, with one scale for all and with a scale
for each token and output, on an x that is in fp8 already: the faster of both. Sparse kernels take x in bf16, and those
that round it to fp8 do so inside the time; their product alone, on an x that is in fp8 as dense has it, is timed beside
that. The bound of a case is the larger of its bytes over the measured bandwidth of a
copy and its live operations over the measured rate of a large dense product in fp8; unstructured weights have the times
of their parts alone beside that, see ``floors.py``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from floors import floors
from graphed import rotated
from sparse_rates import sparse_limits

from record import RESULTS, save
from sparta.errors import SpartaError
from sparta.specialize.implement import implement_named
from sparta.specialize.kernel_spec import KernelSpec
from sparta.specialize.scaled_linear.inputs import InputRounding
from sparta.specialize.scaled_linear.spec import (
    FP8,
    FP8_IMPLEMENTS,
    OP,
    codes_of,
    fp8_rows,
    reference,
    rounded_rows,
    scaled_linear_spec,
    scaled_weight,
)
from sparta.tables import table
from sparta.tesa.attribute import TeSA
from sparta.testing import block_mask, check, compare

WIDE, SQUARE = (14336, 4096), (8192, 8192)
_AT_ONCE = 8
_CHECKED = 32  # rows that are compared with the reference


@dataclass(frozen=True)
class Case:
    """One pattern and format of a weight, for several numbers of tokens, and the aim in times dense."""

    pattern: str
    format: str
    shapes: tuple[tuple[int, int], ...]
    tokens: tuple[int, ...]
    implements: tuple[str, ...]
    aim: float
    group: int | None = None


_TWO_FOUR = ("cuda-24-resident", "cuda-24", "cuda-24-matrix-fp8")
_BLOCKS = ("cuda-block-few", "cuda-block-fp8", "triton-block-fp8", "triton-block")
CASES = (
    Case("2:4", FP8, (WIDE, SQUARE), (1, 16, 64, 256, 2048, 16384), _TWO_FOUR, 1.4),
    Case("2:4", "int4", (WIDE,), (1,), _TWO_FOUR, 1.3, 128),
    Case("unstructured 70 %", FP8, (WIDE, SQUARE), (1,), ("cuda-gather", "cuda-banks"), 1.8),
    Case("unstructured 90 %", FP8, (WIDE, SQUARE), (1,), ("cuda-gather", "cuda-banks"), 3.0),
    Case("blocks of 64, 90 %", FP8, (WIDE,), (1, 16, 64, 256, 2048, 16384), _BLOCKS, 3.0),
    Case("blocks of 128, 90 %", FP8, (WIDE,), (1, 16, 64, 256, 2048, 16384), _BLOCKS, 3.0),
)


def mask_of(pattern: str, shape: tuple[int, int]) -> Tensor:
    """Return a random mask."""
    n, k = shape
    if pattern == "2:4":
        draws = torch.rand(n, k // 4, 4)
        return torch.zeros_like(draws, dtype=torch.bool).scatter_(2, draws.topk(2, -1).indices, True).flatten(1)  # noqa: FBT003
    if pattern.startswith("unstructured"):
        return torch.rand(n, k) >= float(pattern.split()[1]) / 100
    side = int(pattern.split()[2].rstrip(","))
    return block_mask(shape, (side, side), 0.9)


def microseconds(function: Callable[..., object], item: Sequence[Tensor], tokens: int) -> float:
    """Return the time of a call in a graph over copies of what it reads."""
    count = 20 if tokens <= 256 else 4
    replay = rotated(function, item, count)
    took = compare({"it": replay}, warmup=2, iters=15, max_seconds=0.1, device="cuda")["it"].median
    return took * 1e3 / count


def dense(shape: tuple[int, int], tokens: int) -> dict[str, float]:
    """Time dense layers: fp8 with one scale and with many, bf16, and for one token int4."""
    n, k = shape
    weight, x = torch.randn(n, k, device="cuda"), torch.randn(tokens, k, device="cuda").bfloat16()
    codes, scales = codes_of(weight, scaled_weight(weight))
    x8, x_scales = fp8_rows(x)
    one = torch.ones((), device="cuda")
    rounded = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
    times = {
        "fp8, one scale": microseconds(lambda w: torch._scaled_mm(x8, w.t(), one, one, **rounded), (codes,), tokens),
        "fp8, scales of rows": microseconds(
            lambda w, s: torch._scaled_mm(x8, w.t(), x_scales, s.t(), **rounded), (codes, scales), tokens
        ),
        "bf16": microseconds(lambda w: torch.nn.functional.linear(x, w), (weight.bfloat16(),), tokens),
    }
    if tokens == 1:
        nibbles = torch.randint(0, 255, (n, k // 2), dtype=torch.uint8, device="cuda")
        packed = torch._convert_weight_to_int4pack(nibbles, 8)
        groups = torch.randn(k // 128, n, 2, device="cuda").bfloat16()
        times["int4"] = microseconds(lambda w, g: torch._weight_int4pack_mm(x, w, 128, g), (packed, groups), tokens)
    return times


def ceilings() -> dict[str, float]:
    """Measure bytes per microsecond of a copy (read and written) and operations per microsecond of a product in fp8."""
    big = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    to = torch.empty_like(big)
    copy = compare({"it": lambda: to.copy_(big)}, warmup=2, iters=10, max_seconds=0.2, device="cuda")["it"].median
    a = torch.randn(8192, 8192, device="cuda").to(torch.float8_e4m3fn)
    one = torch.ones((), device="cuda")
    multiply = lambda: torch._scaled_mm(a, a.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)  # noqa: E731
    product = compare({"it": multiply}, warmup=2, iters=10, max_seconds=0.2, device="cuda")["it"].median
    return {"bytes": 2 * big.numel() / (copy * 1e3), "operations": 2 * 8192**3 / (product * 1e3)}


def quickest(case: Case, spec: KernelSpec, weight: Tensor, x: Tensor) -> tuple[str, float, int, float] | None:
    """Return the fastest implement, its time, the bytes of its packed weight, and the time of the product alone.

    All that is timed is right.
    """
    expected = reference(spec, weight, x[:_CHECKED])
    built = []
    for name in case.implements:
        implement = implement_named(name, OP)
        if implement.answer(spec):
            tiles = implement.space(spec)["tile"].domain.values[:6]
            built += [(name, implement.build(spec, {"tile": tile})) for tile in tiles]

    def first_run(kernel: Any) -> tuple[Tensor, ...] | None:
        try:
            packed = kernel.pack(weight)
            check(kernel.run(packed, x, None, None)[:_CHECKED], expected, reduction=x.shape[1])
        except SpartaError as error:
            print(f"  {spec['weight']}: {error}")
            return None
        return tuple(packed)

    with ThreadPoolExecutor(_AT_ONCE) as pool:  # compiles
        packs = list(pool.map(first_run, [kernel for _, kernel in built]))
    found = []
    for (name, kernel), packed in zip(built, packs, strict=True):
        if packed is not None:
            took = microseconds(lambda *p, kernel=kernel: kernel.run(p, x, None, None), packed, x.shape[0])
            product = took
            if name in FP8_IMPLEMENTS:
                rounded = InputRounding(None)(x)
                product = microseconds(
                    lambda *p, kernel=kernel, rounded=rounded: kernel.run_rounded(p, rounded, None, None),
                    packed,
                    x.shape[0],
                )
            found.append((name, took, sum(each.numel() * each.element_size() for each in packed), product))
    return min(found, key=lambda each: each[1]) if found else None


def measured(
    case: Case, shape: tuple[int, int], numbers: Sequence[int], known: dict[Any, dict[str, float]], limits: Any
) -> Iterator[dict[str, Any]]:
    """Yield what was found for a weight and these numbers of tokens; `known` are times of dense layers."""
    n, k = shape
    weight, tesa = torch.randn(n, k, device="cuda"), TeSA.from_mask(mask_of(case.pattern, shape))
    scaled = scaled_weight(weight, tesa, case.format, group=case.group)
    for tokens in numbers:
        if (shape, tokens) not in known:
            known[shape, tokens] = dense(shape, tokens)
        times = known[shape, tokens]
        rival = times["int4"] if case.format == "int4" else min(v for t, v in times.items() if "fp8" in t)
        x = rounded_rows(torch.randn(tokens, k, device="cuda").bfloat16())
        best = quickest(case, scaled_linear_spec(scaled, tokens, activations=FP8), weight, x)
        torch.cuda.empty_cache()
        if best is None:
            continue
        name, took, size, product = best
        moved, work = size + 2 * tokens * (n + k), 2 * tokens * tesa.count("live")
        bound = max(moved / limits["bytes"], work / limits["operations"])
        record = {
            "pattern": case.pattern, "format": case.format, "shape": shape, "tokens": tokens, "best": name,
            "us": took, "dense_us": rival, "ratio": rival / took, "product": rival / product,
            "over_bf16": times["bf16"] / took, "aim": case.aim, "bound": rival / bound,
        }  # fmt: skip
        if case.pattern.startswith("unstructured"):
            record["floors"] = floors(shape, tesa.density, tokens, 1)
        print(case.pattern, case.format, shape, tokens, name, f"{took:.1f} us {rival / took:.2f}x", flush=True)
        yield record


def place(record: dict[str, Any]) -> tuple[int, ...]:
    """Return by what results are in order."""
    at = next(i for i, case in enumerate(CASES) if (case.pattern, case.format) == (record["pattern"], record["format"]))
    return at, CASES[at].shapes.index(tuple(record["shape"])), record["tokens"]


def main() -> None:
    """Measure all cases, print the ratios, save the results after each weight."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=None, help="folder of the results")
    parser.add_argument("--only", default="", help="patterns with this text; results of an earlier run are kept")
    parser.add_argument("--tokens", nargs="+", type=int, default=None, help="the same, by numbers of tokens")
    options = parser.parse_args()
    torch.manual_seed(0)

    def chosen(pattern: str, tokens: int) -> bool:
        return options.only in pattern and (options.tokens is None or tokens in options.tokens)

    records, earlier = [], RESULTS / "fp8.nvidia-h200.json"
    if earlier.exists():
        kept = json.loads(earlier.read_text(encoding="utf-8"))["results"]["linear"]
        records = [record for record in kept if not chosen(record["pattern"], record["tokens"])]
    limits = ceilings() | sparse_limits("fp8")
    known: dict[Any, dict[str, float]] = {}
    for case, shape in [(each, shape) for each in CASES for shape in each.shapes]:
        numbers = [tokens for tokens in case.tokens if chosen(case.pattern, tokens)]
        records += measured(case, shape, numbers, known, limits) if numbers else ()
        records.sort(key=place)
        save("fp8", torch.cuda.get_device_name(), {"ceilings": limits, "linear": records}, options.out)
    rows = [
        [r["pattern"], r["format"], f"{r['shape'][0]}x{r['shape'][1]}", r["tokens"], r["best"], f"{r['us']:.1f}",
         f"{r['ratio']:.2f}", f"{r['product']:.2f}", r["aim"], f"{r['bound']:.2f}"]
        for r in records
    ]  # fmt: skip
    print(table(["pattern", "format", "N x K", "M", "best", "us", "x dense", "product", "aim", "bound"], rows))


if __name__ == "__main__":
    main()

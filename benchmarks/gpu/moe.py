"""How fast is a layer of experts on CUDA? Times of ``triton-ragged`` beside ``torch._grouped_mm`` and dense.

Run with ``python benchmarks/gpu/moe.py``. Each contender is a CUDA graph of a few calls and graphs take turns. Two
things are timed: the product alone, on rows that are sorted already for `torch._grouped_mm` and that are not for ours,
and the whole layer, from tokens and the experts they ask to the sum of the answers. "dense" is one matrix product of
the same size for all rows: what no mixture of experts reaches.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[1]))

from attention import graphed

from record import save
from sparta.errors import SpartaError
from sparta.specialize.implement import Kernel
from sparta.specialize.moe.op import ragged_product_of, routes
from sparta.specialize.moe.spec import moe_spec
from sparta.specialize.moe.triton_ragged import TritonRagged
from sparta.tables import table
from sparta.testing import check, compare, moe_reference

DTYPE = torch.bfloat16
_PEAK = 790e12  # what dense bf16 products reach on an H200
_BANDWIDTH = 4.3e12
_NOTES = """
With 384 rows an expert on average, tiles of 128 rows compute 16 % more rows than there are; computing the last rows of
an expert in a tile of half the height cuts that to 8 %. On rows that are sorted already, tiles of 128x128 reached 524
TFLOP/s at 64 experts, 2048x1408: by arithmetic 9 TB/s from the L2 cache, about what was measured of it. Tiles of
128x256 read less (516 TFLOP/s), but one fills a multiprocessor, so that nothing hides its start and end. Tiles of 64
rows, deeper pipelines of narrower steps, and programs that stay were all slower or equal.
"""


@dataclass(frozen=True)
class Case:
    """One layer and batch."""

    tokens: int
    visits: int
    experts: int
    inputs: int
    outputs: int


CASES = [
    Case(4096, 6, 64, 2048, 1408),
    Case(4096, 6, 64, 1408, 2048),
    Case(4096, 2, 8, 4096, 14336),
    Case(512, 6, 64, 2048, 1408),
    Case(16, 6, 64, 2048, 1408),
]


class Layer:
    """The tensors of a case, and each way to compute it."""

    def __init__(self, case: Case) -> None:
        generator = torch.Generator("cuda").manual_seed(0)
        self.tokens = torch.randn(case.tokens, case.inputs, device="cuda", dtype=DTYPE)
        scores = torch.rand(case.tokens, case.experts, device="cuda", generator=generator)
        gates, self.ids = scores.topk(case.visits, dim=1)
        self.gates = gates / gates.sum(1, keepdim=True)
        self.weights = [torch.randn(case.outputs, case.inputs, device="cuda", dtype=DTYPE) for _ in range(case.experts)]
        self.stacked = torch.stack(self.weights).mT
        self.sorted = self.sort()
        self.dense_weight = torch.randn(case.outputs, case.inputs, device="cuda", dtype=DTYPE)

    def sort(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the order of rows, the rows in it, and where each expert's end."""
        ids, order = self.ids.flatten().to(torch.int16).sort(stable=True)
        numbers = torch.arange(len(self.weights), device="cuda", dtype=torch.int16)
        ends = torch.searchsorted(ids, numbers, right=True, out_int32=True)
        return order, self.tokens[order // self.ids.shape[1]], ends

    def grouped(self) -> Tensor:
        """Return the products by PyTorch, of rows that are sorted already."""
        _, rows, ends = self.sorted
        return torch._grouped_mm(rows, self.stacked, offs=ends)

    def grouped_whole(self) -> Tensor:
        """Return the whole layer around PyTorch's product."""
        order, rows, ends = self.sort()
        answers = torch._grouped_mm(rows, self.stacked, offs=ends)
        by_token = torch.empty_like(answers).index_copy_(0, order, answers)
        return torch.einsum("tkn,tk->tn", by_token.view(*self.ids.shape, -1), self.gates.to(DTYPE))

    def dense(self) -> Tensor:
        """Return one product for all rows."""
        return functional.linear(self.sorted[1], self.dense_weight)


def best_tile(layer: Layer, parameters: Sequence[Tensor | None]) -> tuple[str, Callable[[], Tensor], float]:
    """Try all candidates on the whole layer; return the fastest, its call, and how much slower the first guess was."""
    spec, found = moe_spec(layer.tokens, layer.ids, layer.weights), []
    spec = type(spec)(spec.op, spec.operands, attributes=spec.attributes, device="cuda")
    for tile in TritonRagged().space(spec)["tile"].domain.values:
        kernel = TritonRagged().build(spec, {"tile": tile})

        def call(kernel: Kernel = kernel) -> Tensor:
            with torch.no_grad():
                return kernel.run((), layer.tokens, layer.ids, layer.gates, *parameters)

        try:
            took = compare({"it": graphed(call, 4)}, warmup=1, iters=7, max_seconds=0.05, device="cuda")["it"].median
        except SpartaError as error:
            print(f"  {tile}: {error}")
            continue
        found.append((took, tile, call))
        print(f"  {tile}: {took * 250:.1f} us", flush=True)
    took, tile, fastest = min(found, key=lambda each: each[0])
    return tile, fastest, found[0][0] / took


def measure(case: Case) -> dict[str, Any]:
    """Time one case; microseconds a call."""
    layer = Layer(case)
    parameters = [tensor for weight in layer.weights for tensor in (weight, None)]
    tile, ours, first_guess = best_tile(layer, parameters)
    few = slice(0, 64)
    expected = moe_reference(layer.tokens[few], layer.ids[few], layer.weights, None, layer.gates[few])
    check(ours()[few], expected, reduction=4 * case.inputs)
    check(layer.grouped_whole()[few], expected, reduction=16 * case.inputs)
    rows = case.tokens * case.visits
    out, found = torch.empty(rows, case.outputs, device="cuda", dtype=DTYPE), routes(layer.ids, case.experts)
    calls: dict[str, Callable[[], object]] = {
        "dense product": layer.dense,
        "grouped_mm product": layer.grouped,
        "triton-ragged product": lambda: ragged_product_of(found, layer.tokens, layer.weights, case.visits, out, tile),
        "grouped_mm layer": layer.grouped_whole,
        "triton-ragged layer": ours,
    }
    count = 4 if rows > 4096 else 20
    graphs = {name: graphed(call, count) for name, call in calls.items()}
    times = compare(graphs, warmup=2, iters=15, max_seconds=0.3, device="cuda")
    us = {name: times[name].median * 1e3 / count for name in graphs}
    flops = 2.0 * rows * case.inputs * case.outputs
    moved = 2.0 * (case.experts * case.inputs * case.outputs + rows * (case.inputs + case.outputs))
    limit = max(flops / _PEAK, moved / _BANDWIDTH) * 1e6
    record = {**vars(case), "us": us, "tile": tile, "first_guess": first_guess, "limit_us": limit}
    record["tflops"] = {name: flops / value * 1e-6 for name, value in us.items()}
    record["of_limit"] = limit / us["triton-ragged product"]
    return record


def show(records: Sequence[dict[str, Any]]) -> str:
    """Return times and rates as a table."""
    body = []
    for r in records:
        cells = [f"{time:.0f} ({r['tflops'][name]:.0f})" for name, time in r["us"].items()]
        shape = f"{r['experts']}x{r['inputs']}x{r['outputs']}"
        body.append([f"{r['tokens']}x{r['visits']}", shape, *cells, f"{r['of_limit']:.0%}", r["tile"]])
    return table(
        ["tokens", "experts", *(f"{name} us (TFLOP/s)" for name in records[0]["us"]), "of limit", "tile"], body
    )


def main() -> None:
    """Measure all cases, print them, save the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=None, help="folder of the results")
    parser.add_argument("--seconds", type=float, default=200.0, help="stop after this time with what there is")
    options = parser.parse_args()
    begin, records = time.monotonic(), []
    for case in CASES:
        if time.monotonic() - begin > options.seconds:
            print(f"stopped after {len(records)} cases")
            break
        records.append(measure(case))
        print(show(records[-1:]), flush=True)
        torch.cuda.empty_cache()
    print(show(records))
    print(
        save(
            "moe",
            torch.cuda.get_device_name(),
            {"dtype": "bf16", "unit": "us a call", "notes": _NOTES, "moe": records},
            options.out,
        )
    )


if __name__ == "__main__":
    main()

"""How fast are batched products and softmax over kept tiles on CUDA? Times of ``triton-block`` beside dense PyTorch.

Run with ``python benchmarks/gpu/batch_matmul.py``, in about a minute. Each contender is a CUDA graph of a few calls
over rotated operands, and graphs take turns. Dense is ``torch.bmm``, ``torch.baddbmm`` where there is a bias, and
``torch.softmax``; the limit of a mask is one over its density. Attention is in three steps over compressed scores,
beside the same three steps in dense PyTorch.
"""

# ruff: noqa: N806 -- A and B are the operands' names

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from ceilings import ceilings
from graphed import rotated

from record import save
from sparta.errors import SpartaError
from sparta.specialize.blocks.tiled_matrix import block_places, to_values
from sparta.specialize.implement import Implement, Kernel
from sparta.specialize.kernel_spec import KernelSpec
from sparta.specialize.matmul.spec import Product
from sparta.specialize.matmul.triton_block import TritonBlockMatmul
from sparta.specialize.softmax.spec import softmax_spec
from sparta.specialize.softmax.triton_block import TritonBlockSoftmax
from sparta.tables import table
from sparta.testing import block_mask, check, compare, matmul_reference, softmax_reference

DTYPE = torch.bfloat16
_TRIED = 6  # candidates of each case
_CALLS = 4  # in a graph
_NAMES = {"sdd": "A", "dsd": "B", "dds": "C"}

Call = Callable[..., object]


@dataclass(frozen=True)
class Case:
    """One operation, size and mask."""

    what: str
    batches: int
    size: int
    depth: int
    block: int
    density: float
    compressed: bool = True
    biased: bool = False
    backward: bool = False


PLAN = [
    Case("sdd", 8, 2048, 2048, 128, 0.5),
    Case("sdd", 8, 2048, 2048, 128, 0.1),
    Case("dds", 8, 2048, 2048, 128, 0.1),
    Case("dsd", 8, 2048, 2048, 128, 0.1, compressed=False, biased=True),
    Case("sdd", 8, 2048, 2048, 64, 0.1),
    Case("sdd", 8, 2048, 2048, 32, 0.1),
    Case("sdd", 8, 2048, 2048, 128, 0.1, backward=True),
    Case("softmax", 16, 4096, 4096, 64, 0.1),
    Case("attention", 16, 4096, 128, 64, 0.1),
    Case("attention", 16, 4096, 128, 64, 0.1, backward=True),
]


def with_gradients(function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> Call:
    """Return a call that also computes the gradients of all inputs."""
    with torch.no_grad():
        gradient = torch.randn_like(function(*inputs))

    def call(*xs: Tensor) -> object:
        leaves = [x.detach().requires_grad_() for x in xs]
        return torch.autograd.grad(function(*leaves), leaves, gradient)

    return call


def time_all(calls: Mapping[str, tuple[Call, Sequence[Tensor]]]) -> dict[str, float]:
    """Return microseconds a call of each contender, as graphs that take turns."""
    graphs = {name: rotated(call, inputs, _CALLS) for name, (call, inputs) in calls.items()}
    times = compare(graphs, warmup=2, iters=15, max_seconds=0.3, device="cuda")
    return {name: times[name].median * 1e3 / _CALLS for name in graphs}


def candidates(
    implement: Implement, spec: KernelSpec, mask: Tensor, inputs: Sequence[Tensor]
) -> dict[str, Callable[..., Tensor]]:
    """Return the first few candidates by the text of their tile, compiled side by side."""

    def made(tile: str) -> tuple[str, Callable[..., Tensor] | None]:
        kernel: Kernel = implement.build(spec, {"tile": tile})
        packed = kernel.pack(mask)
        try:
            kernel.run(packed, *inputs)
        except SpartaError as error:
            print(f"  {tile}: {error}")
            return tile, None
        return tile, lambda *xs: kernel.run(packed, *xs)

    tiles = list(implement.space(spec)["tile"].domain.values)[:_TRIED]
    with ThreadPoolExecutor(_TRIED) as pool:
        found = dict(pool.map(made, tiles))
    return {tile: call for tile, call in found.items() if call is not None}


def fastest(
    implement: Implement, spec: KernelSpec, mask: Tensor, inputs: Sequence[Tensor]
) -> tuple[str, Callable[..., Tensor]]:
    """Return the fastest of the first few candidates, and its tile."""
    with torch.no_grad():
        calls = candidates(implement, spec, mask, inputs)
        times = time_all({tile: (call, inputs) for tile, call in calls.items()})
    tile = min(times, key=lambda name: times[name])
    return tile, calls[tile]


def product(case: Case) -> tuple[str, dict[str, tuple[Call, Sequence[Tensor]]], float]:
    """Return the tile, the contenders and the multiply-adds of a product."""
    B, M, K = case.batches, case.size, case.depth
    shape = (M, M) if case.what == "dds" else (M, K) if case.what == "sdd" else (K, M)
    mask = block_mask(shape, (case.block, case.block), 1.0 - case.density, seed=0, device="cuda")
    A, X = (torch.randn(B, *size, device="cuda", dtype=DTYPE) for size in ((M, K), (K, M)))
    bias = torch.randn(M, device="cuda", dtype=DTYPE) if case.biased else None
    chosen = Product(case.what, compressed=case.compressed, block=(case.block, case.block))
    which, places = _NAMES[case.what], block_places(mask.cpu(), (case.block, case.block)).cuda()
    given = {"A": A, "B": X}
    if which in given and case.compressed:
        given[which] = to_values(given[which], places, (case.block, case.block))
    inputs = (given["A"], given["B"], *([] if bias is None else [bias]))
    tile, ours = fastest(TritonBlockMatmul(), chosen.spec(mask, A, X, bias=case.biased), mask, inputs)
    expected = matmul_reference(A[0], X[0], **{f"{which}_mask": mask}, bias=bias)  # type: ignore[arg-type]
    if which == "C" and case.compressed:
        expected = to_values(expected, places, (case.block, case.block))
    with torch.no_grad():
        check(ours(*inputs)[0], expected, reduction=K)

    def dense(a: Tensor, b: Tensor, shift: Tensor | None = None) -> Tensor:
        return torch.bmm(a, b) if shift is None else torch.baddbmm(shift, a, b)

    calls: dict[str, tuple[Call, Sequence[Tensor]]] = {
        "dense": (dense, (A, X, *([] if bias is None else [bias]))),
        "triton-block": (ours, inputs),
    }
    return tile, calls, float(B) * M * M * K * float(mask.float().mean())


def softmax(case: Case) -> tuple[str, dict[str, tuple[Call, Sequence[Tensor]]], float]:
    """Return the tile, the contenders and the bytes of a softmax over compressed scores."""
    mask = block_mask((case.size, case.depth), (case.block, case.block), 1.0 - case.density, seed=0, device="cuda")
    block = (case.block, case.block)
    places = block_places(mask.cpu(), block).cuda()
    x = torch.randn(case.batches, case.size, case.depth, device="cuda", dtype=DTYPE)
    values, one = to_values(x, places, block), torch.ones((), dtype=torch.float64, device="cuda")
    spec = softmax_spec(mask, values, block=block, compressed=True)
    tile, ours = fastest(TritonBlockSoftmax(), spec, mask, (values, one))
    check(ours(values, one)[0], to_values(softmax_reference(x[0], mask), places, block), reduction=case.depth)
    calls: dict[str, tuple[Call, Sequence[Tensor]]] = {
        "dense": (lambda scores: scores.softmax(-1), (x,)),
        "triton-block": (ours, (values, one)),
    }
    return tile, calls, 2.0 * values.numel() * values.element_size()


def attention(case: Case) -> tuple[str, dict[str, tuple[Call, Sequence[Tensor]]], float]:
    """Return the tiles, the contenders and the multiply-adds of attention in three steps."""
    B, M, E = case.batches, case.size, case.depth
    block, cold = (case.block, case.block), torch.full((), math.sqrt(E), dtype=torch.float64, device="cuda")
    mask = block_mask((M, M), block, 1.0 - case.density, seed=0, device="cuda")
    q, k, v = (torch.randn(B, M, E, device="cuda", dtype=DTYPE) for _ in range(3))
    scores = Product("dds", transpose_B=True, compressed=True, block=block)
    first, score = fastest(TritonBlockMatmul(), scores.spec(mask, q, k), mask, (q, k))
    values = score(q, k)
    spec = softmax_spec(mask, values, block=block, compressed=True)
    second, normal = fastest(TritonBlockSoftmax(), spec, mask, (values, cold))
    last = Product("sdd", compressed=True, block=block).spec(mask, q.new_zeros(B, M, M), v)
    third, weigh = fastest(TritonBlockMatmul(), last, mask, (values, v))

    def ours(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return weigh(normal(score(a, b), cold), c)

    def dense(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return torch.bmm((torch.bmm(a, b.mT) / math.sqrt(E)).softmax(-1), c)

    calls: dict[str, tuple[Call, Sequence[Tensor]]] = {"dense": (dense, (q, k, v)), "triton-block": (ours, (q, k, v))}
    return f"{first} | {second} | {third}", calls, 2.0 * B * M * M * E * float(mask.float().mean())


def measure(case: Case) -> dict[str, Any]:
    """Time one case."""
    make = {"softmax": softmax, "attention": attention}.get(case.what, product)
    tile, calls, work = make(case)
    if case.backward:
        calls = {name: (with_gradients(call, inputs), inputs) for name, (call, inputs) in calls.items()}  # type: ignore[arg-type]
        work *= 3.0
    with torch.set_grad_enabled(case.backward):
        us = time_all(calls)
    ratio = us["dense"] / us["triton-block"]
    rate = work / us["triton-block"] * (1e-6 if case.what == "softmax" else 2e-6)
    return {**asdict(case), "tile": tile, "us": us, "ratio": ratio, "of_limit": ratio * case.density, "rate": rate}


def show(records: Sequence[dict[str, Any]]) -> str:
    """Return the times as a table; rates are in TFLOP/s, those of softmax in TB/s."""
    body = []
    for r in records:
        traits = [name for name in ("compressed", "biased", "backward") if r[name]]
        what, shape = " ".join([r["what"], *traits]), f"{r['batches']}x{r['size']}x{r['depth']}"
        times = [f"{r['us'][name]:.0f}" for name in ("dense", "triton-block")]
        reached = [f"{r['ratio']:.2f}", f"{r['of_limit']:.0%}", f"{r['rate']:.3g}"]
        body.append([what, shape, str(r["block"]), f"{r['density']:g}", *times, *reached, r["tile"]])
    header = ["what", "B x M x K", "block", "density", "dense us", "triton us", "x dense", "of limit", "rate", "tile"]
    return table(header, body)


def main() -> None:
    """Measure all cases, print the ratios, save the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=None, help="folder of the results")
    parser.add_argument("--seconds", type=float, default=55.0, help="stop after this time with what there is")
    options = parser.parse_args()
    begin = time.monotonic()
    records: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    for case in PLAN:
        if time.monotonic() - begin > options.seconds:
            print(f"stopped after {len(records)} cases")
            break
        try:
            records.append(measure(case))
        except (SpartaError, RuntimeError) as error:  # one case that fails does not take the others with it
            failed[str(case)] = str(error)
            print(f"{case}: {error}", flush=True)
            continue
        print(show(records[-1:]), f"{time.monotonic() - begin:.0f} s", flush=True)
        torch.cuda.empty_cache()
    if records:
        print(show(records))
        results = {"dtype": "bf16", "unit": "us a call", "ceilings": ceilings(), "cases": records, "failed": failed}
        print(save("batch_matmul", torch.cuda.get_device_name(), results, options.out))


if __name__ == "__main__":
    main()

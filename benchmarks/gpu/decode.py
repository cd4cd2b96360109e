"""How fast is decoding on CUDA with unstructured weights or skipped inputs? Against the fastest dense layer.

Run with ``python benchmarks/gpu/decode.py``. Calls are graphed over rotated weights and graphs take turns; ratios
refer to the dense layer on the random or the pruned weight, whichever is faster. Every kernel for unstructured weights
is tried that takes the case, each with its first tiles; the fastest stands in the table, the others in the file. What a
weight of that density leaves room for is measured by kernels of which all but one part was left out, see ``floors.py``.

The kernel that skips small inputs wins with one token and loses with four, where few inputs are small for all and each
weight takes four multiplications on the ordinary cores; what makes it as slow as it is there is not known.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[1]))

from floors import floors
from graphed import rotated

from record import save
from sparta.errors import SpartaError
from sparta.specialize.implement import Cause, implement_named
from sparta.specialize.linear.spec import LinearKernel, linear_spec
from sparta.specialize.linear.threshold import threshold_linear
from sparta.tables import table
from sparta.tesa.attribute import TeSA
from sparta.testing import check, compare, linear_reference

DTYPE = torch.bfloat16
SHAPES = ((14336, 4096), (8192, 8192))
SPARSITIES = (0.5, 0.7, 0.9)
TOKENS = (1, 4, 8, 16)
TARGETS = {0.5: 1.35, 0.7: 2.0, 0.9: 3.5}  # times dense, for any of these tokens
IMPLEMENTS = {
    "cuda-bitmap": 2,
    "cuda-lanes": 3,
    "cuda-24-twice": 3,
    "cuda-banks": 3,
    "cuda-gather": 2,
}  # and how many of their tiles
_COUNT = 20  # calls of a graph
_RATE = 4.3e12  # bytes a second that a copy reaches on an H200
_AT_ONCE = 8  # compilations
_HALF = 2  # bytes of a value

Built = tuple[LinearKernel, tuple[Tensor, ...]]


class Kernels:
    """The kernels of one pruned weight, each built and packed once for all numbers of tokens that it takes."""

    def __init__(self, tesa: TeSA, weight: Tensor) -> None:
        self._tesa, self._weight = tesa, weight
        self._built: dict[tuple[str, str], Built] = {}

    def all_for(self, x: Tensor, expected: Tensor) -> dict[tuple[str, str], Built]:
        """Return kernels and packed weights by implement and tile; every one of them computes what is expected."""
        spec = linear_spec(self._tesa, x.shape[0], DTYPE, device="cuda")
        wanted = []
        for name, most in IMPLEMENTS.items():
            implement = implement_named(name, "linear")
            answer = implement.answer(spec)
            if answer or answer.cause == Cause.PATTERN:  # also where so much is live that it is not chosen
                wanted += [(name, str(tile)) for tile in implement.space(spec)["tile"].domain.values[:most]]

        def ready(key: tuple[str, str]) -> Built | None:
            try:
                built = self._built.get(key)
                if built is None:
                    kernel: Any = implement_named(key[0], "linear").build(spec, {"tile": key[1]})
                    built = (kernel, tuple(kernel.pack(self._weight)))
                check(built[0].run(built[1], x, None, None), expected, reduction=x.shape[1])
            except SpartaError as error:
                print(f"  {key}: {error}", flush=True)
                return None
            return built

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            found = dict(zip(wanted, pool.map(ready, wanted), strict=True))
        usable = {key: built for key, built in found.items() if built is not None}
        self._built |= usable
        return usable


def quickest(built: dict[tuple[str, str], Built], x: Tensor) -> dict[str, tuple[str, int, Callable[[], None]]]:
    """Return for each implement its fastest tile, the bytes that it reads, and its graph."""
    graphs = {
        key: rotated(lambda *p, kernel=kernel: kernel.run(p, x, None, None), packed, _COUNT)
        for key, (kernel, packed) in built.items()
    }
    found: dict[str, tuple[float, str, int, Callable[[], None]]] = {}
    for (name, tile), replay in graphs.items():
        took = compare({"it": replay}, warmup=1, iters=6, max_seconds=0.02, device="cuda")["it"].median
        if name not in found or took < found[name][0]:
            size = sum(t.numel() * t.element_size() for t in built[name, tile][1])
            found[name] = (took, tile, size, replay)
    return {name: rest for name, (_, *rest) in found.items()}  # type: ignore[misc]


def summary(shape: tuple[int, int], tokens: int, sparsity: float, us: dict[str, float], size: float) -> dict[str, Any]:
    """Return one record: the ratio to the fastest dense, the rate, and how near the memory limit that is."""
    ours = min(value for name, value in us.items() if not name.startswith("dense"))
    dense = min(value for name, value in us.items() if name.startswith("dense"))
    rate = size / ours * 1e6
    return {
        "shape": shape, "tokens": tokens, "sparsity": sparsity, "us": us, "ratio": dense / ours,
        "bytes": size, "gigabytes_a_second": rate / 1e9, "of_limit": rate / _RATE,
    }  # fmt: skip


def measure_weights(weight: Tensor, tesa: TeSA, sparsity: float) -> list[dict[str, Any]]:
    """Time one pruned weight, microseconds a call, by every kernel that takes it."""
    pruned, records = tesa.apply(weight), []
    kernels, shape = Kernels(tesa, pruned), (weight.shape[0], weight.shape[1])
    for m in TOKENS:
        x = torch.randn(m, weight.shape[1], device="cuda", dtype=DTYPE)
        best = quickest(kernels.all_for(x, linear_reference(x, pruned)), x)
        graphs = {
            "dense": rotated(lambda w: functional.linear(x, w), (weight,), _COUNT),  # noqa: B023 - used at once
            "dense pruned": rotated(lambda w: functional.linear(x, w), (pruned,), _COUNT),  # noqa: B023
            **{name: replay for name, (_, _, replay) in best.items()},
        }
        times = compare(graphs, warmup=2, iters=15, max_seconds=0.1, device="cuda")
        us = {name: times[name].median * 1e3 / _COUNT for name in graphs}
        name = min(best, key=us.__getitem__)
        record = {"best": name, "tile": best[name][0], **summary(shape, m, sparsity, us, best[name][1])}
        if m in (1, TOKENS[-1]):
            record["floors"] = floors(shape, 1.0 - sparsity, m, _HALF)
        records.append(record)
        show("weights", records[-1])
    return records


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
        found.setdefault(key, []).append(f"{r['ratio']:.2f} {r.get('best', '')}")
    return [[*key, *cells] for key, cells in found.items()]


def main() -> None:
    """Measure all cases, print the ratios, save the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=None, help="folder of the results")
    options = parser.parse_args()
    torch.manual_seed(0)
    weights: list[dict[str, Any]] = []
    threshold: list[dict[str, Any]] = []
    for shape in SHAPES:
        weight = torch.randn(shape, device="cuda", dtype=DTYPE)
        for sparsity in SPARSITIES:
            tesa = TeSA.from_mask(torch.rand(shape, device="cuda") >= sparsity)
            try:
                weights += measure_weights(weight, tesa, sparsity)
                threshold += measure_threshold(weight, sparsity, (1, 4))
            except (SpartaError, RuntimeError) as error:
                print(f"{shape} {sparsity:.0%}: {type(error).__name__}: {error}", flush=True)
            torch.cuda.empty_cache()
    print(table(["N x K", "sparsity", *(f"M = {m}" for m in TOKENS)], rows_of(weights)))
    print(table(["N x K", "inputs skipped", "M = 1", "M = 4"], rows_of(threshold)))
    results: dict[str, Any] = {"dtype": "bf16", "unit": "us a call", "targets": [[s, t] for s, t in TARGETS.items()]}
    results |= {"weights": weights, "threshold": threshold}
    print(save("decode", torch.cuda.get_device_name(), results, options.out))


if __name__ == "__main__":
    main()

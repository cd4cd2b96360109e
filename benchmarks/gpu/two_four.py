"""How fast is a 2:4 linear layer on CUDA? Our kernels and cuSPARSELt against the fastest dense layer.

Run with ``python benchmarks/gpu/two_four.py``; ``--shapes`` takes some of the weights by their numbers and ``--tokens``
some numbers of tokens, and what an earlier run has found of the others is kept. Calls are graphed over rotated weights
and graphs take turns; for many tokens, calls are timed eager too, where PyTorch's own 2:4 tensor pays for its host
work. Dense is timed on a random and on the pruned weight and compiled; the fastest of them is what ratios refer to.

The aims are 1.4x up to 512 tokens and 1.6x from 1024 on. Up to about 16 tokens a layer takes as long as its weight
takes to read, which `cuda-24` does at 3.2-3.8 of the 4.3 TB/s of a copy. Above, the matrix unit takes over, and what
counts is how fast x comes and how long results take on their way out: `cuda-24-matrix` has the copy engine fetch both
operands several steps ahead, and blocks share the input channels of a tile where there are few tiles.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[1]))

from ceilings import ceilings
from graphed import rotated
from sparse_rates import sparse_limits

from record import RESULTS, path_of, save
from sparta.errors import SpartaError
from sparta.specialize.implement import Implement
from sparta.specialize.kernel_spec import KernelSpec
from sparta.specialize.linear.cuda_24 import TwoFour
from sparta.specialize.linear.cuda_24_matrix import TwoFourMatrix
from sparta.specialize.linear.cusparselt import CuSparseLt
from sparta.specialize.linear.spec import linear_spec
from sparta.tables import table
from sparta.tesa.attribute import TeSA
from sparta.testing import check, compare, linear_reference

DTYPE = torch.bfloat16
SHAPES = ((4096, 4096), (11008, 4096), (4096, 11008), (8192, 8192))
FEW, MANY = (1, 16, 32, 64), (128, 256, 512, 1024, 4096, 16384)
_TERABYTE = 1e12
_BYTES = 1.125  # of a 2:4 weight in bf16, an element


def two_four(shape: tuple[int, int]) -> Tensor:
    """Return a random 2:4 mask."""
    draws = torch.rand(shape[0], shape[1] // 4, 4)
    return torch.zeros_like(draws, dtype=torch.bool).scatter_(2, draws.topk(2, -1).indices, True).flatten(1)  # noqa: FBT003


def quickest(
    implement: Implement, spec: KernelSpec, x: Tensor, weight: Tensor, count: int
) -> tuple[dict[str, Any], Callable[[], None], Callable[[], Tensor]]:
    """Try all parameters; return the fastest, its graph and its plain call."""
    ((name, item),) = implement.space(spec).items()
    expected = linear_reference(x[:64], weight)
    values, found = item.domain.values, []
    kernels = [implement.build(spec, {name: value}) for value in values]
    if implement.first_run_compiles:
        with ThreadPoolExecutor(len(kernels)) as pool:
            list(pool.map(lambda kernel: kernel.run(kernel.pack(weight), x, None, None), kernels))
    for value, kernel in zip(values, kernels, strict=True):
        packed = kernel.pack(weight)
        try:
            y = kernel.run(packed, x, None, None)
            check(y[:64], expected, reduction=x.shape[1])
        except SpartaError as error:
            print(f"  {implement.name} {value}: {error}")
            continue
        replay = rotated(lambda *p, kernel=kernel: kernel.run(p, x, None, None), packed, count)
        took = compare({"it": replay}, warmup=1, iters=5, max_seconds=0.05, device="cuda")["it"].median
        plain = lambda kernel=kernel, packed=packed: kernel.run(packed, x, None, None)  # noqa: E731
        found.append((took, {name: value}, replay, plain))
    _, params, replay, plain = min(found, key=lambda each: each[0])
    return params, replay, plain


def measure(shape: tuple[int, int], tokens: int, tesa: TeSA, compiled: Callable[..., Tensor]) -> dict[str, Any]:
    """Time one case; microseconds a call."""
    n, k = shape
    weight = torch.randn(shape, device="cuda", dtype=DTYPE)
    x, pruned = torch.randn(tokens, k, device="cuda", dtype=DTYPE), tesa.apply(weight)
    count = 40 if tokens <= 128 else 10 if tokens <= 1024 else 4
    spec = linear_spec(tesa, tokens, DTYPE, device="cuda")
    graphs = {
        "dense": rotated(lambda w: functional.linear(x, w), (weight,), count),
        "dense pruned": rotated(lambda w: functional.linear(x, w), (pruned,), count),
        "dense compiled": rotated(lambda w: compiled(x, w), (pruned,), count),
    }
    plain: dict[str, Callable[[], Tensor]] = {"dense": lambda: functional.linear(x, pruned)}
    params = {}
    for implement in (TwoFour(), TwoFourMatrix(), CuSparseLt()):
        if implement.supports(spec):
            params[implement.name], graphs[implement.name], plain[implement.name] = quickest(
                implement, spec, x, pruned, count
            )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch_weight = torch.sparse.to_sparse_semi_structured(pruned)
        plain["torch 2:4"] = lambda: functional.linear(x, torch_weight)
        times = compare(graphs, warmup=2, iters=20, max_seconds=0.3, device="cuda")
        eager = compare(plain, warmup=2, iters=10, max_seconds=0.3, device="cuda")
    us = {name: times[name].median * 1e3 / count for name in graphs}
    dense = min(value for name, value in us.items() if name.startswith("dense"))
    ours = {name: us[name] for name in params}
    best = min(ours, key=lambda name: ours[name])
    return {
        "shape": shape, "tokens": tokens, "us": us, "params": params, "best": best, "ratio": dense / us[best],
        "eager_us": {name: eager[name].median * 1e3 for name in plain},
        "tflops": 2e-6 * tokens * n * k / us[best], "terabytes": _BYTES * n * k / us[best] * 1e6 / _TERABYTE,
    }  # fmt: skip


def main() -> None:
    """Measure all cases, print the ratios, save the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=None, help="folder of the results")
    parser.add_argument("--shapes", nargs="+", type=int, default=list(range(len(SHAPES))), help="numbers of weights")
    parser.add_argument("--tokens", nargs="+", type=int, default=FEW + MANY, help="numbers of tokens")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch._dynamo.config.recompile_limit = 64
    compiled, device = torch.compile(functional.linear, dynamic=False), torch.cuda.get_device_name()
    limits = ceilings() | sparse_limits("bf16")
    found: dict[tuple[int, ...], dict[str, Any]] = {}
    earlier = path_of("two_four", device, options.out or RESULTS)
    if earlier.exists():
        kept = json.loads(earlier.read_text(encoding="utf-8"))["results"]["linear"]
        found = {(*record["shape"], record["tokens"]): record for record in kept}
    for shape in [SHAPES[number] for number in options.shapes]:
        tesa = TeSA.from_mask(two_four(shape))
        for tokens in options.tokens:
            r = found[*shape, tokens] = measure(shape, tokens, tesa, compiled)
            torch.cuda.empty_cache()
            print(shape, tokens, r["best"], f"{r['ratio']:.2f}x", flush=True)
            # What follows may be cut short.
            records = [found[key] for key in sorted(found, key=lambda key: (SHAPES.index(key[:2]), key[2]))]
            save(
                "two_four",
                device,
                {"dtype": "bf16", "unit": "us a call", "ceilings": limits, "linear": records},
                options.out,
            )
    rows = [
        [f"{r['shape'][0]}x{r['shape'][1]}", r["tokens"], r["best"], f"{r['us'][r['best']]:.1f}", f"{r['ratio']:.2f}",
         f"{r['eager_us']['dense'] / r['eager_us'][r['best']]:.2f}",
         f"{r['eager_us']['dense'] / r['eager_us']['torch 2:4']:.2f}", f"{r['tflops']:.0f}", f"{r['terabytes']:.2f}"]
        for r in records
    ]  # fmt: skip
    print(table(["N x K", "M", "best", "us", "x dense", "eager", "torch 2:4 eager", "TFLOP/s", "TB/s"], rows))


if __name__ == "__main__":
    main()

"""Where does the time of a compiled model go? The share of each kind of step of its chain, beside the whole.

Run with ``python benchmarks/compiler/shares.py bert-base --pattern 4x4 --sparsity 0.8 --precision int8``. Nothing is
stored: it is for finding what to make faster next. Steps are timed one by one, so their sum is a little more than the
chain; what Python still calls has the name of its function.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import sparta
from sparta.compiler.run.chain.chained import Chained
from sparta.compiler.run.eager import with_fast_paths
from sparta.tables import table

sys.path.insert(0, str(Path(__file__).parents[1]))
from networks import encoder, mobilenet, pruned_layers, resnet

MODELS: dict[str, tuple[Callable[[int], nn.Module], Callable[[int, int], torch.Tensor]]] = {
    "bert-base": (lambda n: encoder(n, 768, 12), lambda b, t: torch.randn(b, t, 768)),
    "minilm": (lambda n: encoder(n, 384, 12), lambda b, t: torch.randn(b, t, 384)),
    "resnet50": (lambda _: resnet((3, 4, 6, 3), 64), lambda b, _: torch.randn(b, 3, 224, 224)),
    "mobilenetv2": (lambda _: mobilenet(1.0), lambda b, _: torch.randn(b, 3, 224, 224)),
}


def main() -> int:
    """Compile one model and print the shares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--pattern", default="4x1")
    parser.add_argument("--sparsity", type=float, default=0.8)
    parser.add_argument("--precision", choices=["fp32", "int8"], default="fp32")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--budget", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    make, inputs = MODELS[options.model]
    model, x = make(options.layers).eval(), inputs(options.batch, options.tokens)
    spec = None
    if options.sparsity:
        spec = sparta.Spec.from_pattern(model, options.pattern, options.sparsity, include=pruned_layers(model))
        spec.apply(model)
    precision: dict[str, Any] = {"precision": "int8", "calibration": [x]} if options.precision == "int8" else {}
    fast = sparta.compile(model, x, spec, budget_s=options.budget, **precision)
    chain, eager = Chained(fast.graph), with_fast_paths(fast.graph)
    program = chain.program(x)
    if program is None:
        print("no chain can be made of it")
        return 1
    whole: dict[str, list[float]] = defaultdict(list)
    parts: dict[str, list[float]] = defaultdict(list)
    counts: dict[str, int] = defaultdict(int)
    with torch.no_grad():
        for _ in range(options.rounds):
            for name, run in (("model as given", model), ("eager", eager), ("chain", chain), ("compiled", fast)):
                begin = time.perf_counter()
                run(x)
                whole[name].append(time.perf_counter() - begin)
            together: dict[str, float] = defaultdict(float)
            counts.clear()
            for name, seconds in program.timed([x]):
                together[name] += seconds
                counts[name] += 1
            for name, seconds in together.items():
                parts[name].append(seconds)
    medians = {name: 1e3 * statistics.median(times) for name, times in parts.items()}
    total = sum(medians.values())
    rows = [[name, counts[name], ms, ms / total] for name, ms in sorted(medians.items(), key=lambda each: -each[1])]
    print(table(["step", "count", "ms", "share"], rows))
    print(table(["run", "ms"], [[name, 1e3 * statistics.median(times)] for name, times in whole.items()]))
    print(
        f"host: {fast.report.plan.whole.host.value}; {program.shared} shared inputs, {program.handed} panels handed on"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

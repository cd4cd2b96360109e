"""Where the time of an encoder goes: its chain step by step, for kernels that are named and not tuned.

Run with ``python benchmarks/cpu/encoder_profile.py --precision int8 --pattern 4x4 --tiles panel:4:4:1:0:0
gathered:16:4:1:0:0``. It prints the milliseconds of a whole call and of each kind of step for every tile, each the
least of several interleaved runs: a look at what to mend next, quick because nothing is tuned, and no result that
documents quote. Layers are BERT-base's shape; ``--layers`` says how many.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import sparta
from sparta.compiler.run.chain.chained import Chained
from sparta.compiler.run.chain.program import Program
from sparta.specialize.implement import implement_named
from sparta.specialize.kernel_spec import KernelSpec
from sparta.specialize.tuning.select import DENSE, Choice
from sparta.specialize.tuning.store import Entry
from sparta.tables import table
from sparta.tesa.patterns import parse_pattern

sys.path.insert(0, str(Path(__file__).parents[1] / "compiler"))
from networks import encoder

KERNELS = {"int8": "cpu-int8", "bf16": "cpu-bf16-panel", "fp32": "cpu"}


def main() -> int:
    """Compile once for each tile, and time whole calls and steps."""
    options = _options()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    short = options.precision == "bf16"
    x = torch.randn(options.batch, options.length, options.width)
    x = x.to(torch.bfloat16) if short else x
    chains, programs = {}, {}
    for tile in options.tiles:
        graph = _compiled(options, x, tile).graph
        chain, program = Chained(graph), Chained(graph).program(x)
        if program is None:
            print(f"{tile}: the model is no chain")
            return 1
        with torch.no_grad():
            chain(x)  # which chooses how a large batch runs
        chains[tile], programs[tile] = chain, program
    whole: dict[str, list[float]] = defaultdict(list)
    with torch.no_grad():
        for _ in range(options.runs):
            for tile, chain in chains.items():
                begin = time.perf_counter()
                chain(x)
                whole[tile].append(time.perf_counter() - begin)
    shares = {tile: _kinds(program, x, options.runs) for tile, program in programs.items()}
    kinds = sorted({kind for each in shares.values() for kind in each})
    rows = [["whole call", *[f"{1e3 * min(whole[tile]):.2f}" for tile in chains]]]
    rows += [[kind, *[f"{shares[tile].get(kind, 0.0):.2f}" for tile in chains]] for kind in kinds]
    print(f"{options.precision} {options.pattern} {options.sparsity:.0%}, batch {options.batch}, ms")
    print(table(["step", *chains], rows))
    return 0


def _kinds(program: Program, x: Tensor, runs: int) -> dict[str, float]:
    """Return the milliseconds of each kind of step, of products by their number in a layer."""
    with torch.no_grad():
        found = [program.timed((x,)) for _ in range(runs)]
    kinds: dict[str, float] = defaultdict(float)
    for at, (name, _) in enumerate(found[0]):
        kinds[name] += 1e3 * min(run[at][1] for run in found)
    return kinds


def _compiled(options: argparse.Namespace, x: Tensor, tile: str) -> Any:
    torch.manual_seed(0)
    model: nn.Module = encoder(options.layers, options.width, options.heads).eval()
    spec = None
    if options.sparsity:
        names = [f"{name}.weight" for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
        spec = sparta.Spec.from_pattern(model, parse_pattern(options.pattern), options.sparsity, include=names)
        spec.apply(model)
    more: dict[str, Any] = {}
    if options.precision == "int8":
        more = {"precision": "int8", "calibration": [x], "max_loss": 10.0}
    elif options.precision == "bf16":
        model = model.to(torch.bfloat16)
    name = KERNELS[options.precision]

    def choose(spec: KernelSpec, _store: object = None) -> Choice:
        if not implement_named(name, spec.op).answer(spec):
            return Choice(DENSE, {}, "dense: the kernel does not run it")
        return Choice(name, {"tile": tile}, f"{name}: not measured", Entry(name, {"tile": tile}, 1.0, 2.0))

    with mock.patch("sparta.compiler.choose.layers.choose", choose):
        return sparta.compile(model, x, spec, tune="off", **more)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiles", nargs="+", default=["panel:4:4:1:0:0"])
    parser.add_argument("--precision", choices=KERNELS, default="int8")
    parser.add_argument("--pattern", default="4x4")
    parser.add_argument("--sparsity", type=float, default=0.8)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=9)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())

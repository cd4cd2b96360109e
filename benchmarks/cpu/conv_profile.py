"""Where the time of a network of images goes: its chain step by step, with kernels chosen by default and not tuned.

Run with ``python benchmarks/cpu/conv_profile.py --model resnet50 --pattern 4x4 --sparsity 0.8 --precision int8``. It
prints the milliseconds of each kind of step and of the slowest steps, each the least of several runs: a look at what to
mend next, quick because nothing is tuned, and no result that documents quote.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections import defaultdict
from pathlib import Path
from unittest import mock

import torch

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
from networks import mobilenet, resnet

MODELS = {
    "resnet50": lambda: resnet((3, 4, 6, 3), 64),
    "mobilenetv2": lambda: mobilenet(1.0),
    "small": lambda: resnet((1, 1), 16),
}
_FEWEST = 4
KERNELS = {"int8": ("cpu-int8",), None: ("cpu-dense", "cpu")}


def main() -> int:
    """Compile without tuning, and time the steps."""
    options = _options()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    model = MODELS[options.model]().eval()
    batches = [torch.randn(options.batch, 3, options.size, options.size) for _ in range(2)]
    spec = None
    if options.sparsity:
        # Neither depthwise layers nor the first one are pruned.
        wide = [name for name, tensor in model.named_parameters() if tensor.dim() > 1 and tensor.shape[1] >= _FEWEST]
        spec = sparta.Spec.from_pattern(model, parse_pattern(options.pattern), options.sparsity, include=wide)
        spec.apply(model)
    names = KERNELS[options.precision]
    more = {"precision": options.precision, "calibration": batches, "max_loss": 10.0} if options.precision else {}
    with mock.patch("sparta.compiler.choose.layers.choose", lambda spec, _store=None: _chosen(spec, names)):
        fast = sparta.compile(model, batches[0], spec, tune="off", **more)
    program = Chained(fast.graph).program(batches[0])
    if program is None:
        print("the model is no chain")
        return 1
    with torch.no_grad():
        runs = [program.timed((batches[0],)) for _ in range(options.runs)]
        whole = min(_seconds(program, batches[0]) for _ in range(options.runs))
    steps = [(name, 1e3 * min(run[at][1] for run in runs)) for at, (name, _) in enumerate(runs[0])]
    kinds: dict[str, list[float]] = defaultdict(list)
    for name, each in steps:
        kinds[name].append(each)
    rows = sorted(((n, len(each), sum(each)) for n, each in kinds.items()), key=lambda row: -row[2])
    total = sum(each for _, each in steps)
    print(table(["step", "count", "ms", "share"], [[n, c, f"{ms:.2f}", f"{ms / total:.0%}"] for n, c, ms in rows]))
    slowest = sorted(enumerate(steps), key=lambda each: -each[1][1])[: options.slowest]
    print(table(["number", "step", "ms"], [[at, name, f"{ms:.3f}"] for at, (name, ms) in slowest]))
    print(f"{len(steps)} steps, {program.calls} of them in Python, {program.handed} handed over: {total:.2f} ms")
    print(f"all in one call, where neighbours may run band by band: {1e3 * whole:.2f} ms")
    return 0


def _seconds(program: Program, x: torch.Tensor) -> float:
    begin = time.perf_counter()
    program((x,))
    return time.perf_counter() - begin


def _chosen(spec: KernelSpec, names: tuple[str, ...]) -> Choice:
    """Return the first implement of these that runs a layer, as if it had won."""
    for name in names:
        try:
            implement = implement_named(name, spec.op)
        except sparta.errors.SpartaError:
            continue
        if implement.answer(spec):
            params = implement.default(spec)
            return Choice(name, params, f"{name}: not measured", Entry(name, params, 1.0, 2.0))
    return Choice(DENSE, {}, "dense: no other runs it")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="resnet50")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--pattern", default="4x1")
    parser.add_argument("--sparsity", type=float, default=0.0)
    parser.add_argument("--precision", choices=["int8"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--slowest", type=int, default=12)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())

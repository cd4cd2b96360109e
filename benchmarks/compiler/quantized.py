"""Sparse and quantised whole models against dense ones in int8 and bf16: what a user gains over the best.

Run with ``python benchmarks/compiler/quantized.py --threads 2``; ``--only`` and ``--batch`` take some of the cases,
``--quick`` small models. The dense model runs in ONNX Runtime and OpenVINO (where they are installed) in int8, bf16 and
fp32 and eagerly in bf16; the sparse one is compiled with ``precision="int8"``, ``"bf16"`` or as it is. All calls of a
model take turns. Threads of other runtimes look for work for tens of milliseconds after a call, and the next call would
share cores with them, so a turn begins when no thread of this process runs. Cores that have rested are slow for some
milliseconds, which would be charged to short calls most, so in its turn each is called for a while before the call that
counts. bf16 is left out where the processor does not compute in it. Sparse models in fp32 are also timed without
their live weights, as :mod:`emptied` says, for a bound. Results are saved after every model, over older ones;
``--continue`` goes on where a run ended, ``--keep`` keeps the rivals' files for the next run, and ``--variants`` takes
some of ours.
"""

from __future__ import annotations

import argparse
import copy
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import sparta
from sparta.specialize.cpu.library import load
from sparta.tables import table
from sparta.tesa.patterns import parse_pattern

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "oneshot"))
from emptied import emptied, least_ms
from networks import encoder, mobilenet, pruned_layers, resnet
from roofline import measured_roof
from rows import keep, stored
from runtimes import rival_calls

from record import RESULTS, path_of

QUESTION, DEVICE = "compiler_quantized", f"{platform.machine()} cpu"
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module], Callable[[int, bool], Tensor]]] = {
    "bert-base": (
        lambda: encoder(12, 768, 12),
        lambda: encoder(1, 64, 4),
        lambda b, quick: torch.randn(b, 16 if quick else 128, 64 if quick else 768),
    ),
    "resnet50": (
        lambda: resnet((3, 4, 6, 3), 64),
        lambda: resnet((1, 1), 16),
        lambda b, quick: torch.randn(b, 3, 32 if quick else 224, 32 if quick else 224),
    ),
    "mobilenetv2": (
        lambda: mobilenet(1.0),
        lambda: mobilenet(0.5),
        lambda b, quick: torch.randn(b, 3, 32 if quick else 224, 32 if quick else 224),
    ),
}
# Pattern, sparsity and precision of what is compiled; a sparsity of 0 is the dense model.
VARIANTS = (
    ("dense", 0.0, None),
    ("4x1", 0.8, None),
    ("4x1", 0.9, None),
    ("4x1", 0.8, "bf16"),
    ("dense", 0.0, "int8"),
    ("4x4", 0.8, "int8"),
    ("4x4", 0.9, "int8"),
)


LABELS = tuple(f"{p} {f'{s:.0%} ' if s else ''}{q or 'fp32'}" for p, s, q in VARIANTS)
_PAUSE, _LONGEST_WAIT = 0.02, 0.5  # seconds: one look at other threads, whose time is counted in ticks, and all looks
_WARM = 0.05  # seconds of calls before the one that counts
_IDLE = 0.1  # the share of a pause that threads may still run
_ROUNDS = 60
_LARGE = 4  # from this batch on one batch of calibration is enough: the rivals keep all activations of it


def main() -> int:
    """Measure every model and batch."""
    options = _options()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    load()  # compiled before any budget begins
    path = path_of(QUESTION, options.machine, options.out or RESULTS)
    done = {(row["model"], row["batch"]) for row in stored(path)} if options.go_on else set()
    for name in options.only:
        for batch in options.batch:
            if (name, batch) in done:
                continue
            row = _measured(name, batch, options)
            print(_shown(row), flush=True)
            if not options.quick or options.out:
                keep(row, ("model", "batch"), _in_order, path, options.machine, {"threads": options.threads})
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=15.0, help="for the last timing of each model")
    parser.add_argument("--budget", type=float, default=90.0, help="for compiling each variant")
    parser.add_argument("--variants", nargs="+", choices=LABELS, default=list(LABELS))
    parser.add_argument("--keep", type=Path, help="a folder for the rivals' files")
    parser.add_argument("--continue", dest="go_on", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--machine", default=DEVICE, help="a name, for results that stand beside those of other ones")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.quick:
        options.seconds, options.budget, options.batch = 1.0, 10.0, options.batch[:1]
    return options


def _in_order(row: dict[str, Any]) -> tuple[int, int]:
    """Return what rows are sorted by."""
    return row["batch"], list(MODELS).index(row["model"])


def _measured(name: str, batch: int, options: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    full, small, inputs = MODELS[name]
    model, x = (small if options.quick else full)().eval(), inputs(batch, options.quick)
    calibration = [inputs(batch, options.quick) for _ in range(1 if batch >= _LARGE else 4)]
    precisions = ("fp32", "bf16", "int8") if load().bf16_units else ("fp32", "int8")
    calls: dict[str, Callable[[Tensor], Any]] = {"eager fp32": model}
    if "bf16" in precisions:
        calls["eager bf16"] = _in_bf16(model)
    changes: dict[str, float] = {}
    empty: dict[str, Callable[[Tensor], Any]] = {}
    least: dict[str, float] = {}
    roof = measured_roof()
    with tempfile.TemporaryDirectory() as temporary, torch.no_grad():
        folder = Path(temporary) if options.keep is None else options.keep / f"{name}-{batch}"
        folder.mkdir(parents=True, exist_ok=True)
        calls |= rival_calls(model, x, folder, options.threads, calibration=calibration, precisions=precisions)
        for short, (pattern, sparsity, precision) in zip(LABELS, VARIANTS, strict=True):
            if short not in options.variants or (precision or "fp32") not in precisions:
                continue
            label = f"sparta {short}"
            begin = time.perf_counter()
            fast = _compiled(model, x, pattern, sparsity, precision, calibration, options.budget)
            print(f"{name}, batch {batch}: {label} compiled in {time.perf_counter() - begin:.0f} s", flush=True)
            calls[label] = fast
            if fast.report.precision is not None:
                changes[label] = fast.report.precision.change
            elif sparsity:
                empty[label], least[label] = emptied(fast), least_ms(fast, roof, options.threads)
        beside = {f"empty {label}": call for label, call in empty.items()}
        medians = _in_turns(calls | beside, x, options.seconds)
    bounds = {label: {"empty": medians.pop(f"empty {label}"), "least": least[label]} for label in empty}
    return {"model": name, "batch": batch, "median_ms": medians, "change": changes, "bound_ms": bounds}


def _in_turns(calls: dict[str, Callable[[Tensor], Any]], x: Tensor, seconds: float) -> dict[str, float]:
    """Return the median milliseconds of each call."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + seconds
    for _ in range(_ROUNDS):
        for name, call in calls.items():
            _wait_for_threads()
            begin = time.perf_counter()
            call(x)
            while time.perf_counter() - begin < _WARM:
                call(x)
            begin = time.perf_counter()
            call(x)
            taken[name].append(1e3 * (time.perf_counter() - begin))
        if time.perf_counter() > end:
            break
    return {name: statistics.median(each) for name, each in taken.items()}


def _wait_for_threads() -> None:
    """Wait until no thread of this process runs any more, or that takes too long."""
    end = time.perf_counter() + _LONGEST_WAIT
    while time.perf_counter() < end:
        used = time.process_time()
        time.sleep(_PAUSE)
        if time.process_time() - used < _IDLE * _PAUSE:
            return


def _compiled(
    model: nn.Module,
    x: Tensor,
    pattern: str,
    sparsity: float,
    precision: str | None,
    batches: list[Tensor],
    budget: float,
) -> Any:
    sparse, spec = copy.deepcopy(model), None
    if sparsity:
        spec = sparta.Spec.from_pattern(sparse, parse_pattern(pattern), sparsity, include=pruned_layers(sparse))
        spec.apply(sparse)
    given: dict[str, Any] = {} if precision is None else {"precision": precision, "max_loss": 10.0}
    if precision == "int8":
        given["calibration"] = batches
    return sparta.compile(sparse, x, spec, budget_s=budget, **given)


def _in_bf16(model: nn.Module) -> Callable[[Tensor], Any]:
    short = copy.deepcopy(model).to(torch.bfloat16)
    return lambda x: short(x.to(torch.bfloat16))


def _shown(row: dict[str, Any]) -> str:
    rows = [
        [row["model"], row["batch"], name, ms, row["change"].get(name), *row["bound_ms"].get(name, {}).values()]
        for name, ms in row["median_ms"].items()
    ]
    heads = ["model", "batch", "what", "ms", "change", "ms without live weights", "ms of live weights"]
    return table(heads, [[*line, *[None] * (len(heads) - len(line))] for line in rows])


if __name__ == "__main__":
    raise SystemExit(main())

"""How much smaller and faster do zeros make real architectures? Propagation, compaction and latency on the CPU.

Run with ``python benchmarks/propagate/architectures.py``; ``--quick`` takes two small models. Zeros are planted in half
of the channels, neurons and heads of each model (the weights that read and write them), which a masked dense model
computes in full and a compact one does not have. Both run interleaved call by call on one thread, and their outputs are
compared. ``--scatter`` plants a fifth of rows and columns at random instead, where neighbours rarely agree.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from models import MODELS, SMALL, build, called

from propagation.architectures import plant
from record import save
from sparta.propagation import capture, propagate
from sparta.propagation.groups import find_slots
from sparta.tables import table
from sparta.testing import compare


def plant_groups(model: nn.Module, inputs: Any, share: float) -> None:
    """Zero a share of the channels, neurons and heads of a model, drawn at random."""
    result = propagate(model, inputs)
    generator = torch.Generator().manual_seed(0)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for slot in find_slots(result.facts, result.captured.graph):
            if slot.kind not in {"channel", "neuron", "head"}:
                continue
            chosen = torch.randperm(len(slot.groups), generator=generator)[: int(share * len(slot.groups))]
            for group in (slot.groups[i] for i in chosen.tolist()):
                for (name, dim), flags in group.slices.items():
                    if name in parameters and not name.endswith("original1"):
                        parameters[name].index_fill_(dim, flags.nonzero().flatten(), 0)


def flops(model: nn.Module, inputs: Any) -> int:
    """Return twice the multiply-adds of one forward."""
    with FlopCounterMode(display=False) as counter:
        called(model, inputs)
    return int(counter.get_total_flops())


def measure(name: str, *, scatter: bool, seconds: float) -> dict[str, Any]:
    """Return sizes, error, times and latencies of one architecture."""
    model, inputs = build(name)
    if scatter:
        plant(model)
    else:
        plant_groups(model, inputs, 0.5)
    start = time.perf_counter()
    capture(model, inputs)
    exported = time.perf_counter() - start
    start = time.perf_counter()
    result = propagate(model, inputs)
    propagated = time.perf_counter() - start
    start = time.perf_counter()
    small = result.compact(allow_empty=True)
    compacted = time.perf_counter() - start
    plain = result.compact(allow_empty=True, seams=None)
    expected, actual = called(model, inputs), called(small, inputs)
    functions = {
        "masked dense": lambda: called(model, inputs),
        "compact": lambda: called(small, inputs),
        "compact without seams": lambda: called(plain, inputs),
    }
    timings = compare(functions, warmup=2, iters=21, max_seconds=seconds)
    medians = {key: timing.median for key, timing in timings.timings.items()}
    return {
        "model": name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "parameters_compact": sum(p.numel() for p in small.parameters()),
        "flops": flops(model, inputs),
        "flops_compact": flops(small, inputs),
        "error": float((expected - actual).abs().max() / expected.abs().max()),
        "export_s": exported,
        "propagate_s": propagated - exported,
        "compact_s": compacted,
        "seams": sum(key.startswith("_seam_") for key in small.mapping),
        "median_ms": medians,
        "speedup": medians["masked dense"] / medians["compact"],
    }


def show(rows: list[dict[str, Any]]) -> str:
    """Return the results as a table."""
    lines: list[list[object]] = []
    for row in rows:
        if "failed" in row:
            lines.append([row["model"], row["failed"], *[""] * 6])
            continue
        lines.append(
            [
                row["model"],
                f"{row['parameters'] / 1e6:.2f} → {row['parameters_compact'] / 1e6:.2f}",
                f"{row['flops'] / 1e9:.2f} → {row['flops_compact'] / 1e9:.2f}",
                f"{row['error']:.0e}",
                f"{row['propagate_s']:.1f} + {row['export_s']:.1f}",
                f"{row['median_ms']['masked dense']:.1f} → {row['median_ms']['compact']:.1f}",
                f"{row['speedup']:.2f}",
                f"{row['median_ms']['masked dense'] / row['median_ms']['compact without seams']:.2f}",
            ]
        )
    head = ["model", "parameters (M)", "GFLOP", "error", "propagate + export (s)", "latency (ms)", "faster", "no seams"]
    return table(head, lines)


def main() -> None:
    """Measure every model and save the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two small models, few calls")
    parser.add_argument("--scatter", action="store_true", help="rows and columns at random instead of groups")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--out", type=Path, help="folder for the JSON instead of benchmarks/results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    load_before = os.getloadavg()[0]
    rows: list[dict[str, Any]] = []
    for name in SMALL if options.quick else options.models:
        try:
            rows.append(measure(name, scatter=options.scatter, seconds=2.0 if options.quick else 20.0))
        except ModuleNotFoundError as error:
            rows.append({"model": name, "failed": f"skipped: {error}"})
        print(show(rows[-1:]), flush=True)
    question = "propagate_scattered" if options.scatter else "propagate_architectures"
    found = {"models": rows, "load": [load_before, os.getloadavg()[0]]}
    path = save(question, f"{platform.machine()} cpu", found, folder=options.out)
    print(show(rows))
    print(f"saved {path}")


if __name__ == "__main__":
    main()

"""Who removes the same channels from the same models: this package and Torch-Pruning side by side.

Run with ``python benchmarks/propagate/torch_pruning.py``; ``--quick`` takes two small models. Half of the channels,
neurons or heads of a model are drawn; the model with zeros there is the reference, and both tools have to remove them.
Three tasks: `dead` (everything of a channel is zero), `constant` (only the weights that write it are zero: what is left
is a bias or a norm's shift, which must not get lost) and `heads`. Each run is a process of its own with a time limit,
because one of them may not return. The answers: who succeeds, how small, how exact, how long.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from models import MODELS, SMALL, build, called

from record import save
from sparta.propagation import propagate
from sparta.propagation.groups import Slot, find_slots
from sparta.tables import table

# This file is named after the package that it is about, which must not hide it.
sys.path[:] = [folder for folder in sys.path if Path(folder).resolve() != Path(__file__).resolve().parent]

TOOLS = ("sparta", "Torch-Pruning")
TASKS = ("dead", "constant", "heads")
_ANSWER = "answer: "


def chosen_groups(model: nn.Module, inputs: Any, task: str) -> list[tuple[Slot, list[int]]]:
    """Return the axes that a task prunes, each with the groups that go."""
    result = propagate(model, inputs)
    kinds = {"head"} if task == "heads" else {"channel", "neuron"}
    generator = torch.Generator().manual_seed(0)
    found = []
    for slot in find_slots(result.facts, result.captured.graph):
        if slot.kind in kinds:
            drawn = torch.randperm(len(slot.groups), generator=generator)[: len(slot.groups) // 2]
            found.append((slot, sorted(drawn.tolist())))
    return found


def plant(model: nn.Module, groups: list[tuple[Slot, list[int]]], task: str) -> None:
    """Zero the groups: all their parameters, or for `constant` only the weights that write them."""
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for slot, chosen in groups:
            for (name, dim), flags in [item for i in chosen for item in slot.groups[i].slices.items()]:
                written = name in slot.writers and name in parameters
                if written if task == "constant" else name in parameters and not name.endswith("original1"):
                    parameters[name].index_fill_(dim, flags.nonzero().flatten(), 0)


def with_sparta(model: nn.Module, inputs: Any, groups: list[tuple[Slot, list[int]]]) -> nn.Module:
    """Propagate the zeros and compact; what to remove is read off the weights."""
    del groups
    return propagate(model, inputs).compact(allow_empty=True)


def with_torch_pruning(model: nn.Module, inputs: Any, groups: list[tuple[Slot, list[int]]]) -> nn.Module:
    """Remove the groups of each axis with Torch-Pruning's dependency graph, starting from the layer that writes it."""
    import torch_pruning as tp

    graph = tp.DependencyGraph()
    graph.build_dependency(
        model, inputs, output_transform=lambda out: out if isinstance(out, torch.Tensor) else next(iter(out.values()))
    )
    modules = dict(model.named_modules())
    for slot, chosen in groups:
        layer = modules[slot.name.rpartition(".")[0]]
        flags = [f for i in chosen for (name, _), f in slot.groups[i].slices.items() if name == slot.name]
        rows = torch.stack(flags).any(0).nonzero().flatten().tolist() if flags else []
        function = graph.get_pruner_of_module(layer).prune_out_channels
        group = graph.get_pruning_group(layer, function, idxs=rows)
        if graph.check_pruning_group(group):
            group.prune()
    return model


def one(name: str, tool: str, task: str) -> dict[str, Any]:
    """Run one tool on one task, here."""
    model, inputs = build(name)
    groups = chosen_groups(model, inputs, task)
    if not groups:
        return {"failed": "no such groups in this model"}
    plant(model, groups, task)
    before = sum(p.numel() for p in model.parameters())
    expected = called(model, inputs)
    start = time.perf_counter()
    small = (with_sparta if tool == "sparta" else with_torch_pruning)(model, inputs, groups)
    seconds = time.perf_counter() - start
    actual = called(small, inputs)
    if actual.shape != expected.shape:
        return {"failed": f"the output is {tuple(actual.shape)} instead of {tuple(expected.shape)}"}
    return {
        "parameters": before,
        "parameters_after": sum(p.numel() for p in small.parameters()),
        "error": float((actual - expected).abs().max() / expected.abs().max()),
        "seconds": seconds,
    }


def guarded(name: str, tool: str, task: str, limit: float) -> dict[str, Any]:
    """Run one tool on one task in a process of its own; returns what it says, or how it failed."""
    command = [sys.executable, __file__, "--one", name, tool, task]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)  # noqa: S603
    except subprocess.TimeoutExpired:
        return {"failed": f"did not return within {limit:.0f} s"}
    answers = [line.removeprefix(_ANSWER) for line in done.stdout.splitlines() if line.startswith(_ANSWER)]
    if answers:
        found: dict[str, Any] = json.loads(answers[-1])
        return found
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return {"failed": lines[-1][:160] if lines else f"exit code {done.returncode}"}


def show(rows: list[dict[str, Any]]) -> str:
    """Return the results as a table."""
    lines: list[list[object]] = []
    for row in rows:
        head = [row["model"], row["task"], row["tool"]]
        if "failed" in row:
            lines.append([*head, "", "", "", row["failed"]])
        else:
            sizes = f"{row['parameters'] / 1e6:.2f} → {row['parameters_after'] / 1e6:.2f}"
            lines.append([*head, sizes, f"{row['error']:.0e}", f"{row['seconds']:.1f}", ""])
    return table(["model", "task", "tool", "parameters (M)", "error", "seconds", "failed"], lines)


def main() -> None:
    """Run every model, task and tool, and save the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two small models")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--limit", type=float, default=180.0, help="seconds for one tool on one task")
    parser.add_argument("--out", type=Path, help="folder for the JSON instead of benchmarks/results")
    parser.add_argument("--one", nargs=3, metavar=("MODEL", "TOOL", "TASK"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.one:
        print(_ANSWER + json.dumps(one(*options.one)), flush=True)
        return
    load_before = os.getloadavg()[0]
    rows: list[dict[str, Any]] = []
    for name in SMALL if options.quick else options.models:
        for task in TASKS:
            for tool in TOOLS:
                rows.append({"model": name, "task": task, "tool": tool, **guarded(name, tool, task, options.limit)})
                print(show(rows[-1:]), flush=True)
    found = {"runs": rows, "limit_s": options.limit, "load": [load_before, os.getloadavg()[0]]}
    path = save("propagate_torch_pruning", f"{platform.machine()} cpu", found, folder=options.out)
    print(show(rows))
    print(f"saved {path}")


if __name__ == "__main__":
    main()

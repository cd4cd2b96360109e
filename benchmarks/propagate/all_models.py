"""Propagation, compaction and structured pruning on models that nobody tuned them for.

Run with ``python benchmarks/propagate/all_models.py`` (``make zoo``); ``--only NAME ...`` takes some models,
``--sources`` some families, ``--quick`` seven; ``--continue`` leaves out models that have a row. Of each model a fifth
of the rows and columns of its weights is set to zero at random; it is captured by its default call, propagated, made
compact, compared with the masked model on the example and at another batch size, pruned by half in groups, pickled, and
at the end all pickles are loaded in a new process and compared again.
"""

from __future__ import annotations

import argparse
import json
import pickle
import platform
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1]))

from propagation.architectures import plant
from record import RESULTS, save
from sparta.propagation import propagate, prune_structured
from sparta.propagation.caches import without_caches
from zoo import language, pictures

QUESTION, DEVICE = "propagate_zoo", f"{platform.machine()} cpu"
SOURCES = {
    "written": list(pictures.WRITTEN),
    "transformers": list(language.ROWS),
    "timm": list(pictures.TIMM),
    "torchvision": list(pictures.TORCHVISION),
}
SHORT = ("lstm tagger", "unet", "transformer", "llama", "swin-v2", "mamba", "t5")
Call = tuple[tuple[Any, ...], dict[str, Any]]


def build(source: str, name: str) -> tuple[nn.Module, Call]:
    """Return a model with planted zeros, and a call of it."""
    if source == "transformers":
        model, inputs = language.build(name)
        return plant(model), ((), inputs)
    model, inputs = pictures.build(source, name)
    return plant(model), (inputs, {})


def called(model: nn.Module, call: Call) -> list[Any]:
    """Return the leaves of a model's results, on copies of the inputs and from one random state."""
    args, kwargs = pytree.tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, call)
    torch.manual_seed(0)
    with torch.no_grad(), without_caches(model):
        return list(pytree.tree_leaves(model(*args, **kwargs)))


def error(expected: list[Any], actual: list[Any]) -> float:
    """Return the largest difference, relative to the largest number of each result."""
    worst = 0.0
    for one, two in zip(expected, actual, strict=True):
        if isinstance(one, Tensor) and one.numel() and (one.is_floating_point() or one.is_complex()):
            if one.shape != two.shape:
                return float("inf")
            scale = max(1.0, float(one.abs().nan_to_num(0, 0, 0).max()))
            worst = max(worst, float((one - two).abs().nan_to_num(0, 0, 0).max()) / scale)
    return worst


def larger(call: Call) -> Call:
    """Return the call with one more sample."""

    def more(leaf: Any) -> Any:
        return torch.cat([leaf, leaf[:1]]) if isinstance(leaf, Tensor) and leaf.dim() else leaf

    grown: Call = pytree.tree_map(more, call)
    return grown


def measure(source: str, name: str, folder: Path, *, prune: bool) -> dict[str, Any]:
    """Return what became of one model."""
    row: dict[str, Any] = {"model": name, "source": source}
    start = time.perf_counter()
    model, call = build(source, name)
    example = call[1] or call[0]
    row["stage"] = "captured and propagated"
    result = propagate(model, example)
    counts = result.to_dict()
    row |= {"parameters": counts["parameters"], "kept": counts["parameters_compact"] / counts["parameters"]}
    row["notes"] = sorted({note.split(" (")[0] for note in counts["notes"]})
    row["stage"] = "compact"
    small = result.compact()
    expected = called(model, call)
    row["error"] = error(expected, called(small, call))
    row["stage"] = "another batch size"
    row["any_batch"] = _other_batch(model, small, call)
    row["stage"] = "kept in a file"
    (folder / f"{len(list(folder.iterdir()))}.pickle").write_bytes(
        pickle.dumps((source, name, small, call, called(small, call)))
    )
    if prune:
        row["stage"] = "pruned by half"
        _, report = prune_structured(model, example, 0.5)
        row["pruned"] = report.parameters_compact / report.parameters
    row["seconds"] = time.perf_counter() - start
    del row["stage"]
    return row


def _other_batch(model: nn.Module, small: nn.Module, call: Call) -> float | str:
    """Return the error at another batch size, or why there is none."""
    other = larger(call)
    try:
        expected = called(model, other)
    except Exception as failed:  # noqa: BLE001 - the model itself does not take it
        return f"the model refuses it: {type(failed).__name__}"
    return error(expected, called(small, other))


def loaded(folder: Path) -> dict[str, float]:
    """Return the error of every pickled model, loaded in this process."""
    found = {}
    for path in sorted(folder.glob("*.pickle")):
        source, name, small, call, expected = pickle.loads(path.read_bytes())  # noqa: S301 - written by this script
        found[f"{source}/{name}"] = error(expected, called(small, call))
    return found


def attempts(chosen: list[tuple[str, str]], folder: Path, *, prune: bool) -> Iterator[dict[str, Any]]:
    """Yield a row for each model; what goes wrong is part of the row."""
    for source, name in chosen:
        row: dict[str, Any] = {"model": name, "source": source}
        try:
            row = measure(source, name, folder, prune=prune)
        except ModuleNotFoundError as missing:
            print(f"left out {source}/{name}: {missing}")
            continue
        except Exception as failed:  # noqa: BLE001 - a zoo reports what it finds
            told = re.sub(r"/\S+/", "", str(failed).strip().partition("\n")[0])  # paths of this machine say nothing
            row["failed"] = f"{type(failed).__name__}: {told[:300]}"
        print(json.dumps(row, ensure_ascii=False), flush=True)
        yield row


def main() -> None:
    """Measure and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", help="names of models")
    parser.add_argument("--sources", nargs="+", default=list(SOURCES), choices=list(SOURCES))
    parser.add_argument("--quick", action="store_true", help="seven small models")
    parser.add_argument("--no-pruning", action="store_true", help="leave out structured pruning, half of the time")
    parser.add_argument("--continue", dest="go_on", action="store_true", help="leave out models that have a row")
    parser.add_argument("--fresh", action="store_true", help="forget the rows of earlier runs")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if options.load:
        print(json.dumps(loaded(options.load)))
        return
    wanted = SHORT if options.quick else options.only
    chosen = [(s, n) for s in options.sources for n in SOURCES[s] if wanted is None or n in wanted]
    old = options.out / f"{QUESTION}.{platform.machine().replace('_', '-')}-cpu.json"
    rows = {} if options.fresh or not old.exists() else _rows(old)
    chosen = [pair for pair in chosen if not options.go_on or "/".join(pair) not in rows]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for row in attempts(chosen, folder, prune=not options.no_pruning):
            rows[f"{row['source']}/{row['model']}"] = row
            save(QUESTION, DEVICE, {"models": list(rows.values())}, folder=options.out)
        command = [sys.executable, __file__, "--load", str(folder)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603 - this script itself
        answer = done.stdout.splitlines()[-1]
    for key, found in json.loads(answer).items():
        rows[key]["loaded"] = found
    path = save(QUESTION, DEVICE, {"models": list(rows.values())}, folder=options.out)
    bad = [key for key, row in rows.items() if "failed" in row]
    print(f"{len(rows)} models, {len(bad)} failed: {', '.join(bad)}; saved {path}")


def _rows(path: Path) -> dict[str, dict[str, Any]]:
    return {f"{row['source']}/{row['model']}": row for row in json.loads(path.read_text())["results"]["models"]}


if __name__ == "__main__":
    main()

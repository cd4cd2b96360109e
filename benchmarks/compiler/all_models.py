"""Models that nobody tuned for: are they compiled, whole or in part, exact, at other sizes, and from files.

Run with ``python benchmarks/compiler/all_models.py``; ``--only NAME ...`` takes some models, ``--sources`` some
families, ``--quick`` ten; ``--continue`` leaves out models that have a row. Of each model a fifth of rows and columns
of its weights is set to zero at random; it is compiled by its default call without measuring, compared with the model
on the example and at another batch size, saved, and loaded in a new process, where it is compared again.
"""

from __future__ import annotations

import argparse
import json
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

import sparta
from propagation.architectures import plant
from record import RESULTS, save
from sparta.compiler import PartialModel
from sparta.propagation.caches import without_caches
from zoo import language, pictures

QUESTION, DEVICE = "compiler_zoo", f"{platform.machine()} cpu"
SOURCES = {
    "written": list(pictures.WRITTEN),
    "transformers": list(language.ROWS),
    "timm": list(pictures.TIMM),
    "torchvision": list(pictures.TORCHVISION),
}
SHORT = ("lstm tagger", "unet", "transformer", "bert", "deberta-v2", "swin-v2", "vit", "convnext-v2", "mamba", "gpt2")
Call = tuple[tuple[Any, ...], dict[str, Any]]


def build(source: str, name: str) -> tuple[nn.Module, Call]:
    """Return a model with planted zeros, and a call of it."""
    torch.manual_seed(0)
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
        found = model(*args, **kwargs)
    return [leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, Tensor)]


def error(expected: list[Any], actual: list[Any]) -> float:
    """Return the largest difference, relative to the largest number of each result."""
    worst = 0.0
    for one, two in zip(expected, actual, strict=True):
        if one.shape != two.shape:
            return float("inf")
        if one.numel() and (one.is_floating_point() or one.is_complex()):
            scale = max(1.0, float(one.abs().nan_to_num(0, 0, 0).max()))
            worst = max(worst, float((one - two).abs().nan_to_num(0, 0, 0).max()) / scale)
    return worst


def larger(call: Call) -> Call:
    """Return the call with one more sample."""

    def more(leaf: Any) -> Any:
        return torch.cat([leaf, leaf[:1]]) if isinstance(leaf, Tensor) and leaf.dim() else leaf

    grown: Call = pytree.tree_map(more, call)
    return grown


def how(fast: Any) -> str:
    """Return how much of a model was compiled."""
    if not isinstance(fast, PartialModel):
        return "whole" if isinstance(fast, sparta.compiler.CompiledModel) else "with generate"
    return f"in {len(fast.parts)} parts" if fast.parts else "as given"


def measure(source: str, name: str, folder: Path) -> dict[str, Any]:
    """Return what became of one model."""
    row: dict[str, Any] = {"model": name, "source": source}
    model, call = build(source, name)
    start = time.perf_counter()
    row["stage"] = "compile"
    fast = sparta.compile(model, call[1] or call[0], tune="off")
    row["compiled"] = how(fast)
    print(f"{name}: {time.perf_counter() - start:.0f} s; {' / '.join(note[:200] for note in fast.report.notes[:3])}")
    row["stage"] = "compare"
    expected = called(model, call)
    row["error"] = error(expected, called(fast, call))
    row["stage"] = "another batch size"
    row["any_batch"] = _other_batch(model, fast, call)
    row["stage"] = "save"
    place = folder / str(len(list(folder.iterdir())))
    place.mkdir()
    fast.save(place / "model.sparta")
    torch.save({"source": source, "name": name, "expected": expected}, place / "expected.pt")
    del row["stage"]
    return row


def _other_batch(model: nn.Module, fast: Any, call: Call) -> float | str:
    """Return the error at another batch size, or why there is none."""
    other = larger(call)
    try:
        expected = called(model, other)
    except Exception as failed:  # noqa: BLE001 - the model itself does not take it
        return f"the model refuses it: {type(failed).__name__}"
    return error(expected, called(fast, other))


def loaded(folder: Path) -> dict[str, Any]:
    """Return the error of every saved model, loaded in this process; models of parts are made here again."""
    found: dict[str, Any] = {}
    for place in sorted(folder.iterdir()):
        stored = torch.load(place / "expected.pt", weights_only=True)
        model, call = build(stored["source"], stored["name"])
        try:
            fast = _load(place / "model.sparta", model)
            found[f"{stored['source']}/{stored['name']}"] = error(stored["expected"], called(fast, call))
        except Exception as failed:  # noqa: BLE001 - a zoo reports what it finds
            found[f"{stored['source']}/{stored['name']}"] = _told(failed)
    return found


def _told(failed: Exception) -> str:
    """Return an error in a line, without the folders of this machine."""
    lines = str(failed).splitlines() or [""]
    return re.sub(r"/\S*(?:site-packages|/src|/tmp)/", "", f"{type(failed).__name__}: {lines[0]}")[:200]


def _load(path: Path, model: nn.Module) -> Any:
    try:
        return sparta.load(path)
    except sparta.errors.ValueRangeError:  # holds parts
        return sparta.load(path, model=model)


def attempts(chosen: list[tuple[str, str]], folder: Path) -> Iterator[dict[str, Any]]:
    """Yield a row for each model; what goes wrong is part of the row."""
    for source, name in chosen:
        row: dict[str, Any] = {"model": name, "source": source}
        try:
            row = measure(source, name, folder)
        except ModuleNotFoundError as missing:
            print(f"left out {source}/{name}: {missing}")
            continue
        except Exception as failed:  # noqa: BLE001 - a zoo reports what it finds
            row["failed"] = _told(failed)
            row.pop("stage", None)
        print(json.dumps(row, ensure_ascii=False), flush=True)
        yield row


def main() -> None:
    """Measure and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", help="names of models")
    parser.add_argument("--sources", nargs="+", default=list(SOURCES), choices=list(SOURCES))
    parser.add_argument("--quick", action="store_true", help="ten small models")
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
    chosen = [pair for pair in chosen if not options.go_on or "loaded" not in rows.get("/".join(pair), {})]
    for start in range(0, len(chosen), 10):  # few at a time, so that a run that is cut short keeps whole rows
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for row in attempts(chosen[start : start + 10], folder):
                rows[f"{row['source']}/{row['model']}"] = row
            command = [sys.executable, __file__, "--load", str(folder)]
            answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]  # noqa: S603 - this file
            for key, found in json.loads(answer).items():
                rows[key]["loaded"] = found
        path = save(QUESTION, DEVICE, {"models": list(rows.values())}, folder=options.out)
    bad = [key for key, row in rows.items() if "failed" in row or not isinstance(row.get("loaded"), float)]
    print(f"{len(rows)} models, {len(bad)} failed: {', '.join(bad)}; saved {path}")


def _rows(path: Path) -> dict[str, dict[str, Any]]:
    return {f"{row['source']}/{row['model']}": row for row in json.loads(path.read_text())["results"]["models"]}


if __name__ == "__main__":
    main()

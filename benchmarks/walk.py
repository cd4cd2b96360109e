"""A walk over models that nobody tuned for, shared by the scripts that try all of them.

Each model has a process of its own and a time limit, so that one which crashes or does not return costs its row alone.
What a script keeps of a model in a file is looked at again in a new process that has seen nothing of the model.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from processes import Failed, Pool
from propagation.architectures import plant
from record import RESULTS, save
from sparta.propagation.caches import without_caches
from zoo import composed, couplings, language, pictures

Call = tuple[tuple[Any, ...], dict[str, Any]]
Row = dict[str, Any]
SOURCES: dict[str, list[str]] = {
    "written": list(pictures.WRITTEN),
    "couplings": list(couplings.COUPLINGS),
    "transformers": [*language.ROWS, *composed.COMPOSED],
    "timm": list(pictures.TIMM),
    "torchvision": list(pictures.TORCHVISION),
}
_PRELOADED = ["torch", "sparta.compiler", "sparta.propagation"]
_OF_SOURCE = {"transformers": ["transformers.models.llama.modeling_llama"], "timm": ["timm"]}
_LEFT_OUT = "left out"


def build(source: str, name: str) -> tuple[nn.Module, Call]:
    """Return a model with planted zeros, and a call of it."""
    torch.manual_seed(0)
    if source == "transformers":
        model, keywords = (language if name in language.ROWS else composed).build(name)
        return plant(model), ((), keywords)
    model, inputs = couplings.build(name) if source == "couplings" else pictures.build(source, name)
    return plant(model), (inputs, {})


def called(model: nn.Module, call: Call) -> list[Any]:
    """Return the tensors of a model's results, on copies of the inputs and from one random state."""
    args, kwargs = pytree.tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, call)
    torch.manual_seed(0)
    with torch.no_grad(), without_caches(model):
        found = model(*args, **kwargs)
    return [leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, Tensor)]


def error(expected: Sequence[Tensor], actual: Sequence[Tensor]) -> float:
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


def error_at(model: nn.Module, other: nn.Module, call: Call) -> float | str:
    """Return how far another model is from a model at a call, or why that cannot be said."""
    try:
        expected = called(model, call)
    except Exception as failed:  # noqa: BLE001 - the model itself does not take it
        return f"the model refuses it: {type(failed).__name__}"
    return error(expected, called(other, call))


def told(failed: BaseException) -> str:
    """Return an error in a line, without the folders of this machine."""
    lines = str(failed).strip().splitlines() or [""]
    return re.sub(r"/\S+/", "", f"{type(failed).__name__}: {lines[0]}")[:300]


@dataclass(frozen=True)
class Walk:
    """What is done with each model.

    Parameters
    ----------
    question
        The name of the results' file.
    measure
        Fills the row of a model (its `"stage"` says how far it came) and writes files into a folder.
    reload
        Returns, from the files alone and in a new process, how far the model is from what it was.
    short
        The models of a quick run.
    """

    question: str
    measure: Callable[[Row, Path], None]
    reload: Callable[[Row, Path], float]
    short: tuple[str, ...]

    def main(self, description: str | None) -> None:
        """Read the arguments, walk, save."""
        options = _arguments(description)
        wanted = self.short if options.quick else options.only
        chosen = [(s, n) for s in options.sources for n in SOURCES[s] if wanted is None or n in wanted]
        device = f"{platform.machine()} cpu"
        old = options.out / f"{self.question}.{platform.machine().replace('_', '-')}-cpu.json"
        rows = {} if options.fresh or not old.exists() else _rows(old)
        if options.go_on:
            chosen = [pair for pair in chosen if not _is_done(rows.get("/".join(pair), {}))]
        start, path = time.perf_counter(), old
        with tempfile.TemporaryDirectory() as name:
            for row in self._rows(chosen, Path(name), Pool(options.workers, options.limit)):
                print(json.dumps(row, ensure_ascii=False), flush=True)
                rows["/".join((row["source"], row["model"]))] = row
                path = save(self.question, device, {"models": list(rows.values())}, folder=options.out)
        bad = [key for key, row in rows.items() if not _is_done(row)]
        seconds = time.perf_counter() - start
        print(f"{len(rows)} models in {seconds:.0f} s, {len(bad)} failed: {', '.join(bad)}; saved {path}")

    def _rows(self, chosen: Sequence[tuple[str, str]], folder: Path, pool: Pool) -> Iterator[Row]:
        """Yield a row for each model, as they are done."""
        # What measures has all packages imported already; what loads comes from this process, which has none of them.
        own = [module for source in {source for source, _ in chosen} for module in _OF_SOURCE.get(source, [])]
        multiprocessing.get_context("forkserver").set_forkserver_preload([*_PRELOADED, *own])
        for number, (source, name) in enumerate(chosen):
            place = folder / str(number)
            place.mkdir()
            row = {"model": name, "source": source}
            pool.add((row, place, False), "forkserver", _measured, self.measure, row, place)
        for (row, place, loads), answer in pool.answers():
            if isinstance(answer, Failed):
                print(answer.log[-2000:], file=sys.stderr, flush=True)
                yield {**row, "loaded" if loads else "failed": answer.how[:300]}
            elif _LEFT_OUT in answer:
                print(f"left out {row['source']}/{row['model']}: {answer[_LEFT_OUT]}", flush=True)
            elif loads or "failed" in answer:
                yield answer
            else:
                pool.add((answer, place, True), "fork", _loaded, self.reload, answer, place, next_one=True)


def _measured(measure: Callable[[Row, Path], None], row: Row, place: Path) -> Row:
    """Return the row of a model; what goes wrong is part of it."""
    start = time.perf_counter()
    try:
        measure(row, place)
        del row["stage"]
    except ModuleNotFoundError as missing:
        return {**row, _LEFT_OUT: str(missing)}
    except Exception as failed:  # noqa: BLE001 - a zoo reports what it finds
        traceback.print_exc()
        stage = row.pop("stage", "")
        return {**row, "failed": f"{stage}: {told(failed)}"}
    return {**row, "seconds": round(time.perf_counter() - start, 1)}


def _loaded(reload: Callable[[Row, Path], float], row: Row, place: Path) -> Row:
    """Return the row with what became of the file."""
    try:
        found: float | str = reload(row, place)
    except Exception as failed:  # noqa: BLE001 - a zoo reports what it finds
        traceback.print_exc()
        found = told(failed)
    return {**row, "loaded": found}


def _arguments(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--only", nargs="+", help="names of models")
    parser.add_argument("--sources", nargs="+", default=list(SOURCES), choices=list(SOURCES))
    parser.add_argument("--quick", action="store_true", help="a few small models")
    parser.add_argument("--continue", dest="go_on", action="store_true", help="leave out models that have a good row")
    parser.add_argument("--fresh", action="store_true", help="forget the rows of earlier runs")
    parser.add_argument("--workers", type=int, default=2, help="models at a time")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds per model")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
    return parser.parse_args()


def _is_done(row: Row) -> bool:
    return "failed" not in row and isinstance(row.get("loaded"), float)


def _rows(path: Path) -> dict[str, Row]:
    return {f"{row['source']}/{row['model']}": row for row in json.loads(path.read_text())["results"]["models"]}

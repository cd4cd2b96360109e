"""The SparTA paper's own grid on the CPU: three models under four patterns, against today's runtimes.

Run with ``python benchmarks/compiler/paper_grid.py --threads 2``. Models: BERT-base (32 x 128 tokens), MobileNet-v1 (32
images), HuBERT-base (32 x 16,000 samples). Patterns: pruned channels and heads, 95 % unstructured, channels in int8,
and int8 blocks with a fine-grained remainder. Rivals run the dense model: eager, `torch.compile`, ONNX Runtime and
OpenVINO where they are installed, in fp32, and in int8 where ours is; TVM in fp32, where it builds and is no more than
ten times slower than eager. The ablation is timed beside them: the pruned model cut by propagation, sparse kernels in
its graph, all of it as the compiler hosts it, and with ``tune="full"``.

A row is made in pieces: files and code of the rivals, our two compiled files, memory, the timing of all. What is made
stays in ``--keep``. ``--limit`` ends a run before a piece that would take longer than what is left; the same command
goes on from there, and its status is 3 until all is measured. ``--prepare`` makes what does not have to be made on a
quiet machine. ``--only`` takes some models, patterns, or rows such as
``"BERT-base, channels"``; ``--again`` measures rows that the results have already. Several processes may write the same
results, each on cores of its own.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import sparta
from sparta.compiler.run.host import Host, hosted
from sparta.specialize.cpu.library import load
from sparta.tables import table
from sparta.testing import compare

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "oneshot"))
from paper_networks import MODELS, PATTERNS, pruned
from rows import keep, stored
from runtimes import TVM_FILE, has, rival_calls

from record import RESULTS, path_of

QUESTION, DEVICE = "compiler_paper_grid", f"{platform.machine()} cpu"
TUNES = ("quick", "full")
UNFINISHED = 3
_WARMING = 70.0  # seconds, about, in which all models are loaded and called once before they are timed
_BEYOND = 1.3  # of a budget: what a compilation takes, with capture, checks and files
_CALIBRATION = 40.0
_COMPILING = 100.0


def main() -> int:
    """Measure every row that is asked for, or as many as there is time for."""
    options = _options()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    load()  # compiled before any budget begins
    path = path_of(QUESTION, options.machine, options.out or RESULTS)
    done = set() if options.again else {(row["model"], row["pattern"]) for row in stored(path)}
    begin, first = time.perf_counter(), True
    for row in _rows(options):
        if (row.name, row.pattern) in done:
            continue
        for what, seconds, made in row.pieces():
            if not first and time.perf_counter() - begin + seconds > options.limit:
                print(f"not begun, the time is up: {row.name}, {row.pattern}: {what}", flush=True)
                return UNFINISHED
            before, first = time.perf_counter(), False
            made()
            print(f"{row.name}, {row.pattern}: {what} in {time.perf_counter() - before:.0f} s", flush=True)
        if options.prepare:
            continue
        print(_shown(row.found), flush=True)
        if not options.quick or options.out:
            keep(row.found, ("model", "pattern"), _in_order, path, options.machine, {"threads": options.threads})
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="models, patterns, or 'model, pattern'")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=40.0, help="for the last timing of a row")
    parser.add_argument("--budget", type=float, default=90.0, help="for compiling a row")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds for this run")
    parser.add_argument("--keep", type=Path, help="a folder for what is made on the way; a temporary one by default")
    parser.add_argument("--prepare", action="store_true", help="make the rivals' files and code only, measure nothing")
    parser.add_argument("--no-inductor", action="store_true")
    parser.add_argument("--no-full", action="store_true", help="leave the last step of the ablation out")
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--quick", action="store_true", help="small models and batches")
    parser.add_argument("--machine", default=DEVICE, help="a name, for results that stand beside those of other ones")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.quick:
        options.seconds, options.budget, options.batch, options.no_inductor, options.no_full = 1.0, 10.0, 2, True, True
    return options


def _rows(options: argparse.Namespace) -> Iterator[_Row]:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) if options.keep is None else options.keep
        for name in MODELS:
            for pattern in PATTERNS:
                if not options.only or not {name, pattern, f"{name}, {pattern}"}.isdisjoint(options.only):
                    yield _Row(name, pattern, folder, options)


def _in_order(row: dict[str, Any]) -> tuple[int, int]:
    """Return what rows are sorted by."""
    return list(MODELS).index(row["model"]), PATTERNS.index(row["pattern"])


@dataclass
class _Row:
    """One model under one pattern, and the files that are made of it."""

    name: str
    pattern: str
    folder: Path
    options: argparse.Namespace
    found: dict[str, Any] = field(default_factory=dict)

    def pieces(self) -> Iterator[tuple[str, float, Callable[[], None]]]:
        """Yield what is still to be made: what it is, seconds that it takes, about, and what makes it."""
        if not self._files("onnx").issubset(self._known_files()):
            yield "files of other runtimes", 30.0 + _CALIBRATION * self.integers, self._export
        if has("tvm") and not any(self._tvm.with_suffix(end).exists() for end in (".so", ".txt")):
            yield "code of TVM", _COMPILING, self._export
        if not self.options.no_inductor and not self._warm.exists():
            yield "code of torch.compile", _COMPILING, self._prepare_inductor
        if not self.options.prepare:
            yield from self._measured_pieces()

    def _measured_pieces(self) -> Iterator[tuple[str, float, Callable[[], None]]]:
        """Yield those that need a quiet machine."""
        for tune in TUNES[: 1 if self.options.no_full else 2]:
            if not self._compiled(tune).exists():
                seconds = _BEYOND * self.options.budget + _CALIBRATION * self.integers
                yield f"compiled, {tune}", seconds, lambda tune=tune: self._compile(tune)  # type: ignore[misc]
        if not self.options.no_memory and not self._memory.exists():
            yield "memory", 30.0, self._weigh
        yield "timed", self.options.seconds + _WARMING, self._time

    @property
    def integers(self) -> bool:
        """Whether the pattern has int8."""
        return "int8" in self.pattern

    @property
    def _own(self) -> Path:
        return self.folder / self.name / self.pattern.replace(" ", "-").replace(",", "").replace("%", "percent")

    @property
    def _warm(self) -> Path:
        return self.folder / self.name / "torch.compile"

    @property
    def _tvm(self) -> Path:
        return self.folder / self.name / TVM_FILE

    @property
    def _memory(self) -> Path:
        return self._own / "memory.json"

    def _compiled(self, tune: str) -> Path:
        return self._own / f"{tune}.sparta"

    def _files(self, kind: str) -> set[str]:
        return {f"dense.{kind}", *([f"dense-int8.{kind}"] if self.integers else [])}

    def _known_files(self) -> set[str]:
        return {path.name for path in (self.folder / self.name).glob("*")}

    @cached_property
    def _dense(self) -> tuple[nn.Module, Tensor, Tensor]:
        """The dense model, an input, and another to calibrate by."""
        torch.manual_seed(0)
        full, small, inputs = MODELS[self.name]
        quick, batch = self.options.quick, self.options.batch
        return (small if quick else full)().eval(), inputs(batch, quick), inputs(batch, quick)

    @cached_property
    def _pruned(self) -> tuple[nn.Module, sparta.Spec | None]:
        return pruned(self._dense[0], self.pattern)

    def _rivals(self) -> dict[str, Callable[[Tensor], Any]]:
        dense, x, other = self._dense
        precisions = ("fp32", "int8") if self.integers else ("fp32",)
        folder = self.folder / self.name
        folder.mkdir(parents=True, exist_ok=True)
        threads = self.options.threads
        return rival_calls(dense, x, folder, threads, calibration=[other], precisions=precisions, tvm=True)

    def _export(self) -> None:
        self._rivals()  # which writes them
        for name in self._files("onnx") - self._known_files():  # nobody reads them, and the piece is done
            (self.folder / self.name / name).touch()

    def _compile(self, tune: str) -> None:
        _, x, other = self._dense
        sparse, spec = self._pruned
        given: dict[str, Any] = {"budget_s": self.options.budget, "dynamic_shapes": None, "tune": tune}
        if self.integers:
            given |= {"precision": "int8", "calibration": [other], "max_loss": 10.0}
        fast = sparta.compile(sparse, x, spec, **given)
        self._own.mkdir(parents=True, exist_ok=True)
        (self._own / f"{tune}.txt").write_text(str(fast.report), encoding="utf-8")
        fast.save(self._compiled(tune))

    def _prepare_inductor(self) -> None:
        """Let Inductor compile the model once: its cache has the code for the processes that come after."""
        dense, x, _ = self._dense
        with torch.no_grad():
            torch.compile(dense, dynamic=False)(x)
        self._warm.parent.mkdir(parents=True, exist_ok=True)
        self._warm.touch()

    def _weigh(self) -> None:
        """Note the memory that a process of its own holds after a call, beyond what it held before the model."""
        dense, x, _ = self._dense
        whole, small = self._own / "dense.pt2", self._own / "input.pt"
        torch.export.save(torch.export.export(dense, (x,)), whole)
        torch.save(x, small)
        files = {"eager": whole, "sparta": self._compiled("quick")}
        precision = "int8" if self.integers else "fp32"
        name = "dense-int8.onnx" if self.integers else "dense.onnx"
        onnx = self.folder / self.name / name
        if onnx.stat().st_size:
            files |= {f"{kind} {precision}": onnx for kind in ("onnxruntime", "openvino")}
        script = Path(__file__).with_name("paper_memory.py")
        mib = {}
        for key, file in files.items():
            command = [sys.executable, script, key.split()[0], file, small, str(self.options.threads)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - ourselves
            if done.returncode == 0:
                mib[key] = float(done.stdout.split()[-1])
        whole.unlink()
        self._memory.write_text(json.dumps(mib), encoding="utf-8")

    def _time(self) -> None:
        dense, x, _ = self._dense
        calls: dict[str, Callable[[Tensor], Any]] = {"eager": dense, **self._rivals()}
        if not self.options.no_inductor:
            calls["torch.compile"] = torch.compile(dense, dynamic=False)
        steps: dict[str, Callable[[Tensor], Any]] = {}
        if self.pattern.startswith("channels"):
            steps["propagation"] = sparta.propagate(self._pruned[0], x).compact()
        fast = sparta.load(self._compiled("quick"))
        steps["kernels"] = hosted(fast.graph, Host.EAGER)
        steps["sparta"] = fast
        if not self.options.no_full:
            steps["full search"] = sparta.load(self._compiled("full"))
        with torch.no_grad():
            timings = compare(calls | steps, (x,), warmup=0, iters=30, max_seconds=self.options.seconds).timings
        medians = {name: timing.median for name, timing in timings.items()}
        ablation = {"dense": medians["eager"], **{name: medians[name] for name in steps}}
        weights = sum(p.numel() * p.element_size() for p in dense.parameters())
        files = {"dense": weights / 2**20, "sparta": self._compiled("quick").stat().st_size / 2**20}
        held = json.loads(self._memory.read_text(encoding="utf-8")) if self._memory.exists() else {}
        rivals = {name: medians[name] for name in (*calls, "sparta")}
        self.found = {"model": self.name, "pattern": self.pattern, "median_ms": rivals, "ablation_ms": ablation}
        self.found |= {"mib": files, "held_mib": held}
        reason = self._tvm.with_suffix(".txt")
        self.found["left_out"] = reason.read_text(encoding="utf-8") if reason.exists() else None


def _shown(row: dict[str, Any]) -> str:
    ours = row["median_ms"]["sparta"]
    times = {**row["median_ms"], **row["ablation_ms"]}
    rows = [[row["model"], row["pattern"], name, ms, ms / ours] for name, ms in times.items()]
    return table(["model", "pattern", "what", "ms", "sparta is faster by"], rows) + f"\nMiB: {row['held_mib']}"


if __name__ == "__main__":
    raise SystemExit(main())

"""A service in small: threads call a compiled model with changing sizes while it is reloaded and tuned again.

Beside them a second process compiles the same model into the same file and the same tuning store, and is killed and
started again at random moments. Every answer is compared with the masked dense model in float64, and the memory of this
process is sampled throughout.
"""

import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
import warnings
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

import sparta
from compiler.conftest import forcing
from sparta.tables import table

SIZES = (1, 2, 3, 7, 16, 33, 64, 128)
INPUTS = 96
TOLERANCE = 1e-4  # of the largest value; the layers sum 96 to 256 products in float32
MOST_GROWTH = 64.0  # MiB over the run, after its first third
WARM_UP = 9  # reloads, two of which tune
MIB = 2**20
_LONGEST = 120.0  # seconds that the second process may take for its files


def pruned_model():
    """Return the model that both processes serve: its weights depend on nothing but the seed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(INPUTS, 256), nn.ReLU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 24)).eval()
    sparta.Spec.from_pattern(model, sparta.Block(4, 1), 0.9).apply(model)
    return model.requires_grad_(requires_grad=False)


def compiled(model, seconds, *, forced=False):
    """Return the model compiled for any number of rows; forced, all of its layers run on sparse kernels."""
    rows = torch.export.Dim("rows", min=1, max=max(SIZES))
    x, more = torch.randn(16, INPUTS), [torch.randn(size, INPUTS) for size in (2, 128)]
    options = {"dynamic_shapes": ({0: rows},), "more_inputs": more, "budget_s": seconds, "progress": False}
    if not forced:
        return sparta.compile(model, x, inductor=False, **options)
    with forcing():  # nothing is measured, so nothing can be left out for want of time
        return sparta.compile(model, x, inductor=False, tune="off", **options | {"budget_s": None})


@dataclass
class Outcome:
    """What a run came to."""

    seconds: float = 0.0
    sparse: int = 0  # layers of the first model that run on sparse kernels
    answers: int = 0
    reloads: int = 0
    sparse_reloads: int = 0  # of models with sparse layers
    retunes: int = 0
    kills: int = 0
    written: int = 0  # artifacts that the second process wrote
    wrong: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    memory: list[tuple[float, float]] = field(default_factory=list)  # seconds, MiB

    @property
    def growth(self):
        """MiB between the second third of the run and its end; 0 without samples."""
        later = self.memory[len(self.memory) // 3 :]
        if len(later) < 4:
            return 0.0
        quarter = max(1, len(later) // 4)
        first, last = (statistics.median(mib for _, mib in part) for part in (later[:quarter], later[-quarter:]))
        return last - first

    @property
    def slope(self):
        """MiB per hour after the first third of the run: a line by least squares."""
        later = self.memory[len(self.memory) // 3 :]
        if len(later) < 4:
            return 0.0
        return 3600 * statistics.linear_regression(*zip(*later, strict=True)).slope

    @property
    def failures(self):
        """What went wrong, in words."""
        grown = [f"memory grew by {self.growth:.0f} MiB"] if self.growth > MOST_GROWTH else []
        return [*self.wrong, *self.errors, *grown]

    def __str__(self):
        rows = [
            ["seconds", f"{self.seconds:.0f}"],
            ["sparse layers", self.sparse],
            ["answers compared", f"{self.answers:,}"],
            ["wrong", len(self.wrong)],
            ["errors", len(self.errors)],
            ["reloads", self.reloads],
            ["of these with sparse layers", self.sparse_reloads],
            ["retunes", self.retunes],
            ["second process killed", self.kills],
            ["files it wrote", self.written],
            ["memory at the end, MiB", f"{self.memory[-1][1]:.0f}" if self.memory else ""],
            ["memory, MiB per hour", f"{self.slope:+.1f}"],
        ]
        return table(["soak", ""], rows)


class Soak:
    """One run; `folder` takes the artifact and the cache of both processes."""

    def __init__(self, folder, *, seconds, threads=8, seed=0):
        self.folder, self.threads, self.random = Path(folder), threads, random.Random(seed)
        self.path = self.folder / "model.sparta"
        self.outcome, self.seconds, self.end = Outcome(), seconds, 0.0
        self.lock = threading.Lock()
        self.truth = pruned_model().double()
        self.serving = None

    def run(self):
        """Serve for so many seconds and return what came of it."""
        with self._cache():
            self.serving = compiled(pruned_model(), 4.0, forced=True)
            self.serving.save(self.path)
            self.outcome.sparse = len(self.serving.report.plan.sparse)
            begin = time.monotonic()
            self.end = begin + self.seconds
            jobs = [lambda number=number: self._serve(number) for number in range(self.threads)]
            jobs += [self._maintain, self._second_process, lambda: self._sample(begin)]
            workers = [threading.Thread(target=self._guarded, args=(job,)) for job in jobs]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
            self.outcome.seconds = time.monotonic() - begin
            self._check_store()
        return self.outcome

    @contextmanager
    def _cache(self):
        before = os.environ.get("SPARTA_CACHE")
        os.environ["SPARTA_CACHE"] = str(self.folder / "cache")
        try:
            yield
        finally:
            if before is None:
                del os.environ["SPARTA_CACHE"]
            else:
                os.environ["SPARTA_CACHE"] = before

    def _guarded(self, job):
        try:
            job()
        except Exception as error:  # noqa: BLE001 - whatever ends a thread is what the run is to find
            self.outcome.errors.append(f"{type(error).__name__}: {error}")

    def _on(self):
        return time.monotonic() < self.end and not self.outcome.errors

    def _serve(self, number):
        """Call the model that serves now, with sizes in an order of this thread's own, and compare."""
        generator, order, answered = torch.Generator().manual_seed(number), random.Random(number), 0
        while self._on():
            x = torch.randn(order.choice(SIZES), INPUTS, generator=generator)
            with torch.no_grad():
                found, expected = self.serving(x), self.truth(x.double())
            error = float((found.double() - expected).abs().max() / expected.abs().max())
            if found.shape != expected.shape or not error < TOLERANCE:
                self.outcome.wrong.append(f"{tuple(x.shape)}: off by {error:.3g} of the largest value")
            answered += 1
        with self.lock:
            self.outcome.answers += answered

    def _maintain(self):
        """Load the file that is there, mostly as it is, sometimes with its kernels measured again; serve that."""
        while self._on():
            retune = self.outcome.reloads % 4 == 3
            self.serving = sparta.load(self.path, retune=retune)
            self.outcome.reloads += 1
            self.outcome.sparse_reloads += bool(self.serving.kernels)
            self.outcome.retunes += retune
            self._wait(0.5)

    def _second_process(self):
        """Keep a process that compiles into the same file and store; kill it at any moment, start it again."""
        command = [sys.executable, Path(__file__).with_name("writer.py"), self.path]
        while self._on():
            log = self.folder / "writer.log"
            with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT) as process:
                self._let_it_write(process, log)
                if process.poll() is not None:
                    raise RuntimeError(f"the second process ended by itself: {log.read_text()[-1000:]}")
                process.send_signal(signal.SIGKILL)
            self.outcome.kills += 1
            self.outcome.written += log.read_text().count("saved")

    def _let_it_write(self, process, log):
        """Wait until the process has written some files and is at work on the next, or for a while before its first."""
        files, moment = self.random.choice((0, 1, 1, 2, 3)), 4.0 * self.random.random()

        def short_of(count):
            return process.poll() is None and log.read_text().count("saved") < count

        self._wait(_LONGEST, lambda: short_of(files))
        self._wait(moment, lambda: process.poll() is None)

    def _wait(self, seconds, going=lambda: True):
        end = time.monotonic() + seconds
        while time.monotonic() < end and self._on() and going():
            time.sleep(0.05)

    def _sample(self, begin):
        """Sample memory, after what the first loads and tunings bring in for good."""
        while self._on():
            if self.outcome.reloads < WARM_UP:
                self._wait(0.5)
                continue
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            self.outcome.memory.append((time.monotonic() - begin, pages * os.sysconf("SC_PAGE_SIZE") / MIB))
            self._wait(0.5)

    def _check_store(self):
        """The store has lost nothing to killed writers: every entry in it can be read."""
        store = sparta.specialize.tuning.store.TuningStore()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            store.export(self.folder / "export.json")
        self.outcome.errors += [str(warning.message) for warning in caught if "damaged" in str(warning.message)]

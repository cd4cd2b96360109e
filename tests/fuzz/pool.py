"""Readers in processes of their own, with a time limit; what ends one is an outcome, and another takes its place."""

import contextlib
import json
import os
import queue
import random
import select
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from fuzz.mutate import mutated

SECONDS = 20
GOOD = ("loaded", "called", "refused")
BAD = ("foreign", "signal", "time-out", "execution", "memory")
TESTS = Path(__file__).parents[1]


@dataclass(frozen=True)
class Finding:
    """What came of one bad file."""

    kind: str
    outcome: str
    detail: str
    number: int
    source: str


class Reader:
    """One reading process, started when it is needed."""

    def __init__(self, folder, corpus, program=(str(TESTS / "fuzz" / "reader.py"),)):
        self.folder, self.corpus, self.program, self.process = folder, corpus, program, None

    def read(self, kind, path):
        """Return the outcome and a word on it."""
        if self.process is None:
            self._start()
        answer = self._ask({"kind": kind, "path": str(path)}, SECONDS)
        if isinstance(answer, dict):
            return answer["outcome"], answer["detail"]
        return answer

    def _start(self):
        path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
        cache = os.environ.get("SPARTA_CACHE", "") or str(Path.home() / ".cache" / "sparta")
        environment = {
            **os.environ,
            "PYTHONPATH": path,
            "SPARTA_CACHE": cache,
            "OMP_NUM_THREADS": "1",
            "MALLOC_ARENA_MAX": "2",
        }
        command = [sys.executable, *self.program, str(self.folder)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=self.folder
        )
        for kind, good in self.corpus:
            answer = self._ask({"kind": kind, "path": str(good), "warm": True}, 300)
            if not isinstance(answer, dict) or answer["outcome"] not in ("loaded", "called"):
                raise AssertionError(f"the good file {good} gave {answer}")

    def _ask(self, question, seconds):
        """Return the answer, or the outcome of a process that gives none."""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(question) + "\n")
            self.process.stdin.flush()
        ready, _, _ = select.select([self.process.stdout], [], [], seconds)
        line = self.process.stdout.readline() if ready else ""
        if line:
            return json.loads(line)
        if not ready:
            self.close()
            return "time-out", f"after {seconds} s"
        code = self.process.wait()
        self.close()
        return "signal", f"exit {code}"

    def close(self):
        """End the process."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
            self.process = None


def fuzz(corpus, count, seed=0, workers=1, keep=None, kinds=None):
    """Read `count` mutated files; yields a finding for each.

    Parameters
    ----------
    corpus
        (kind, path) of good files. Kinds are taken equally often.
    keep
        Folder for the files that gave a bad outcome; None keeps none.
    """
    corpus = [(kind, path) for kind, path in corpus if kinds is None or kind in kinds]
    numbers, found = queue.SimpleQueue(), queue.SimpleQueue()
    for number in range(count):
        numbers.put(number)

    def work(folder):
        reader = Reader(folder, corpus)
        try:
            while True:
                found.put(_one(reader, numbers.get_nowait(), seed, keep))
        except queue.Empty:
            pass
        except BaseException as error:  # noqa: BLE001 - told to the caller's thread
            found.put(error)
        finally:
            reader.close()
            found.put(None)

    with tempfile.TemporaryDirectory() as temporary:
        for number in range(workers):
            folder = Path(temporary) / str(number)
            folder.mkdir()
            threading.Thread(target=work, args=(folder,)).start()
        working = workers
        while working:
            one = found.get()
            if isinstance(one, BaseException):
                raise one
            if one is not None:
                yield one
            working -= one is None


def _one(reader, number, seed, keep):
    """Make the bad file of a number and read it."""
    kinds = sorted({kind for kind, _ in reader.corpus})
    kind = kinds[number % len(kinds)]
    sources = [path for other, path in reader.corpus if other == kind]
    source = sources[number // len(kinds) % len(sources)]
    bad = reader.folder / f"mutated{source.suffix}"
    bad.write_bytes(mutated(source.read_bytes(), source.name, random.Random(f"{seed} {number}")))
    outcome, detail = reader.read(kind, bad)
    if keep is not None and outcome in BAD:
        shutil.copyfile(bad, Path(keep) / f"{number}-{outcome}-{source.name}")
    return Finding(kind, outcome, detail, number, source.name)


def table(findings):
    """Return how often each outcome came, by kind."""
    counts = Counter((one.kind, one.outcome) for one in findings)
    columns = (*GOOD, *BAD)
    lines = [f"{'kind':10}" + "".join(f"{name:>11}" for name in ("files", *columns))]
    for kind in sorted({one.kind for one in findings}):
        row = [counts[kind, name] for name in columns]
        lines.append(f"{kind:10}" + "".join(f"{number:>11}" for number in (sum(row), *row)))
    totals = [sum(counts[kind, name] for kind in {one.kind for one in findings}) for name in columns]
    lines.append(f"{'all':10}" + "".join(f"{number:>11}" for number in (sum(totals), *totals)))
    return "\n".join(lines)

"""Processes for measurements: each piece of work has one of its own and a time limit, several run at a time.

A piece that crashes or does not return costs its own answer alone. Answers are JSON values and travel in files, as do
logs; each process can have cores of its own, so that those beside it do not disturb what it times.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import multiprocessing
import os
import tempfile
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

import torch

Way = Literal["forkserver", "fork", "spawn"]


@dataclass(frozen=True)
class Failed:
    """Work that gave no answer: how it ended, and the end of its log."""

    how: str
    log: str


@dataclass
class _Work:
    key: Any
    way: Way
    function: Callable[..., Any]
    arguments: tuple[Any, ...]


@dataclass
class _Running:
    work: _Work
    place: Path
    process: BaseProcess
    cores: tuple[int, ...]
    until: float


@dataclass
class Pool:
    """Work to be done, and what does it.

    Parameters
    ----------
    workers
        How many pieces run at a time.
    limit
        Seconds for each.
    cores
        How many cores each has for itself; 0 leaves that to the system.
    """

    workers: int
    limit: float
    cores: int = 0
    _waiting: deque[_Work] = field(default_factory=deque)
    _running: list[_Running] = field(default_factory=list)

    def add(self, key: Any, way: Way, function: Callable[..., Any], *arguments: Any, next_one: bool = False) -> None:
        """Have a function of a module called in a process, after all others or before them; also between answers."""
        place = self._waiting.appendleft if next_one else self._waiting.append
        place(_Work(key, way, function, arguments))

    def answers(self) -> Iterator[tuple[Any, Any | Failed]]:
        """Yield the key of each piece with its answer, as they end."""
        allowed = sorted(os.sched_getaffinity(0))
        free = [tuple(allowed[at : at + self.cores]) for at in range(0, len(allowed), max(1, self.cores))]
        workers = min(self.workers, len(free)) if self.cores else self.workers
        with tempfile.TemporaryDirectory() as folder:
            number = 0
            while self._waiting or self._running:
                while self._waiting and len(self._running) < workers:
                    place = Path(folder) / str(number)
                    place.mkdir()
                    number += 1
                    self._start(self._waiting.popleft(), place, free.pop(0) if self.cores else ())
                for ended in self._ended():
                    if self.cores:
                        free.append(ended.cores)
                    yield ended.work.key, self._answer(ended)

    def _start(self, work: _Work, place: Path, cores: tuple[int, ...]) -> None:
        context = multiprocessing.get_context(work.way)
        arguments = (work.function, work.arguments, place, cores)
        process: BaseProcess = context.Process(target=_call, args=arguments)  # type: ignore[attr-defined]
        process.start()
        self._running.append(_Running(work, place, process, cores, time.perf_counter() + self.limit))

    def _ended(self) -> list[_Running]:
        """Wait a while, and return what has ended; what is late is ended."""
        wait([each.process.sentinel for each in self._running], timeout=1.0)
        now = time.perf_counter()
        ended = [each for each in self._running if now > each.until or not each.process.is_alive()]
        for each in ended:
            each.process.kill()
            each.process.join()
            self._running.remove(each)
        return ended

    def _answer(self, ended: _Running) -> Any | Failed:
        answer = ended.place / "answer.json"
        if answer.exists():
            return json.loads(answer.read_text())
        log = (ended.place / "log.txt").read_text(errors="replace") if (ended.place / "log.txt").exists() else ""
        error = ended.place / "error.txt"
        if error.exists():
            return Failed(error.read_text(), log)
        late = time.perf_counter() > ended.until
        return Failed(f"took more than {self.limit:g} s" if late else f"ended with {ended.process.exitcode}", log)


def _call(function: Callable[..., Any], arguments: tuple[Any, ...], place: Path, cores: tuple[int, ...]) -> None:
    """Call a function in this process; what it prints is the log."""
    if cores:
        os.sched_setaffinity(0, cores)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with (place / "log.txt").open("a", buffering=1) as log, contextlib.redirect_stdout(log):
        os.dup2(log.fileno(), 2)
        faulthandler.enable(log)
        try:
            answer = json.dumps(function(*arguments))
            (place / "answer.part").write_text(answer)
            (place / "answer.part").rename(place / "answer.json")
        except Exception as failed:  # noqa: BLE001 - how it failed is the answer
            traceback.print_exc(file=log)
            (place / "error.txt").write_text(f"{type(failed).__name__}: {failed}")
        os._exit(0)  # threads of libraries need not end in order

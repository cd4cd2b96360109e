"""The session of one compilation: how much to measure, until when, and where results are kept and shown.

One :class:`Session` goes through all steps. The budget is one for the whole compilation; a step asks
:attr:`Session.left`, which is net of the time reserved for verification and of past overruns, and does less when little
is left. An interrupt only sets a flag that ends the measuring.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from sparta.common.progress import LiveLine, Progress, Step
from sparta.compiler.clock import Measure, interleaved
from sparta.errors import NameNotFoundError, SpartaError, ValueRangeError, did_you_mean, message
from sparta.specialize.tuning.forgiving import ForgivingStore

__all__ = ["EFFORT", "ForgivingStore", "Session", "Show", "Tune", "checked_tune", "in_words", "shown"]

Tune = Literal["quick", "full", "off"]
Show = Callable[[str], object]
EFFORT: Mapping[str, tuple[int, float]] = {"quick": (12, 3.0), "full": (60, 20.0)}
"""How many trials, and how many seconds, the search for one kernel may take."""
_TUNES = ("quick", "full", "off")
_FOR_LAYERS = 0.6  # of the budget that is left when they begin
_FOR_CAPTURE = 0.5
_FOR_CHECKS = 0.25  # of what is left
_NOTHING = 0.02
_SLOW_SECONDS = 0.3
_MANY_CALLS = 150  # about as many as a thorough contest makes


@dataclass
class Session:
    """One compilation under way.

    Parameters
    ----------
    tune
        How much to measure.
    budget_s
        Seconds for the whole compilation; None sets no limit.
    show
        Called with a line about what is being tried.
    reserve
        Seconds of the budget that are kept for what comes after measuring.
    brief
        Whether the whole is chosen by one look: for models that are measured on their own afterwards.
    hurried
        Whether the time was too short to try, or to time well, all that competes for a whole.
    in_graphs
        Whether the model may be replayed from a CUDA graph, so that the host's time does not count.
    measure
        What times whole models; a test passes a clock of its own.
    now
        Seconds by the clock that the budget goes by.
    call_seconds
        What one call of the model as given takes, about.
    inductor_seconds
        What Inductor takes to compile one call of a graph, about.
    """

    tune: Tune = "quick"
    budget_s: float | None = None
    show: Show = lambda _line: None
    seed: int = 0
    store: ForgivingStore = field(default_factory=ForgivingStore)
    interrupted: bool = False
    notes: list[str] = field(default_factory=list)
    reserve: float = 0.0
    hurried: bool = False
    in_graphs: bool = False
    brief: bool = False
    measure: Measure = interleaved
    now: Callable[[], float] = time.perf_counter
    call_seconds: float = 0.0
    inductor_seconds: float = 0.1  # before one was compiled here
    started: float = field(init=False)
    _layers_from: float = 0.0
    _grace: float | None = None
    _beyond: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.started = self.now()
        checked_tune(self.tune)
        if self.budget_s is not None and not self.budget_s > 0:
            raise ValueRangeError(message(f"budget_s={self.budget_s}", "seconds above 0, or None for no limit"))

    def again(self, share: float = 1.0) -> Session:
        """Return a session like this one that starts now, with its whole budget or a share of it."""
        budget = None if self.budget_s is None else share * self.budget_s
        return Session(self.tune, budget, self.show, self.seed, self.store, measure=self.measure, now=self.now)

    @contextmanager
    def showing(self) -> Iterator[None]:
        """Take the live line away in the end, where there is one."""
        try:
            yield
        finally:
            if isinstance(self.show, LiveLine):
                self.show.close()

    def use_graphs(self) -> None:
        """Let the host's time not count: kernels are timed as CUDA graphs replay them, and kept apart from others."""
        self.in_graphs = True
        self.store = ForgivingStore("graphs")

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return self.now() - self.started

    @property
    def slow(self) -> bool:
        """Whether calls take so long that few of them must do: each counts by itself, or for the budget."""
        patient = self.budget_s is None or _MANY_CALLS * self.call_seconds <= self.budget_s
        return self.call_seconds > _SLOW_SECONDS or not patient

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Let what is done within take none of the budget."""
        before = self.now()
        try:
            yield
        finally:
            self.started += self.now() - before

    @property
    def left(self) -> float:
        """Seconds that measuring may still take; 0 after an interrupt."""
        if self.interrupted:
            return 0.0
        if self.budget_s is None:
            return float("inf")
        # The first step may compile the kernels' library, which comes once; the least overrun is what all others have.
        overrun = min(self._beyond[1:], default=0.0)
        return max(0.0, self.budget_s + (self._grace or 0.0) - self.elapsed - self.reserve - overrun)

    @property
    def left_for_layers(self) -> float:
        """Seconds that measuring layers one by one may still take, so that the whole can be measured after them."""
        if self.budget_s is None:
            return self.left
        whole = self.budget_s + (self._grace or 0.0)
        return min(self.left, self._layers_from + _FOR_LAYERS * (whole - self._layers_from) - self.elapsed)

    def begin_measuring(self, calls: int) -> None:
        """Let layers have their share of what is left from now on, with time for so many calls kept for afterwards.

        What came before cannot be cut short. Where it took more than half of the budget, the other half is still there,
        once: a budget that capture has spent would measure nothing.
        """
        wanted = calls * self.call_seconds
        if self.budget_s is None:
            self.reserve = wanted
            return
        if self._grace is None:
            self._grace = max(0.0, self.elapsed - _FOR_CAPTURE * self.budget_s)
        self.reserve = 0.0
        self.reserve = min(wanted, _FOR_CHECKS * self.left)
        self._layers_from = self.elapsed

    @contextmanager
    def step(self, seconds: float) -> Iterator[None]:
        """Run one step that was given `seconds`, and learn what it takes beyond them."""
        before = self.elapsed
        try:
            yield
        finally:
            self._beyond.append(max(0.0, self.elapsed - before - seconds))

    def share(self, share: float, most: float) -> float:
        """Return the seconds for a layer that gets a share of what is left for layers."""
        return min(most, self.left_for_layers * share)

    def affords(self, seconds: float) -> bool:
        """Whether a step can be paid for: by what is left, or because next to the budget it is nothing."""
        small = self.budget_s is not None and seconds < _NOTHING * self.budget_s
        return not self.interrupted and (seconds < self.left or small)

    def note(self, text: str) -> None:
        """Keep a line for the report, once."""
        if text and text not in self.notes:
            self.notes.append(text)

    def gave_up(self, what: str, error: BaseException) -> None:
        """Keep a line on a step that failed, after which the step before it is what runs."""
        self.note(f"{what}: {in_words(error)}")


def checked_tune(tune: Tune | bool) -> Tune:  # noqa: FBT001 - an older spelling
    """Return how much to measure; True stands for ``"quick"`` and False for ``"off"``.

    >>> checked_tune("full"), checked_tune(True)
    ('full', 'quick')
    """
    if isinstance(tune, bool):
        return "quick" if tune else "off"
    if tune not in _TUNES:
        raise NameNotFoundError(did_you_mean(str(tune), _TUNES, "tune"))
    return tune


def in_words(error: BaseException) -> str:
    """Return an error in one line: its text, with its type where it is none of ours.

    >>> in_words(KeyError("weight"))
    "KeyError: 'weight'"
    """
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else "no message"
    return text if isinstance(error, SpartaError) else f"{type(error).__name__}: {text}"


def shown(progress: Progress | bool | None) -> Show:  # noqa: FBT001 - as people pass it
    """Return what shows a line about progress: the given callable, the live line of a terminal, stderr, or nothing.

    >>> shown(None if not sys.stderr.isatty() else False)("trying ...")
    >>> shown(print)("trying ...")
    trying ...
    """
    if callable(progress):
        return lambda line: progress(Step(line))
    if progress is not False and sys.stderr.isatty():
        return LiveLine(sys.stderr)
    if progress:
        return lambda line: print(f"sparta: {line}", file=sys.stderr, flush=True)  # noqa: T201 - what progress is for
    return lambda _line: None

"""How long does a function take? Warm-up, medians and spread, of one function or of several that take turns.

:func:`profile` times one function, :func:`compare` several; both work on the CPU (wall clock) and on CUDA (events), and
both check the outputs first if told what to expect. A machine drifts (clocks, caches, other users), so functions that
are to be compared are interleaved, call by call, and medians are compared. On a busy machine the wall clock also counts
what other processes do while a call waits for a processor; :func:`compare_own_time` leaves that out.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, overload

import torch

from sparta.errors import NameNotFoundError, ValueRangeError, did_you_mean, message
from sparta.measure.checks import check
from sparta.measure.processor_time import waits
from sparta.tables import table

__all__ = ["Comparison", "Timing", "compare", "compare_own_time", "profile"]

Function = Callable[..., Any]
Inputs = torch.Tensor | Sequence[Any] | Mapping[str, Any]

_COARSE, _COARSE_MILLISECONDS = 1.01, 1e-3  # how far own time may lie above the wall clock's: two clocks are never one


@dataclass(frozen=True)
class Timing:
    """The times of one function, in milliseconds.

    Examples
    --------
    >>> timing = Timing(samples=(2.0, 1.0, 3.0, 2.0), device="cpu")
    >>> timing.median, timing.min, timing.spread
    (2.0, 1.0, 0.5)
    >>> print(timing)
    2 ms, spread 0.5, min 1, 4 samples on cpu
    """

    samples: tuple[float, ...]
    device: str

    def __post_init__(self) -> None:
        if not self.samples:
            raise ValueRangeError(message("a timing without samples", "one or more"))

    @property
    def median(self) -> float:
        """The median time in ms."""
        return statistics.median(self.samples)

    @property
    def min(self) -> float:
        """The shortest time in ms."""
        return min(self.samples)

    @property
    def spread(self) -> float:
        """The interquartile range in ms: half of the samples lie within it; 0 of a single sample."""
        if len(self.samples) == 1:
            return 0.0
        lower, _, upper = statistics.quantiles(self.samples, n=4, method="inclusive")
        return upper - lower

    def __float__(self) -> float:
        """Return the median in ms."""
        return self.median

    def __str__(self) -> str:
        return (
            f"{self.median:.4g} ms, spread {self.spread:.2g}, min {self.min:.4g}, "
            f"{len(self.samples)} samples on {self.device}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the statistics and the samples as plain values."""
        return {
            "median": self.median,
            "spread": self.spread,
            "min": self.min,
            "samples": list(self.samples),
            "unit": "ms",
            "device": self.device,
        }


@dataclass(frozen=True)
class Comparison:
    """The times of several functions that took turns; the first is what the others are compared with.

    Examples
    --------
    >>> both = Comparison({"dense": Timing((4.0,), "cpu"), "sparse": Timing((2.0,), "cpu")})
    >>> both.speedup("sparse"), both.fastest
    (2.0, 'sparse')
    >>> print(both)
    cpu     median ms  spread ms  min ms  samples  speedup
    ------  ---------  ---------  ------  -------  -------
    dense           4          0       4        1    1.00x
    sparse          2          0       2        1    2.00x
    """

    timings: Mapping[str, Timing]

    def __getitem__(self, name: str) -> Timing:
        """Return the timing of one function."""
        if name not in self.timings:
            raise NameNotFoundError(did_you_mean(name, self.timings, "timed function"))
        return self.timings[name]

    @property
    def fastest(self) -> str:
        """The name of the function with the lowest median; the first of equals."""
        return min(self.timings, key=lambda name: self.timings[name].median)

    def speedup(self, name: str) -> float:
        """Return how many times faster a function is than the first one: the ratio of the medians."""
        first = next(iter(self.timings.values()))
        median = self[name].median
        return first.median / median if median else math.inf

    def __str__(self) -> str:
        columns = [self._device(), "median ms", "spread ms", "min ms", "samples", "speedup"]
        rows = [
            [
                name,
                timing.median,
                timing.spread,
                timing.min,
                len(timing.samples),
                f"{self.speedup(name):.2f}x",
            ]
            for name, timing in self.timings.items()
        ]
        return table(columns, rows)

    def to_dict(self) -> dict[str, Any]:
        """Return each function's statistics with its ``speedup`` over the first, as plain values."""
        return {name: {**timing.to_dict(), "speedup": self.speedup(name)} for name, timing in self.timings.items()}

    def _device(self) -> str:
        return " and ".join(dict.fromkeys(timing.device for timing in self.timings.values()))


@overload
def profile(
    fn: Function,
    inputs: Inputs = ...,
    target_outputs: object = ...,
    *,
    warmup: int = ...,
    iters: int = ...,
    max_seconds: float = ...,
    device: torch.device | str | None = ...,
    reduction: int = ...,
) -> Timing: ...


@overload
def profile(
    fn: Mapping[str, Function],
    inputs: Inputs = ...,
    target_outputs: object = ...,
    *,
    warmup: int = ...,
    iters: int = ...,
    max_seconds: float = ...,
    device: torch.device | str | None = ...,
    reduction: int = ...,
) -> Comparison: ...


def profile(
    fn: Function | Mapping[str, Function],
    inputs: Inputs = (),
    target_outputs: object = None,
    *,
    warmup: int = 10,
    iters: int = 100,
    max_seconds: float = 10.0,
    device: torch.device | str | None = None,
    reduction: int = 1,
) -> Timing | Comparison:
    """Time a function, or several by name (then as :func:`compare` does).

    Parameters
    ----------
    fn
        The function, or a mapping from names to functions.
    inputs
        Its positional arguments, a mapping of keyword arguments, or a single tensor.
    target_outputs
        What the function must return; compared by :func:`sparta.testing.check` before anything is timed. What
        that or the function raises comes through.
    warmup
        How many calls come before the timed ones; at least one is made.
    iters
        How many calls are timed.
    max_seconds
        Stop warming up and timing after about this long; every function gets one timed call at least.
    device
        Where the work happens: ``'cpu'`` times with the wall clock, ``'cuda'`` with events. ``None`` looks at
        the tensors among inputs and outputs.
    reduction
        For the check: how many terms the longest sum of one output element has.

    Returns
    -------
    Timing or Comparison

    Examples
    --------
    >>> x = torch.rand(16, 16)
    >>> timing = profile(torch.matmul, (x, x), x @ x, iters=5, reduction=16)
    >>> len(timing.samples), timing.device
    (5, 'cpu')
    """
    comparison = compare(
        fn if isinstance(fn, Mapping) else {"function": fn},
        inputs,
        target_outputs,
        warmup=warmup,
        iters=iters,
        max_seconds=max_seconds,
        device=device,
        reduction=reduction,
    )
    return comparison if isinstance(fn, Mapping) else comparison["function"]


def compare(
    functions: Mapping[str, Function],
    inputs: Inputs = (),
    target_outputs: object = None,
    *,
    warmup: int = 10,
    iters: int = 100,
    max_seconds: float = 10.0,
    device: torch.device | str | None = None,
    reduction: int = 1,
) -> Comparison:
    """Time several functions on the same inputs, one call of each in turn.

    Parameters
    ----------
    functions
        From names to functions; the first is what the others are compared with.
    inputs, target_outputs, warmup, iters, max_seconds, device, reduction
        As for :func:`profile`; ``iters`` counts the calls of each function.

    Examples
    --------
    >>> x = torch.rand(8, 8)
    >>> comparison = compare({"mm": torch.mm, "matmul": torch.matmul}, (x, x), iters=3)
    >>> sorted(comparison.to_dict())
    ['matmul', 'mm']
    """
    _check_counts(functions, warmup, iters, max_seconds)
    calls: dict[str, Callable[[], Any]] = {name: _bound(fn, inputs) for name, fn in functions.items()}
    outputs = {}
    for name, call in calls.items():
        outputs[name] = call()
        if target_outputs is not None:
            check(outputs[name], target_outputs, reduction=reduction, what=f"output of {name}")
    where = _device_of(device, inputs, outputs)
    outputs.clear()

    return _timed(calls, where, warmup, iters, max_seconds)


def compare_own_time(
    functions: Mapping[str, Callable[[], Any]],
    *,
    warmup: int = 10,
    iters: int = 100,
    max_seconds: float = 10.0,
    patience: float = 1.0,
    device: torch.device | str | None = None,
) -> Comparison:
    """Time several functions as :func:`compare` does, but count only what is their own time on a busy CPU.

    That is the time in which the calling thread had a processor, and not the time in which other processes had it. The
    wall clock still tells in rounds in which a call waited for something (another thread, a file), where CUDA is in
    use, and on systems that cannot say so.

    Parameters
    ----------
    functions, warmup, iters, max_seconds, device
        As for :func:`compare`; the functions take no arguments. With a device and a warmup of 0, the first call of
        each is timed.
    patience
        Go on for so many times `max_seconds` by the wall clock, until the calls themselves have had `max_seconds`.

    Examples
    --------
    >>> x = torch.rand(8, 8)
    >>> both = compare_own_time({"one": lambda: x @ x, "two": lambda: x @ x @ x}, iters=3)
    >>> len(both["two"].samples)
    3
    """
    _check_counts(functions, warmup, iters, max_seconds)
    if not patience >= 1:
        raise ValueRangeError(message(f"patience={patience}", "1 or more"))
    cold = device is not None and warmup == 0
    where = _device_of(device, [] if cold else [call() for call in functions.values()])
    # What waits for a device may do so without a pause: its own time would be that of the waiting.
    cuda = bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
    return _timed(functions, where, warmup, iters, max_seconds, None if cuda else patience)


def _timed(
    calls: Mapping[str, Callable[[], Any]],
    where: torch.device,
    warmup: int,
    iters: int,
    max_seconds: float,
    patience: float | None = None,
) -> Comparison:
    """Warm up and time calls that have been made once."""
    round_seconds = _warm_up(calls, warmup - 1, max_seconds / 4, where)
    with _no_collector():
        if where.type == "cuda":
            rounds = max(1, min(iters, int(max_seconds / round_seconds) if round_seconds else iters))
            samples = _sample_cuda(calls, rounds, max_seconds, where)
        else:
            samples = _sample_cpu(calls, iters, max_seconds, patience)
    return Comparison({name: Timing(tuple(times), str(where)) for name, times in samples.items()})


def _check_counts(functions: Mapping[str, Function], warmup: int, iters: int, max_seconds: float) -> None:
    """Raise unless there is something to time, and a number of times."""
    if not functions:
        raise ValueRangeError(message("no functions to time", "one or more", "pass {'name': function}"))
    if warmup < 0 or iters < 1 or not max_seconds > 0:
        given = f"warmup={warmup}, iters={iters}, max_seconds={max_seconds}"
        raise ValueRangeError(message(given, "warmup >= 0, iters >= 1, max_seconds > 0"))


def _bound(fn: Function, inputs: Inputs) -> Callable[[], Any]:
    """Return the function with its inputs, ready to be called without any."""
    if isinstance(inputs, Mapping):
        return lambda: fn(**inputs)
    arguments = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
    return lambda: fn(*arguments)


def _device_of(device: torch.device | str | None, *structures: object) -> torch.device:
    """Return the device that was named, or that of the first tensor that is not on the CPU."""
    if device is None:
        found = (tensor.device for tensor in chain.from_iterable(map(_tensors, structures)))
        where = next((place for place in found if place.type != "cpu"), torch.device("cpu"))
    else:
        where = torch.device(device)
    if where.type not in ("cpu", "cuda"):
        raise ValueRangeError(message(f"device {str(where)!r}", "'cpu' and 'cuda'", "pass device= or move the inputs"))
    return where


def _tensors(structure: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested tuples, lists and dicts."""
    if isinstance(structure, torch.Tensor):
        yield structure
    elif isinstance(structure, Mapping):
        yield from chain.from_iterable(map(_tensors, structure.values()))
    elif isinstance(structure, (tuple, list)):
        yield from chain.from_iterable(map(_tensors, structure))


def _turns(names: Sequence[str], rounds: int) -> Iterator[Sequence[str]]:
    """Yield the order of calls for each round: everyone goes first equally often, and follows others in turn.

    What a function finds in the caches is what the one before it left, so every other round goes backwards.
    """
    for turn in range(rounds):
        start = turn // 2 % len(names)
        order = [*names[start:], *names[:start]]
        yield order if turn % 2 == 0 else order[::-1]


def _warm_up(calls: Mapping[str, Callable[[], Any]], rounds: int, seconds: float, where: torch.device) -> float:
    """Call everything for some rounds, as long as there is time; return the seconds of the last round."""
    _synchronize(where)
    begin = time.perf_counter()
    last = 0.0
    for _ in range(rounds):
        start = time.perf_counter()
        for call in calls.values():
            call()
        _synchronize(where)
        last = time.perf_counter() - start
        if time.perf_counter() - begin > seconds:
            break
    return last


def _sample_cpu(
    calls: Mapping[str, Callable[[], Any]], rounds: int, seconds: float, patience: float | None
) -> dict[str, list[float]]:
    """Return the milliseconds of each call by the wall clock; with patience, by the time of the thread itself."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    begin, spent = time.perf_counter(), 0.0
    for order in _turns(list(calls), rounds):
        times = _round(calls, order, own_time=patience is not None)
        for name, milliseconds in times.items():
            samples[name].append(milliseconds)
        spent += sum(times.values()) * 1e-3
        passed = time.perf_counter() - begin
        if passed >= seconds and (patience is None or spent >= seconds or passed >= patience * seconds):
            break
    return samples


def _round(calls: Mapping[str, Callable[[], Any]], order: Sequence[str], *, own_time: bool) -> dict[str, float]:
    """Return the milliseconds of one call of each, all by the same clock, so that they can be compared."""
    wall: dict[str, float] = {}
    own: dict[str, float] = {}
    before = waits() if own_time else None
    for name in order:
        call = calls[name]
        if before is None:
            start = time.perf_counter()
            call()
            wall[name] = (time.perf_counter() - start) * 1e3
        else:
            start, own_start = time.perf_counter(), time.thread_time()
            call()
            own_end, end = time.thread_time(), time.perf_counter()
            wall[name], own[name] = (end - start) * 1e3, (own_end - own_start) * 1e3
    # Where a call slept, its own time leaves out what it waited for, such as the work of other threads.
    if before is None or waits() != before:
        return wall
    fine = all(0 < own[name] <= _COARSE * wall[name] + _COARSE_MILLISECONDS for name in order)
    return own if fine else wall


def _sample_cuda(
    calls: Mapping[str, Callable[[], Any]], rounds: int, seconds: float, where: torch.device
) -> dict[str, list[float]]:
    """Return the milliseconds of each call between two events on the current stream.

    Nothing waits for the device in between, so that launches run ahead and only the device's time is
    measured. That is why the warm-up fits the number of rounds to the time there is; the clock here only
    catches a bad estimate.
    """
    begin = time.perf_counter()
    marks: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in calls}
    with torch.cuda.device(where):
        for order in _turns(list(calls), rounds):
            for name in order:
                start, end = _event(), _event()
                start.record()
                calls[name]()
                end.record()
                marks[name].append((start, end))
            if time.perf_counter() - begin > seconds:
                break
        _synchronize(where)
        return {name: [start.elapsed_time(end) for start, end in pairs] for name, pairs in marks.items()}


def _event() -> torch.cuda.Event:
    """Return a CUDA event that can tell the time."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _synchronize(where: torch.device) -> None:
    """Wait for a CUDA device; the CPU never runs ahead."""
    if where.type == "cuda":
        torch.cuda.synchronize(where)


@contextmanager
def _no_collector() -> Iterator[None]:
    """Keep the garbage collector from running in the middle of a timed call."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()

"""Programs: a trace with its layouts decided, its memory planned and its steps in tables, ready to run again and again.

Neighbouring products hand over panels, products that read the same tensor share one packed copy, and whatever no one
but steps reads lies in one arena, where memory is used again as soon as it is free.
"""

from __future__ import annotations

import ctypes
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from sparta.compiler.run.chain.gaps import set_apart
from sparta.compiler.run.chain.layouts import fuse, hand_over_panels, readers_of, reads, round_early, share_packed
from sparta.compiler.run.chain.memory import LINE, planned
from sparta.compiler.run.chain.native import constant_of
from sparta.compiler.run.chain.places import hand_over_bytes
from sparta.compiler.run.chain.trace import ImageItem, Linear, Native, PythonCall, Trace
from sparta.compiler.run.chain.values import Constant, Made, NotChained, Slot, Source, Value, mapped
from sparta.compiler.run.eager import quicker
from sparta.errors import ShapeError, message
from sparta.specialize.cpu.chain import NO_ROW, NOWHERE, STEP_BYTES, Step, place, step_table
from sparta.specialize.cpu.library import Library, load, raise_for

__all__ = ["Program"]

_Slots = list[Any]


@dataclass
class _Segment:
    """Steps without Python in between, and whose memory they use."""

    steps: list[tuple[Step, list[int]]] = field(default_factory=list)
    sources: list[Source] = field(default_factory=list)  # after the arena
    passing: set[int] = field(default_factory=set)  # steps whose results only the next one reads

    def place_of(self, source: Source | None, offset: int) -> int:
        """Return a place in the memory of a source."""
        if source is None:
            return NOWHERE
        if isinstance(source, Made):
            if source.slot is None:
                return place(0, source.offset + offset)
            source = _slot_of(source)
        number = next((n for n, each in enumerate(self.sources) if _same(each, source)), len(self.sources))
        if number == len(self.sources):
            self.sources.append(source)
        return place(1 + number, offset)


def _slot_of(made: Made) -> Slot:
    assert made.slot is not None  # noqa: S101 - asked for those only
    return Slot(made.slot)


def _same(one: Source, two: Source) -> bool:
    if isinstance(one, Slot) and isinstance(two, Slot):
        return one.number == two.number
    return one is two


class Program:
    """What runs a graph for inputs of one size.

    Parameters
    ----------
    trace
        The graph as steps and calls.
    """

    def __init__(self, trace: Trace) -> None:
        self.slots, self.library, self.shapes = trace.slots, load(), trace.shapes
        fuse(trace)
        round_early(trace)
        self.handed, self.shared = hand_over_panels(trace) + hand_over_bytes(trace), share_packed(trace)
        self.apart = set_apart(trace)
        self._new: dict[int, tuple[torch.Size, tuple[int, ...], torch.dtype]] = {}
        self._show_python(trace)
        self.arena_bytes = planned(trace.items, trace.threads)
        self._free: list[Tensor] = []
        self._runs = self._compiled(trace)
        self._results = _fetcher(trace.outputs, copies=True)
        self.steps = sum(not isinstance(item, PythonCall) for item in trace.items)
        self.calls = len(trace.items) - self.steps

    def __call__(self, leaves: Sequence[Any]) -> Any:
        """Return the graph's flat results."""
        slots, arena = self._begun(leaves), self._arena()
        for run in self._runs:
            run(slots, arena)
        self._free.append(arena)
        return self._results(slots)

    @property
    def in_one_call(self) -> bool:
        """Whether all of it is one call of the library."""
        return len(self._runs) == 1 and isinstance(self._runs[0], _SegmentRun)

    def side_by_side(self, parts: Sequence[Sequence[Any]], threads: int) -> list[Any]:
        """Return the flat results for several inputs of this size, each computed by one of so many threads.

        Programs that are not one call of the library cannot.
        """
        (run,) = self._runs
        assert isinstance(run, _SegmentRun)  # noqa: S101 - callers have asked
        slots, arenas = [self._begun(leaves) for leaves in parts], [self._arena() for _ in range(threads)]
        run.side_by_side(slots, arenas)
        self._free += arenas
        return [self._results(each) for each in slots]

    def timed(self, leaves: Sequence[Any]) -> list[tuple[str, float]]:
        """Run it step by step; return the steps' kinds and the calls' names with the seconds that they took."""
        slots, arena = self._begun(leaves), self._new_arena()
        return [each for run in self._runs for each in run.timed(slots, arena)]

    def _begun(self, leaves: Sequence[Any]) -> _Slots:
        return [*leaves, *[None] * (self.slots - len(leaves))]

    def _arena(self) -> Tensor:
        """Return memory that no one else uses now."""
        try:
            return self._free.pop()
        except IndexError:
            return self._new_arena()

    def _new_arena(self) -> Tensor:
        return torch.empty(self.arena_bytes + LINE, dtype=torch.uint8)

    # ------------------------------------------------------------------ making it

    def _show_python(self, trace: Trace) -> None:
        """Give memory that Python reads, or that is returned, to tensors of its own."""
        seen: list[Value] = []

        def look(each: Any) -> None:
            if isinstance(each, Value):
                seen.append(each)

        for item in trace.items:
            if isinstance(item, PythonCall):
                mapped((item.args, item.kwargs), look)
        mapped(trace.outputs, look)
        made = {id(each.source) for each in seen if isinstance(each.source, Made)}
        for item in trace.items:
            if isinstance(item, PythonCall) or id(item.result.source) not in made:
                continue
            source, meta = item.result.source, item.result.meta
            assert isinstance(source, Made)  # noqa: S101 - a step writes what is made
            source.slot = self.slots
            self._new[self.slots] = (meta.shape, meta.stride(), meta.dtype)
            self.slots += 1

    def _compiled(self, trace: Trace) -> list[_SegmentRun | _PythonRun]:
        runs: list[_SegmentRun | _PythonRun] = []
        segment = _Segment()
        fresh: list[int] = []
        read = {
            each.source.number
            for item in trace.items
            if not isinstance(item, PythonCall)
            for each in reads(item)
            if isinstance(each.source, Slot)
        }
        passing = _passing(trace)
        for item in trace.items:
            if isinstance(item, PythonCall):
                if segment.steps:
                    runs.append(_SegmentRun(segment, {slot: self._new[slot] for slot in fresh}, self.library))
                    segment, fresh = _Segment(), []
                runs.append(_PythonRun(item, check=item.slot in read))
                continue
            segment.steps += _steps_of(item, segment)
            source = item.result.source
            if id(item) in passing:
                segment.passing.add(len(segment.steps) - 1)
            if isinstance(source, Made) and source.slot is not None:
                fresh.append(source.slot)
        if segment.steps:
            runs.append(_SegmentRun(segment, {slot: self._new[slot] for slot in fresh}, self.library))
        return runs


def _steps_of(item: Native | Linear | ImageItem, segment: _Segment) -> list[tuple[Step, list[int]]]:
    def at(value: Value | None) -> int:
        return NOWHERE if value is None else segment.place_of(value.source, value.offset)

    if isinstance(item, Native):
        return [(item.call.step, [at(item.call.x), at(item.result), *map(at, item.call.others)])]
    if isinstance(item, ImageItem):
        return [_image_step(item, segment)]
    product, steps = item.product, []
    x = at(item.x)
    if item.packed is not None:
        panel = segment.place_of(item.packed, 0)
        if item.packs:
            steps.append((product.pack(item.tokens, item.stride), [x, panel]))
        x = panel
    form = "panel" if item.packed is not None else "real" if item.x.meta.dtype == torch.float32 else "bytes"
    has_residual = item.residual is not None
    step = product.step(item.tokens, item.stride, form, to_panel=item.to_panel, residual=has_residual)
    return [*steps, (step, [x, at(item.result), at(item.residual)])]


def _passing(trace: Trace) -> set[int]:
    """Return the layers of images, by identity, whose results nothing but the next layer reads, all of it as its x."""
    found: set[int] = set()
    readers = readers_of(trace)
    for item, after in pairwise(trace.items):
        if not isinstance(item, ImageItem) or not isinstance(after, ImageItem):
            continue
        source, uses = item.result.source, readers[id(item.result.source)]
        whole = after.x.meta.shape == item.result.meta.shape and after.x.offset == item.result.offset
        if isinstance(source, Made) and source.slot is None and len(uses) == 1 and uses[0][1] is after.x and whole:
            found.add(id(item))
    return found


def _image_step(item: ImageItem, segment: _Segment) -> tuple[Step, list[int]]:
    """Return a layer of images, with what is handed to it and by it in bytes."""

    def at(value: Value | None, in_bytes: Made | None) -> int:
        if in_bytes is not None:
            return segment.place_of(in_bytes, 0)
        return NOWHERE if value is None else segment.place_of(value.source, value.offset)

    step, handing = item.product.step, item.product.handing
    if handing is not None:
        step = handing(item.from_bytes is not None, item.to_bytes, item.residual_bytes is not None)
    beside = item.in_bytes is not None and item.in_bytes is not item.result.source
    ends = [at(item.x, item.from_bytes), at(item.result, item.in_bytes), at(item.residual, item.residual_bytes)]
    return step, [*ends, at(None, item.room), at(item.result, None) if beside else NOWHERE]


class _SegmentRun:
    """A segment in its table: one call of the library."""

    def __init__(
        self, segment: _Segment, new: Mapping[int, tuple[torch.Size, tuple[int, ...], torch.dtype]], library: Library
    ) -> None:
        self._table, self._alive = step_table(segment.steps, segment.passing)
        self.names, self.passing = [step.kind.name.lower() for step, _ in segment.steps], segment.passing
        # Fixed tensors have fixed addresses; the others are asked in every call.
        self._fixed = [each.tensor.data_ptr() if isinstance(each, Constant) else 0 for each in segment.sources]
        self._asked = [(n + 1, each.number) for n, each in enumerate(segment.sources) if isinstance(each, Slot)]
        self._held = [each for each in segment.sources if isinstance(each, Constant)]
        self._new = [(slot, *how) for slot, how in new.items()]
        self._pack = struct.Struct(f"@{1 + len(self._fixed)}P").pack
        self._run, self._address = library.handle.sparta_run_chain, ctypes.addressof(self._table)
        self._run_parts = library.handle.sparta_run_chains

    def __call__(self, slots: _Slots, arena: Tensor) -> None:
        memories = self._pack(*self._memories(slots, arena))
        _check(self._run(self._address, len(self.names), memories, torch.get_num_threads()))

    def side_by_side(self, parts: Sequence[_Slots], arenas: Sequence[Tensor]) -> None:
        """Run it for the slots of several parts, each on one thread; there are as many threads as arenas."""
        memories = [each for slots in parts for each in self._memories(slots, arenas[0])]
        given = (ctypes.c_void_p * len(memories))(*memories)
        own = (ctypes.c_void_p * len(arenas))(*map(_line_of, arenas))
        each, count = 1 + len(self._fixed), len(self.names)
        _check(self._run_parts(self._address, count, given, each, len(parts), own, len(arenas)))

    def timed(self, slots: _Slots, arena: Tensor) -> list[tuple[str, float]]:
        """Run it step by step, and return what each took."""
        memories, found = self._pack(*self._memories(slots, arena)), []
        for number, name in enumerate(self.names):
            begin = time.perf_counter()
            _check(self._run(self._address + number * STEP_BYTES, 1, memories, torch.get_num_threads()))
            found.append((name, time.perf_counter() - begin))
        return found

    def _memories(self, slots: _Slots, arena: Tensor) -> list[int]:
        for slot, shape, stride, dtype in self._new:
            slots[slot] = torch.empty_strided(shape, stride, dtype=dtype)
        memories = [_line_of(arena), *self._fixed]
        for number, slot in self._asked:
            memories[number] = slots[slot].data_ptr()
        return memories


def _line_of(arena: Tensor) -> int:
    """Return the address of the first whole line of an arena."""
    start = arena.data_ptr()
    return start + -start % LINE


def _check(code: int) -> None:
    if code == NO_ROW:
        raise IndexError("index out of range in self")
    if code:
        raise_for(code)


class _PythonRun:
    """A Python call as part of a program; what steps read of it has the strides that they expect."""

    def __init__(self, item: PythonCall, *, check: bool) -> None:
        self._args, self._kwargs = _fetcher(item.args), _fetcher(item.kwargs) if item.kwargs else None
        self._target, self._slot = quicker(item.target), item.slot
        self._expected = (item.meta.shape, item.meta.stride()) if check else None
        self.name = str(getattr(item.target, "__name__", item.target))

    def __call__(self, slots: _Slots, arena: Tensor) -> None:
        del arena
        args, kwargs = self._args(slots), self._kwargs
        result = self._target(*args) if kwargs is None else self._target(*args, **kwargs(slots))
        if self._expected is not None and (result.shape, result.stride()) != self._expected:
            shape, stride = self._expected
            if result.shape != shape:
                given = f"a result of shape {tuple(result.shape)}"
                raise ShapeError(message(given, f"{tuple(shape)}, as its sizes say"))
            result = torch.empty_strided(shape, stride, dtype=result.dtype).copy_(result)
        slots[self._slot] = result

    def timed(self, slots: _Slots, arena: Tensor) -> list[tuple[str, float]]:
        """Run it, and return what it took."""
        begin = time.perf_counter()
        self(slots, arena)
        return [(self.name, time.perf_counter() - begin)]


def _fetcher(tree: Any, *, copies: bool = False) -> Callable[[_Slots], Any]:
    """Return a function that puts a call's tensors into arguments; with `copies`, fixed ones are copied."""
    if isinstance(tree, (list, tuple)) and not any(isinstance(each, (list, tuple, dict, slice)) for each in tree):
        parts, kind = [_getter(each, copies=copies) for each in tree], type(tree)
        return lambda slots: kind([part(slots) for part in parts])

    def fetch(slots: _Slots) -> Any:
        return mapped(tree, lambda each: _getter(each, copies=copies)(slots))

    return fetch


def _getter(each: Any, *, copies: bool) -> Callable[[_Slots], Any]:
    if not isinstance(each, Value):
        several = getattr(each, "slot", None)
        if several is not None and hasattr(each, "metas"):
            return lambda slots: slots[several]
        return lambda _: each
    source, meta = each.source, each.meta
    if isinstance(source, Constant):
        held = constant_of(each)
        assert held is not None  # noqa: S101 - it is one
        return (lambda _: held.clone()) if copies else (lambda _: held)
    number = source.slot if isinstance(source, Made) else source.number
    if number is None:
        raise NotChained("memory of the arena that Python reads")
    shape, stride, offset = meta.shape, meta.stride(), int(meta.storage_offset())

    def get(slots: _Slots) -> Any:
        base = slots[number]
        if offset == 0 and base.shape == shape and base.stride() == stride:
            return base
        return torch.as_strided(base, shape, stride, base.storage_offset() + offset)

    return get

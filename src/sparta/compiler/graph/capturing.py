"""Capturing: a model becomes one graph for as many sizes of its inputs as it takes.

First every dim of every input may change, then the first dims alone (the batch), then none. A dim of size 1 would be
taken for one that is always 1, so such dims are traced with 2 where the model takes that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ShapesCollection
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils import _pytree as pytree

from sparta.compiler.graph.sizes import Sizes
from sparta.propagation.capture import Captured, CaptureError, call_arguments, capture
from sparta.propagation.sizes import pinned

__all__ = ["AUTO", "captured_for"]

_MOST_SECONDS = 60.0  # of one attempt; most take a few

AUTO = "auto"
"""Let every dim change that the model lets change."""


def captured_for(
    model: nn.Module, example: Any, dynamic_shapes: Any, note: Callable[[str], object]
) -> tuple[Captured, Sizes]:
    """Return the captured model and the sizes it takes.

    Parameters
    ----------
    dynamic_shapes
        As in :func:`torch.export.export`, or ``"auto"``.
    note
        Called with a line on what could not be captured for all sizes.
    """
    if not (isinstance(dynamic_shapes, str) and dynamic_shapes == AUTO):
        return _sized(capture(model, example, dynamic_shapes), example)
    reasons: list[str] = []
    for what, given, shapes in _attempts(model, example):
        try:
            with _within(None if shapes is None else _MOST_SECONDS):
                captured, sizes = _sized(capture(model, given, shapes), example)
            hindrance = "" if shapes is None else _hindrance(captured, sizes)
        except Exception as error:
            if shapes is None:
                raise
            said = str(error).strip().splitlines() or [""]
            reasons.append((said[0] if isinstance(error, CaptureError) else f"{type(error).__name__}: {said[0]}")[:300])
            continue
        if hindrance:
            reasons.append(hindrance)
            continue
        if reasons:
            note(f"captured for {what} only: {reasons[0]}")
        return captured, sizes
    raise CaptureError("no attempt was made")


@contextmanager
def _within(seconds: float | None) -> Iterator[None]:
    """End a trace that takes longer than so many seconds of this process, at the next module that it comes to.

    Where padding and windows depend on sizes, torch's terms of them grow from layer to layer, and so does its time.
    """
    if seconds is None:
        yield
        return
    thread, end = threading.get_ident(), time.process_time() + seconds

    def check(module: nn.Module, args: Any) -> None:
        del module, args
        if threading.get_ident() == thread and time.process_time() > end:
            raise CaptureError(f"tracing it with sizes that may change takes more than {seconds:.0f} s")

    hook = register_module_forward_pre_hook(check)
    try:
        yield
    finally:
        hook.remove()


def _sized(captured: Captured, example: Any) -> tuple[Captured, Sizes]:
    places = [node for node in captured.graph.nodes if node.op == "placeholder"]
    args, kwargs = call_arguments(example)
    return captured, Sizes.of(places, pytree.tree_leaves((args, kwargs)))


def _hindrance(captured: Captured, sizes: Sizes) -> str:
    """Return why a graph that was traced for many sizes is not taken; nothing where it is."""
    if pinned(captured.graph):
        return "a layer takes a certain number of them, such as a linear layer after Flatten"
    return "" if _has_example(sizes) else "what is 1 in the example is fixed by the model where it is 2"


def _has_example(sizes: Sizes) -> bool:
    """Whether sizes that a trace has fixed are the example's own, which may have been traced with 2 instead of 1."""
    return all(
        not isinstance(term, int) or term == size
        for terms, shape in zip(sizes.dims, sizes.example, strict=True)
        for term, size in zip(terms or (), shape or (), strict=True)
    )


def _attempts(model: nn.Module, example: Any) -> Iterator[tuple[str, Any, Any]]:
    leaves = [leaf for leaf in pytree.tree_leaves(example) if isinstance(leaf, Tensor)]
    if any(leaf.dim() for leaf in leaves):
        wide = _widened(model, example)
        for what, dims in (("any size", None), ("any batch size", (0,))):
            given = _copied(wide)
            yield what, given, _auto(model, given, dims)
    yield "the example's sizes", example, None


def _copied(example: Any) -> Any:
    """Return an example of other tensors: torch marks those that it traces, and leaves the marks where that fails."""
    copies: dict[int, Tensor] = {}

    def copy(leaf: Any) -> Any:
        return copies.setdefault(id(leaf), leaf.detach().clone()) if isinstance(leaf, Tensor) else leaf

    return pytree.tree_map(copy, example)


def _auto(model: nn.Module, example: Any, dims: Sequence[int] | None) -> Any:
    """Return what lets dims of all tensors change: all, or these."""
    args, kwargs = call_arguments(example)
    shapes = ShapesCollection()  # type: ignore[no-untyped-call]
    for leaf in pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, Tensor):
            shapes[leaf] = {dim: Dim.AUTO for dim in range(leaf.dim()) if dims is None or dim in dims}
    return shapes.dynamic_shapes(model, args, kwargs)  # type: ignore[no-untyped-call]


def _widened(model: nn.Module, example: Any) -> Any:
    """Return an example in which dims of size 1 have size 2: all, or the first ones, as far as the model takes it."""
    for dims in (None, (0,)):
        wide = pytree.tree_map(lambda leaf, d=dims: _doubled(leaf, d), example)
        if not _other(wide, example):
            return example
        args, kwargs = call_arguments(wide)
        try:
            with torch.no_grad():
                model(*args, **kwargs)
        except Exception:  # noqa: BLE001, S112 - whatever the model raises, it does not take these sizes
            continue
        return wide
    return example


def _doubled(leaf: Any, dims: Sequence[int] | None) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    times = [2 if size == 1 and (dims is None or dim in dims) else 1 for dim, size in enumerate(leaf.shape)]
    return leaf.repeat(times) if 2 in times else leaf


def _other(one: Any, two: Any) -> bool:
    return any(a is not b for a, b in zip(pytree.tree_leaves(one), pytree.tree_leaves(two), strict=True))

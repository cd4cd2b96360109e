"""Tidying: a captured graph made easier to reason about, without changing what it computes.

Modules of PyTorch fold the batch into the heads of an attention and take it out again (`nn.MultiheadAttention`). With a
batch of any size, nothing could be known of a head in between, so the two steps are joined into one that keeps them
apart. What is written over a whole tensor becomes a value like any other. Ops of fake quantisation get the shape
functions that torch lacks, which tracing with free sizes needs, and recurrent networks are traced without walking their
steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

__all__ = ["copies_as_values", "join_views_of_heads", "know_shapes_of_fake_quantization", "recurrent_networks_whole"]

_aten = torch.ops.aten
_VIEWS = (_aten.view.default, _aten.reshape.default)
_FAKE_QUANTIZATION = (
    "fake_quantize_per_tensor_affine_cachemask",
    "fake_quantize_per_channel_affine_cachemask",
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams",
)


@cache
def know_shapes_of_fake_quantization() -> Any:
    """Give torch the shapes of fake quantisation where it has none; returns what must be kept."""
    library = torch.library.Library("aten", "IMPL", "Meta")  # type: ignore[no-untyped-call]

    def shapes(x: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)

    for name in _FAKE_QUANTIZATION:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "Meta"):
            library.impl(name, shapes)  # type: ignore[no-untyped-call]
    return library


def copies_as_values(graph: fx.Graph) -> None:
    """Replace ``copy(old, new)``, which is `new` in the shape and dtype of `old`, by ops that say so."""
    for node in list(graph.nodes):
        if node.target is not _aten.copy.default:
            continue
        old, new = node.args[:2]
        made, was, now = node.meta["val"], old.meta["val"], new.meta["val"]
        with graph.inserting_before(node):
            value = new
            if tuple(map(str, was.shape)) != tuple(map(str, now.shape)):
                value = graph.call_function(_aten.expand_as.default, (value, old))
                value.meta = {**node.meta, "val": made.to(now.dtype)}
            if was.dtype != now.dtype:
                value = graph.call_function(_aten.to.dtype, (value, was.dtype))
            elif value is new:
                value = graph.call_function(_aten.clone.default, (value,))
        value.meta = {**node.meta, **value.meta}
        node.replace_all_uses_with(value)
        graph.erase_node(node)


def join_views_of_heads(graph: fx.Graph) -> None:
    """Replace (T, B, H·D) → (T, B·H, D) → (B·H, T, D) → (B, H, T, D) by one view and one permutation."""
    for last in list(graph.nodes):
        found = _folded(last)
        if found is None:
            continue
        source, sizes = found
        batch, heads, length, width = sizes
        values = last.meta["val"]
        with graph.inserting_before(last):
            apart = graph.call_function(_aten.view.default, (source, [length, batch, heads, width]))
            turned = graph.call_function(_aten.permute.default, (apart, [1, 2, 0, 3]))
        shape = values.shape
        apart.meta = {**last.meta, "val": source.meta["val"].reshape(shape[2], shape[0], shape[1], shape[3])}
        turned.meta = {**last.meta, "val": apart.meta["val"].permute(1, 2, 0, 3)}
        last.replace_all_uses_with(turned)
        for node in (last, last.args[0], last.args[0].args[0]):
            graph.erase_node(node)


def _folded(last: fx.Node) -> tuple[fx.Node, Sequence[Any]] | None:
    """Return the source and the sizes (B, H, T, D) of a chain of views as above, or None."""
    if last.target not in _VIEWS or not isinstance(last.args[1], Sequence) or len(last.args[1]) != 4:
        return None
    swap = last.args[0]
    if not isinstance(swap, fx.Node) or swap.target is not _aten.transpose.int or sorted(swap.args[1:]) != [0, 1]:  # type: ignore[type-var]
        return None
    fold = swap.args[0]
    if not isinstance(fold, fx.Node) or fold.target not in _VIEWS or len(swap.users) != 1 or len(fold.users) != 1:
        return None
    source = fold.args[0]
    shapes = [n.meta["val"].shape for n in (source, fold, last) if isinstance(n, fx.Node)]
    if len(shapes) != 3 or [len(s) for s in shapes] != [3, 3, 4] or not isinstance(source, fx.Node):
        return None
    (length, batch, whole), _, (b, heads, t, width) = shapes
    static = all(isinstance(size, int) for size in (whole, heads, width))
    same = static and heads * width == whole and str(b) == str(batch) and str(t) == str(length)
    return (source, list(last.args[1])) if same and -1 not in last.args[1] else None


_RECURRENT = (_aten.lstm.input, _aten.gru.input, _aten.rnn_tanh.input, _aten.rnn_relu.input)


@contextmanager
def recurrent_networks_whole() -> Iterator[None]:
    """Let traces see the shapes of recurrent networks only: torch would walk their steps and fix the length."""
    old = {op: (dict(op.py_kernels), dict(op._dispatch_cache)) for op in _RECURRENT}
    try:
        for op in _RECURRENT:
            for key, kernel in list(op.py_kernels.items()):
                op.py_kernels[key] = _shapes_or(kernel)
            op._dispatch_cache.clear()
        yield
    finally:
        for op, (kernels, cached) in old.items():
            op.py_kernels.clear()
            op.py_kernels.update(kernels)
            op._dispatch_cache.clear()
            op._dispatch_cache.update(cached)


def _shapes_or(kernel: Any) -> Any:
    """Return a kernel that makes results of the right shapes from fake tensors, and runs the given one on others."""

    def shapes(x: Tensor, hx: Any, params: list[Tensor], *settings: Any) -> Any:
        if not isinstance(x, FakeTensor) or x.dim() != 3:
            return kernel(x, hx, params, *settings)
        both = settings[4]
        states = [hx] if isinstance(hx, Tensor) else list(hx)
        width = states[0].shape[-1] * (2 if both else 1)
        made = [x.new_empty((*x.shape[:2], width)), *(torch.empty_like(state) for state in states)]
        return tuple(made)

    return shapes

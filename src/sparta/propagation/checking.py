"""The check of a compact model: it is run next to the masked dense model before anyone gets it.

It is compared with the graph that it was cut from, on the example and on other inputs, which finds a wrong rule; and
the graph with the model itself, which finds a model that runs differently while it is traced. Every side gets copies of
the inputs and buffers and the same random numbers, so that a forward that writes or draws does not spoil the next one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from sparta.aten import argument_of, set_argument
from sparta.errors import CheckError, message
from sparta.propagation.capture import Captured
from sparta.propagation.inputs import fresh_inputs

__all__ = ["check_equal", "check_graph"]

_Call = tuple[tuple[Any, ...], dict[str, Any]]


def check_equal(captured: Captured, masked: Mapping[str, Tensor], small: nn.Module, *, brief: bool = False) -> float:
    """Raise :class:`CheckError` unless a compact model agrees with the masked one; returns the difference.

    Parameters
    ----------
    masked
        The tensors of the captured graph as the masked model has them, by name.
    brief
        Compare on the example alone, and leave it to the caller to compare the graph with the model itself.
    """
    worst = 0.0
    example: _Call = (captured.args, dict(captured.kwargs))
    buffers = dict(small.named_buffers())
    for call in (example,) if brief else (example, fresh_inputs(example, seed=0)):
        with _without_dropout(captured.module), _without_dropout(small):
            expected = _run(captured.module, _copies(captured, masked), call)
            actual = _run(small, {name: t.clone() for name, t in buffers.items()}, call)
        worst = max(worst, _largest(expected, actual, "compact model", _RULE))
    if not brief:
        check_graph(captured, masked)
    return worst


def check_graph(captured: Captured, masked: Mapping[str, Tensor]) -> None:
    """Raise :class:`CheckError` unless the captured graph computes what the model itself does, on the example.

    Where PyTorch's fused encoder layers differ, which write zeros to padded positions, a warning says so.
    """
    model = captured.model
    if model is None or captured.train:
        return  # in train mode the two draw different dropouts
    call: _Call = (captured.args, dict(captured.kwargs))
    graph = _run(captured.module, _copies(captured, masked), call)

    def own() -> Any:
        tensors = {n: t for n, t in _copies(captured, masked).items() if n in captured.tensors}
        with captured.as_captured():
            return _run(model, tensors, call)

    try:
        _largest(own(), graph, "captured graph", _STATE)
    except CheckError:
        if not _equal_without_fast_path(own, graph):
            raise
        warnings.warn(
            "the model takes PyTorch's fast path for encoder layers, which writes zeros to padded positions; the "
            "captured graph computes them like the others. Build nn.TransformerEncoder with enable_nested_tensor=False "
            "to have both alike",
            stacklevel=2,
        )


def _equal_without_fast_path(own: Callable[[], Any], graph: Any) -> bool:
    enabled = torch.backends.mha.get_fastpath_enabled()
    if not enabled:
        return False
    try:
        torch.backends.mha.set_fastpath_enabled(value=False)
        _largest(own(), graph, "captured graph", _STATE)
    except CheckError:
        return False
    finally:
        torch.backends.mha.set_fastpath_enabled(value=enabled)
    return True


def _copies(captured: Captured, masked: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors for one call: parameters themselves, and copies of what a forward may write to."""
    return {n: t if isinstance(captured.tensors.get(n), nn.Parameter) else t.clone() for n, t in masked.items()}


def _run(model: nn.Module, tensors: dict[str, Tensor], call: _Call) -> Any:
    """Return a model's outputs on copies of the inputs, from one state of the random numbers, which is put back."""
    args, kwargs = pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, call)
    devices = range(torch.cuda.device_count())
    with torch.no_grad(), torch.random.fork_rng(devices=devices), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the model warns of, it has told its user before
        torch.manual_seed(0)
        return torch.func.functional_call(model, tensors, args, kwargs)


_DROPOUT = {
    torch.ops.aten.dropout.default: "p",
    torch.ops.aten.feature_dropout.default: "p",
    torch.ops.aten.scaled_dot_product_attention.default: "dropout_p",
}


@contextmanager
def _without_dropout(model: nn.Module) -> Iterator[None]:
    """Set the probabilities of all dropout ops to 0 for a while: two models do not drop the same elements."""
    if not isinstance(model, fx.GraphModule):
        yield
        return
    names = {node: _DROPOUT[node.target] for node in model.graph.nodes if node.target in _DROPOUT}
    changed = [(node, name, argument_of(node, name)) for node, name in names.items() if argument_of(node, name)]
    try:
        for node, name, _ in changed:
            set_argument(node, name, 0.0)
        if changed:
            model.recompile()
        yield
    finally:
        for node, name, value in changed:
            set_argument(node, name, value)
        if changed:
            model.recompile()


def _largest(expected: Any, actual: Any, what: str, fix: str) -> float:
    """Return the largest difference of two results; raises for one that rounding does not explain."""
    one, two = pytree.tree_leaves(expected), pytree.tree_leaves(actual)
    if len(one) != len(two):
        raise CheckError(message(f"{len(two)} results of the {what}", f"{len(one)}, as the masked model's", fix))
    pairs = [(a, b) for a, b in zip(one, two, strict=True) if isinstance(a, Tensor) and isinstance(b, Tensor)]
    return max((_difference(a, b, what, fix) for a, b in pairs), default=0.0)


_RULE = "this is a defect of a rule: please report the model; `result.why(name)` shows the rules involved"
_STATE = (
    "look for state that forward changes, random numbers, or code that asks whether it is being traced; "
    "check=False hands the compact model over as it is"
)


def _difference(expected: Tensor, actual: Tensor, what: str, fix: str) -> float:
    if expected.shape != actual.shape:
        raise CheckError(
            message(f"the {what} gives {tuple(actual.shape)}", f"{tuple(expected.shape)}, as the masked model", fix)
        )
    if not expected.is_floating_point() and not expected.is_complex():
        wrong = int((expected != actual).sum())
        if wrong:
            raise CheckError(
                message(f"{wrong} elements of a whole-number output of the {what}", "the masked model's", fix)
            )
        return 0.0
    if expected.is_complex():
        expected, actual = torch.view_as_real(expected.resolve_conj()), torch.view_as_real(actual.resolve_conj())
    one, two = expected.to(torch.float64), actual.to(torch.float64)
    scale = max(1.0, float(one.nan_to_num(0, 0, 0).abs().max())) if one.numel() else 1.0
    bound = scale * torch.finfo(expected.dtype).eps * 4096
    gap = (one - two).abs()
    wrong_places = ~((gap <= bound) | (one == two) | (one.isnan() & two.isnan()))
    if bool(wrong_places.any()):
        raise CheckError(
            message(
                f"{int(wrong_places.sum())} output elements of the {what} differ from the masked model's by up "
                f"to {float(gap.nan_to_num(torch.inf).max()):.3g}",
                f"a difference of {bound:.1g}",
                fix,
            )
        )
    return float(gap.nan_to_num(0.0, 0.0, 0.0).max()) if gap.numel() else 0.0

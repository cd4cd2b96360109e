"""Capture: a model and its example inputs become one graph of ATen ops, under the model's own tensor names.

`torch.export` (non-strict, the training IR as it comes, not decomposed) does the tracing; this module makes its graph
easy to reason about: sub-graphs are inlined, in-place ops become functional ones, tied parameters become one node.
After :func:`capture` every tensor of the model is a ``get_attr`` node whose target is its name in
``model.named_parameters()``, and every other node is a pure function of its arguments, or is listed as `impure`.
"""

from __future__ import annotations

import operator
import traceback
import warnings
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from sparta.errors import SpartaError, ValueRangeError, message
from sparta.modules import member, unwrapped
from sparta.propagation.advice import advice_on, quiet
from sparta.propagation.caches import wants_cache, without_caches
from sparta.propagation.sizes import AUTO, all_sizes, free_dims, input_sizes, pinned
from sparta.propagation.tidy import (
    copies_as_values,
    join_views_of_heads,
    know_shapes_of_fake_quantization,
    recurrent_networks_whole,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["CaptureError", "Captured", "call_arguments", "capture"]

_aten = torch.ops.aten
_WRAPPERS = ("wrap_with_set_grad_enabled", "wrap_with_autocast")


class CaptureError(SpartaError, RuntimeError):
    """`torch.export` could not turn the model into one graph."""


@dataclass(frozen=True)
class Captured:
    """A model as one graph.

    Parameters
    ----------
    module
        The graph with the model's parameters; it is called exactly as the model is.
    tensors
        Every parameter and buffer of the model by name, tied ones under each of their names.
    literals
        Tensors that the forward itself makes from numbers, by the name that the trace gave them.
    tied
        For each name that is another tensor's second name, the name that the graph uses.
    args, kwargs
        The example inputs.
    dynamic_shapes
        As given to :func:`capture`.
    train
        Whether this is the model as it is trained: batch norms use the batch's statistics, dropout is on.
    model
        The model itself, without wrappers.
    """

    module: fx.GraphModule
    tensors: Mapping[str, Tensor]
    literals: Mapping[str, Tensor]
    tied: Mapping[str, str]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    dynamic_shapes: Any
    train: bool = False
    model: nn.Module | None = None

    @property
    def graph(self) -> fx.Graph:
        """The graph: ``get_attr`` nodes are the model's tensors, ``placeholder`` nodes the (flattened) inputs."""
        return self.module.graph

    def arguments(self, given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return inputs that are given as example inputs are as positional and keyword arguments."""
        return call_arguments(given, None)

    @contextmanager
    def as_captured(self) -> Iterator[None]:
        """Put the model into the state in which it was captured, for a while: its mode, and without caches."""
        if self.model is None:
            yield
            return
        with _mode(self.model, train=self.train), without_caches(self.model, active=not wants_cache(self.kwargs)):
            yield

    def nodes(self) -> dict[str, fx.Node]:
        """Return the node of each tensor of the model that the graph uses, by the tensor's name."""
        return {str(n.target): n for n in self.graph.nodes if n.op == "get_attr"}


def capture(
    model: nn.Module,
    example_inputs: Any,
    dynamic_shapes: Any = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    train: bool = False,
) -> Captured:
    """Trace `model` into one graph; the model's own mode is restored afterwards.

    Wrappers around the whole model (DataParallel, `torch.compile` and the like) are taken off. A language model is
    traced without the cache that it returns for the next token, unless the example asks for it.

    Parameters
    ----------
    example_inputs
        A tensor, a tuple of positional arguments (which may be nested), or a dict of keyword arguments.
    dynamic_shapes
        Which dims may change their size, as in :func:`torch.export.export`; ``"auto"`` finds all that may. With None
        the graph is for the shapes of the example only.
    kwargs
        Keyword arguments next to positional ones.
    train
        Trace the model as it is trained instead of as it is used (eval mode).

    Examples
    --------
    >>> model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(inplace=True))
    >>> captured = capture(model, torch.randn(2, 4))
    >>> [str(n.target) for n in captured.graph.nodes if n.op == "call_function"]
    ['aten.linear.default', 'aten.relu.default']
    >>> sorted(captured.nodes())
    ['0.bias', '0.weight']
    """
    args, keywords = call_arguments(example_inputs, kwargs)
    model = unwrapped(model)
    with _mode(model, train=train), without_caches(model, active=not wants_cache(keywords)):
        exported = _exported(model, args, keywords, dynamic_shapes)
    module = exported.module()
    if not isinstance(module, fx.GraphModule):
        raise CaptureError(message(f"torch.export returned a {type(module).__name__}", "a graph module"))
    _inline(module)
    if _has_aliased_mutation(module.graph):
        # Writing through a view cannot be undone node by node; torch's own functionalisation can.
        module = _functionalized(exported)
    _make_functional(module.graph)
    tensors: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    tensors.update(model.named_buffers(remove_duplicate=False))
    tied = _merge_tied(module.graph, tensors)
    _drop_unused(module.graph)
    copies_as_values(module.graph)
    join_views_of_heads(module.graph)
    if hasattr(module, "_guards_fn"):
        module._guards_fn = input_sizes(module.graph)
    module.recompile()
    literals = _literals(module, tensors)
    return Captured(module, tensors, literals, tied, args, keywords, dynamic_shapes, train, model)


def _literals(module: fx.GraphModule, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of the graph that are not the model's own."""
    found: dict[str, Tensor] = {}
    for node in module.graph.nodes:
        name = str(node.target)
        if node.op == "get_attr" and name not in tensors:
            value = member(module, name)
            if isinstance(value, Tensor):
                found[name] = value
    return found


def call_arguments(given: Any, kwargs: Mapping[str, Any] | None = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return example inputs as positional and keyword arguments.

    >>> call_arguments({"a": 1}), call_arguments((1, 2)), call_arguments(3)
    (((), {'a': 1}), ((1, 2), {}), ((3,), {}))
    """
    keywords = dict(kwargs or {})
    if isinstance(given, Mapping):
        return (), {**given, **keywords}
    if isinstance(given, Sequence) and not isinstance(given, str):
        return tuple(given), keywords
    return (given,), keywords


@contextmanager
def _mode(model: nn.Module, *, train: bool) -> Iterator[None]:
    """Switch every module to one mode and each back to its own."""
    modes = {module: module.training for module in model.modules()}
    model.train(train)
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def _exported(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any) -> Any:
    """Export with the given dynamic dims, or with as many as can be traced."""
    if not isinstance(dynamic_shapes, str):
        return _export(model, args, kwargs, dynamic_shapes)
    if dynamic_shapes != AUTO:
        raise ValueRangeError(message(f"dynamic_shapes={dynamic_shapes!r}", f"{AUTO!r}, None, or as in torch.export"))
    know_shapes_of_fake_quantization()
    for shapes in free_dims(model, args, kwargs):
        if shapes is None:
            break
        try:
            with all_sizes(), recurrent_networks_whole():
                exported = _export(model, args, kwargs, shapes)
        except CaptureError:
            continue  # fewer dims may do
        if not pinned(exported.graph_module.graph):
            return exported
    return _export(model, args, kwargs, None)


def _export(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dynamic_shapes: Any,
) -> Any:
    try:
        with warnings.catch_warnings(), torch.no_grad(), quiet():
            # torch's own tracer warns of its internals; what matters to the user is in the error below.
            warnings.simplefilter("ignore")
            return torch.export.export(model, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False)
    except Exception as error:
        reason = str(error).strip().splitlines() or [""]
        given = (
            f"torch.export could not trace {type(model).__name__}{_place(error)}: {type(error).__name__}: {reason[0]}"
        )
        raise CaptureError(message(given, *advice_on(error))) from error


def _functionalized(exported: Any) -> fx.GraphModule:
    """Return the graph without in-place ops, as torch's own functionalisation makes it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module: fx.GraphModule = exported.run_decompositions({}).module()
    except Exception as error:
        raise CaptureError(
            message(
                f"torch could not make the model's in-place ops functional: {type(error).__name__}: {error}",
                "in-place ops on tensors that are not views of others",
                "write `y = y.clone()` before changing a part of y in place",
            )
        ) from error
    _inline(module)
    return module


def _place(error: BaseException) -> str:
    """Return " at file:line (`code`)" for the innermost line of the user's code that the error came through."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "/torch/" not in f.filename and "sparta/propagation" not in f.filename]
    if not own:
        return ""
    last = own[-1]
    return f" at {last.filename}:{last.lineno} (`{last.line}`)"


def _inline(module: fx.GraphModule) -> None:
    """Replace calls of wrapped sub-graphs (`no_grad` and autocast blocks) by their nodes."""
    graph = module.graph
    for node in list(graph.nodes):
        if node.op != "call_function" or getattr(node.target, "_name", "") not in _WRAPPERS:
            continue
        holder = next(a for a in node.args if isinstance(a, fx.Node) and a.op == "get_attr")
        inner = module.get_submodule(str(holder.target))
        if not isinstance(inner, fx.GraphModule):
            continue
        actual = node.args[node.args.index(holder) + 1 :]
        places = [n for n in inner.graph.nodes if n.op == "placeholder"]
        mapping = dict(zip(places, actual, strict=True))
        with graph.inserting_before(node):
            results = graph.graph_copy(inner.graph, mapping)
        for copied in mapping.values():
            if isinstance(copied, fx.Node) and "nn_module_stack" not in copied.meta:
                copied.meta["nn_module_stack"] = node.meta.get("nn_module_stack", {})
        for user in list(node.users):
            if user.target is operator.getitem and isinstance(results, Sequence):
                user.replace_all_uses_with(results[user.args[1]])
                graph.erase_node(user)
        if node.users and isinstance(results, fx.Node):
            node.replace_all_uses_with(results)
        graph.erase_node(node)
        if not holder.users:
            graph.erase_node(holder)


def _mutated(node: fx.Node) -> fx.Node | None:
    """Return the node that an in-place op writes to, or None for a pure op."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return None
    schema = node.target._schema
    if not schema.is_mutable:
        return None
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
            return given if isinstance(given, fx.Node) else None
    return None


def _root(node: fx.Node) -> fx.Node:
    """Return the node whose memory `node` shares, by going up through views and in-place ops."""
    while node.op == "call_function" and node.args and isinstance(node.args[0], fx.Node):
        target = node.target
        views = isinstance(target, torch._ops.OpOverload) and (
            any(a.alias_info is not None for a in target._schema.arguments)
            or (
                target.namespace == "aten"
                and target.overloadpacket in {_aten.reshape, _aten.flatten, _aten.contiguous, _aten.dropout}
            )
        )
        if not views and target is not operator.getitem:
            break
        node = node.args[0]
    return node


def _has_aliased_mutation(graph: fx.Graph) -> bool:
    """Whether some in-place op changes memory that a later node still reads under another name."""
    order = {node: position for position, node in enumerate(graph.nodes)}
    roots = {node: _root(node) for node in graph.nodes}
    for node in graph.nodes:
        written = _mutated(node)
        if written is None or _root(written).op in {"get_attr", "placeholder"}:
            continue
        relatives = [n for n in graph.nodes if roots[n] is roots[written] and order[n] < order[node]]
        if any(order[user] > order[node] for n in relatives for user in n.users):
            return True
    return False


def _make_functional(graph: fx.Graph) -> None:
    """Replace in-place ops by their functional forms, except where they write to the model's or caller's tensors."""
    for node in graph.nodes:
        written = _mutated(node)
        if written is None or _root(written).op in {"get_attr", "placeholder"}:
            continue
        packet, _, overload = str(node.target).removeprefix("aten.").partition(".")
        pure = getattr(_aten, packet.removesuffix("_"), None)
        if packet.endswith("_") and overload in (pure.overloads() if pure is not None else ()):
            node.target = getattr(pure, overload)


def _drop_unused(graph: fx.Graph) -> None:
    """Erase tensors and pure ops that nothing uses, and checks of values, which compute nothing."""
    for node in reversed(list(graph.nodes)):
        target = node.target
        pure = target is _aten._assert_scalar.default or getattr(target, "__module__", "") == "_operator"
        if isinstance(target, torch._ops.OpOverload) and not target._schema.is_mutable:
            pure |= bool(target._schema.returns)
        if not node.users and (node.op == "get_attr" or (node.op == "call_function" and pure)):
            graph.erase_node(node)


def _merge_tied(graph: fx.Graph, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Let one node stand for all names of a tied tensor; returns the other names and what stands for them."""
    groups: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(id(tensor), []).append(name)
    nodes = {str(n.target): n for n in graph.nodes if n.op == "get_attr"}
    tied: dict[str, str] = {}
    for names in groups.values():
        used = [name for name in names if name in nodes and nodes[name].users] or [n for n in names if n in nodes]
        if not used:
            continue
        for other in names:
            if other == used[0]:
                continue
            tied[other] = used[0]
            if other in nodes:
                nodes[other].replace_all_uses_with(nodes[used[0]])
    return tied

"""Tuning of a compiled model at another size: each layer gets a kernel for the sizes it sees there.

It works on the compiled model itself, so a loaded one can be tuned as well. Layers that kernels run already get a
choice for the new size; layers that stayed dense at the sizes before may get a kernel now. The new choices stay if the
whole is faster with them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, fx

from sparta.compiler.choose.layers import TOO_DENSE, choice_for
from sparta.compiler.choose.partition import partition
from sparta.compiler.choose.timer import Timer
from sparta.compiler.choose.workshop import called
from sparta.compiler.graph.fixed import fixed_module
from sparta.compiler.graph.program import Program
from sparta.compiler.lower.subgraph import SubGraph
from sparta.compiler.plan import Plan
from sparta.compiler.run.combine import combined
from sparta.compiler.run.compiled_model import CompiledModel
from sparta.compiler.run.host import Host, hosted
from sparta.compiler.run.kernel_module import KernelModule
from sparta.compiler.session import Session
from sparta.specialize.tuning.select import DENSE, Choice

__all__ = ["tuned_at"]

_KERNEL = re.compile(r"(.*?)(?:_folded(?:_\d+)?)?_kernel(?:_(\d+))?")
_Seen = dict[str, tuple[Tensor, Tensor | None]]
_DENSE = Choice(DENSE, {}, "dense: not measured at this size")


def search(
    model: CompiledModel, leaves: Sequence[Any], tune: Literal["quick", "full", "off"], budget_s: float | None
) -> None:
    """Tune a model at the sizes of these flat inputs, with so much effort; what ``CompiledModel.tune`` calls."""
    tuned_at(model, leaves, Session(tune=tune, budget_s=budget_s))


def tuned_at(model: CompiledModel, leaves: Sequence[Any], session: Session) -> None:
    """Choose kernels for the sizes that layers see with these flat inputs, and run them at these sizes from now on."""
    graph = model.general if model.general is not None else model.graph
    known: dict[str, Choice] = {}
    seen = _seen(graph, leaves)
    kernels = dict(model.kernels)
    sparse: dict[str, tuple[int, Choice]] = {}
    for number, (name, kernel) in enumerate(kernels.items()):
        if name in seen:
            session.show(f"{name} {number + 1}/{len(kernels)}")
            sparse[name] = _choice(kernel, *seen[name], known, session)
    added = _added(graph, leaves, seen, known, session)
    with torch.no_grad():
        for name, (size, choice) in sparse.items():
            kernels[name].put(size, kernels[name].spec_for(seen[name][0]), choice)
        if added:
            _join(model, graph, added)
    _settle(model, leaves, session, _all_sizes(model, leaves))
    _tell(model, leaves)


def _seen(graph: fx.GraphModule, leaves: Sequence[Any]) -> _Seen:
    """Return what each kernel module of a graph is called with."""
    seen: _Seen = {}

    class Observer(fx.Interpreter):
        def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
            if isinstance(self.submodules.get(str(target)), KernelModule):
                seen[str(target)] = args[0], args[1] if len(args) > 1 else None
            return super().call_module(target, args, kwargs)

    with torch.no_grad():
        Observer(graph).run(*leaves)
    return seen


def _choice(
    kernel: KernelModule, x: Tensor, residual: Tensor | None, known: dict[str, Choice], session: Session
) -> tuple[int, Choice]:
    """Return the size that a layer has, and the fastest kernel for it."""
    fused, spec = kernel.fused, kernel.spec_for(x)

    def problem() -> Any:
        return fused.lowering.problem(spec, kernel.weight(), x, kernel.bias, residual)

    return fused.lowering.size(x), choice_for(spec, problem, known, session, share=1.0)


def _added(
    graph: fx.GraphModule, leaves: Sequence[Any], seen: _Seen, known: dict[str, Choice], session: Session
) -> dict[SubGraph, KernelModule]:
    """Return kernels for layers that are dense in the graph, where they win at this size."""
    values = _values(graph, leaves)
    tensors = {n: t for n, t in graph.named_buffers() if not any(n.startswith(f"{name}.") for name in seen)}
    found: dict[SubGraph, KernelModule] = {}
    for subgraph in partition(Program(graph.graph, tensors), _shapes(values)):
        if subgraph.tesa.density >= TOO_DENSE:
            continue
        x = values[subgraph.anchor.x]
        residual = None if subgraph.residual is None else values[subgraph.residual]
        spec = subgraph.spec(x)
        problem = partial(subgraph.lowering.problem, spec, subgraph.weight, x, subgraph.bias, residual)
        choice = choice_for(spec, problem, known, session, share=1.0)
        if choice.implement != DENSE:
            found[subgraph] = KernelModule.of(subgraph, {subgraph.lowering.size(x): (spec, choice)})
    return found


def _join(model: CompiledModel, graph: fx.GraphModule, added: Mapping[SubGraph, KernelModule]) -> None:
    """Put new kernels into the graph for any size; at the sizes before, these layers stay dense."""
    tensors = dict(graph.named_buffers())
    present = {name: kernel for name, kernel in graph.named_modules() if isinstance(kernel, KernelModule)}
    joined = combined(Program(graph.graph, tensors), added, present)
    for subgraph, kernel in added.items():
        spec, _ = next(iter(kernel.choices.values()))
        for size in _other_sizes(model, subgraph):
            kernel.put(size, spec, _DENSE)
    model.use_general(joined)


def _other_sizes(model: CompiledModel, subgraph: SubGraph) -> list[int]:
    """Return the sizes at which a layer was measured before."""
    plans = {layer.name: layer for layer in model.report.plan.layers}
    return list(plans[subgraph.name].choices) if subgraph.name in plans else []


def _all_sizes(model: CompiledModel, leaves: Sequence[Any]) -> Callable[[], None]:
    """Return what makes all kernels dense at the sizes that they see with these inputs."""

    def dense() -> None:
        graph = model.general if model.general is not None else model.graph
        for name, (x, _) in _seen(graph, leaves).items():
            kernel = model.kernels[name]
            kernel.put(kernel.fused.lowering.size(x), kernel.spec_for(x), _DENSE)

    return dense


def _settle(model: CompiledModel, leaves: Sequence[Any], session: Session, make_dense: Callable[[], None]) -> None:
    """Time the whole with the kernels, all dense and as given, and keep the fastest at these sizes."""
    graph = model.general if model.general is not None else model.graph
    calls: dict[str, Callable[..., Any]] = {"kernels": hosted(fixed_module(graph, leaves), Host.EAGER, any_size=True)}
    if model.given is not None:
        calls["given"] = model.given
    chosen = "kernels"
    if session.tune != "off" and session.left > 0:
        dense = hosted(fixed_module(model.dense_graph(), leaves), Host.EAGER)
        calls["dense"] = dense
        before = session.elapsed
        dense(*leaves)
        timer = Timer(session, session.measure, session.elapsed - before)
        rounds = timer.rounds({name: called(run, leaves) for name, run in calls.items()})
        chosen = min(calls, key=rounds.median)
    if chosen == "dense":
        make_dense()
        chosen = "kernels"
        calls[chosen] = hosted(fixed_module(graph, leaves), Host.EAGER, any_size=True)
    model.use_at(leaves, calls[chosen])


def _tell(model: CompiledModel, leaves: Sequence[Any]) -> None:
    """Write the new choices into the report."""
    graph = model.general if model.general is not None else model.graph
    chosen: dict[str, tuple[int, Choice]] = {}
    for name, (x, _) in _seen(graph, leaves).items():
        kernel = model.kernels[name]
        chosen[_layer(name)] = kernel.fused.lowering.size(x), kernel.choice_for(x)
    layers = tuple(
        replace(layer, choices={**layer.choices, chosen[layer.name][0]: chosen[layer.name][1]})
        if layer.name in chosen
        else layer
        for layer in model.report.plan.layers
    )
    model.report = replace(model.report, plan=Plan(layers, model.report.plan.whole))


def _layer(kernel: str) -> str:
    """Return the name of the layer that a kernel module runs.

    >>> _layer("encoder.0.weight_folded_kernel"), _layer("fc.weight_kernel_2")
    ('encoder.0', 'fc#2')
    """
    found = _KERNEL.fullmatch(kernel)
    weight, number = (found[1], found[2]) if found else (kernel, None)
    base = weight.removesuffix("weight").rstrip(".") or weight
    return f"{base}#{number}" if number else base


def _values(graph: fx.GraphModule, leaves: Sequence[Any]) -> dict[fx.Node, Any]:
    """Return what each node of a graph computes."""
    interpreter = fx.Interpreter(graph, garbage_collect_values=False)
    with torch.no_grad():
        interpreter.run(*leaves)
    return dict(interpreter.env)


def _shapes(values: Mapping[fx.Node, Any]) -> dict[fx.Node, Tensor]:
    return {node: value for node, value in values.items() if isinstance(value, Tensor)}


CompiledModel.search = staticmethod(search)

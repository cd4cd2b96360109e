"""Tuning of a compiled model at another size: each layer gets a kernel for the sizes it sees there.

It works on the compiled model itself, so a loaded one can be tuned as well. Layers that kernels run already get a
choice for the new size; layers that stayed dense at the sizes before may get a kernel now. The new choices stay if the
whole is faster with them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from sparta.compiler.choose.layers import TOO_DENSE, choice_for
from sparta.compiler.choose.partition import partition
from sparta.compiler.choose.timer import until_done
from sparta.compiler.choose.workshop import called
from sparta.compiler.clock import Rounds
from sparta.compiler.graph.fixed import fixed_module
from sparta.compiler.graph.program import Program
from sparta.compiler.lower.subgraph import SubGraph
from sparta.compiler.plan import Plan
from sparta.compiler.report import Report
from sparta.compiler.run.chain.chained import Chained, chainable
from sparta.compiler.run.combine import combined, module_name
from sparta.compiler.run.compiled_model import CompiledModel
from sparta.compiler.run.eager import with_fast_paths
from sparta.compiler.run.given import GivenModel
from sparta.compiler.run.kernel_module import KernelModule
from sparta.compiler.session import Session
from sparta.compiler.verify import agree, tolerance_of
from sparta.specialize.tuning.select import DENSE, Choice

__all__ = ["tuned_at"]

_KERNEL = re.compile(r"(.*?)(?:_folded(?:_\d+)?)?_kernel(?:_(\d+))?")
_Seen = dict[str, tuple[Tensor, Tensor | None]]
_Choices = Mapping[str, Choice]
_DENSE = Choice(DENSE, {}, "dense: nothing else was measured to be faster at this size")
_ROUNDS = 6
_GIVEN_AT, _MORE, _MOST_NAMED = "the model as given was faster than its graphs at ", " and more", 4
_LEAST_SECONDS, _MOST_SECONDS = 0.02, 1.5


def search(
    model: CompiledModel, leaves: Sequence[Any], tune: Literal["quick", "full", "off"], budget_s: float | None
) -> None:
    """Tune a model at the sizes of these flat inputs, with so much effort; what ``CompiledModel.tune`` calls."""
    tuned_at(model, leaves, Session(tune=tune, budget_s=budget_s))


def tuned_at(model: CompiledModel, leaves: Sequence[Any], session: Session) -> None:
    """Choose kernels for the sizes that layers see with these flat inputs, and run what wins at these sizes.

    Kernels that were measured, the kernels of the nearest size, dense layers and the model as given compete as wholes.
    """
    graph = model.general if model.general is not None else model.graph
    before = session.elapsed
    seen = _seen(graph, leaves)
    contest = _Contest(model, graph, leaves, session, session.elapsed - before, seen)
    known: dict[str, Choice] = {}
    measured: dict[str, Choice] = {}
    for number, name in enumerate(seen):
        session.show(f"{name} {number + 1}/{len(seen)}")
        measured[name] = _choice(model.kernels[name], *seen[name], known, session, 1 / (len(seen) - number))
    added = _added(graph, leaves, seen, known, session)
    with torch.no_grad():
        contest.decide(measured, added)
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
    kernel: KernelModule, x: Tensor, residual: Tensor | None, known: dict[str, Choice], session: Session, share: float
) -> Choice:
    """Return the fastest kernel of a layer for an input of this size."""
    fused, spec = kernel.fused, kernel.spec_for(x)

    def problem() -> Any:
        return fused.lowering.problem(spec, kernel.weight(), x, kernel.bias, residual)

    return choice_for(spec, problem, known, session, share=share)


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


@dataclass(frozen=True)
class _Candidate:
    """What may run at a size: a function of flat inputs, and the graph and the choices of kernels behind it."""

    graph: fx.GraphModule
    choices: _Choices
    run: Callable[..., Any]


class _Chain(Chained):
    """A chain for one size, which holds the kernels of when it was made."""

    def __init__(self, module: fx.GraphModule, packed: dict[Any, Any]) -> None:
        super().__init__(module)
        self._packed = packed

    def holds(self, leaves: Sequence[Any]) -> bool:
        """Whether inputs like these run as a chain: it is made here."""
        self(*leaves)
        return any(program is not None for program in self._programs.values())


@dataclass
class _Contest:
    """What competes at one size, timed as the callers of the model will see it.

    Each candidate holds the kernels that it was made with, whatever is chosen for other sizes later.

    Parameters
    ----------
    graph
        For any size, as it is before.
    call_seconds
        What a call takes, about.
    inputs
        Of kernel modules, by their names.
    """

    model: CompiledModel
    graph: fx.GraphModule
    leaves: Sequence[Any]
    session: Session
    call_seconds: float
    inputs: _Seen

    def __post_init__(self) -> None:
        self._kernels = {name: self.model.kernels[name] for name in self.inputs}
        self._sizes = {name: kernel.fused.lowering.size(self.inputs[name][0]) for name, kernel in self._kernels.items()}
        self._before = {name: kernel.choices.get(self._sizes[name]) for name, kernel in self._kernels.items()}

    def decide(self, measured: _Choices, added: Mapping[SubGraph, KernelModule]) -> None:
        """Time the candidates, and keep the fastest at this size.

        Parameters
        ----------
        measured
            What is fastest for each layer alone.
        added
            Kernels for layers that were dense at the sizes before.
        """
        model, graph = self.model, self.graph
        timed = self.session.tune != "off" and not self.session.interrupted
        joined = self._joined(added)
        candidates: dict[str, _Candidate] = {}
        nearest = {name: kernel.choice_for(self.inputs[name][0]) for name, kernel in self._kernels.items()}
        if timed and (added or any(measured[name].config != nearest[name].config for name in nearest)):
            candidates |= self._forms("nearest", graph, {}, {})
        candidates |= self._forms("measured", joined, measured, added)
        if timed and nearest:
            candidates |= self._forms("dense", graph, dict.fromkeys(nearest, _DENSE), {})
        now = model.decided_at(self.leaves)
        if timed and now is not None and not isinstance(now, GivenModel):
            candidates["now"] = _Candidate(graph, {}, now)
        best, given = self._fastest(candidates) if timed else ("measured", None)
        chosen = candidates[best]
        self._put(chosen.choices)
        if chosen.graph is not graph:
            model.use_general(chosen.graph)
        model.use_at(self.leaves, chosen.run if given is None else given)
        if given is not None:
            model.report = _with_note(model.report, [leaf.shape for leaf in self.leaves if isinstance(leaf, Tensor)])

    def _fastest(self, candidates: Mapping[str, _Candidate]) -> tuple[str, GivenModel | None]:
        """Return the fastest of the graphs, and the model as given where that is faster than all of them."""
        calls = {name: self._call(self.model.finished(each.run), self.leaves) for name, each in candidates.items()}
        given = self._agreeing(candidates["measured"].run)
        if given is not None:
            args, kwargs = pytree.tree_unflatten(list(self.leaves), self.model.signature.in_spec)
            calls["given"] = self._call(partial(given.model, *args, **kwargs), ())
        least = min(1.0, _ROUNDS * len(calls) * self.call_seconds)  # without which nothing could be said
        seconds = min(_MOST_SECONDS, max(_LEAST_SECONDS, least, 0.5 * self.session.left))
        rounds = Rounds(self.session.measure(calls, seconds))
        best = max(candidates, key=lambda name: rounds.ratio("measured", name).value)
        if given is None or rounds.ratio("given", best).value >= 1:
            return best, None
        return best, self.model.given_again(keep=True)

    def _agreeing(self, run: Callable[..., Any]) -> GivenModel | None:
        """Return the model as given, if it still computes what was compiled."""
        given = self.model.given_again(keep=False)
        try:
            if given is not None:
                least = tolerance_of(given.model.parameters())
                agree(pytree.tree_leaves(given(*self.leaves)), pytree.tree_leaves(run(*self.leaves)), least=least)
        except Exception:  # noqa: BLE001 - it was changed, or does not run any more
            return None
        return given

    def _call(self, run: Callable[..., Any], inputs: Sequence[Any]) -> Callable[[], Any]:
        cuda = any(isinstance(leaf, Tensor) and leaf.is_cuda for leaf in self.leaves)
        return until_done(called(run, inputs)) if cuda else called(run, inputs)

    def _forms(
        self, name: str, graph: fx.GraphModule, choices: _Choices, added: Mapping[SubGraph, KernelModule]
    ) -> dict[str, _Candidate]:
        """Return a graph for these sizes that holds these kernels, or those of before: eager, and as a chain."""
        self._put(choices)
        fixed = fixed_module(graph, self.leaves)
        new = {module_name(subgraph): next(iter(kernel.choices)) for subgraph, kernel in added.items()}
        found = {name: _Candidate(graph, choices, with_fast_paths(fixed, sizes={**self._sizes, **new}))}
        if self.session.tune != "off" and chainable(fixed):
            chain = _Chain(fixed, self.model.packed)
            if chain.holds(self.leaves):
                found[f"{name} chain"] = _Candidate(graph, choices, chain)
        return found

    def _put(self, choices: _Choices) -> None:
        """Let kernels run what was chosen at these sizes; without choices, what they ran before."""
        for name, kernel in self._kernels.items():
            size, before = self._sizes[name], self._before[name]
            if name in choices:
                kernel.put(size, kernel.spec_for(self.inputs[name][0]), choices[name])
            elif before is not None:
                kernel.put(size, *before)
            else:
                kernel.drop(size)

    def _joined(self, added: Mapping[SubGraph, KernelModule]) -> fx.GraphModule:
        """Return the graph for any size with new kernels; at the sizes before, these layers stay dense."""
        if not added:
            return self.graph
        tensors = dict(self.graph.named_buffers())
        present = {name: kernel for name, kernel in self.graph.named_modules() if isinstance(kernel, KernelModule)}
        for subgraph, kernel in added.items():
            spec, _ = next(iter(kernel.choices.values()))
            for size in _other_sizes(self.model, subgraph):
                if size not in kernel.choices:
                    kernel.put(size, spec, _DENSE)
        return combined(Program(self.graph.graph, tensors), added, present)


def _with_note(report: Report, shapes: Sequence[Sequence[int]]) -> Report:
    """Return the report with these sizes among those at which the model as given runs; a few are named."""
    size = ", ".join("×".join(map(str, shape)) or "a scalar" for shape in shapes)
    known = next((note for note in report.notes if note.startswith(_GIVEN_AT)), "")
    if size in known or known.endswith(_MORE):
        return report
    named = [*known.removeprefix(_GIVEN_AT).split("; "), size] if known else [size]
    text = _GIVEN_AT + "; ".join(named[:_MOST_NAMED]) + (_MORE if len(named) > _MOST_NAMED else "")
    return replace(report, notes=(*(note for note in report.notes if note != known), text))


def _other_sizes(model: CompiledModel, subgraph: SubGraph) -> list[int]:
    """Return the sizes at which a layer was measured before."""
    plans = {layer.name: layer for layer in model.report.plan.layers}
    return list(plans[subgraph.name].choices) if subgraph.name in plans else []


def _tell(model: CompiledModel, leaves: Sequence[Any]) -> None:
    """Write the new choices into the report."""
    graph = model.general if model.general is not None else model.graph
    chosen: dict[str, tuple[int, Choice]] = {}
    for name, (x, _) in _seen(graph, leaves).items():
        kernel = model.kernels[name]
        chosen[_layer(name)] = kernel.fused.lowering.size(x), kernel.choice_for(x)
    layers = tuple(
        replace(layer, choices={**layer.choices, chosen[product][0]: chosen[product][1]})
        if (product := layer.joined[0] if layer.joined else layer.name) in chosen
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

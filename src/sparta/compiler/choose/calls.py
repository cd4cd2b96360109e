"""Calls: attention under fixed masks, batched products and mixtures of experts get the kernel that is fastest.

They take several activations, so they are found and measured apart from the layers, before these. What comes out is a
program with other calls in it; a call for which nothing was faster stays what it was.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, fx

from sparta.compiler.choose.layers import TOO_DENSE, best_ratio, choice_for
from sparta.compiler.graph.program import Program, drop_unused
from sparta.compiler.lower.attention import find_attention
from sparta.compiler.lower.call import Call
from sparta.compiler.lower.experts import find_experts
from sparta.compiler.lower.matmul import find_product
from sparta.compiler.plan import LayerPlan
from sparta.compiler.run.ops import config_text
from sparta.compiler.session import Session
from sparta.specialize.tuning.select import DENSE, Choice
from sparta.specialize.tuning.store import key_of

__all__ = ["FINDERS", "with_operators"]

Finder = Callable[[fx.Node, Program, dict[fx.Node, Tensor]], Call | str | None]
FINDERS: tuple[Finder, ...] = (find_attention, find_product, find_experts)
"""What is recognised in a graph: functions of a node, its program and the shapes of all nodes."""


def with_operators(program: Program, inputs: Sequence[Any], session: Session) -> tuple[Program, list[LayerPlan]]:
    """Return the program with the fastest kernel for every such call, and their plans.

    Parameters
    ----------
    inputs
        Flat inputs to measure with.
    """
    calls = _calls(program, program.shapes(inputs, computed=not session.slow), session)
    if not calls:
        return program, []
    values = program.values(inputs, {node for call in calls for node in call.activations})
    known: dict[str, Choice] = {}
    chosen: list[tuple[Call, Choice]] = []
    plans = []
    for number, call in enumerate(calls):
        seen = [values[node] for node in call.activations]
        session.show(f"{call.op} {number + 1}/{len(calls)} {call.name}")
        choice = _choice(call, seen, known, session, share=1 / (len(calls) - number))
        chosen.append((call, choice))
        plans.append(_plan(call, choice, seen))
    return _rewritten(program, chosen), plans


def _calls(program: Program, shapes: Mapping[fx.Node, Tensor], session: Session) -> list[Call]:
    found, known = [], dict(shapes)
    refused: dict[str, list[str]] = {}
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        for finder in FINDERS:
            answer = finder(node, program, known)
            if isinstance(answer, Call):
                found.append(answer)
            elif answer:
                refused.setdefault(answer, []).append(node.name)
    for answer, names in refused.items():
        others = f" (and {len(names) - 1} like it)" if len(names) > 1 else ""
        session.note(f"{names[0]}{others} stays dense: {answer}")
    return found


def _choice(call: Call, seen: Sequence[Tensor], known: dict[str, Choice], session: Session, *, share: float) -> Choice:
    if call.known.density >= TOO_DENSE and not call.present:
        zeros = call.known.sparsity
        return Choice(DENSE, {}, f"dense: only {zeros:.1%} of it is pruned" if zeros else "dense: nothing is pruned")
    problem = call.problem(seen)
    measured = key_of(problem.spec) in known or session.tune != "off"
    choice = choice_for(problem.spec, lambda: problem, known, session, share=share)
    if call.present and not measured and choice.implement == DENSE:
        config = json.loads(call.present)
        return Choice(str(config.pop("_name")), config, "as the module had it, not measured here")
    return choice


def _plan(call: Call, choice: Choice, seen: Sequence[Tensor]) -> LayerPlan:
    flops = call.flops(seen)
    return LayerPlan(
        name=call.name,
        op=call.op,
        pattern=call.known.describe_pattern(),
        density=call.known.density,
        shape=call.known.shape,
        choices={seen[0].numel() // max(1, seen[0].shape[-1]): choice},
        flops=flops,
        live_flops=round(flops * call.known.density),
        best_ratio=best_ratio(choice),
    )


def _rewritten(program: Program, chosen: Sequence[tuple[Call, Choice]]) -> Program:
    """Return the program with the ops of ours in the places of calls that do not stay dense."""
    graph, copies = program.copy()
    tensors = dict(program.tensors)
    for call, choice in chosen:
        if choice.implement == DENSE and not call.present:
            continue
        tensors.update(call.added)
        node = copies[call.node]
        with graph.inserting_before(node):
            fixed = {name: graph.get_attr(name) for name in call.added}
            args = [fixed[arg] if isinstance(arg, str) and arg in fixed else arg for arg in call.args]
            args = fx.map_arg(args, lambda source: copies.get(source, source))
            fresh = graph.call_function(call.target, (*args, config_text(choice.config)))
        node.replace_all_uses_with(fresh)
        graph.erase_node(node)
        copies[call.node] = fresh
    drop_unused(graph)
    used = {str(node.target) for node in graph.nodes if node.op == "get_attr"}
    return Program(graph, {name: tensors[name] for name in tensors if name in used}, program.origins)

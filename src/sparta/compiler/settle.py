"""What runs in the end: remembered or found now, checked against the original, and less of it where it is wrong.

A compiled model that does not agree with the masked dense model is not handed over. What may be wrong is given up one
by one: kernels by name, the host, all kernels, the reduced graph. The original graph remains.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from sparta.compiler.certificate import Certificate
from sparta.compiler.choose.decisions import Decision, model_key, recall, remember
from sparta.compiler.choose.end_to_end import Contest
from sparta.compiler.choose.outcome import Outcome
from sparta.compiler.choose.precision import rounding_kernels
from sparta.compiler.choose.trim import made_dense
from sparta.compiler.choose.workshop import Workshop, sparse_names
from sparta.compiler.graph.serialize import graph_text
from sparta.compiler.job import Job
from sparta.compiler.layerwise import LayerByLayer
from sparta.compiler.run.host import Host
from sparta.compiler.session import in_words
from sparta.compiler.variant import ORIGINAL, Base, Variant
from sparta.compiler.verify import agree, relative_error, verify, wrong_kernels
from sparta.errors import CheckError, message

__all__ = ["decided", "verified"]


def decided(contest: Contest) -> tuple[Outcome, float | None]:
    """Return what runs, remembered or found now, and the seconds of the first compilation if this is not it."""
    session = contest.session
    if session.tune == "off":
        variant = Variant(Base.REDUCED, sparse_names(contest.plans))
        return Outcome.untimed(variant, contest.plans, "not timed: tune='off'"), None
    key = _key(contest)
    decision = recall(key)
    if decision is not None:
        outcome = _again(contest, decision)
        if outcome is not None:
            return outcome, decision.seconds
    outcome = contest.decide()
    if outcome.lasting:
        runs = sparse_names(outcome.plans)
        dense = tuple(plan.name for plan in outcome.plans if plan.name not in runs)
        variant = outcome.variant
        found = Decision(variant.base, variant.host, dense, session.elapsed, outcome.given_milliseconds)
        try:
            remember(key, found)
        except OSError as error:
            session.note(f"the decision for the whole model cannot be kept: {error}")
    return outcome, None


def _key(contest: Contest) -> str:
    tensors = contest.workshop.original.tensors
    device = next(iter(tensors.values())).device.type if tensors else "cpu"
    session = contest.session
    effort = f"{session.tune} {contest.inductor} {session.in_graphs}"
    return model_key(graph_text(contest.workshop.reduced.graph), contest.plans, device, effort)


def _again(contest: Contest, decision: Decision) -> Outcome | None:
    try:
        return contest.again(decision)
    except KeyboardInterrupt:
        contest.session.interrupted = True
        return None
    except Exception as error:  # noqa: BLE001 - what was remembered does not run any more: it is searched for again
        contest.session.gave_up("what was remembered does not run", error)
        return None


def verified(job: Job, contest: Contest, outcome: Outcome, *, check: bool) -> tuple[Outcome, Certificate]:
    """Check against the original, and replace what is wrong until it agrees."""
    if not check:
        return outcome, Certificate((), "", 0.0, 0.0, 0.0, 0, passed=False)
    workshop, original = contest.workshop, job.reference()
    while True:
        job.session.show("verifying against the original")
        try:
            kernels = workshop.kernels(outcome.plans, outcome.variant.kernels)
            rounding = rounding_kernels(kernels)
            compiled = workshop.run(outcome.variant, outcome.plans)
            expected = _in_real_numbers(job, original) if rounding else []
            layers = _layers(job, contest, outcome) if rounding else None
            certificate = verify(
                original, compiled, job.inputs, layers=layers, brief=job.session.slow, least=job.tolerance
            )
            if rounding:
                with torch.no_grad():
                    loss = relative_error(expected, pytree.tree_leaves(compiled(*job.inputs[0])))
                several = f"{len(rounding)} layers round their inputs to 8 bits"
                job.session.note(f"{several}, which changes the outputs by {loss:.2g} of their norm on the example")
        except Exception as error:  # noqa: BLE001 - whatever it raises, less of it may be right
            outcome = _less(job, contest, outcome, error)
        else:
            return outcome, certificate


def _in_real_numbers(job: Job, original: Callable[..., Any]) -> list[Any]:
    """Return what the original computes of the example, after a check of the graph in real numbers at all sizes."""
    plain, results = job.reduced.module(), []
    for inputs in job.inputs:
        with torch.no_grad():
            results.append(pytree.tree_leaves(original(*inputs)))
            agree(results[-1], pytree.tree_leaves(plain(*inputs)), least=job.tolerance)
    first: list[Any] = results[0]
    return first


def _layers(job: Job, contest: Contest, outcome: Outcome) -> LayerByLayer:
    """Return what compares layers that round."""
    workshop, variant = contest.workshop, outcome.variant
    kernels = workshop.kernels(outcome.plans, variant.kernels)
    return LayerByLayer(job.reduced, workshop.graph(variant, outcome.plans), kernels, variant.host)


def _less(job: Job, contest: Contest, outcome: Outcome, error: Exception) -> Outcome:
    """Give up the next thing that may be wrong: kernels by name, the host, all kernels, the reduced graph."""
    reason, note = in_words(error), job.session.note
    variant, plans = outcome.variant, outcome.plans
    wrong = _wrong(contest.workshop, outcome)
    if wrong:
        for name, found in wrong.items():
            note(f"the kernel of {name} computed wrong numbers and was replaced by dense: {found}")
        plans = made_dense(plans, frozenset(wrong), "dense: the chosen kernel computed wrong numbers")
        fewer = replace(variant, kernels=variant.kernels - frozenset(wrong))
        return Outcome.untimed(fewer, plans, "not timed after a wrong kernel was replaced")
    if variant.host is not Host.EAGER:
        note(f"not hosted by {variant.host.value}, which did not agree with the original: {reason}")
        why = f"not timed after {variant.host.value} was given up"
        return Outcome.untimed(replace(variant, host=Host.EAGER), plans, why)
    if variant.kernels:
        note(f"all kernels were replaced by dense, because the whole did not agree: {reason}")
        plans = made_dense(plans, variant.kernels, "dense: the whole did not agree with the original")
        why = "dense: the kernels together did not agree with the original"
        return Outcome.untimed(Variant(variant.base), plans, why)
    if variant.base is not Base.ORIGINAL:
        note(f"the original graph runs, because the {variant} did not agree: {reason}")
        return Outcome.untimed(ORIGINAL, plans, f"dense: the {variant} did not agree with the original")
    raise CheckError(
        message(
            f"the captured graph does not compute what the model does: {reason}",
            "a forward that is a function of its inputs",
            "look for randomness or state in evaluation mode, or pass verify=False",
        )
    ) from error


def _wrong(workshop: Workshop, outcome: Outcome) -> dict[str, str]:
    """Return the layers whose kernels compute wrong numbers alone, with what was found; none where none can be run."""
    try:
        return wrong_kernels(workshop.kernels(outcome.plans, outcome.variant.kernels), workshop.samples)
    except Exception:  # noqa: BLE001 - then all of them are given up
        return {}

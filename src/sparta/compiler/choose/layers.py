"""Choose, layer by layer: every sub-graph's candidates are timed, dense among them; the fastest that is right stays.

The specialiser's tuner does the measuring, on the activations that the layer really gets. Layers of one kernel-spec
bucket cost alike, so they are measured once and share the result. Layers of nearly the same sizes, as cut channels
leave them, share the search: what won for the first is confirmed for the others. A layer that the budget does not reach
runs what won for the most similar one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sparta.common.tuning import includes
from sparta.compiler.choose.light import lighter
from sparta.compiler.lower.samples import SizeSample
from sparta.compiler.lower.subgraph import SubGraph
from sparta.compiler.plan import LayerPlan
from sparta.compiler.session import EFFORT, Session, in_words
from sparta.errors import SpartaError
from sparta.specialize.cpu.library import load as load_kernels
from sparta.specialize.implement import implement_named
from sparta.specialize.kernel_spec import KernelSpec
from sparta.specialize.tuning.select import DENSE, Choice, Problem, choose, tune_kernel
from sparta.specialize.tuning.shipped import CLEAR_WIN
from sparta.specialize.tuning.store import key_of
from sparta.tesa.attribute import TeSA

__all__ = ["TOO_DENSE", "best_ratio", "choice_for", "choose_layers", "looked_at"]

TOO_DENSE = 0.98
_ALIKE = 2.0  # the factor within which densities of similar layers lie
_PER_NUMBER = 32  # operations that a core does in the time in which a number in fp32 is moved
_STEPS = 4  # to which sizes that are nearly the same are rounded, per doubling


def looked_at(subgraphs: Sequence[SubGraph], samples: Sequence[SizeSample]) -> None:
    """Find out where the zeros of layers are, which takes its time and is no measuring."""
    _kinds(subgraphs, samples)


def choose_layers(subgraphs: Sequence[SubGraph], samples: Sequence[SizeSample], session: Session) -> list[LayerPlan]:
    """Return the plan of every sub-graph, each the best on its own.

    Never raises for what a candidate does; an interrupt or a spent budget leaves the rest dense, or as stored.
    """
    chosen = _chosen(subgraphs, samples, session)
    plans = []
    for subgraph in subgraphs:
        x, _ = samples[0].values[subgraph]
        weight, attributes = subgraph.tesa, subgraph.anchor.attributes
        plans.append(
            LayerPlan(
                name=subgraph.name,
                op=subgraph.lowering.op,
                pattern=weight.describe_pattern(),
                density=weight.density,
                shape=weight.shape,
                choices=chosen[subgraph],
                flops=subgraph.lowering.flops(weight, x, attributes, live=False),
                live_flops=subgraph.lowering.flops(weight, x, attributes, live=True),
                best_ratio=best_ratio(next(iter(chosen[subgraph].values()))),
                picture=weight.picture() if weight.density < 1 else (),
            )
        )
    return plans


def _chosen(
    subgraphs: Sequence[SubGraph], samples: Sequence[SizeSample], session: Session
) -> dict[SubGraph, dict[int, Choice]]:
    """Return what runs every sub-graph, by size.

    The most expensive kinds are measured first, so the cheapest layers pay for overruns. Those whose time was up have a
    second turn if others have left some.
    """
    kinds = _kinds(subgraphs, samples)
    first = {kind: place for place, kind in reversed(kinds.items())}
    costs = dict.fromkeys(first, 0)
    for (subgraph, at), kind in kinds.items():
        costs[kind] += _cost(subgraph, samples[at].values[subgraph][0])
    specs = {kind: subgraph.spec(samples[at].values[subgraph][0]) for kind, (subgraph, at) in first.items()}
    families = {kind: _family(spec) for kind, spec in specs.items()}
    known: dict[str, Choice] = {}
    won: dict[str, Choice] = {}
    late: set[str] = set()

    def measure(kind: str, number: int, like: Choice | None) -> None:
        subgraph, at = first[kind]
        x, residual = samples[at].values[subgraph]
        if session.left_for_layers <= 0 and not session.interrupted:
            late.add(kind)
        size = subgraph.lowering.size(x)
        pattern = subgraph.tesa.describe_pattern()
        session.show(f"kind of layer {number + 1}/{len(first)}: {subgraph.name} ({pattern}), size {size}")
        choice = _choice(subgraph, x, residual, known, session, share=_share(kind, costs, known), like=like)
        if choice.implement != DENSE and choice.entry is not None:
            won.setdefault(families[kind], choice)

    slowest = sorted(first, key=lambda kind: -costs[kind])
    for number, kind in enumerate(slowest):
        measure(kind, number, won.get(families[kind]))
    for number, kind in enumerate(slowest):
        if _hurried(known[kind]) and session.left_for_layers > 0:
            del known[kind]
            measure(kind, number, None)  # what won for its like had its look
    for kind in slowest:
        if kind in late or _hurried(known[kind]):
            session.hurried |= known[kind].entry is None and not session.interrupted
            known[kind] = _as_its_like(kind, specs, known)

    chosen: dict[SubGraph, dict[int, Choice]] = {subgraph: {} for subgraph in subgraphs}
    for subgraph in subgraphs:
        for at, sample in enumerate(samples):
            size = subgraph.lowering.size(sample.values[subgraph][0])
            place = (subgraph, at)
            choice = _fitting(known[kinds[place]], subgraph, sample) if place in kinds else _not_measured(subgraph)
            chosen[subgraph].setdefault(size, choice)
    return chosen


def _fitting(choice: Choice, subgraph: SubGraph, sample: SizeSample) -> Choice:
    """Return what was measured for a layer of the same kind with parameters that this one has.

    Masks of one kind may differ in small gaps, and with them the tiles that are offered.
    """
    if choice.implement == DENSE or not choice.params:
        return choice
    spec = subgraph.spec(sample.values[subgraph][0])
    implement = implement_named(choice.implement, spec.op)
    if includes(dict(implement.space(spec)), dict(choice.params)):
        return choice
    return replace(choice, params=implement.default(spec))


def _hurried(choice: Choice) -> bool:
    """Whether a layer stays dense only because its time was up."""
    return choice.implement == DENSE and choice.entry is None and choice.result is not None


def _as_its_like(kind: str, specs: Mapping[str, KernelSpec], known: Mapping[str, Choice]) -> Choice:
    """Return for a layer that nobody had time for what won clearly for the most similar one; what it has, if none did.

    What the table that comes with the package says of it comes before that; what was timed here and was no faster than
    dense is neither. The whole model is timed with it in any case, and what it computes is checked.
    """
    now, spec = known[kind], specs[kind]
    if now.implement != DENSE or now.entry is not None:
        return now
    shipped = choose(spec)
    if shipped.implement != DENSE and not _lost_here(now, shipped.config):
        return replace(shipped, refused=now.refused, result=now.result)
    weight = spec["weight"]
    likes: list[tuple[float, Choice]] = []
    for other, choice in known.items():
        its = specs[other]["weight"]
        clear = choice.implement != DENSE and choice.entry is not None and choice.entry.speedup >= CLEAR_WIN
        near = its.density <= _ALIKE * weight.density and weight.density <= _ALIKE * its.density
        if clear and near and _like_in_kind(specs[other], spec):
            likes.append((abs(math.log(its.numel / weight.numel)), choice))
    for _, choice in sorted(likes, key=lambda pair: pair[0]):
        implement = implement_named(choice.implement, spec.op)
        if not implement.answer(spec):
            continue
        inside = includes(dict(implement.space(spec)), dict(choice.params))
        params = choice.params if inside else implement.default(spec)
        found = Choice(choice.implement, params, "as the most similar layer: the time was up", None, now.refused)
        if not _lost_here(now, found.config):
            return found
    return now


def _like_in_kind(one: KernelSpec, two: KernelSpec) -> bool:
    """Whether what runs one layer may run the other: their patterns are the same, or both are depthwise."""
    patterns = {spec["weight"].describe_pattern() for spec in (one, two)}
    depthwise = all(_depthwise(spec.attributes, spec["weight"]) for spec in (one, two))
    return one.op == two.op and (len(patterns) == 1 or depthwise)


def _lost_here(now: Choice, config: Mapping[str, Any]) -> bool:
    """Whether a candidate was tried for a layer in the time that it had, and did not work or was no faster."""
    tried = () if now.result is None else now.result.trials
    return any(dict(trial.params) == config and (trial.value is None or trial.value >= 1) for trial in tried)


def _kinds(subgraphs: Sequence[SubGraph], samples: Sequence[SizeSample]) -> dict[tuple[SubGraph, int], str]:
    """Return the key that layers which cost alike share, by layer and size, for those that are worth measuring.

    Beside sparse layers those are depthwise ones, in models that are sparse elsewhere: most of such a layer, seen as a
    convolution of all channels, is zero by its nature.
    """
    sparse = {subgraph for subgraph in subgraphs if subgraph.tesa.density < TOO_DENSE or subgraph.scales is not None}
    measured = [g for g in subgraphs if g in sparse or (sparse and _depthwise(g.anchor.attributes, g.tesa))]
    return {(g, at): key_of(g.spec(sample.values[g][0])) for g in measured for at, sample in enumerate(samples)}


def _family(spec: KernelSpec) -> str:
    """Return what layers of nearly the same sizes have in common: all but the sizes, which are rounded."""
    operands = []
    for name, tesa in sorted(spec.operands.items()):
        sizes = "x".join(str(round(_STEPS * math.log2(max(1, size)))) for size in tesa.shape)
        density = round(_STEPS * math.log2(tesa.density)) if tesa.density else None
        operands.append(f"{name}={sizes}:{tesa.format}:{tesa.describe_pattern()}@{density}")
    attributes = [f"{key}={value}" for key, value in sorted(spec.attributes.items())]
    return " ".join([spec.op, *operands, f"epilogue={spec.epilogue}", *attributes])


def _cost(subgraph: SubGraph, x: Tensor) -> int:
    """Return what a layer costs when dense, in operations: those of its products, and those that its bytes stand for.

    A depthwise layer multiplies little and moves as much as any other.
    """
    weight = subgraph.tesa
    products = subgraph.lowering.flops(weight, x, subgraph.anchor.attributes, live=False)
    results = products * weight.shape[0] // max(1, 2 * weight.numel)
    return products + _PER_NUMBER * (x.numel() + weight.numel + results)


def _depthwise(attributes: Mapping[str, Any], weight: TeSA) -> bool:
    return attributes.get("groups", 1) > 1 and weight.shape[1] == 1


def _share(key: str, costs: Mapping[str, int], known: Mapping[str, Choice]) -> float:
    """Return the share of the time that is left for one kind: by its cost, and half as much as all alike at least."""
    left = {other: cost for other, cost in costs.items() if other not in known or other == key}
    return max(costs.get(key, 0) / max(1, sum(left.values())), 0.5 / max(1, len(left)))


def _not_measured(subgraph: SubGraph) -> Choice:
    zeros = subgraph.tesa.sparsity
    why = "the weight has no zeros" if not zeros else f"only {zeros:.1%} of the weight is zero"
    return Choice(DENSE, {}, f"dense: {why}")


def _choice(
    subgraph: SubGraph,
    x: Tensor,
    residual: Tensor | None,
    known: dict[str, Choice],
    session: Session,
    *,
    share: float,
    like: Choice | None,
) -> Choice:
    spec = subgraph.spec(x)
    stored = session.tune != "quick" or choose(spec, session.store).entry is not None
    light = None if stored else lighter(subgraph, x, residual)

    def problem() -> Problem:
        if light is None:
            return subgraph.lowering.problem(spec, subgraph.weight, x, subgraph.bias, residual)
        part = subgraph.spec(light.x)
        return subgraph.lowering.problem(part, subgraph.weight, light.x, subgraph.bias, light.residual)

    choice = choice_for(spec, problem, known, session, share=share, like=like)
    if light is not None:
        choice = known[key_of(spec)] = light.scaled(choice)
    return choice


def choice_for(
    spec: KernelSpec,
    problem: Callable[[], Problem],
    known: dict[str, Choice],
    session: Session,
    *,
    share: float,
    like: Choice | None = None,
) -> Choice:
    """Return what runs a kernel spec: as another of its kind, as stored, or as measured now; dense if all fails.

    Parameters
    ----------
    problem
        Called where something is measured.
    known
        Choices of this compilation, by the key of their kind; the new one is added.
    share
        Of the time that is left for layers.
    like
        What won for a layer of nearly the same sizes; it is taken where it wins here as well.
    """
    key = key_of(spec)
    if key in known:
        return known[key]
    try:
        choice = _measured(spec, problem, session, share, like)
    except KeyboardInterrupt:
        session.interrupted = True
        choice = Choice(DENSE, {}, "dense: interrupted")
    except Exception as error:  # noqa: BLE001 - a layer that cannot be measured must not end the compilation
        choice = Choice(DENSE, {}, f"dense: measuring failed ({in_words(error)})")
    known[key] = choice
    return choice


def _measured(
    spec: KernelSpec, problem: Callable[[], Problem], session: Session, share: float, like: Choice | None
) -> Choice:
    stored = choose(spec, session.store)
    if session.tune == "off" or session.left_for_layers <= 0:
        return _unmeasured(stored, session)
    if spec.device == "cpu":
        with session.uncounted(), suppress(SpartaError, OSError):  # what is missing, implements tell one by one
            load_kernels()
    trials, most = EFFORT[session.tune]
    seconds = max(0.05, session.share(share, most))
    with torch.no_grad(), session.step(seconds):
        begin, given = session.elapsed, problem()
        choice = tune_kernel(  # which takes what is stored, if dense still takes about as long as it did then
            given,
            max_trials=trials,
            max_seconds=max(0.01, seconds - (session.elapsed - begin)),  # the reference takes time as well
            seed=session.seed,
            store=session.store,
            in_graphs=session.in_graphs,
            like=like,
        )
    if choice.result is not None and choice.result.interrupted:
        session.interrupted = True
    return _told(choice) if choice.result is None else choice


def _unmeasured(stored: Choice, session: Session) -> Choice:
    """Return what runs where nothing is measured: what is stored or comes with the package, else dense."""
    if stored.entry is not None:
        return _told(stored)
    if stored.implement != DENSE and not session.interrupted:
        return stored  # of the table that comes with the package
    if session.tune != "off":
        why = "interrupted" if session.interrupted else "the budget was spent before this layer"
        return Choice(DENSE, {}, f"dense: {why}", None, stored.refused)
    return Choice(DENSE, {}, "dense: not tuned, and no stored result", None, stored.refused)


def _told(stored: Choice) -> Choice:
    """Return a stored choice with a reason that says why it is dense, if it is."""
    lost = stored.implement == DENSE and stored.entry is not None
    return replace(stored, reason="dense: nothing was faster (stored)") if lost else stored


def best_ratio(choice: Choice) -> float | None:
    """Return the time of the best candidate over dense's, where one was timed."""
    if choice.implement != DENSE and choice.entry is not None:
        return 1.0 / choice.entry.speedup
    if choice.result is None:
        return None
    tried = [t.value for t in choice.result.trials if t.value is not None and t.params.get("_name") != DENSE]
    return min(tried, default=None)

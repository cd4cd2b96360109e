"""Siblings: layers that read one tensor compete as one product with the same layers one by one.

A product is measured like any layer, beginning with what won for the largest of its parts, and competes end to end if
it takes less time than its parts do together. On CUDA only: there a kernel's start costs about what a small layer does.
Its plan stands after those of the layers, under all their names; while it runs, its parts have no kernels of their own.
A report tells of the layers, each with its share of the product.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from sparta.common.tuning import includes
from sparta.compiler.choose.layers import choice_for
from sparta.compiler.choose.trim import made_dense
from sparta.compiler.choose.workshop import Plans
from sparta.compiler.lower.joined import JoinedSubGraph, join, siblings
from sparta.compiler.lower.samples import SizeSample
from sparta.compiler.lower.subgraph import SubGraph, is_joined
from sparta.compiler.plan import LayerPlan
from sparta.compiler.session import Session
from sparta.errors import SpartaError
from sparta.specialize.implement import implement_named
from sparta.specialize.tuning.select import DENSE, Choice
from sparta.specialize.tuning.store import key_of

__all__ = ["apart", "milliseconds_of", "of_layers", "rejoined", "running", "share_of", "with_products"]

_DEVICES = frozenset({"cuda"})
_Parts = tuple[tuple[SubGraph, ...], tuple[SizeSample, ...], list[LayerPlan]]


def with_products(
    subgraphs: Sequence[SubGraph], samples: Sequence[SizeSample], plans: Plans, session: Session
) -> _Parts:
    """Return sub-graphs, samples and plans with the products of siblings that may pay after those of the layers."""
    by_name = {plan.name: plan for plan in plans}
    known: dict[str, Choice] = {}
    found: list[tuple[JoinedSubGraph, LayerPlan]] = []
    for group in siblings([each for each in subgraphs if each.weight.device.type in _DEVICES]):
        parts = [by_name[part.name] for part in group]
        measured = sum(plan.first.entry is not None for plan in parts)
        sparse = sum(plan.sparse for plan in parts)
        if not measured and session.tune == "off":
            continue
        choices: dict[int, Choice] | None = None
        with suppress(SpartaError):  # such as scales that no kernel takes together
            product = join(group)
            if measured == len(parts):
                choices = _choices(product, parts, samples, known, session)
            elif sparse == len(parts):
                choices = _as_parts(product, parts, samples)
            elif not measured and not sparse:
                choices = _dense(product, samples)
            if choices is not None:
                found.append((product, _plan(product, parts, choices)))
    more = [
        SizeSample({**sample.values, **{product: (sample.values[product.parts[0]][0], None) for product, _ in found}})
        for sample in samples
    ]
    return (*subgraphs, *(product for product, _ in found)), tuple(more), [*plans, *(plan for _, plan in found)]


def _choices(
    product: JoinedSubGraph,
    parts: Sequence[LayerPlan],
    samples: Sequence[SizeSample],
    known: dict[str, Choice],
    session: Session,
) -> dict[int, Choice] | None:
    """Return what runs a product at each size; None where it takes as long as its parts at the first.

    A product that nobody had time for runs as its parts do: the whole is timed with it and without.
    """
    chosen: dict[int, Choice] = {}
    for sample in samples:
        x, _ = sample.values[product.parts[0]]
        size, spec = product.lowering.size(x), product.spec(x)
        if size in chosen:
            continue
        if key_of(spec) not in known:
            session.show(f"as one product: {product.name}, size {size}")
        like = max((plan.choices[size] for plan in parts), key=milliseconds_of)

        problem = partial(product.lowering.problem, spec, product.weight, x, product.bias, None)
        chosen[size] = choice_for(spec, problem, known, session, share=0.5, like=like)
    first = next(iter(chosen.values()))
    if first.entry is None:
        return _as_parts(product, parts, samples)
    return chosen if milliseconds_of(first) < sum(milliseconds_of(plan.first) for plan in parts) else None


def _as_parts(
    product: JoinedSubGraph, parts: Sequence[LayerPlan], samples: Sequence[SizeSample]
) -> dict[int, Choice] | None:
    """Return what runs a product without a measurement, at each size what runs one of its layers; None for dense."""
    chosen: dict[int, Choice] = {}
    for sample in samples:
        x, _ = sample.values[product.parts[0]]
        size, spec = product.lowering.size(x), product.spec(x)
        like = max((plan.choices[size] for plan in parts), key=milliseconds_of)
        implement = implement_named(like.implement, spec.op)
        if like.implement == DENSE or not implement.answer(spec):
            return None
        inside = includes(dict(implement.space(spec)), dict(like.params))
        params = like.params if inside else implement.default(spec)
        chosen[size] = Choice(like.implement, params, "as its layers: the time was up")
    return chosen


def _dense(product: JoinedSubGraph, samples: Sequence[SizeSample]) -> dict[int, Choice]:
    """Return what runs a product of layers that were not measured, because they have no zeros."""
    why = Choice(DENSE, {}, "dense: the weights have no zeros")
    return dict.fromkeys((product.lowering.size(sample.values[product.parts[0]][0]) for sample in samples), why)


def _plan(product: JoinedSubGraph, parts: Sequence[LayerPlan], choices: dict[int, Choice]) -> LayerPlan:
    weight = product.tesa
    return LayerPlan(
        name=product.name,
        op=product.lowering.op,
        pattern=weight.describe_pattern(),
        density=weight.density,
        shape=weight.shape,
        choices=choices,
        flops=sum(plan.flops for plan in parts),
        live_flops=sum(plan.live_flops for plan in parts),
        joined=tuple(plan.name for plan in parts),
    )


def milliseconds_of(choice: Choice) -> float:
    """Return what a layer takes by its own measurement; 0 where it was not measured."""
    entry = choice.entry
    if entry is None:
        return 0.0
    return entry.dense_milliseconds if choice.implement == DENSE else entry.milliseconds


def apart(plans: Plans) -> tuple[LayerPlan, ...]:
    """Return plans in which every layer runs by itself."""
    return running(plans, frozenset())


def running(plans: Plans, kernels: frozenset[str]) -> tuple[LayerPlan, ...]:
    """Return plans in which the products that are not among these kernels do not run."""
    others = frozenset(plan.name for plan in plans if is_joined(plan.name)) - kernels
    return made_dense(plans, others, "one by one: as one product, the whole was no faster")


def rejoined(layers: Plans, plans: Plans) -> tuple[LayerPlan, ...]:
    """Return plans with their products again, except those of layers that have become dense.

    Parameters
    ----------
    layers
        As :func:`apart` returned them, some of them dense since.
    """
    pairs = list(zip(layers, plans, strict=True))
    lost = {now.name for now, before in pairs if now.sparse != before.sparse and not is_joined(now.name)}
    return tuple(before if before.joined and not lost & set(before.joined) else now for now, before in pairs)


def of_layers(plans: Plans) -> tuple[LayerPlan, ...]:
    """Return the plans of the layers, as a report tells them: those that are one product with their share of it."""
    products = {name: plan for plan in plans for name in plan.joined}
    layers = (plan for plan in plans if not is_joined(plan.name))
    return tuple(_share(plan, products[plan.name]) if plan.name in products else plan for plan in layers)


def share_of(choice: Choice, share: float, others: Sequence[str]) -> Choice:
    """Return what runs a product as what runs one of its layers, with its share of the time."""
    entry = choice.entry
    if entry is not None:
        times = share * entry.milliseconds, share * entry.dense_milliseconds
        entry = replace(entry, milliseconds=times[0], dense_milliseconds=times[1])
    return replace(choice, entry=entry, reason=f"one product with {', '.join(others)}: {choice.reason}")


def _share(plan: LayerPlan, product: LayerPlan) -> LayerPlan:
    """Return the plan of a layer that is part of a product, with the part of its time that its weights are of all."""
    share = plan.flops / max(1, product.flops)
    others = [name for name in product.joined if name != plan.name]
    choices = {size: share_of(choice, share, others) for size, choice in product.choices.items()}
    ratio = None if product.first.entry is None else 1.0 / product.first.entry.speedup
    return replace(plan, choices=choices, joined=product.joined, best_ratio=ratio)

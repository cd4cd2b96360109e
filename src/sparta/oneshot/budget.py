"""The budget: which pattern lies on which layer, and how many of its units are pruned.

Patterns are checked against every layer before anything runs. An allocation spreads one sparsity over all layers, by
the sizes of their weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from sparta.errors import NameNotFoundError, ValueRangeError, did_you_mean, message
from sparta.oneshot.targets import Target
from sparta.sparsify.allocation import ERK, Allocation, Candidate, Energy, Global, Uniform, lamp
from sparta.tesa import names
from sparta.tesa.patterns import Pattern, as_pattern
from sparta.tesa.select import check_sparsity, pruned_count

__all__ = ["counts_of", "patterns_of"]

_ALLOCATIONS: dict[str, Callable[[], Allocation]] = {
    "uniform": Uniform,
    "global": Global,
    "erk": ERK,
    "lamp": lamp,
    "energy": Energy,
}


def patterns_of(targets: Sequence[Target], pattern: Pattern | str | Mapping[str, Pattern | str]) -> dict[str, Pattern]:
    """Return the pattern of each layer; layers that a mapping does not name have none."""
    if not isinstance(pattern, Mapping):
        made = as_pattern(pattern)
        return {target.name: target.fitted(made) for target in targets}
    by_name = {target.name: target for target in targets}
    found: dict[str, Pattern] = {}
    for key, value in pattern.items():
        for name in names.resolve(key, list(by_name)):
            found.setdefault(name, by_name[name].fitted(as_pattern(value)))
    return found


def counts_of(
    targets: Sequence[Target],
    patterns: Mapping[str, Pattern],
    sparsity: float | Mapping[str, float] | None,
    allocation: Allocation | str,
) -> dict[str, int | None]:
    """Return how many units to prune in each layer, None for a pattern's own number."""
    if isinstance(sparsity, Mapping):
        return _counts_by_layer(targets, patterns, sparsity, allocation)
    if isinstance(allocation, str):
        if allocation not in _ALLOCATIONS:
            raise NameNotFoundError(did_you_mean(allocation, _ALLOCATIONS, "allocation"))
        allocation = _ALLOCATIONS[allocation]()
    own = {name for name, pattern in patterns.items() if pattern.own_sparsity() is not None}
    mixed = len(own) < len(patterns)
    for name in own:
        patterns[name].final_sparsity(None if mixed else sparsity)
    free = [target for target in targets if target.name in patterns and target.name not in own]
    if own and not isinstance(allocation, Uniform):
        raise ValueRangeError(
            message(
                f"the allocation {type(allocation).__name__} with the pattern {patterns[min(own)]}",
                "patterns without a sparsity of their own",
                "leave the allocation out",
            )
        )
    if free and sparsity is None:
        raise ValueRangeError(
            message(f"no sparsity for {patterns[free[0].name]}", "a number in [0, 1]", "N:M has one of its own")
        )
    result: dict[str, int | None] = dict.fromkeys(own)
    if free and sparsity is not None:
        candidates = [_candidate(target, patterns[target.name]) for target in free]
        counted = allocation.counts(candidates, sparsity)
        result.update({target.name: count for target, count in zip(free, counted, strict=True)})
    return result


def _counts_by_layer(
    targets: Sequence[Target],
    patterns: Mapping[str, Pattern],
    sparsity: Mapping[str, float],
    allocation: Allocation | str,
) -> dict[str, int | None]:
    """Return the counts where each layer has a sparsity of its own; the first name or pattern that fits counts."""
    if allocation != "uniform":
        raise ValueRangeError(
            message("an allocation together with a sparsity per layer", "one of them", "leave the allocation out")
        )
    by_name = {target.name: target for target in targets}
    shares: dict[str, float] = {}
    for key, value in sparsity.items():
        for name in names.resolve(key, list(by_name)):
            shares.setdefault(name, check_sparsity(value))
    result: dict[str, int | None] = {}
    for name, pattern in patterns.items():
        if pattern.own_sparsity() is not None:
            pattern.final_sparsity(shares.get(name))
            result[name] = None
        elif name in shares:
            result[name] = pruned_count(pattern.unit_count(by_name[name].layout.shape), shares[name])
        else:
            raise ValueRangeError(
                message(f"no sparsity for {name!r} ({pattern})", "a number in [0, 1] for each layer", "name it too")
            )
    return result


def _candidate(target: Target, pattern: Pattern) -> Candidate:
    shape = target.layout.shape
    scores = pattern.unit_scores(target.seen(target.parameter.detach()).abs())
    return Candidate(target.name, shape, pattern.unit_count(shape), scores)

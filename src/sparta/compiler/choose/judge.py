"""The judge: reads the rounds of a contest. Which variant runs, whether that can be claimed, and what could be gained.

The captured original graph does the work of the model as given, so the two are the gauge of noise: where they differ
and the difference does not hold still, no ratio is claimed. Nothing is measured here.
"""

from __future__ import annotations

from collections.abc import Sequence

from sparta.compiler.clock import Ratio, Rounds, machine_load, ratio_of
from sparta.compiler.plan import LayerPlan
from sparta.compiler.run.host import Host
from sparta.compiler.variant import GIVEN, ORIGINAL, Base, Variant
from sparta.specialize.tuning.shipped import CLEAR_WIN
from sparta.specialize.tuning.significance import LEAST_GAIN, Pairs

__all__ = [
    "LAYERS",
    "are_few",
    "bound",
    "close_ones",
    "doubt",
    "doubt_of_few",
    "explained",
    "fastest",
    "gained_elsewhere",
    "layers_win",
    "near_ones",
    "rivals",
    "surest",
    "times_of",
]

LAYERS = "layers alone"
"""Stands in rounds for the layers that could be sparse, run dense and nothing else."""

_HOST_GAIN = 1.02  # what a host other than eager must bring, so that noise does not choose
_CLOSE = 1.08  # within this, variants are timed once more
_GAUGE = 1.1  # how far the original graph may be from the model as given before the difference must hold still
_CLAIM = 1.2  # how far the interval of a ratio that is claimed may reach from it
_BEYOND = 1.05  # above a bound that is an estimate itself
_MOST_OF = 0.9  # of the rounds must tell
_FAR = 1.5  # by how much one call of each tells which is faster
_FEWEST = 3
_TWO_THIRDS = 2 / 3  # of the rounds, for a chain, where timing is unstable
_MOST = 0.6  # of the rounds: noise that hits every other call gives half of them
_OURS = {Host.EAGER, Host.CHAIN, Host.PANELS}  # hosts that need not win beyond doubt
_FEWEST_QUICK = 8  # rounds, for the quickest calls of either half to tell
_ALIKE, _CLEARLY_FASTER = 1.25, 1.1  # of gains by the quickest calls


def rivals(rounds: Rounds) -> list[Variant]:
    """Return the graphs among what was timed."""
    return [key for key in rounds.samples if isinstance(key, Variant) and key.base is not Base.GIVEN]


def fastest(rounds: Rounds, *, given: bool = True) -> Variant:
    """Return what runs: the fastest graph, an eager one where others are hardly faster, or the model as given.

    The model itself runs only where it can, and is faster than every graph beyond doubt; so does a chain without
    kernels beside one that has them, which is what was known to be best before.
    """
    graphs = rivals(rounds)
    best = max(graphs, key=lambda each: rounds.ratio(ORIGINAL, each).value)
    chain = next((each for each in graphs if each.host is Host.CHAIN and each.kernels), best)
    if best.host is Host.CHAIN and not rounds.ratio(chain, best).sure:
        best = chain
    eager = max(
        (each for each in graphs if each.host is Host.EAGER), key=lambda each: rounds.ratio(ORIGINAL, each).value
    )
    if rounds.ratio(eager, best).value < _HOST_GAIN:
        best = eager
    return GIVEN if given and rounds.ratio(best, GIVEN).sure else best


def surest(rounds: Rounds, *, layers_win: bool = False) -> Variant:
    """Return what runs where timing is unstable: the fastest that is faster than the original graph beyond doubt.

    Where none is, the fastest of those that likely are. The sparse graph runs eagerly if most rounds and their median
    are for it, because its layers have won one by one; as a chain if two rounds of three are, because a chain makes
    fewer calls for the same work. Whatever disturbs a call only makes it longer, so a graph also runs if its quickest
    calls are clearly faster, by a tenth, in either half of the rounds. Where the kernels were measured one by one to be
    clearly faster, a graph with kernels runs if its quickest calls are faster by 3 %.

    Parameters
    ----------
    layers_win
        Whether kernels were measured one by one to be clearly faster.
    """
    graphs = rivals(rounds)
    sure = [each for each in graphs if rounds.ratio(ORIGINAL, each).sure]
    if sure:
        return max(sure, key=lambda each: rounds.ratio(ORIGINAL, each).value)
    likely = [each for each in graphs if each.kernels and each.host is Host.EAGER and _share_won(rounds, each) >= _MOST]
    likely += [each for each in graphs if each.host is Host.CHAIN and _share_won(rounds, each) >= _TWO_THIRDS]
    likely = [each for each in likely if rounds.ratio(ORIGINAL, each).value >= LEAST_GAIN]
    ours = [each for each in graphs if each.host in _OURS and each != ORIGINAL]
    quick = {each: _by_quickest(rounds, each) for each in ours}
    least = {each: LEAST_GAIN if layers_win and each.kernels else _CLEARLY_FASTER for each in quick}
    likely += [each for each, gain in quick.items() if gain >= least[each]]
    return max(likely, key=lambda each: (quick[each], rounds.ratio(ORIGINAL, each).value), default=ORIGINAL)


def _share_won(rounds: Rounds, variant: Variant) -> float:
    pairs = list(zip(rounds.samples[ORIGINAL], rounds.samples[variant], strict=True))
    return sum(time < original for original, time in pairs) / max(len(pairs), 1)


def _by_quickest(rounds: Rounds, variant: Variant) -> float:
    """Return how many times faster than the original graph a variant's quickest calls are, by the worse half of rounds.

    Every other round is a half; 1 where the halves do not agree, or are too short to tell.
    """
    pairs = tuple(zip(rounds.samples[ORIGINAL], rounds.samples[variant], strict=True))
    if len(pairs) < _FEWEST_QUICK:
        return 1.0
    halves = [Pairs(pairs[half::2]).quiet_gain for half in range(2)]
    return min(halves) if max(halves) <= _ALIKE * min(halves) else 1.0


def layers_win(plans: Sequence[LayerPlan]) -> bool:
    """Whether the kernels of plans, measured one by one, are clearly faster than dense together."""
    entries = [plan.first.entry for plan in plans if plan.sparse and plan.first.entry is not None]
    dense = sum(entry.dense_milliseconds for entry in entries)
    return bool(entries) and dense >= CLEAR_WIN * sum(entry.milliseconds for entry in entries)


def close_ones(rounds: Rounds) -> list[Variant]:
    """Return the graphs that are as fast as the fastest, or nearly so."""
    graphs = rivals(rounds)
    best = max(graphs, key=lambda each: rounds.ratio(ORIGINAL, each).value)
    return [each for each in graphs if rounds.ratio(each, best).value < _CLOSE]


def near_ones(rounds: Rounds) -> list[Variant]:
    """Return what one call of each cannot tell apart from the fastest.

    >>> near_ones(Rounds({"a": [1.0], "b": [1.4], "c": [2.0]}))
    ['a', 'b']
    """
    best = min(rounds.median(key) for key in rounds.samples)
    return [key for key in rounds.samples if rounds.median(key) < _FAR * best]


def are_few(rounds: Rounds) -> bool:
    """Whether there are too few rounds to know the spread."""
    return len(next(iter(rounds.samples.values()))) < _FEWEST


def doubt_of_few(rounds: Rounds, best: Variant) -> str:
    """Return why the ratio of a variant to the model as given cannot be claimed after a few calls, or nothing."""
    if not are_few(rounds):
        return doubt(rounds, best)
    about = rounds.ratio(GIVEN, best).value
    return f"about {about:.1f}x the model as given, by a call of each: the budget was too small to claim a ratio"


def doubt(rounds: Rounds, best: Variant) -> str:
    """Return why the ratio of a variant to the model as given cannot be claimed, or nothing."""
    gauge, claim = rounds.ratio(GIVEN, ORIGINAL), rounds.ratio(GIVEN, best)
    off = max(gauge.value, 1 / gauge.value) > _GAUGE
    if (off and not gauge.within(_GAUGE)) or not claim.within(_CLAIM):
        return f"timing unstable ({machine_load()}): no ratio is claimed"
    return ""


def bound(rounds: Rounds, graph: Variant) -> float | None:
    """Return the ratio if the layers took no time: from rounds with them, the model as given and a dense graph.

    None where that is not known: they were not timed, or the rounds do not agree.
    """
    if LAYERS not in rounds.samples or graph not in rounds.samples or doubt(rounds, graph):
        return None
    series = zip(*(rounds.samples[key] for key in (GIVEN, graph, LAYERS)), strict=True)
    pairs = [(given, whole - layers) for given, whole, layers in series if whole > layers]
    if len(pairs) < _MOST_OF * len(rounds.samples[LAYERS]):
        return None  # layers that are all of the model, or that took longer alone
    found = ratio_of(*zip(*pairs, strict=True))
    return found.value if found.within(_CLAIM) else None


def explained(claim: Ratio, best: Variant, most: float | None) -> bool:
    """Whether a ratio is what sparse layers can account for; without one of them, the work is that of the original."""
    if best.kernels:
        return most is None or claim.value <= _BEYOND * most
    return best.base is Base.GIVEN or claim.value <= _GAUGE


def gained_elsewhere(rounds: Rounds, best: Variant, *, reduced: bool, all_of_it: bool = True) -> str:
    """Return in words what made a variant faster beside its sparse layers: what was seen, or all that may have.

    Parameters
    ----------
    reduced
        Whether the reduced graph is another than the original.
    all_of_it
        Whether to name what may be gained as well: the ratio is more than sparse layers account for.
    """
    reasons = []
    graph = rounds.ratio(GIVEN, ORIGINAL).value
    if graph > _GAUGE:
        reasons.append(f"the captured graph alone is {graph:.2f}x the model as given (fewer calls of Python)")
    if all_of_it and best.base is Base.REDUCED and reduced:
        reasons.append("the graph was reduced (see the notes)")
    if all_of_it and best.host is not Host.EAGER:
        reasons.append(f"{best.host.value} also speeds up what lies between the layers")
    if all_of_it and best.kernels:
        reasons.append("kernels also do what follows a layer (bias, activation, sum)")
    return "; ".join(reasons)


def times_of(rounds: Sequence[Rounds]) -> dict[str, float]:
    """Return the medians of variants by their names, of the last rounds that each took part in."""
    found: dict[str, float] = {}
    for each in rounds:
        found.update({str(key): each.median(key) for key in each.samples if isinstance(key, Variant)})
    return found

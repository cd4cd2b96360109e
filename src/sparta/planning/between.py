"""Between: levels of sparsity that are not measured take their time and cost from the measured ones on either side.

A kernel's time grows with the weights that it keeps, about as a straight line between two levels, and so does the
logarithm of what a layer loses. So a fine grid of levels, which meets a goal closely, costs the measuring of a coarse
one; the whole model is measured in any case.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import pairwise

from sparta.planning.options import SPARSITIES, Option

__all__ = ["costs_between", "times_between"]

_LEAST = 1e-30  # of a cost, for its logarithm


def times_between(measured: Mapping[Option, float]) -> dict[Option, float]:
    """Return the milliseconds of the options between measured ones.

    >>> found = times_between({Option("4x1", 0.95): 1.0, Option("4x1", 0.8): 4.0})
    >>> {str(option): round(ms, 6) for option, ms in found.items()}
    {'4x1 90 %': 2.0, '4x1 85 %': 3.0}
    """
    return {option: (1 - share) * measured[a] + share * measured[b] for option, a, b, share in _inside(measured)}


def costs_between(known: Mapping[Option, float]) -> dict[Option, float]:
    """Return the costs of the options between those whose costs are known."""
    logs = {option: math.log(max(cost, _LEAST)) for option, cost in known.items()}
    return {option: math.exp((1 - share) * logs[a] + share * logs[b]) for option, a, b, share in _inside(known)}


def _inside(known: Iterable[Option]) -> Iterable[tuple[Option, Option, Option, float]]:
    """Give each option between two known ones of its pattern and precision, with them and its share of the way."""
    series: dict[tuple[str, str | None], list[Option]] = {}
    for option in known:
        if option.sparsity is not None and option.measured:
            series.setdefault((option.pattern, option.precision), []).append(option)
    for (pattern, precision), options in series.items():
        options.sort(key=lambda option: -(option.sparsity or 0.0))
        for a, b in pairwise(options):
            high, low = a.sparsity or 0.0, b.sparsity or 0.0
            for level in SPARSITIES:
                if low < level < high:
                    yield Option(pattern, level, precision), a, b, (high - level) / (high - low)

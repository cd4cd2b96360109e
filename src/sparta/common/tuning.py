"""Tuning: search spaces, tuners and the search itself, all under the one name to import from.

A space is written as :class:`TunableItemCfg` (nested choices in NNI's notation), :class:`Tunable` makes a tuner for it,
and :func:`search` runs one against an objective within a budget. A point is an implement together with its parameters,
so choosing the kernel and tuning it are one search.
"""

from __future__ import annotations

from sparta.common.result import NoMoreTrial, PrunedTrial, Trial, TuningResult
from sparta.common.sampler import Tunable, Tuner
from sparta.common.search import search
from sparta.common.space import (
    Sample,
    Space,
    TunableItemCfg,
    default_of,
    from_json,
    from_nni_search_space,
    includes,
    normalize,
    samples_of,
    size_of,
    to_json,
    to_nni_search_space,
)

__all__ = [
    "NoMoreTrial",
    "PrunedTrial",
    "Sample",
    "Space",
    "Trial",
    "Tunable",
    "TunableItemCfg",
    "Tuner",
    "TuningResult",
    "default_of",
    "from_json",
    "from_nni_search_space",
    "includes",
    "normalize",
    "samples_of",
    "search",
    "size_of",
    "to_json",
    "to_nni_search_space",
]

"""A model with what it takes to plan for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Made:
    """A model with what it takes to plan for it.

    Parameters
    ----------
    metric
        Larger is better; None where there are no real weights.
    sign
        What makes the metric the number that is shown: -1 for a perplexity.
    """

    model: nn.Module
    example: Any
    data: list[Any]
    metric: Callable[[Any], float] | None = None
    metric_name: str = ""
    sign: int = 1

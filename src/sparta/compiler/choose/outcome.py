"""What a contest of variants decides: what runs, what was measured of it, and whether that is worth keeping."""

from __future__ import annotations

from dataclasses import dataclass

from sparta.compiler.choose.workshop import Plans
from sparta.compiler.plan import EndToEnd, LayerPlan
from sparta.compiler.variant import Variant

__all__ = ["Outcome"]


@dataclass(frozen=True)
class Outcome:
    """What a contest decided.

    Parameters
    ----------
    variant, plans
        What runs.
    whole
        What was measured.
    given_milliseconds
        Of the model as given.
    lasting
        Whether it is worth keeping: there was time enough, and timing was stable.
    """

    variant: Variant
    plans: tuple[LayerPlan, ...]
    whole: EndToEnd
    given_milliseconds: float = 0.0
    lasting: bool = False

    @staticmethod
    def untimed(variant: Variant, plans: Plans, reason: str) -> Outcome:
        """Return what runs without a measurement."""
        return Outcome(variant, tuple(plans), EndToEnd(variant.base, variant.host, reason=reason))

"""The timer of one contest: how many rounds the budget pays for, and whether that was enough to be worth keeping."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from sparta.compiler.clock import Call, Measure, Rounds
from sparta.compiler.session import Session

__all__ = ["ROUNDS", "Timer", "until_done"]

ROUNDS = 9  # of the contest that decides, where the budget allows

_SECONDS = {"quick": 1.5, "full": 6.0, "off": 1.0}
_BRIEF_SECONDS = 0.4
_LEAST_CALLS = 3  # of each variant: two to warm up and one that counts
_FEW = 3  # rounds, of calls that take long: the least that can be claimed


@dataclass
class Timer:
    """Times calls of whole models within the session's budget.

    Parameters
    ----------
    session
        Whose budget it is.
    measure
        The clock.
    call_seconds
        What one call of the model takes, about.
    cuda
        Whether the work is done by a CUDA device, for which each call waits.
    enough
        The share of the time that a comparison wants, below which its outcome is not worth keeping.
    hurried
        Whether there was too little time for a decision that is worth keeping.
    """

    session: Session
    measure: Measure
    call_seconds: float
    cuda: bool = False
    enough: float = 0.5
    hurried: bool = False

    def affords(self, variants: int) -> bool:
        """Whether what is left of the budget is enough to time this many variants at all."""
        return self.session.affords(_LEAST_CALLS * variants * self.call_seconds)

    def rounds(self, calls: Mapping[Any, Call], rounds: int = 0) -> Rounds:
        """Time calls, interleaved, for as many rounds as the budget allows."""
        least = _BRIEF_SECONDS if self.session.brief else _SECONDS[self.session.tune]
        wanted = max(least, rounds * len(calls) * self.call_seconds)
        seconds = min(wanted, max(0.02, 0.5 * self.session.left))
        self.hurried |= seconds < self.enough * wanted
        # By the clock, until the device is done: callers that wait for a result wait for the host as well.
        waiting = {key: until_done(call) if self.cuda else call for key, call in calls.items()}
        return Rounds(self.measure(waiting, seconds))

    @property
    def slow(self) -> bool:
        """Whether calls take so long that few of each must do."""
        return self.session.slow

    def few(self, calls: Mapping[Any, Call], most: int = _FEW) -> Rounds:
        """Time calls that take long and have been made before: one of each, and up to `most` if the budget allows."""
        waiting = {key: until_done(call) if self.cuda else call for key, call in calls.items()}
        found = Rounds(self.measure(waiting, 0.0))
        for _ in range(most - 1):
            if not self.session.affords(1e-3 * sum(found.median(key) for key in calls)):
                self.hurried = True
                break
            found = found.joined(Rounds(self.measure(waiting, 0.0)))
        return found


def until_done(call: Call) -> Call:
    """Return a call that waits for the CUDA device."""

    def waiting() -> Any:
        result = call()
        torch.cuda.synchronize()
        return result

    return waiting

"""What a search found: every trial with its outcome, and the best of them.

:func:`sparta.common.search.search` returns a :class:`TuningResult`; stores and reports keep its ``to_dict()``. A trial
that could not run is a result too, so its reason is kept and counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from sparta.common.domains import thaw
from sparta.common.space import Sample
from sparta.errors import SpartaError
from sparta.tables import table

__all__ = ["NoMoreTrial", "PrunedTrial", "Trial", "TrialState", "TuningResult", "shortened"]

TrialState = Literal["complete", "pruned", "failed"]

_SHOWN_TRIALS = 20
_SHOWN_REASON = 70


class NoMoreTrial(SpartaError):  # noqa: N818 - NNI's name for it
    """A tuner has no point left that was not tried."""


class PrunedTrial(SpartaError):  # noqa: N818 - a verdict that an objective raises, not a mistake
    """Raised by an objective whose candidate is of no use: it does not compile, or its numbers are wrong.

    >>> str(PrunedTrial("tile 64 needs more shared memory than there is"))
    'tile 64 needs more shared memory than there is'
    """


@dataclass(frozen=True)
class Trial:
    """One point that was tried.

    Attributes
    ----------
    number
        Its position in the search, from 0.
    params
        The sample.
    value
        What the objective returned (lower is better); None unless complete.
    state
        ``'complete'``, ``'pruned'`` (the objective said so) or ``'failed'`` (any other error, or a value that is not
        a finite number).
    seconds
        How long preparing and measuring it took.
    reason
        Why it is not complete; empty otherwise.
    """

    number: int
    params: Sample
    value: float | None
    state: TrialState
    seconds: float = 0.0
    reason: str = ""

    @property
    def params_text(self) -> str:
        """The sample on one line, such as ``block tile=16``."""
        return _params_text(self.params)

    def __str__(self) -> str:
        what = f"{self.value:.4g}" if self.value is not None else f"{self.state} ({shortened(self.reason, 60)})"
        return f"{what} with {self.params_text}"

    def to_dict(self) -> dict[str, Any]:
        """Return the trial as JSON-able data."""
        return {
            "number": self.number,
            "params": thaw(self.params),
            "value": self.value,
            "state": self.state,
            "seconds": self.seconds,
            "reason": self.reason,
        }


@dataclass(frozen=True)
class TuningResult:
    """The outcome of a search: all trials in order, and the best.

    Examples
    --------
    >>> result = TuningResult((Trial(0, {"tile": 16}, 2.5, "complete", 0.1), Trial(1, {"tile": 32}, None, "pruned")))
    >>> result.best, result.best_value
    ({'tile': 16}, 2.5)
    """

    trials: tuple[Trial, ...] = ()
    interrupted: bool = False

    @property
    def best_trial(self) -> Trial | None:
        """The complete trial with the lowest value, the earliest of equals; None if none is complete."""
        complete = [trial for trial in self.trials if trial.value is not None]
        return min(complete, key=lambda trial: (cast("float", trial.value), trial.number), default=None)

    @property
    def best(self) -> Sample | None:
        """The best sample, or None if no trial is complete."""
        return None if self.best_trial is None else self.best_trial.params

    @property
    def best_value(self) -> float | None:
        """The lowest value, or None if no trial is complete."""
        return None if self.best_trial is None else self.best_trial.value

    @property
    def reasons(self) -> dict[str, int]:
        """Why trials are not complete: each reason and how often it was given, the most frequent first."""
        return dict(Counter(trial.reason for trial in self.trials if trial.state != "complete").most_common())

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON-able data."""
        return {"trials": [trial.to_dict() for trial in self.trials], "interrupted": self.interrupted}

    def __str__(self) -> str:
        counts = Counter(trial.state for trial in self.trials)
        title = f"{len(self.trials)} trials"
        parts = [f"{counts[state]} {state}" for state in get_args(TrialState) if counts[state]]
        title += f" ({', '.join(parts)})" if parts else ""
        title += ", interrupted" if self.interrupted else ""
        rank = sorted(self.trials, key=lambda t: (t.value is None, t.value or 0.0, t.number))
        if len(rank) > _SHOWN_TRIALS:
            title += f", the best {_SHOWN_TRIALS}"
        rows = [
            (t.number, t.value, t.state, t.seconds, t.params_text, shortened(t.reason, _SHOWN_REASON))
            for t in rank[:_SHOWN_TRIALS]
        ]
        return table(["trial", "value", "state", "seconds", "params", "reason"], rows, title)


def _params_text(params: Sample) -> str:
    """Return a sample on one line: ``block tile=16``."""
    if not isinstance(params, Mapping):
        return str(params)
    named = [str(params["_name"])] if "_name" in params else []
    for name, value in params.items():
        if name != "_name":
            text = _params_text(value)
            named.append(f"{name}=({text})" if isinstance(value, Mapping) else f"{name}={text}")
    return " ".join(named)


def shortened(text: str, width: int) -> str:
    r"""Return a text on one line of at most `width` characters.

    >>> shortened("error:\n  too many resources requested", 20)
    'error: too many r...'
    """
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 3] + "..."

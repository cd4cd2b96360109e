"""The log of a recovery: what each block and the whole model's outputs were off by, before and after.

Losses of blocks are relative: the squared difference from the teacher's output over the square of that output.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from sparta.tables import table

__all__ = ["RecoveryLog", "StageLog"]


@dataclass(frozen=True)
class StageLog:
    """One stage: a block, or ``outputs`` for the whole model.

    Parameters
    ----------
    before, after
        The loss on the data. A stage that did not lower it was undone, and has the same number twice.
    """

    name: str
    before: float
    after: float
    steps: int
    seconds: float


@dataclass
class RecoveryLog:
    """What a recovery did, stage by stage; prints as a table."""

    stages: list[StageLog] = field(default_factory=list)
    note: str = ""

    def __iter__(self) -> Iterator[StageLog]:
        return iter(self.stages)

    def __len__(self) -> int:
        return len(self.stages)

    def to_dict(self) -> dict[str, Any]:
        """Return the log as plain values."""
        return {"stages": [asdict(stage) for stage in self.stages], "note": self.note}

    def __str__(self) -> str:
        rows = [
            [stage.name, f"{stage.before:.4g}", f"{stage.after:.4g}", stage.steps, f"{stage.seconds:.1f}"]
            for stage in self.stages
        ]
        text = table(["stage", "loss before", "after", "steps", "s"], rows)
        return f"{text}\n{self.note}" if self.note else text

"""The window: from when to when a modifier acts, and how often.

All times are epochs, also fractions of one. A window knows when something is due; what is done then is the modifier's.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Self

from pydantic import BaseModel, PrivateAttr, field_validator

from sparta.errors import ValueRangeError, message

__all__ = ["Window"]

_SLACK = 1e-6  # of an epoch: far below one step, far above the rounding of a sum of floats


class Window(BaseModel):
    """A window of epochs; the fields are described in :class:`~sparta.create.modifiers.base.Modifier`."""

    epoch_fields: ClassVar[tuple[str, ...]] = ("start_epoch", "end_epoch")
    """Fields that are moments in time, which :meth:`shifted` moves."""

    start_epoch: float = -1.0
    end_epoch: float = -1.0
    update_frequency: float = -1.0

    _started: bool = PrivateAttr(default=False)
    _ended: bool = PrivateAttr(default=False)
    _last_update: float = PrivateAttr(default=-1.0)

    @classmethod
    def label(cls) -> str:
        """Return the name it has in a recipe: that of the class, without ``Modifier``."""
        return cls.__name__.removesuffix("Modifier")

    @property
    def name(self) -> str:
        """The name it has in a recipe."""
        return type(self).label()

    @field_validator("update_frequency")
    @classmethod
    def _check_frequency(cls, value: float) -> float:
        if value != -1 and not value > 0:
            raise ValueError(message(f"update_frequency is {value}", "a number of epochs above 0, or -1: every step"))
        return value

    def _check_window(self) -> None:
        for name in ("start_epoch", "end_epoch"):
            value = getattr(self, name)
            if value < 0 and value != -1:
                raise ValueRangeError(message(f"{name} of {self.name} is {value}", "0 or more, or -1"))
        if 0 <= self.end_epoch < self.start_epoch:
            raise ValueRangeError(
                message(
                    f"{self.name} starts at epoch {self.start_epoch} and ends at {self.end_epoch}",
                    "an end that is not before the start, or -1 for no end",
                )
            )

    def start_pending(self, epoch: float) -> bool:
        """Whether it has not begun and is due to at `epoch`."""
        return not self._started and epoch >= self.start_epoch - _SLACK

    def end_pending(self, epoch: float) -> bool:
        """Whether it has begun, not ended, and is due to end at `epoch`."""
        return self._started and not self._ended and 0 <= self.end_epoch <= epoch + _SLACK

    def update_ready(self, epoch: float) -> bool:
        """Whether something is due at `epoch`: its start, its end, or a regular update in between."""
        if self.start_pending(epoch) or self.end_pending(epoch):
            return True
        if not self._started or self._ended:
            return False
        if self.update_frequency < 0:
            return True
        return self._updates_by(epoch) > self._updates_by(self._last_update)

    def active(self, epoch: float) -> bool:
        """Whether `epoch` lies in the window, the end left out."""
        return epoch >= self.start_epoch - _SLACK and (self.end_epoch < 0 or epoch < self.end_epoch - _SLACK)

    def _updates_by(self, epoch: float) -> int:
        """Count the regular updates due from the start until `epoch`."""
        return math.floor((epoch - max(0.0, self.start_epoch) + _SLACK) / self.update_frequency)

    def epochs(self) -> tuple[float, float]:
        """Return the first and the last epoch at which something happens; -1 where there is none."""
        return self.start_epoch, self.end_epoch

    def shifted(self, epochs: float) -> Self:
        """Return the same modifier `epochs` later; what begins "at once" begins then."""
        moved: dict[str, Any] = {}
        for name in self.epoch_fields:
            value = getattr(self, name)
            if value is not None and value >= 0:
                moved[name] = value + epochs
        if self.start_epoch < 0 and epochs > 0:
            moved["start_epoch"] = epochs
        return type(self)(**{**{name: getattr(self, name) for name in self.model_fields_set}, **moved})

"""The clock of a recipe: optimizer steps that really happened, read as epochs.

Time is a whole number of steps and epochs are derived from it, so that no rounding adds up over a long run and a
resumed run reads the very same times.
"""

from __future__ import annotations

from dataclasses import dataclass

from sparta.errors import ValueRangeError, message

__all__ = ["Clock", "optimizer_steps"]


@dataclass
class Clock:
    """Counts steps.

    >>> clock = Clock(steps_per_epoch=4)
    >>> for _ in range(6):
    ...     clock.tick()
    >>> clock.step, clock.epoch
    (6, 1.5)
    """

    steps_per_epoch: int
    step: int = 0

    @property
    def epoch(self) -> float:
        """The time in epochs."""
        whole, rest = divmod(self.step, self.steps_per_epoch)
        return whole + rest / self.steps_per_epoch

    def tick(self) -> None:
        """Count one step."""
        self.step += 1

    def set_epoch(self, epoch: float) -> None:
        """Go to the step nearest to `epoch`."""
        if not epoch >= 0:
            raise ValueRangeError(message(f"epoch is {epoch!r}", "0 or more"))
        self.step = round(epoch * self.steps_per_epoch)


def optimizer_steps(steps_per_epoch: int, accumulation_steps: int = 1) -> int:
    """Return how many optimizer steps an epoch of `steps_per_epoch` batches has.

    >>> optimizer_steps(100, 4)
    25
    """
    for name, value in (("steps_per_epoch", steps_per_epoch), ("accumulation_steps", accumulation_steps)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            fix = "for a loader without a length, count the batches" if name == "steps_per_epoch" else ""
            raise ValueRangeError(message(f"{name} is {value!r}", "a whole number of 1 or more", fix))
    if steps_per_epoch % accumulation_steps:
        less = steps_per_epoch // accumulation_steps
        raise ValueRangeError(
            message(
                f"{steps_per_epoch} batches an epoch do not divide into accumulations of {accumulation_steps}",
                "a whole number of optimizer steps an epoch",
                f"pass the number of optimizer steps that your loop takes in an epoch ({less} if it drops the rest, "
                f"{less + 1} if not) as steps_per_epoch, and leave accumulation_steps at 1",
            )
        )
    return steps_per_epoch // accumulation_steps

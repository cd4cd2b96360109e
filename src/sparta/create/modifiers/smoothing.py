"""The modifier that smooths activations before quantization; `sparta.create.quantize.smooth` has what it does."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from sparta.create.modifiers.base import Modifier, Run, modifier
from sparta.create.quantize.compensate import as_inputs
from sparta.create.quantize.smooth import smooth
from sparta.errors import ValueRangeError, message

__all__ = ["SmoothQuantModifier"]


@modifier
class SmoothQuantModifier(Modifier):
    """Moves large input channels from norms into the linear layers that read them, once, by the data of the run.

    Examples
    --------
    >>> SmoothQuantModifier(smoothing_strength=0.8).fields()
    {'smoothing_strength': 0.8}
    """

    kind: ClassVar[str] = "training"

    smoothing_strength: float = Field(
        default=0.5, ge=0, le=1, description="How much goes into the weights: 0 nothing, 1 all of the difference."
    )
    mappings: list[tuple[list[str], str]] | None = Field(
        default=None, description="Pairs of layers and the norm that they read; null: as the data shows."
    )
    num_calibration_steps: int | None = Field(default=None, ge=1, description="Batches of `data`; null: all.")

    def initialize(self, run: Run) -> None:
        """Check that there is data."""
        if run.data is None:
            given = f"{self.name} without data"
            raise ValueRangeError(message(given, "batches as the model takes them", "pass data= where the run begins"))

    def update_ready(self, epoch: float) -> bool:
        """Return whether it starts now."""
        return self.start_pending(epoch)

    def update(self, run: Run) -> None:
        """Smooth, and log how many norms gave something away."""
        assert run.data is not None  # noqa: S101 - checked before the run began
        done = smooth(
            run.model,
            as_inputs(run.data, self.num_calibration_steps),
            self.smoothing_strength,
            mappings=self.mappings,
            steps=self.num_calibration_steps,
        )
        run.log({"smoothed_norms": float(len(done))})

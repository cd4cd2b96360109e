"""OperatorBase: what every sparse module is: a drop-in for a dense one that owns several implements.

Until it is tuned or built it runs dense, so it can be put in place first and made fast later. The one idea to know: its
parameters are the dense module's own, so optimizers, checkpoints and weight tying never notice.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from sparta.common.tuning import TunableItemCfg
from sparta.errors import ValueRangeError, message
from sparta.specialize.tuner import Choice

__all__ = ["OperatorBase", "as_inputs"]


class OperatorBase(nn.Module):
    """Base of the sparse modules.

    Subclasses define `get_search_space`, `tune`, `build`, `update_mask` and `forward`. Of these, `tune` measures and
    `build` takes what a `tune` returned (its ``config``) without measuring.
    """

    choice: Choice | None
    """What runs and why; None until tuned or built."""

    def __init__(self) -> None:
        super().__init__()
        self.choice = None

    @property
    def ready(self) -> bool:
        """Whether it was tuned or built; dense runs until then."""
        return self.choice is not None

    @abstractmethod
    def get_search_space(self, inputs: Sequence[Tensor] | Tensor) -> TunableItemCfg:
        """Return the nested choice over the implements that can run, for inputs like these."""

    @abstractmethod
    def tune(self, inputs: Sequence[Tensor] | Tensor, **options: Any) -> Choice:  # noqa: ANN401 - the tuner's
        """Measure all implements on these inputs and keep the fastest."""

    @abstractmethod
    def build(self, config: Mapping[str, Any], sample_inputs: Sequence[Tensor] | Tensor) -> None:
        """Build the implement and parameters that `config` names."""

    def extra_repr(self) -> str:
        """Say what runs."""
        return str(self.choice) if self.choice is not None else "dense until tuned"


def as_inputs(inputs: Sequence[Tensor] | Tensor, count: int) -> tuple[Tensor, ...]:
    """Return sample inputs as a tuple; ``(A)`` is a tensor and not a tuple, and means the same."""
    given = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    if len(given) != count or not all(isinstance(t, Tensor) for t in given):
        raise ValueRangeError(message(f"{len(given)} sample inputs", f"a tuple of {count} tensors", "inputs=(x,)"))
    return given

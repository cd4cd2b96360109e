"""The range of epochs of a recipe: how long to train.

It does nothing by itself; the manager's `max_epochs` comes from it and from the windows of all others. A script asks
the manager how long to train, and nothing stops a script that trains longer.
"""

from __future__ import annotations

from typing import ClassVar

from sparta.create.modifiers.base import Modifier, modifier

__all__ = ["EpochRangeModifier"]


@modifier
class EpochRangeModifier(Modifier):
    """Says from when until when a recipe trains.

    >>> EpochRangeModifier(start_epoch=0, end_epoch=20).epochs()
    (0.0, 20.0)
    """

    kind: ClassVar[str] = "epoch"

    start_epoch: float = 0.0
    end_epoch: float

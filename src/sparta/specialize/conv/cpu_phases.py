"""Images of one tap whose channels do not begin on cache lines, read where they are: the layout ``'phases'``.

Planes of 14x14 floats, for one, begin at four different places of a line, and three in four loads from them would cross
two lines. Channels that begin at the same place are a chunk here, a *phase*: it is read from the beginning of a line,
some pixels early, and its sums are put back by as many. So nothing is copied, and no load crosses a line.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["PHASES", "PHASE_COUNT", "by_phase", "has_phases"]

PHASES = "phases"
PHASE_COUNT = 4  # kPhases of native/conv.h
_LEAST_PIXELS = (
    16  # floats in a cache line: less of a channel is not read early, for the first begins where memory does
)


def has_phases(channels: int, size: Sequence[int]) -> bool:
    """Tell whether images of so many channels, rows and columns can be read by phases: whole ones, of whole quads.

    >>> has_phases(1024, (14, 14)), has_phases(1024, (7, 7)), has_phases(3, (14, 14))
    (True, False, False)
    """
    pixels = size[0] * size[1]
    return channels > 0 and channels % PHASE_COUNT == 0 and pixels % PHASE_COUNT == 0 and pixels >= _LEAST_PIXELS


def by_phase(channels: int) -> NDArray[np.int64]:
    """Return channels in the order of their phases.

    >>> by_phase(8).tolist()
    [0, 4, 1, 5, 2, 6, 3, 7]
    """
    return np.arange(channels).reshape(-1, PHASE_COUNT).T.reshape(-1)

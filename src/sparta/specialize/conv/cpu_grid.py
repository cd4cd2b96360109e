"""Images cut into a grid of regions, one for each lane of a vector: the layout ``'grid'``.

A vector holds one pixel of every region, so a tap's shift is a whole number of vectors, and no load crosses two cache
lines; for the other layouts such loads cost twice as much, or a copy for each shift. Regions overlap by what their
taps read, and pixels are transposed on the way in and out, which pays where each is read often.
"""

from __future__ import annotations

import itertools

from sparta.specialize.conv.cpu_image import ImagePlan, shifts
from sparta.specialize.conv.spec import ConvGeometry

__all__ = ["GRID", "plan_grid"]

GRID = "grid"
_BAND_FLOATS = 128 * 1024  # a band's copy, where it has several rows; with the weights it stays in the second cache
_LINE = 16  # floats in a cache line


def plan_grid(
    geometry: ConvGeometry,
    kernel: tuple[int, int],
    size: tuple[int, int],
    *,
    channels: int = 1,
    lanes: int = 16,
    threads: int = 1,
) -> ImagePlan:
    """Return the layout of the copy of an image.

    Parameters
    ----------
    geometry, kernel, size
        Of a 2-d convolution, its taps and its input.
    channels, lanes, threads
        Input channels, floats in a vector, threads: they decide how large regions and bands are.

    Examples
    --------
    >>> plan = plan_grid(ConvGeometry.make(2, padding=1), (3, 3), (56, 56))
    >>> plan.grid_columns, plan.row_width, plan.tap_offsets[:4]
    (4, 16, (0, 16, 32, 256))
    """
    out_rows, out_columns = geometry.output_size(size, kernel)
    taps = list(itertools.product(*(shifts(geometry, kernel, dim) for dim in (0, 1))))
    keys = [(row[0], column[0]) for row, column in taps]
    slots = list(dict.fromkeys(keys))
    down, right = max(row[1] for row, _ in taps), max(column[1] for _, column in taps)
    columns = _grid_columns(out_rows, out_columns, (down, right), lanes)
    height, width = -(-out_rows // (lanes // columns)), -(-out_columns // columns)
    pitch = max(width, 1) + right
    most = max(_BAND_FLOATS // (max(len(slots) * channels, 1) * pitch * lanes) - down, 1)
    bands = -(-max(height, 1) // most)
    bands = -(-bands // threads) * threads
    rows = max(-(-height // bands), 1)
    lines = -(-(rows + down) * pitch * lanes // _LINE)
    (top, _), (left, _) = geometry.padding
    return ImagePlan(
        out_size=(out_rows, out_columns),
        slot_rows=tuple(row - top for row, _ in slots),
        slot_columns=tuple(column - left for _, column in slots),
        tap_slots=tuple(slots.index(key) for key in keys),
        tap_offsets=tuple((row[1] * pitch + column[1]) * lanes for row, column in taps),
        row_width=pitch,
        # An odd number of lines lets planes begin in different sets of a cache.
        plane=(lines + 1 - lines % 2) * _LINE,
        band_tokens=rows * pitch,
        reach=down * pitch + right,
        direct=False,
        grid_columns=columns,
    )


def _grid_columns(out_rows: int, out_columns: int, reach: tuple[int, int], lanes: int) -> int:
    """Return how many regions lie side by side: as many as compute the fewest pixels, and then copy the fewest."""

    def costs(columns: int) -> tuple[int, int]:
        height, width = -(-out_rows // (lanes // columns)), -(-out_columns // columns)
        return height * width, (height + reach[0]) * (width + reach[1])

    return min((1 << power for power in range(lanes.bit_length())), key=costs)

"""Where a convolution's kernel finds its input values: the slots, rows and planes of a padded copy of the image.

A kernel sees an image as a flat row of tokens, and adds a weight's offset to a token to find what the weight
multiplies. :func:`plan_image` chooses the copy's layout for one image size. A tap's shift is either part of the offset,
or done once when the image is copied to a *slot* of its own; slots cost memory and copying, and give aligned loads
(``'rows'``), no gaps (``'columns'``), or no gaps and panels that hold no more than is computed at once (``'taps'``).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sparta.errors import NameNotFoundError, ShapeError, did_you_mean, message
from sparta.specialize.conv.spec import ConvGeometry

__all__ = ["IMAGES", "ImagePlan", "plan_image", "shifts"]

IMAGES = ("flat", "rows", "columns", "taps")
"""Which shifts of a tap have slots of their own: none but the phases of a stride, those along rows (where rows are
aligned, or follow each other without a gap), or all."""

_LINE = 16  # floats in a cache line
_BAND_FLOATS = 64 * 1024  # a band's copy and the weights share the second level of caches
_MOST_FLOATS = 96 * 1024
_LEAST_SHARE = 48  # tokens of a thread
Ints = NDArray[np.integer]


@dataclass(frozen=True)
class ImagePlan:
    """The layout of an image's copy; sizes are in floats.

    Attributes
    ----------
    out_size
        Rows and columns of the output.
    slot_rows, slot_columns
        Input row and column after the first pixel of each slot.
    tap_slots
        Slot of each tap.
    tap_offsets
        Floats from an output pixel to the tap's value in its slot.
    row_width, plane
        Distance of two rows, and of two channels.
    band_tokens
        How many tokens are copied and computed together.
    reach
        Tokens after a band that its taps read.
    direct
        Whether the input is read as it is.
    grid_columns
        Regions side by side, in the layout of :mod:`~sparta.specialize.conv.cpu_grid`; else 0.
    by_phases
        Whether channels are read as :mod:`~sparta.specialize.conv.cpu_phases` says.
    """

    out_size: tuple[int, int]
    slot_rows: tuple[int, ...]
    slot_columns: tuple[int, ...]
    tap_slots: tuple[int, ...]
    tap_offsets: tuple[int, ...]
    row_width: int
    plane: int
    band_tokens: int
    reach: int
    direct: bool
    grid_columns: int = 0
    by_phases: bool = False

    def entry_offsets(self, tap: Ints, channel: Ints, channels: int) -> Ints:
        """Return byte offsets of weights at these taps and input channels."""
        start = np.array(self.tap_slots) * (channels * self.plane) + np.array(self.tap_offsets)
        offsets: Ints = 4 * (start[tap] + channel * self.plane)
        if offsets.size and offsets.max() >= 2**31 - 1:
            given = f"{len(self.slot_rows)} copies of {channels} channels of {self.plane} floats"
            raise ShapeError(message(given, "2 GiB in all", "use the image 'flat', or a smaller one"))
        return offsets


def plan_image(
    geometry: ConvGeometry,
    kernel: tuple[int, int],
    size: tuple[int, int],
    *,
    image: str = "flat",
    channels: int = 1,
    tile: int = 16,
    threads: int = 1,
    contiguous: bool = False,
) -> ImagePlan:
    """Return the layout of the copy of an image.

    Parameters
    ----------
    geometry, kernel, size
        Of a 2-d convolution, its taps and its input.
    image
        One of :data:`IMAGES`.
    channels, tile, threads
        Input channels, tokens that a kernel computes at once, threads: they decide how large bands are.
    contiguous
        Whether the input is, so that it need not be copied where nothing is to be padded or shifted.

    Examples
    --------
    >>> plan = plan_image(ConvGeometry.make(2, padding=1), (3, 3), (14, 14))
    >>> plan.row_width, plan.tap_offsets[:4]
    (15, (0, 1, 2, 15))
    """
    if image not in IMAGES:
        raise NameNotFoundError(did_you_mean(str(image), IMAGES, "image layout"))
    out_rows, out_columns = geometry.output_size(size, kernel)
    taps = list(itertools.product(*(shifts(geometry, kernel, dim) for dim in (0, 1))))
    # A shift is (phase, whole strides); a slot holds the phases and the strides that offsets leave out.
    keys = [
        (row[0], column[0], row[1] if image == "taps" else 0, column[1] if image != "flat" else 0)
        for row, column in taps
    ]
    slots = list(dict.fromkeys(keys))
    left_rows = [row[1] - key[2] for (row, _), key in zip(taps, keys, strict=True)]
    left_columns = [column[1] - key[3] for (_, column), key in zip(taps, keys, strict=True)]
    row_width = out_columns + max(left_columns)
    if image == "flat":
        row_width = _shared_width(geometry, size[1], out_columns, keys, left_columns)
    elif image == "rows":
        row_width = -(-row_width // _LINE) * _LINE
    offsets = tuple(r * row_width + c for r, c in zip(left_rows, left_columns, strict=True))
    reach, tokens = max(offsets), (out_rows - 1) * row_width + out_columns
    down, right = geometry.stride
    # The kernel reads whole vectors of the input and no more.
    alone = len(taps) == 1 and down == right == 1 and not any(map(sum, geometry.padding))
    direct = contiguous and alone and image == "flat" and tokens >= _LINE
    copies = max(len(slots) * channels, 1)
    room = tile if image == "taps" else _BAND_FLOATS // copies - reach
    # An image that is little larger than a band is not worth two.
    room = tokens if image != "taps" and (tokens + reach) * copies <= _MOST_FLOATS else room
    band = _direct_band(tokens, threads) if direct else _copied_band(tokens, room, tile, threads)
    (top, _), (left, _) = geometry.padding
    return ImagePlan(
        out_size=(out_rows, out_columns),
        slot_rows=tuple(key[0] + key[2] * down - top for key in slots),
        slot_columns=tuple(key[1] + key[3] * right - left for key in slots),
        tap_slots=tuple(slots.index(key) for key in keys),
        tap_offsets=offsets,
        row_width=row_width,
        plane=size[0] * size[1] if direct else _plane(band + reach, image, contiguous=contiguous),
        band_tokens=band,
        reach=reach,
        direct=direct,
    )


def _direct_band(tokens: int, threads: int) -> int:
    """Return how many tokens of an input that is read as it is one thread takes.

    Each thread keeps the same pixels from layer to layer, and so finds in its own cache what it wrote. An image of few
    pixels is not cut: parts of vectors would be lost, and threads share the weight's rows instead.
    """
    return tokens // threads if tokens >= _LEAST_SHARE * threads else tokens


def _copied_band(tokens: int, room: int, tile: int, threads: int) -> int:
    """Return how many tokens are copied together: whole tiles, or bands that threads share without cutting any."""
    band = max(-(-min(room, -(-tokens // threads)) // tile) * tile, tile)
    bands = -(-tokens // band)
    shared = -(-bands // threads) * threads
    even = -(-tokens // (shared * _LINE)) * _LINE
    return even if bands > 1 and -(-tokens // even) == shared else band


def _shared_width(
    geometry: ConvGeometry, columns: int, out_columns: int, keys: Sequence[tuple[int, ...]], shifts: Sequence[int]
) -> int:
    """Return the distance of two rows, of which the first may end in the padding that the second begins with."""
    width, step = out_columns, geometry.stride[1]
    for (_, phase, *_), shift in zip(keys, shifts, strict=True):
        first, read = phase - geometry.padding[1][0], out_columns + shift
        before, values_end = -(-max(-first, 0) // step), -(-(columns - first) // step)
        width = max(width, min(values_end, read), read - before)
    return width


def shifts(geometry: ConvGeometry, kernel: Sequence[int], dim: int) -> list[tuple[int, int]]:
    """Return the phase and the whole strides of each tap along a dim."""
    distances = (tap * geometry.dilation[dim] for tap in range(kernel[dim]))
    return [(distance % geometry.stride[dim], distance // geometry.stride[dim]) for distance in distances]


def _plane(floats: int, image: str, *, contiguous: bool) -> int:
    """Return the distance of two channels that hold so many floats, in whole cache lines."""
    # Channels-last images are copied in squares, the last of which may write beyond the end.
    lines = -(-floats // _LINE) + (not contiguous)
    # An odd number of lines lets planes begin in different sets of a cache; panels follow each other without a gap.
    return (lines if image == "taps" else lines + 1 - lines % 2) * _LINE

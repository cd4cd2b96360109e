"""From a mask back to its pattern: the most regular one that holds, and how dense the mask is inside it.

This is how zeros that are already in a checkpoint get a name. What matters is the order of questions, from
what says most to what says least: dense, channels, blocks, V:N:M, N:M, unstructured; the first that holds is the
answer. N:M must also say something: that no group of a sparse random mask happens to be overfull is no pattern.
Channels and blocks hold as well where a few weights inside them happen to be zero, as they are in trained, rounded or
freshly drawn weights: a kernel stores these zeros with the rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparta.tesa.mask import as_mask
from sparta.tesa.patterns.base import Pattern
from sparta.tesa.patterns.block import Block
from sparta.tesa.patterns.channel import Channel
from sparta.tesa.patterns.nm import NM
from sparta.tesa.patterns.unstructured import Unstructured
from sparta.tesa.patterns.vnm import VNM

__all__ = ["Detection", "detect"]

# Tried in the order of what they leave: lowest density first and, at equal density, the smaller group, because
# n:m implies 2n:2m. Powers of two, and the pairs V:N:M is published with.
_PAIRS = sorted(
    [(n, m) for m in (2, 4, 8, 16, 32) for n in (1, 2, 4, 8, 16) if 2 * n <= m] + [(2, 5), (2, 10), (2, 20)],
    key=lambda pair: (pair[0] / pair[1], pair[1]),
)
_ROWS_PER_BLOCK = (128, 64, 32, 16)
_SAMPLE = 128  # rows that rule most patterns out; a multiple of all of the above
_SMALLEST_BLOCK = 4  # elements; anything smaller is better called unstructured
_STRAY = 0.01  # zeros inside channels and blocks that are forgiven, as a share of the live elements
_STRAY_SHARE = 0.5  # and as a share of all zeros: a mask whose zeros are all strays has no pattern
_FEW = 8  # strays in a corner of the mask, or times their share, that let a size be looked at
_SIDES = (64, 32, 16, 8, 4, 2, 1)


@dataclass(frozen=True)
class Detection:
    """What :func:`detect` found.

    Parameters
    ----------
    pattern
        The most regular pattern that holds; None when every element is live.
    density
        Fraction of live elements.
    inside
        Fraction of live elements among those the pattern lets live: 1 for whole channels and blocks, just below 1
        where single elements of them are zero, the density divided by the pattern's capacity for N:M and V:N:M, the
        density itself for unstructured.
    """

    pattern: Pattern | None
    density: float
    inside: float

    def __str__(self) -> str:
        if self.pattern is None:
            return "dense"
        inside = "" if self.inside in {1.0, self.density} else f" ({self.inside:.2f} inside)"
        return f"{self.pattern}, density {self.density:.2f}{inside}"

    def to_dict(self) -> dict[str, Any]:
        """Return the detection as plain JSON values."""
        pattern = None if self.pattern is None else self.pattern.to_dict()
        return {"pattern": pattern, "density": self.density, "inside": self.inside}


def detect(mask: Tensor) -> Detection:
    """Return the most regular pattern that holds for `mask`, and the density inside it.

    Parameters
    ----------
    mask
        Bool tensor (True = live), or a numeric one of zeros and ones, of any shape, stride and device.

    Returns
    -------
    Detection
        `pattern` is None for a dense mask (every element live, or no element at all), ``Channel(0)`` for a mask
        without live elements. A mask along a single axis is N:M or unstructured: there, each element is a channel.

    Examples
    --------
    >>> diagonal = torch.eye(4, dtype=torch.bool)
    >>> print(detect(diagonal.repeat_interleave(32, 0).repeat_interleave(32, 1)))
    block 32×32, density 0.25
    >>> print(detect(NM(2, 4).project(torch.rand(32, 32))))
    2:4, density 0.50
    """
    mask = as_mask(mask)
    live = int(torch.count_nonzero(mask))
    if live == mask.numel():
        return Detection(None, 1.0, 1.0)
    density = live / mask.numel()
    if live == 0 and mask.ndim:
        return Detection(Channel(0), 0.0, 1.0)
    whole = _whole_units(mask)
    if whole is not None:
        return Detection(whole, density, 1.0)
    forgiven = _forgiven_units(mask, live)
    if forgiven is not None:
        pattern, covered = forgiven
        return Detection(pattern, density, live / covered)
    for group in _group_patterns(mask, density):
        if group.holds(_sample(mask, group.axis)) and group.holds(mask):
            return Detection(group, density, density / group.capacity(mask.shape))
    return Detection(Unstructured(), density, density)


def _whole_units(mask: Tensor) -> Pattern | None:
    """Return the channels or the largest blocks that `mask` is made of, or None."""
    steps = [_change_step(mask, axis) for axis in range(mask.ndim)]
    changing = [axis for axis in range(mask.ndim) if steps[axis] != 0]
    if len(changing) == 1 and sum(size > 1 for size in mask.shape) > 1:
        return Channel(changing[0])
    if mask.ndim < 2:
        return None
    # along an axis without changes the whole axis is one block
    sizes = [step or length for step, length in zip(steps, mask.shape, strict=True)]
    candidates = [Block(sizes[0], sizes[1])]
    if mask.ndim > 2:
        candidates.append(Block(sizes[-2], sizes[-1], axes=(-2, -1)))
    largest = max(candidates, key=lambda block: block.h * block.w)
    return largest if largest.h * largest.w >= _SMALLEST_BLOCK else None


def _forgiven_units(mask: Tensor, live: int) -> tuple[Pattern, int] | None:
    """Return channels or the largest blocks that `mask` fills but for stray zeros, and how many elements they cover."""
    if mask.ndim < 2:
        return None
    strays = min(int(_STRAY * live), int((1 - _STRAY_SHARE) * (mask.numel() - live)))
    for axis in range(2):
        size = mask.shape[1 - axis] * math.prod(mask.shape[2:])
        inside = int(mask.any([dim for dim in range(mask.ndim) if dim != axis]).sum()) * size
        if size >= _SMALLEST_BLOCK and inside <= live + strays:
            return Channel(axis), inside
    planes = [(0, 1)] if mask.ndim == 2 else [(0, 1), (mask.ndim - 2, mask.ndim - 1)]
    blocks = [(h, w, axes) for axes in planes for h, w in _block_sizes(mask.shape[axes[0]], mask.shape[axes[1]])]
    for h, w, axes in sorted(blocks, key=lambda block: -block[0] * block[1]):
        corner = mask.narrow(axes[0], 0, min(mask.shape[axes[0]], _SAMPLE))
        corner = corner.narrow(axes[1], 0, min(mask.shape[axes[1]], _SAMPLE))
        few = max(_FEW, _FEW * _STRAY * int(corner.sum()))
        if _covered(corner, h, w, axes) - int(corner.sum()) <= few:  # most sizes are out after a look at a corner
            inside = _covered(mask, h, w, axes)
            if inside <= live + strays:
                return Block(h, w) if axes == (0, 1) else Block(h, w, axes=(-2, -1)), inside
    return None


def _block_sizes(rows: int, columns: int) -> list[tuple[int, int]]:
    """Return the sizes of blocks that are tried, all of which divide the shape; a short axis may be one block."""
    heights, widths = ([*_SIDES, size] if size < _SIDES[0] else _SIDES for size in (rows, columns))
    sizes = {(h, w) for h in heights for w in widths if h * w >= _SMALLEST_BLOCK}
    return sorted((h, w) for h, w in sizes if rows % h == 0 and columns % w == 0)


def _covered(mask: Tensor, h: int, w: int, axes: tuple[int, int]) -> int:
    """Return how many elements the blocks of h by w along two neighbouring axes have that are not empty."""
    first, second = axes
    rows, columns = mask.shape[first] // h, mask.shape[second] // w
    cut = mask.narrow(first, 0, rows * h).narrow(second, 0, columns * w)
    split = cut.reshape(*mask.shape[:first], rows, h, columns, w, *mask.shape[second + 1 :])
    return int(split.any(first + 1).any(second + 1).sum()) * h * w


def _change_step(mask: Tensor, axis: int) -> int:
    """Return the greatest step of which every position where the slices along `axis` change is a multiple.

    0 means that no two slices differ.
    """
    others = [dim for dim in range(mask.ndim) if dim != axis]
    step = 0
    # a few slices first: most masks without structure change everywhere in them already
    for part in (_sample(mask, axis), mask):
        length = part.shape[axis]
        changes = part.narrow(axis, 1, length - 1) ^ part.narrow(axis, 0, length - 1)
        if others:  # torch reads an empty list of axes as all axes
            changes = changes.any(others)
        step = math.gcd(*(changes.nonzero().flatten() + 1).tolist())
        if step == 1:
            break
    return step


def _group_patterns(mask: Tensor, density: float) -> Iterator[NM | VNM]:
    """Yield the V:N:M and then the N:M patterns that may say something of `mask`, the most regular first."""
    fitting = [
        NM(n, m, axis)
        for axis in (1, 0)
        for n, m in _PAIRS
        if axis < mask.ndim and m <= mask.shape[axis] and density <= NM(n, m, axis).capacity(mask.shape)
    ]
    for nm in fitting:
        # with m = 2n the rows have nothing to agree on; and what is not N:M cannot be V:N:M
        if mask.ndim > 1 and nm.m > 2 * nm.n and nm.holds(_sample(mask, nm.axis)):
            for v in _ROWS_PER_BLOCK:
                agreed = NM(2 * nm.n, nm.m, nm.axis)
                telling = _is_telling(agreed, 1 - (1 - density) ** v, mask.numel() / v)
                if v <= mask.shape[1 - nm.axis] and (telling or density == nm.capacity(mask.shape)):
                    yield VNM(v, nm.n, nm.m, nm.axis)
    for nm in fitting:
        if density == nm.capacity(mask.shape) or _is_telling(nm, density, mask.numel()):
            yield nm


def _is_telling(nm: NM, density: float, numel: float) -> bool:
    """Return whether a random mask of this density and size would hardly hold `nm`.

    It breaks it in so many groups on average, and with this many in none with a probability of 1 in 20 000.
    """
    over = range(nm.n + 1, nm.m + 1)
    probability = sum(math.comb(nm.m, live) * density**live * (1 - density) ** (nm.m - live) for live in over)
    return probability * numel / nm.m >= 10


def _sample(mask: Tensor, axis: int) -> Tensor:
    """Return the first rows of groups along `axis`: a pattern that is broken in them is broken in `mask`."""
    if mask.ndim < 2:
        return mask
    other = 0 if axis else 1
    return mask.narrow(other, 0, min(_SAMPLE, mask.shape[other]))

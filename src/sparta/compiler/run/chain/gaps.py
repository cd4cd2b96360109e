"""Gaps: how the channels of small images are set apart, decided before anything is planned.

Threads share an image by its pixels, so each channel has a border between what one thread writes and what another does.
Where a line of a cache holds both, every channel costs a transfer between cores, which takes longer than multiplying.
So channels begin at whole pairs of lines (which processors fetch together) where only layers that can skip the gaps
read them; loads are aligned then as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from sparta.compiler.run.chain.layouts import readers_of, returned_by
from sparta.compiler.run.chain.trace import ImageItem, Trace
from sparta.compiler.run.chain.values import Made

__all__ = ["set_apart"]

_PAIR = 32  # floats in two lines


def set_apart(trace: Trace) -> int:
    """Set apart the channels of what only sparse convolutions make and read; return for how many results."""
    apart = _candidates(trace)
    # A result and its residual are read and written at the same offsets.
    while odd := [each for each in _with_residuals(trace) if len(each & apart.keys()) == 1]:
        for each in odd:
            for source in each:
                apart.pop(source, None)
    for item in trace.items:
        if isinstance(item, ImageItem) and item.product.apart is not None:
            gaps = apart.get(id(item.x.source), 0), apart.get(id(item.result.source), 0)
            if any(gaps):
                item.product = replace(item.product, step=item.product.apart(*gaps))
            if gaps[1] and isinstance(item.result.source, Made):
                shape = item.product.shape
                item.result.source.nbytes = 4 * shape[0] * shape[1] * (math.prod(shape[2:]) + gaps[1])
    return len(apart)


def _candidates(trace: Trace) -> dict[int, int]:
    """Return the gaps that results can have, by the identity of their memory."""
    found: dict[int, int] = {}
    readers, returned = readers_of(trace), returned_by(trace)
    for item in trace.items:
        if not isinstance(item, ImageItem) or item.product.apart is None:
            continue
        source, meta = item.result.source, item.result.meta
        uses = readers[id(source)]
        skips = all(
            isinstance(reader, ImageItem)
            and reader.product.apart is not None
            and value.offset == item.result.offset
            and value.meta.shape == meta.shape
            and value.meta.is_contiguous()
            for reader, value in uses
        )
        gap = -math.prod(item.product.shape[2:]) % _PAIR
        if isinstance(source, Made) and uses and skips and gap and id(source) not in returned:
            found[id(source)] = gap
    return found


def _with_residuals(trace: Trace) -> Iterator[set[int]]:
    """Yield the memory of results with that of what is added to them, by identity."""
    for item in trace.items:
        if isinstance(item, ImageItem) and item.residual is not None:
            yield {id(item.result.source), id(item.residual.source)}

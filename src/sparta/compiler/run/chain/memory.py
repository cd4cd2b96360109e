"""Memory: every piece of an arena gets its place, so that what is in use at the same time does not overlap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sparta.compiler.run.chain.layouts import reads
from sparta.compiler.run.chain.trace import ImageItem, Item, Linear, Native, PythonCall
from sparta.compiler.run.chain.values import Made, Source
from sparta.specialize.cpu.chain import StepKind

__all__ = ["LINE", "planned"]

LINE = 64
"""Bytes to which memory is aligned."""
_NEAR = 1 << 21  # bytes of a piece that is likely to be in the caches of the cores that wrote it
_OF_HEADS = (StepKind.ATTENTION, StepKind.ATTENTION_BF16)


def _of_images(item: ImageItem) -> list[Source]:
    """Return the memory that a layer of images uses beside its result; what comes in bytes is read in no other way."""
    residual = None if item.residual is None else item.residual.source
    used = (item.from_bytes or item.x.source, item.residual_bytes or residual, item.room, item.in_bytes)
    return [each for each in used if each is not None]


def _is_paired(item: Item, after: Sequence[Item]) -> bool:
    """Whether the next layer may begin before this one has read all of its input; see ``native/conv.h``."""
    if not after or not isinstance(item, ImageItem) or not isinstance(after[0], ImageItem):
        return False
    kinds = (item.product.step.kind, after[0].product.step.kind)
    convolutions = kinds[0] is StepKind.CONV and kinds[1] in (StepKind.CONV, StepKind.DEPTHWISE)
    return convolutions and any(value.source is item.result.source for value in reads(after[0]))


def _cut(item: Item) -> str:
    """Return what threads share among each other when they write the result of an item."""
    if isinstance(item, ImageItem):
        return "pixels"
    return "heads" if isinstance(item, Native) and item.call.step.kind in _OF_HEADS else "rows"


def _may_share(one: Made, two: Made, cuts: Mapping[int, str], threads: int) -> bool:
    """Whether two pieces that are never in use at the same time may lie in the same memory.

    A core that writes where another one wrote must first fetch those lines from the other's cache, which takes longer
    than what a small layer computes. So where there are several, the same core should write the same part of all pieces
    in one place.
    """
    if threads == 1 or max(one.nbytes, two.nbytes) > _NEAR:
        return True
    cut = cuts.get(id(one), "rows")
    return cut == cuts.get(id(two), "rows") and (cut == "pixels" or one.nbytes == two.nbytes)


def planned(items: Sequence[Item], threads: int) -> int:
    """Place all memory of the arena, so that what is in use at the same time does not overlap; return the size.

    Parameters
    ----------
    threads
        How many will run the items.
    """
    pieces: dict[int, Made] = {}
    cuts = {id(item.result.source): _cut(item) for item in items if not isinstance(item, PythonCall)}
    for number, item in enumerate(items):
        used = [value.source for value in reads(item)] if not isinstance(item, ImageItem) else _of_images(item)
        if not isinstance(item, PythonCall):
            used.append(item.result.source)
        used += [item.packed] if isinstance(item, Linear) and item.packed is not None else []
        for source in used:
            if isinstance(source, Made):
                source.used_at(number)
                pieces[id(source)] = source
                if _is_paired(item, items[number + 1 : number + 2]):
                    source.used_at(number + 1)
    placed: list[Made] = []
    total = 0
    for piece in sorted((p for p in pieces.values() if p.slot is None), key=lambda each: -each.nbytes):
        busy = sorted(
            (other.offset, other.offset + other.nbytes)
            for other in placed
            if (other.first <= piece.last and piece.first <= other.last) or not _may_share(piece, other, cuts, threads)
        )
        offset = 0
        for begin, end in busy:
            if offset + piece.nbytes <= begin:
                break
            offset = max(offset, -(-end // LINE) * LINE)
        piece.offset = offset
        placed.append(piece)
        total = max(total, offset + piece.nbytes)
    return total

"""Places: how layers of images in int8 or bf16 hand each other short numbers, decided before anything is planned.

A result that such convolutions read is rounded by the layer that makes it, once for all that round it in the same way,
and poolings between them compare what was rounded. Where someone else reads it too it is written in real numbers
beside. What is said of bytes here holds for bf16 as well.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from typing import Any

from sparta.compiler.run.chain.layouts import reads, returned_by
from sparta.compiler.run.chain.trace import ImageItem, Item, Native, Trace
from sparta.compiler.run.chain.values import Made, Source, Value
from sparta.specialize.cpu.chain import kept_bytes, kept_dtype

__all__ = ["hand_over_bytes"]

_Rounding = tuple[Any, ...]


def hand_over_bytes(trace: Trace) -> int:
    """Let int8 convolutions leave their results in bytes for others that would round them; return how many do."""
    plan = _Plan(trace)
    for item in reversed(trace.items):  # readers first: a pooling reads bytes if its own readers do
        if isinstance(item, Native) and item.call.in_bytes is not None:
            plan.pool(item)
        elif isinstance(item, ImageItem) and item.product.handing is not None:
            plan.image(item)
    return plan.handed


class _Plan:
    """Who reads and writes the memory of a trace, and what was decided so far."""

    def __init__(self, trace: Trace) -> None:
        self.handed = 0
        self._returned = returned_by(trace)
        self._uses: dict[int, list[tuple[Item, Value]]] = defaultdict(list)
        self._makers: dict[int, Item] = {}
        self._pooled: dict[int, _Rounding] = {}  # the rounding of poolings of bytes, by identity
        for item in trace.items:
            for value in reads(item):
                self._uses[id(value.source)].append((item, value))
            if isinstance(item, (Native, ImageItem)):
                self._makers[id(item.result.source)] = item

    def image(self, item: ImageItem) -> None:
        """Hand on the result of a convolution."""
        source = item.result.source
        takers, adds = self._takers(item), self._adding(item)
        # Layers may round one tensor in several ways: the most common one is handed over.
        ways = [way for _, way in takers] or [each.product.adding for each in adds if each.product.adding is not None]
        ways = [way for way in ways if kept_dtype(way) == item.product.hands]
        if not ways:
            return
        (way, _), *_rest = Counter(ways).most_common()
        adding = [each for each in adds if each.product.adding == way]
        readers = [each for each, wanted in takers if wanted == way]
        alone = len(readers) + len(adding) == len(self._uses[id(source)]) and id(source) not in self._returned
        nbytes = kept_bytes(item.product.shape, item.product.hands)
        item.to_bytes, item.in_bytes = way, Made(nbytes)
        if alone and isinstance(source, Made):
            source.nbytes, item.in_bytes = nbytes, source
        _read_bytes(readers, item.in_bytes)
        for reader in adding:
            reader.residual_bytes = item.in_bytes
        self.handed += 1

    def pool(self, item: Native) -> None:
        """Let a pooling compare bytes, where a convolution makes what it reads and all that read it round it alike."""
        source, read = item.result.source, item.call.x.source
        made = self._makers.get(id(read))
        alone = len(self._uses[id(read)]) == 1 and id(read) not in self._returned
        if (
            not isinstance(made, ImageItem)
            or made.product.handing is None
            or not alone
            or not _is_whole(item.call.x, made)
        ):
            return
        takers = self._takers(item)
        ways = {way for _, way in takers}
        adding = [each for each in self._adding(item) if each.product.adding in ways]
        every = len(takers) + len(adding) == len(self._uses[id(source)]) and id(source) not in self._returned
        dtype = made.product.hands
        fits = {kept_dtype(way) for way in ways} == {dtype}
        if len(ways) != 1 or not fits or not every or not isinstance(source, Made) or item.call.in_bytes is None:
            return
        source.nbytes = kept_bytes(tuple(item.result.meta.shape), dtype)
        item.call = replace(item.call, step=item.call.in_bytes(dtype))
        _read_bytes([each for each, _ in takers], source)
        for reader in adding:
            reader.residual_bytes = source
        (self._pooled[id(item)],) = ways
        self.handed += 1

    def _takers(self, item: ImageItem | Native) -> list[tuple[ImageItem | Native, _Rounding]]:
        """Return what would read all of a result as an image in bytes, and how it rounds it."""
        found: list[tuple[ImageItem | Native, _Rounding]] = []
        for reader, value in self._uses[id(item.result.source)]:
            if not _is_whole(value, item):
                continue
            if isinstance(reader, ImageItem) and reader.x is value and reader.residual is not value:
                found += [] if reader.product.rounding is None else [(reader, reader.product.rounding)]
            elif isinstance(reader, Native) and id(reader) in self._pooled:
                found.append((reader, self._pooled[id(reader)]))
        return found

    def _adding(self, item: ImageItem | Native) -> list[ImageItem]:
        """Return what adds all of a result, rounded."""
        return [
            reader
            for reader, value in self._uses[id(item.result.source)]
            if isinstance(reader, ImageItem) and reader.residual is value and reader.x is not value
            if reader.product.adding is not None and _is_whole(value, item)
        ]


def _read_bytes(readers: list[ImageItem | Native], source: Source) -> None:
    for reader in readers:
        if isinstance(reader, ImageItem) and isinstance(source, Made):
            reader.from_bytes, reader.room = source, None


def _is_whole(value: Value, made: ImageItem | Native) -> bool:
    same = value.meta.shape == made.result.meta.shape and value.meta.is_contiguous()
    return same and value.offset == made.result.offset == 0

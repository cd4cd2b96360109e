"""Layouts: how products of a trace hand each other their activations, decided before anything is planned.

A result that only products read stays a panel, one that they would all round in the same way is rounded by the product
that makes it, and several products of one tensor share one packed copy.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch

from sparta.compiler.run.chain.trace import ImageItem, Item, Linear, Native, PythonCall, Trace
from sparta.compiler.run.chain.values import Made, Value, mapped, rows_of
from sparta.specialize.cpu.chain import StepKind

__all__ = ["fuse", "hand_over_panels", "readers_of", "reads", "returned_by", "round_early", "share_packed"]


def readers_of(trace: Trace) -> dict[int, list[tuple[Item, Value]]]:
    """Return who reads the memory of each source, by its identity; the outputs are read by no item."""
    found: dict[int, list[tuple[Item, Value]]] = defaultdict(list)
    for item in trace.items:
        for value in reads(item):
            found[id(value.source)].append((item, value))
    return found


def reads(item: Item) -> list[Value]:
    """Return the tensors that an item reads."""
    if isinstance(item, PythonCall):
        found: list[Value] = []
        mapped((item.args, item.kwargs), lambda each: found.append(each) if isinstance(each, Value) else None)
        return found
    if isinstance(item, Native):
        return [each for each in (item.call.x, *item.call.others) if each is not None]
    return [each for each in (item.x, item.residual) if each is not None]


def returned_by(trace: Trace) -> set[int]:
    """Return the sources that hold outputs, by their identity."""
    found: set[int] = set()
    mapped(trace.outputs, lambda each: found.add(id(each.source)) if isinstance(each, Value) else None)
    return found


def fuse(trace: Trace) -> None:
    """Let dense products do what follows them: an activation, then a sum with a tensor that is there already."""
    readers, returned = readers_of(trace), returned_by(trace)
    for item in list(trace.items):
        if isinstance(item, ImageItem) and item.product.activated is not None:
            _fuse_image(trace, item, readers, returned)
            readers = readers_of(trace)
        if not isinstance(item, Linear) or item.product.activated is None:
            continue
        after = _only_reader(item, readers, returned)
        if after is not None and after.call.activation is not None:
            item.product = item.product.activated(after.call.activation)
            _take_over(trace, item, after)
            after = _only_reader(item, readers, returned)
        if after is not None and after.call.adds:
            both = (after.call.x, *after.call.others)
            added = next((each for each in both if each is not None and each.source is not item.result.source), None)
            if added is not None and rows_of(added.meta, item.product.outputs) == (item.tokens, item.product.outputs):
                item.residual = added
                _take_over(trace, item, after)
                readers = readers_of(trace)


def _fuse_image(
    trace: Trace, item: ImageItem, readers: dict[int, list[tuple[Item, Value]]], returned: set[int]
) -> None:
    """Let a dense layer of images do what follows it; of a ReLU after a sum, both."""
    after = _only_reader(item, readers, returned)
    if after is not None and _activated(item, after.call.activation):
        _take_over(trace, item, after)
        after = _only_reader(item, readers, returned)
    if after is None or not after.call.adds:
        return
    both = (after.call.x, *after.call.others)
    added = next((each for each in both if each is not None and each.source is not item.result.source), None)
    if added is None or not added.meta.is_contiguous() or tuple(added.meta.shape) != item.product.shape:
        return
    item.residual = added
    _take_over(trace, item, after)
    last = _only_reader(item, readers, returned)
    if last is not None and last.call.activation == "relu" and _activated(item, "relu_last"):
        _take_over(trace, item, last)


def _activated(item: ImageItem, activation: str | None) -> bool:
    """Give a layer of images an activation; False where it has one, or there is none."""
    make = item.product.activated
    made = None if activation is None or make is None else make(activation)
    if made is not None:
        item.product = made
    return made is not None


def _only_reader(
    item: Linear | ImageItem, readers: dict[int, list[tuple[Item, Value]]], returned: set[int]
) -> Native | None:
    """Return the step that alone reads a product's result, and all of it as it is."""
    source, meta = item.result.source, item.result.meta
    found = readers[id(source)]
    if len(found) != 1 or id(source) in returned:
        return None
    reader, value = found[0]
    same = value.meta.shape == meta.shape and value.offset == 0 and value.meta.is_contiguous()
    return reader if isinstance(reader, Native) and same else None


def _take_over(trace: Trace, item: Linear | ImageItem, after: Native) -> None:
    """Let a product write the result of a step, in its place: what that reads may be made between the two."""
    item.result = after.result
    trace.items.remove(item)
    trace.items[trace.items.index(after)] = item


def round_early(trace: Trace) -> None:
    """Let int8 products round their results where all that reads them would round them in one way."""
    readers, returned = readers_of(trace), returned_by(trace)
    for item in trace.items:
        if not isinstance(item, Linear) or item.residual is not None or item.product.rounded is None:
            continue
        source = item.result.source
        found = readers[id(source)]
        reading = [other for other, value in found if isinstance(other, Linear) and _reads_bytes(item, other, value)]
        ways = {other.product.rounding or () for other in reading}
        if len(ways) != 1 or len(reading) != len(found) or id(source) in returned or not isinstance(source, Made):
            continue
        item.product = item.product.rounded(*ways)
        source.nbytes = item.result.meta.numel()
        item.result = Value(item.result.meta.to(item.product.output), source)
        for other in reading:
            other.x = Value(other.x.meta.to(item.product.output), source)


def _reads_bytes(writer: Linear, reader: Linear, value: Value) -> bool:
    """Whether a product can read all of another's result as bytes."""
    whole = reader.tokens == writer.tokens and reader.product.inputs == writer.product.outputs and value.offset == 0
    return reader.x is value and whole and reader.product.takes is not None


def hand_over_panels(trace: Trace) -> int:
    """Let products leave their results in panels where all that reads them reads panels of the same tiles."""
    readers, returned, count = readers_of(trace), returned_by(trace), 0
    for item in trace.items:
        if not isinstance(item, Linear) or item.residual is not None or not item.product.tile:
            continue
        source, product = item.result.source, item.product
        reading = readers[id(source)]
        fits = (
            reading
            and id(source) not in returned
            and all(
                isinstance(other, Linear) and other.x is value and _reads_panel(item, other) for other, value in reading
            )
        )
        if (
            not fits
            or not isinstance(source, Made)
            or (product.kind is StepKind.INT8) == (product.output == torch.float32)
        ):
            continue
        item.to_panel = True
        source.nbytes = product.panel_bytes(item.tokens, product.outputs)
        for other, _ in reading:
            assert isinstance(other, Linear)  # noqa: S101 - looked at above
            other.packed = source
        count += 1
    return count


def _reads_panel(writer: Linear, reader: Linear) -> bool:
    """Whether a product can read another's result as a panel: all of it, in tiles of one width."""
    one, two = writer.product, reader.product
    same = one.tile == two.tile and one.kind is two.kind and two.inputs == one.outputs
    whole = (
        reader.tokens == writer.tokens and reader.x.offset == 0 and reader.x.meta.numel() == writer.result.meta.numel()
    )
    integers = one.kind is not StepKind.INT8 or two.takes == one.output
    return same and whole and integers and reader.residual is not writer.result


def share_packed(trace: Trace) -> int:
    """Let products that read the same rows in the same panels share one packed copy."""
    groups: dict[Any, list[Linear]] = defaultdict(list)
    for item in trace.items:
        if isinstance(item, Linear) and item.packed is None and item.product.rounding is not None:
            if item.x.meta.dtype != torch.float32:
                continue
            product = item.product
            rows = (id(item.x.source), item.x.offset, item.tokens, item.stride)
            groups[rows, product.kind, product.tile, product.inputs, product.rounding].append(item)
    shared = [group for group in groups.values() if len(group) > 1]
    for group in shared:
        packed = Made(group[0].product.panel_bytes(group[0].tokens, group[0].product.inputs))
        group[0].packs = True
        for item in group:
            item.packed = packed
    return len(shared)

"""Which layers choose together: those that share an input take one option, and channels go where they are read.

Layers that get one tensor (query, key and value; gate and up) are one *unit*. Removing inputs of a layer removes the
outputs of the layers that make them, so the option ``"channels"`` belongs to a layer and all that write for it: a
*group* of units, which chooses either that or one option per unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sparta.oneshot.calibrate import call
from sparta.oneshot.stages import order
from sparta.oneshot.targets import Target
from sparta.propagation.api import propagate
from sparta.propagation.groups import Slot, find_slots
from sparta.tesa.patterns import Block, Channel, Pattern

__all__ = ["Channels", "Group", "groups_of"]


@dataclass(frozen=True)
class Channels:
    """Inputs of a layer that can go, each with what makes it.

    Parameters
    ----------
    reader
        The layer whose inputs they are.
    writers
        The layers whose outputs they are.
    pattern
        The pattern on the reader's weight: its columns, or as many columns side by side as a head has.
    """

    reader: str
    writers: tuple[str, ...]
    pattern: Pattern


@dataclass(frozen=True)
class Group:
    """Units that choose independently of each other, or become narrower together.

    Parameters
    ----------
    units
        Layers by name; those of one unit take the same option.
    channels
        What can become narrower; empty where nothing can.
    """

    units: tuple[tuple[str, ...], ...]
    channels: tuple[Channels, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All layers of the group."""
        return tuple(name for unit in self.units for name in unit)


def groups_of(
    model: nn.Module, targets: Sequence[Target], batch: Any, example: Any, *, channels: bool
) -> tuple[list[Group], list[str]]:
    """Return the groups of layers in the order of the model, and notes on what could not be found out."""
    with torch.no_grad():
        call(model, batch, 0)  # a wrong batch is told before anything else
        stages, _ = order(model, targets, batch, None)
    units = [tuple(target.name for target in stage.targets) for stage in stages]
    if not channels:
        return [Group((unit,)) for unit in units], []
    try:
        result = propagate(model, example)
        slots = find_slots(result.facts, result.captured.graph)
    except Exception as error:  # noqa: BLE001 - a model that cannot be captured has no channels to remove
        return [Group((unit,)) for unit in units], [f"no channels: {str(error).splitlines()[0]}"]
    known = {target.name: target for target in targets}
    found = [each for slot in slots if (each := _channels(slot, known)) is not None]
    return _joined(units, found), []


def _joined(units: Sequence[tuple[str, ...]], found: Sequence[Channels]) -> list[Group]:
    """Return the units that share channels as one group each."""
    at = {name: number for number, unit in enumerate(units) for name in unit}
    root = list(range(len(units)))

    def top(number: int) -> int:
        while root[number] != number:
            number = root[number]
        return number

    usable = [each for each in found if all(name in at for name in (each.reader, *each.writers))]
    for each in usable:
        for name in each.writers:
            root[top(at[name])] = top(at[each.reader])
    members: dict[int, list[int]] = {}
    for number in range(len(units)):
        members.setdefault(top(number), []).append(number)
    return [
        Group(tuple(units[n] for n in numbers), tuple(each for each in usable if top(at[each.reader]) == group))
        for group, numbers in members.items()
    ]


def _channels(slot: Slot, known: dict[str, Target]) -> Channels | None:
    """Return a slot as channels of one layer; None where several layers read it, or one that cannot be pruned."""
    if slot.kind not in {"channel", "neuron", "head"}:
        return None
    touched = {key for group in slot.groups for key in group.slices}
    readers = [name for name, dim in touched if dim == 1 and name in known]
    writers = [name for name, dim in touched if dim == 0 and name in known]
    others = [name for name, dim in touched if dim == 1 and name not in known]
    if len(readers) != 1 or not writers or others or readers[0] in writers or known[readers[0]].transposed:
        return None
    if any(known[name].layout.groups > 1 for name in [*readers, *writers]):
        return None
    reader = known[readers[0]]
    widths = set()
    for group in slot.groups:
        columns = group.slices[reader.name, 1].nonzero().flatten()
        widths.add(len(columns))
        if int(columns[-1]) - int(columns[0]) + 1 != len(columns):
            return None
    columns_in_all = len(slot.groups) * max(widths)
    if len(widths) != 1 or columns_in_all != reader.layout.shape[1] or len(slot.groups) < 2:
        return None
    width = widths.pop()
    pattern = Channel(1) if width == 1 else Block(reader.layout.shape[0], width)
    return Channels(reader.name, tuple(sorted(writers)), pattern)

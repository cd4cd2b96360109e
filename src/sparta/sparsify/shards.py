"""Sharded parameters: which part of a tensor is in this process, and how parts become whole again.

FSDP2 and tensor parallelism keep a parameter as a ``DTensor``, cut along any of its axes over one or several dims of a
mesh. All that matters here is where the part of this process lies in the whole, and over which groups of processes
counts are summed: the rest of the package works on that part alone, with the masks that a single process would make.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparta.errors import ShapeError, message
from sparta.tesa.formats.mask_bits import pack_bits, unpack_bits
from sparta.tesa.patterns import NM, Pattern

__all__ = [
    "WHOLE",
    "Shards",
    "gathered",
    "gradient_part",
    "local",
    "own_part",
    "packed",
    "shards_of",
    "summed",
    "summed_counts",
    "taken",
    "unpacked",
    "whole",
]


@dataclass(frozen=True)
class Shards:
    """How a parameter is spread over processes; :data:`WHOLE` when it is all here.

    Parameters
    ----------
    groups
        The process groups over which it is cut, one for each dim of the mesh that cuts it.
    shape
        Of the whole.
    offset, part
        Where the part of this process begins, and its shape.
    device
        Where counts lie that the groups sum.
    """

    groups: tuple[Any, ...] = ()  # torch.distributed.ProcessGroup, which must not be imported to import this module
    shape: tuple[int, ...] = ()
    offset: tuple[int, ...] = ()
    part: tuple[int, ...] = ()
    device: str = "cpu"

    @property
    def is_whole(self) -> bool:
        """Whether every element is in this process."""
        return not self.groups

    def positions(self, places: Tensor) -> Tensor:
        """Return the row-major indices in the whole of elements given by their row-major indices in this part."""
        if self.is_whole:
            return places
        found, rest = torch.zeros_like(places), places
        steps = [math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape))]
        for axis in reversed(range(len(self.shape))):
            size = max(1, self.part[axis])
            found += (rest % size + self.offset[axis]) * steps[axis]
            rest = rest // size
        return found

    def slices(self) -> tuple[slice, ...]:
        """Return what cuts the part of this process out of the whole."""
        return tuple(slice(start, start + size) for start, size in zip(self.offset, self.part, strict=True))

    def of_units(self, pattern: Pattern) -> Shards | None:
        """Return how the units of `pattern` are spread; None where one lies across processes.

        All processes that share the tensor call it together, and have the same answer. Units of single elements are
        spread as the elements are. Others are counted in rows, so that the tensor must be cut between rows alone.
        """
        has_quota = pattern.own_sparsity() is not None
        if self.is_whole or (not has_quota and pattern.unit_count(self.shape) == math.prod(self.shape)):
            return self
        crossing = torch.tensor(int(self._cuts(self._sides(pattern))), device=self.device)
        if int(summed(crossing, self)):
            return None
        if has_quota:
            return self
        start, here = (
            pattern.unit_count((rows, *self.shape[1:])) if rows else 0 for rows in (self.offset[0], self.part[0])
        )
        return Shards(self.groups, (pattern.unit_count(self.shape),), (start,), (here,), self.device)

    def _sides(self, pattern: Pattern) -> list[int]:
        """Return how many indices of each axis stay together in one process."""
        rows = pattern.rows_per_unit(self.shape)
        if isinstance(pattern, NM):
            axis = pattern.axis % len(self.shape)
            return [pattern.m if place == axis else 1 for place in range(len(self.shape))]
        return [self.shape[0] if rows is None else rows, *self.shape[1:]]

    def _cuts(self, sides: list[int]) -> bool:
        """Return whether this part begins or ends within what stays together."""
        edges = [
            (edge, size, self.shape[axis])
            for axis, size in enumerate(sides)
            for edge in (self.offset[axis], self.offset[axis] + self.part[axis])
        ]
        return 0 not in self.part and any(edge % size and edge < end for edge, size, end in edges)


WHOLE = Shards()


def local(tensor: Tensor) -> Tensor:
    """Return the part of `tensor` that this process holds: the tensor itself unless it is a ``DTensor``.

    The result shares the storage of `tensor`, so writing to it under ``torch.no_grad()`` changes the parameter.
    """
    spread: Any = tensor
    part: Tensor = spread.to_local() if hasattr(tensor, "placements") else tensor
    return part.detach()


def gradient_part(parameter: Tensor) -> Tensor | None:
    """Return what this process holds of the gradient of a parameter, cut as the parameter is; None without one.

    The result shares the gradient's storage. A gradient that is placed otherwise, such as a sum over processes that is
    still to be made, is brought to the parameter's placement first, which the optimizer would do in any case.
    """
    gradient: Any = parameter.grad
    if gradient is None:
        return None
    placements = getattr(parameter, "placements", None)
    if placements is not None and gradient.placements != placements:
        gradient = gradient.redistribute(placements=placements)
        parameter.grad = gradient
    return local(gradient)


def shards_of(tensor: Tensor) -> Shards:
    """Return how `tensor` is spread over processes.

    Raises :class:`ShapeError` for a ``DTensor`` whose value is a sum that is still to be made, or of which a process
    holds several pieces.
    """
    if not hasattr(tensor, "placements"):
        return WHOLE
    spread: Any = tensor
    cut = [dim for dim, placement in enumerate(spread.placements) if not placement.is_replicate()]
    if not cut:
        return WHOLE
    pieces = [] if any(placement.is_partial() for placement in spread.placements) else spread.__create_chunk_list__()
    if len(pieces) != 1:
        raise ShapeError(
            message(
                f"a parameter of shape {tuple(tensor.shape)} is placed as {spread.placements}",
                "one piece for each process (FSDP2, column- or row-wise parallel), or replicated",
                "prune before it is distributed like this",
            )
        )
    mesh = spread.device_mesh
    groups = tuple(mesh.get_group(dim) for dim in cut)
    offset, part = tuple(pieces[0].offsets), tuple(pieces[0].sizes)
    return Shards(groups, tuple(tensor.shape), offset, part, str(local(tensor).device))


def summed(value: Tensor, shards: Shards) -> Tensor:
    """Return `value` summed over the processes that share a parameter."""
    if shards.is_whole:
        return value
    import torch.distributed as dist

    total = value.clone()
    for group in shards.groups:
        dist.all_reduce(total, group=group)
    return total


def summed_counts(counts: Sequence[Tensor], spread: Sequence[Shards]) -> list[int]:
    """Return counts of several tensors, each summed over the processes that share the tensor; one message for all."""
    found = [0] * len(counts)
    for shards in {each.groups: each for each in spread}.values():
        places = [place for place, each in enumerate(spread) if each.groups == shards.groups]
        here = torch.stack([counts[place].to(counts[places[0]].device) for place in places])
        for place, total in zip(places, summed(here, shards).tolist(), strict=True):
            found[place] = int(total)
    return found


def whole(part: Tensor, like: Tensor) -> Tensor:
    """Return the tensor of which `part` is this process's share, cut as `like` is; gathers it if it is cut."""
    return gathered(part, shards_of(like))


def gathered(part: Tensor, shards: Shards) -> Tensor:
    """Return the whole tensor of which each process holds a part, bit for bit."""
    if shards.is_whole:
        return part
    import torch.distributed as dist

    full = torch.zeros(shards.shape, dtype=part.dtype, device=part.device)
    full[shards.slices()] = part.reshape(shards.part)
    as_bytes = full.reshape(-1).view(torch.uint8)  # sums of bytes and zeros are exact, and every backend can make them
    for group in shards.groups:
        dist.all_reduce(as_bytes, group=group)
    return full


def own_part(full: Tensor, like: Tensor) -> Tensor:
    """Return what this process holds of `full` when it is cut as `like` is: the inverse of :func:`whole`."""
    shards = shards_of(like)
    return full if shards.is_whole else full[shards.slices()].contiguous()


def packed(mask: Tensor, like: Tensor) -> Tensor:
    """Return the whole mask of which `mask` is this process's share, eight elements to a byte, on the CPU.

    >>> packed(torch.tensor([[True, False, True]]), torch.zeros(1, 3))
    tensor([5], dtype=torch.uint8)
    """
    return pack_bits(whole(mask, like).reshape(1, -1))[0].cpu()


def unpacked(bits: Tensor, like: Tensor) -> Tensor:
    """Return what this process holds of a mask that :func:`packed` made, also in another number of processes.

    Bits of this process's part alone, as older states have them, are taken too.
    """
    part = local(like)
    if bits.numel() == -(-like.numel() // 8):
        full = unpack_bits(bits.to(part.device).reshape(1, -1), like.numel()).reshape(like.shape)
        return own_part(full, like)
    if bits.numel() != -(-part.numel() // 8):
        given = f"a mask of {bits.numel()} bytes"
        raise ShapeError(message(given, f"{-(-like.numel() // 8)} bytes for {tuple(like.shape)}"))
    return unpack_bits(bits.to(part.device).reshape(1, -1), part.numel()).reshape(part.shape)


def taken(values: Tensor, like: Tensor) -> Tensor:
    """Return what this process holds of whole values; a part that was saved as such is taken as it is."""
    part = local(like)
    found = own_part(values.to(part.device), like) if values.shape == like.shape else values.to(part.device)
    if found.shape != part.shape:
        raise ShapeError(message(f"values of shape {tuple(values.shape)}", f"{tuple(like.shape)}"))
    return found.clone()

"""Sharded parameters: what of a tensor is here, and choosing the lowest scores over all shards.

FSDP2 keeps a parameter as a ``DTensor`` of which each process holds some rows. The threshold is found by bisection on
counts, one integer per round summed over the processes, so that no weight is ever gathered and the mask is bit for bit
the one that a single process would make.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparta.errors import ShapeError, ValueRangeError, message
from sparta.tesa.formats.mask_bits import pack_bits, unpack_bits
from sparta.tesa.patterns import Pattern
from sparta.tesa.select import comparable, lowest

__all__ = [
    "WHOLE",
    "Shards",
    "check_sharding",
    "local",
    "lowest_of",
    "own_part",
    "packed",
    "shards_of",
    "summed",
    "taken",
    "unpacked",
    "whole",
]


@dataclass(frozen=True)
class Shards:
    """How a parameter is spread: the process group over which its rows are cut, or None when it is all here."""

    group: Any = None  # torch.distributed.ProcessGroup, which must not be imported to import this module
    rank: int = 0
    size: int = 1

    @property
    def is_whole(self) -> bool:
        """Whether every element is in this process."""
        return self.group is None


WHOLE = Shards()


def local(tensor: Tensor) -> Tensor:
    """Return the part of `tensor` that this process holds: the tensor itself unless it is a ``DTensor``.

    The result shares the storage of `tensor`, so writing to it under ``torch.no_grad()`` changes the parameter.
    """
    spread: Any = tensor
    part: Tensor = spread.to_local() if hasattr(tensor, "placements") else tensor
    return part.detach()


def shards_of(tensor: Tensor) -> Shards:
    """Return how `tensor` is spread over processes.

    Raises :class:`ShapeError` for a ``DTensor`` that is cut along another axis than the first, or along several.
    """
    if not hasattr(tensor, "placements"):
        return WHOLE
    mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
    cut = [dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    if not cut:
        return WHOLE
    if len(cut) > 1 or not tensor.placements[cut[0]].is_shard(0):
        raise ShapeError(
            message(
                f"a parameter of shape {tuple(tensor.shape)} is placed as {tensor.placements}",
                "rows cut once (FSDP2's Shard(0)), or replicated",
                "prune before tensor parallelism is applied",
            )
        )
    return Shards(mesh.get_group(cut[0]), mesh.get_local_rank(cut[0]), mesh.size(cut[0]))


def whole(part: Tensor, like: Tensor) -> Tensor:
    """Return the tensor of which `part` is this process's share, cut as `like` is; gathers it if it is cut."""
    if not hasattr(like, "placements"):
        return part
    from torch.distributed.tensor import DTensor

    spread = DTensor.from_local(
        part.view(torch.uint8) if part.dtype is torch.bool else part,
        like.device_mesh,  # type: ignore[attr-defined]
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
    gathered: Tensor = spread.full_tensor()
    return gathered.view(torch.bool) if part.dtype is torch.bool else gathered


def check_sharding(pattern: Pattern, shape: Sequence[int], rows: int, shards: Shards) -> None:
    """Raise :class:`ShapeError` when a unit of `pattern` would lie across two processes.

    Parameters
    ----------
    rows
        How many rows of the tensor of `shape` this process holds.
    """
    if shards.is_whole:
        return
    together, is_last = pattern.rows_per_unit(shape), shards.rank + 1 == shards.size
    if together is None or (rows % together and not is_last):
        raise ShapeError(
            message(
                f"{pattern} on a weight of shape {tuple(shape)} whose rows are cut over {shards.size} processes",
                "units that lie in one process",
                "use a pattern that does not cross rows, or leave the layer unsharded",
            )
        )


def own_part(full: Tensor, like: Tensor) -> Tensor:
    """Return what this process holds of `full` when it is cut as `like` is: the inverse of :func:`whole`."""
    if not hasattr(like, "placements"):
        return full
    from torch.distributed.tensor import distribute_tensor

    spread: Any = like
    as_bytes = full.view(torch.uint8) if full.dtype is torch.bool else full
    part = local(distribute_tensor(as_bytes, spread.device_mesh, spread.placements))
    return part.view(torch.bool) if full.dtype is torch.bool else part


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


def summed(value: Tensor, shards: Shards) -> Tensor:
    """Return `value` summed over the processes that share a parameter."""
    if shards.is_whole:
        return value
    import torch.distributed as dist

    total = value.clone()
    dist.all_reduce(total, group=shards.group)
    return total


def lowest_of(
    parts: Sequence[Tensor],
    count: int,
    shards: Shards = WHOLE,
    among: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """Return masks of exactly `count` elements of several tensors together: the first in pruning order.

    Parameters
    ----------
    parts
        Real tensors of any shapes, in order: among equal scores, an earlier tensor's are chosen first. Of sharded
        tensors, what this process holds.
    count
        How many to choose, over all tensors and all processes.
    among
        Optional bool tensors of the same shapes: the candidates.

    Returns
    -------
    list of Tensor
        Bool tensors of the shapes of `parts`.

    Examples
    --------
    >>> lowest_of([torch.tensor([3.0, 1.0]), torch.tensor([1.0, 2.0])], 2)
    [tensor([False,  True]), tensor([ True, False])]
    """
    if shards.is_whole:
        device = parts[0].device
        scores = torch.cat([comparable(part).flatten().to(device) for part in parts])
        candidates = None if among is None else torch.cat([part.flatten().to(device) for part in among])
        chosen = torch.split(lowest(scores, count, candidates), [part.numel() for part in parts])
        return [mask.reshape(part.shape).to(part.device) for mask, part in zip(chosen, parts, strict=True)]
    keys = [_ordered(part) for part in parts]
    masks = [torch.ones_like(key, dtype=torch.bool) for key in keys] if among is None else list(among)
    candidates_here = sum(int(torch.count_nonzero(mask)) for mask in masks)
    device = parts[0].device
    available = _total(candidates_here, shards, device)
    if not 0 <= count <= available:
        raise ValueRangeError(message(f"count is {count}", f"0 to {available}, the number of candidates"))
    edge = _edge(keys, masks, count, shards)
    below = [(key < edge) & mask for key, mask in zip(keys, masks, strict=True)]
    tied = [(key == edge) & mask for key, mask in zip(keys, masks, strict=True)]
    missing = count - _total(sum(int(torch.count_nonzero(mask)) for mask in below), shards, device)
    return _first_of_tied(below, tied, missing, shards)


def _total(count: int, shards: Shards, device: torch.device) -> int:
    """Return `count` summed over the processes; the tensor lies where the process group can reach it."""
    return int(summed(torch.tensor(count, device=device), shards))


def _ordered(score: Tensor) -> Tensor:
    """Return int64 keys in the order of the scores: a float's bits, read as an integer, order as the float does."""
    values = comparable(score)
    if not values.is_floating_point():
        return values.to(torch.int64)
    values = values + 0.0  # -0.0 ties with 0.0
    kind, bits = (torch.int32, 31) if values.dtype == torch.float32 else (torch.int64, 63)
    raw = values.view(kind)
    return torch.where(raw < 0, raw ^ ((1 << bits) - 1), raw).to(torch.int64)


def _edge(keys: Sequence[Tensor], masks: Sequence[Tensor], count: int, shards: Shards) -> int:
    """Return the smallest key of which `count` candidates or more are not larger, over all processes."""
    low, high = -(1 << 63), (1 << 63) - 1
    if all(int(k.abs().max()) < 1 << 32 for k in keys if k.numel()):
        low, high = -(1 << 32), 1 << 32
    bounds = torch.tensor([low, -high], device=keys[0].device)
    import torch.distributed as dist

    dist.all_reduce(bounds, op=dist.ReduceOp.MIN, group=shards.group)
    low, high = int(bounds[0]), -int(bounds[1])
    while low < high:
        middle = (low + high) // 2
        here = sum(int(torch.count_nonzero((key <= middle) & mask)) for key, mask in zip(keys, masks, strict=True))
        if _total(here, shards, keys[0].device) >= count:
            high = middle
        else:
            low = middle + 1
    return low


def _first_of_tied(below: list[Tensor], tied: list[Tensor], missing: int, shards: Shards) -> list[Tensor]:
    """Add the first `missing` tied elements to `below`: earlier tensors first, then earlier rows of any process."""
    import torch.distributed as dist

    here = torch.stack([torch.count_nonzero(ties) for ties in tied])
    gathered = [torch.zeros_like(here) for _ in range(shards.size)]
    dist.all_gather(gathered, here, group=shards.group)
    counts = torch.stack(gathered)  # (processes, tensors)
    for place, (chosen, ties) in enumerate(zip(below, tied, strict=True)):
        before = int(counts[:, :place].sum()) + int(counts[: shards.rank, place].sum())
        quota = max(0, min(missing - before, int(here[place])))
        rank = ties.flatten().cumsum(0).reshape(ties.shape)
        chosen.logical_or_(ties & (rank <= quota))
    return below

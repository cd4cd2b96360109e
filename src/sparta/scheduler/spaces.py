"""Spaces: sets of channels that can only be permuted together, and how everything that knows them is permuted.

Which channels belong together is found by :mod:`sparta.scheduler.channels`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Part", "Space", "columns_read", "owner_of", "permute_space"]


@dataclass(eq=False)
class Space:
    """One set of channels that can only be permuted together.

    Parameters
    ----------
    size
        How many channels, or None where it is not known.
    makers
        Linear layers and convolutions whose outputs the channels are.
    readers
        Those whose inputs they are, and from which of its input channels on: not 0 after a concatenation.
    followers
        Norms and depthwise convolutions that have one parameter per channel, and from which on.
    block
        Channels may only change places within blocks of so many, as convolutions with groups want; 0: anywhere.
    fixed
        Why it must not be permuted; empty when it may be.
    """

    size: int | None = None
    makers: list[nn.Module] = field(default_factory=list)
    readers: list[tuple[nn.Module, int]] = field(default_factory=list)
    followers: list[tuple[nn.Module, int]] = field(default_factory=list)
    block: int = 0
    fixed: str = ""
    joined: Space | None = None

    def blocks(self) -> list[slice]:
        """Return the runs of channels within which they may change places."""
        size = self.size or 0
        step = self.block or max(1, size)
        return [slice(start, start + step) for start in range(0, size, step)]


@dataclass(frozen=True, eq=False)
class Part:
    """A weight that is not its module's ``weight``: a projection of attention, the transpose of an embedding."""

    weight: Tensor
    owner: nn.Module
    bias: Tensor | None = None


def owner_of(module: Any) -> nn.Module:
    """Return the module that a maker or reader of a space belongs to."""
    found: nn.Module = getattr(module, "owner", module)
    return found


@torch.no_grad()
def permute_space(space: Space, order: Tensor) -> None:
    """Permute everything that makes, carries or reads the channels of a space, in place.

    Parameters
    ----------
    order
        Channel ``j`` becomes what channel ``order[j]`` was; shape (size,). It stays within :meth:`Space.blocks`.
    """
    for module, start in [*((maker, 0) for maker in space.makers), *space.followers]:
        for name in ("weight", "bias", "running_mean", "running_var"):
            value = getattr(module, name, None)
            if isinstance(value, Tensor):
                _reorder(value[start : start + len(order)], order)
    for module, start in space.readers:
        weight: Tensor = module.weight.detach().transpose(0, 1)  # type: ignore[operator]
        groups = int(getattr(module, "groups", 1))
        if groups == 1:
            _reorder(weight[start : start + len(order)], order)
            continue
        for group, rows in enumerate(weight.chunk(groups, 1)):  # each group of filters reads channels of its own
            here = slice(group * len(rows), (group + 1) * len(rows))
            _reorder(rows, order[here] - here.start)


def columns_read(module: nn.Module, start: int, channels: slice) -> Tensor:
    """Return the weights with which `module` reads some channels of a space, as a matrix with one column per channel.

    Parameters
    ----------
    start
        Which input channel of the module is the first of the space.
    channels
        A block of the space; with groups, it lies within one of them.

    Returns
    -------
    Tensor
        Shape (output channels × kernel positions, channels).
    """
    weight: Tensor = module.weight.detach()  # type: ignore[operator]
    first, last, groups = start + channels.start, start + channels.stop, int(getattr(module, "groups", 1))
    if groups > 1:
        width = weight.shape[1]
        weight = weight.chunk(groups, 0)[first // width]
        first, last = first % width, first % width + last - first
    return weight[:, first:last].movedim(1, -1).reshape(-1, last - first)


def _reorder(rows: Tensor, order: Tensor) -> None:
    rows.copy_(rows[order.to(rows.device)].clone())

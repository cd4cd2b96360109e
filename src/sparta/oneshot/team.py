"""Several processes that prune one model: each calibrates on its part of the data, and each layer has one owner.

Gram matrices are added up at the owner, which prunes the layer and sends the result to all, so the model is the same
everywhere after every stage. Without `torch.distributed`, or alone, nothing is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparta.errors import ValueRangeError, message

__all__ = ["Team"]


@dataclass(frozen=True)
class Team:
    """The processes of one run.

    >>> Team(1, 2).part(["a", "b", "c"])
    ['b']
    """

    rank: int = 0
    size: int = 1

    @classmethod
    def current(cls) -> Team:
        """Return the team of the default process group; one process where there is none."""
        from torch import distributed

        if not (distributed.is_available() and distributed.is_initialized()):
            return cls()
        return cls(distributed.get_rank(), distributed.get_world_size())

    def part(self, batches: Sequence[Any]) -> list[Any]:
        """Return the batches of this process; every process is given all of them."""
        if len(batches) < self.size:
            raise ValueRangeError(
                message(f"{len(batches)} batches for {self.size} processes", "one batch for each at least")
            )
        return list(batches[self.rank :: self.size])

    def added(self, gram: Tensor, owner: int) -> None:
        """Add up the Gram matrices of all processes, in place at the owner."""
        if self.size > 1:
            torch.distributed.reduce(gram, owner)

    def sent(self, tensors: Sequence[Tensor], owner: int) -> None:
        """Send tensors of the owner to all, in place."""
        if self.size > 1:
            for tensor in tensors:
                torch.distributed.broadcast(tensor, owner)

    def agreed(self, problem: str, owner: int, device: torch.device) -> None:
        """Raise in every process where the owner has a problem, so that none waits for it."""
        if self.size == 1:
            return
        failed = torch.tensor([bool(problem)], dtype=torch.uint8, device=device)
        self.sent([failed], owner)
        if bool(failed) and self.rank != owner:
            raise ValueRangeError(message(f"process {owner} could not go on", fix="its own error says why"))

    def wait(self) -> None:
        """Wait until all processes are here."""
        if self.size > 1:
            torch.distributed.barrier()

"""Blocks: each block of a pruned model is trained to give what the same block of the teacher gives.

The teacher's blocks see the teacher's hidden states and the model's blocks those of the model, pruned and recovered so
far, so that a block makes up for what is lost before it. Nothing but one block's graph is held at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sparta.errors import NameNotFoundError
from sparta.oneshot.stages import Chain, find_chain
from sparta.oneshot.targets import find_targets
from sparta.recovery.log import StageLog
from sparta.recovery.training import Trained, mean_loss, only_these_train, order_of_batches

__all__ = ["chains_of", "train_block"]


@torch.no_grad()
def chains_of(model: nn.Module, teacher: nn.Module, batches: Sequence[Any]) -> tuple[Chain, Chain] | None:
    """Return the blocks of model and teacher, ready to run; None where one of them is no chain of such blocks."""
    try:
        targets = find_targets(teacher)  # which has no adapters, so that all its weights are plain
        theirs = find_chain(teacher, targets, batches[0])
        if theirs is None:
            return None
        ours = Chain(theirs.names, [model.get_submodule(name) for name in theirs.names])
    except (NameNotFoundError, AttributeError):
        return None
    if not ours.capture(model, batches) or not theirs.capture(teacher, batches):
        return None
    fits = all(a.shape == b.shape for a, b in zip(ours.hidden, theirs.hidden, strict=True))
    return (ours, theirs) if fits else None


def train_block(
    ours: Chain,
    theirs: Chain,
    parameters: Mapping[str, nn.Parameter],
    live: Mapping[str, Tensor],
    settings: tuple[int, float, int],
) -> StageLog:
    """Train the next block of `ours` towards that of `theirs`, and move both chains on.

    Parameters
    ----------
    settings
        Number of steps, rate and seed.
    """
    steps, lr, seed = settings
    started, block = time.perf_counter(), ours.blocks[ours.position]
    inside = {id(parameter) for parameter in block.parameters()}
    chosen = {name: parameter for name, parameter in parameters.items() if id(parameter) in inside}
    name = ours.names[ours.position]
    with torch.no_grad():
        theirs.advance()
    loss_of = _loss_towards(ours, theirs.hidden)
    before = after = mean_loss(loss_of, len(ours.hidden))
    if chosen and steps and before > 0:
        trained = Trained(chosen, live, lr, steps)
        start = trained.values()
        with only_these_train([block], chosen):
            for step in range(steps):
                trained.step(step, loss_of(order_of_batches(len(ours.hidden), step, seed)))
        trained.clear()
        after = mean_loss(loss_of, len(ours.hidden))
        if not after < before:  # also where it is NaN
            trained.set_values(start)
            after = before
    with torch.no_grad():
        ours.advance()
    return StageLog(name, before, after, steps if chosen else 0, time.perf_counter() - started)


def _loss_towards(ours: Chain, wanted: Sequence[Tensor]) -> Callable[[int], Tensor]:
    def loss_of(batch: int) -> Tensor:
        goal = wanted[batch].float()
        size = goal.square().mean().clamp(min=torch.finfo(torch.float32).tiny)
        found: Tensor = (ours.run(batch).float() - goal).square().mean() / size
        return found

    return loss_of

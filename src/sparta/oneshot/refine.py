"""Refinement of a block: its remaining weights are trained for a few steps to give the dense block's outputs.

Masks are held. The step size follows the size of each weight and falls to zero, and the result is taken only when the
outputs are nearer to the dense ones than before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sparta.oneshot.stages import Chain
from sparta.oneshot.targets import Target

__all__ = ["refine_block"]

STEPS, RATE = 64, 0.01  # steps at least, each batch twice at least; step size as a share of a weight's mean size


def refine_block(
    chain: Chain, targets: Sequence[Target], masks: Mapping[str, Tensor], wanted: Sequence[Tensor]
) -> bool:
    """Train the weights of the chain's next block towards `wanted`, one output per batch; return whether it helped."""
    parameters = [target.parameter for target in targets]
    before = [parameter.detach().clone() for parameter in parameters]
    start = _loss(chain, wanted)
    groups = [{"params": [p], "lr": RATE * float(p.detach().abs().mean())} for p in parameters]
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.95))
    steps = max(STEPS, 2 * len(wanted))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    others = [p for p in chain.blocks[chain.position].parameters() if not any(p is q for q in parameters)]
    frozen = [(p, p.requires_grad) for p in [*others, *parameters]]
    try:
        for parameter, _ in frozen:
            parameter.requires_grad_(any(parameter is q for q in parameters))
        for step in range(steps):
            batch = step % len(wanted)
            with torch.enable_grad():
                loss = (chain.run(batch) - wanted[batch]).square().mean()
                gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
            for target, parameter, gradient in zip(targets, parameters, gradients, strict=True):
                parameter.grad = None if gradient is None else gradient * masks[target.name]
            optimizer.step()
            schedule.step()
    finally:
        for parameter, needed in frozen:
            parameter.requires_grad_(needed)
        for parameter in parameters:
            parameter.grad = None
    better = _loss(chain, wanted) < start
    if not better:
        for parameter, weight in zip(parameters, before, strict=True):
            parameter.data.copy_(weight)
    return better


def _loss(chain: Chain, wanted: Sequence[Tensor]) -> float:
    with torch.no_grad():
        return sum(float((chain.run(i) - output).square().sum()) for i, output in enumerate(wanted))

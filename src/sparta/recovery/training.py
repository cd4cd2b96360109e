"""Training of chosen parameters towards a loss, with the zeros of a spec held.

Gradients of pruned weights are set to zero before each step, and there is no weight decay, so the zeros never move.
Weights in half precision are trained as copies in float32, since their small steps would be rounded away.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

__all__ = ["Trained", "mean_loss", "only_these_train", "order_of_batches"]

_PROBES = 16  # batches at most on which the loss before and after is taken
_WARM = 0.05  # of all steps: the rate rises to its full size
_SCALE = (1e-3, 0.1)  # a weight's mean size, which its rate follows, is taken to be within these
_ADAPTERS = 0.2  # the size that adapters, which begin at zero, are taken to have


class Trained:
    """Parameters under Adam with a rate that rises, then falls to zero.

    Parameters
    ----------
    parameters
        By name.
    live
        By name: what may change; a parameter that is not in it is dense.
    lr
        Step size as a share of a weight's mean size.
    steps
        All steps that will be made.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], live: Mapping[str, Tensor], lr: float, steps: int
    ) -> None:
        self.parameters, self.live, self.steps = dict(parameters), live, steps
        self.masters = {n: p if p.dtype in {torch.float32, torch.float64} else p.detach().float().clone()
                        for n, p in self.parameters.items()}  # fmt: skip
        groups = [{"params": [self.masters[name]], "lr": lr * _size(name, p)} for name, p in self.parameters.items()]
        self.optimizer = torch.optim.Adam(groups, betas=(0.9, 0.95))
        self._rates = [float(group["lr"]) for group in self.optimizer.param_groups]

    def step(self, number: int, loss: Tensor) -> None:
        """Make one step down a loss."""
        gradients = torch.autograd.grad(loss, list(self.parameters.values()), allow_unused=True)
        for (name, master), gradient in zip(self.masters.items(), gradients, strict=True):
            if gradient is not None and name in self.live:
                gradient = gradient * self.live[name]  # noqa: PLW2901
            master.grad = None if gradient is None else gradient.to(master.dtype)
        share = min(1.0, (number + 1) / max(1, math.ceil(self.steps * _WARM))) * (1 - number / self.steps)
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * share
        self.optimizer.step()
        self._put()

    def values(self) -> dict[str, Tensor]:
        """Return copies of the values, in the precision in which they are trained."""
        return {name: master.detach().clone() for name, master in self.masters.items()}

    def set_values(self, values: Mapping[str, Tensor]) -> None:
        """Put values back."""
        with torch.no_grad():
            for name, master in self.masters.items():
                master.copy_(values[name])
        self._put()

    def state(self) -> dict[str, Tensor]:
        """Return values and moments, by name and part."""
        found = {f"{name}::value": value for name, value in self.values().items()}
        for name, master in self.masters.items():
            for part, moment in self.optimizer.state.get(master, {}).items():
                found[f"{name}::{part}"] = moment
        return found

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take up what :meth:`state` returned."""
        self.set_values({name: state[f"{name}::value"] for name in self.masters})
        for name, master in self.masters.items():
            if f"{name}::exp_avg" in state:
                parts = ("step", "exp_avg", "exp_avg_sq")
                moments = {part: state[f"{name}::{part}"].clone() for part in parts}
                self.optimizer.state[master] = {
                    k: v if k == "step" else v.to(master.device) for k, v in moments.items()
                }

    def clear(self) -> None:
        """Leave no gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def _put(self) -> None:
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                if self.masters[name] is not parameter:
                    parameter.copy_(self.masters[name])


def _size(name: str, parameter: Tensor) -> float:
    if "::" in name:
        return _ADAPTERS
    low, high = _SCALE
    return min(max(float(parameter.detach().float().abs().mean()), low), high) if parameter.numel() else low


def mean_loss(loss_of: Callable[[int], Tensor], batches: int) -> float:
    """Return the mean loss over some batches, without gradients."""
    probes = min(batches, _PROBES)
    with torch.no_grad():
        return sum(float(loss_of(batch)) for batch in range(probes)) / probes


def order_of_batches(batches: int, step: int, seed: int) -> int:
    """Return which batch a step uses: all of them once in an order of its own, then all of them in another one.

    >>> sorted(order_of_batches(4, step, 0) for step in range(4))
    [0, 1, 2, 3]
    """
    generator = torch.Generator().manual_seed((seed + step // batches) % 2**63)
    return int(torch.randperm(batches, generator=generator)[step % batches])


@contextmanager
def only_these_train(models: Sequence[nn.Module], parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Let these parameters ask for gradients and no others."""
    chosen = {id(parameter) for parameter in parameters.values()}
    before = [(parameter, parameter.requires_grad) for model in models for parameter in model.parameters()]
    try:
        for parameter, _ in before:
            parameter.requires_grad_(id(parameter) in chosen)
        yield
    finally:
        for parameter, needed in before:
            parameter.requires_grad_(needed)

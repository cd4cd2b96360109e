"""Scores: how much each weight matters. The lowest are pruned first.

A score is a small object called with a :class:`~sparta.sparsify.layers.Layer`; those that learn from training see every
optimizer step through :meth:`Score.observe`. A score returns a tensor of the shape of what this process holds of the
weight, and knows nothing of patterns, budgets or schedules.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from sparta.errors import NameNotFoundError, ValueRangeError, did_you_mean, message
from sparta.sparsify.layers import Layer
from sparta.sparsify.shards import gradient_part, local, own_part

__all__ = ["Gradient", "Magnitude", "Movement", "Random", "Score", "Taylor", "make_score"]


class Score(ABC):
    """How much each weight of a layer matters.

    A new score is one subclass: what it returns is compared within a layer by a pattern and across layers by an
    allocation.
    """

    name: ClassVar[str]

    @abstractmethod
    def __call__(self, layer: Layer) -> Tensor:
        """Return the score of the weights of `layer` that this process holds."""

    def observe(self, layers: Sequence[Layer], optimizer: Optimizer) -> None:  # noqa: B027 - most learn nothing
        """Learn from the gradients of one step, just before the optimizer takes it."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return what was learnt, by layer."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take back what :meth:`state_dict` returned."""
        if state:
            raise ValueRangeError(message(f"a state for the score {self.name!r}, which has none", "an empty state"))


class Magnitude(Score):
    """The absolute value of the weight.

    >>> from sparta.sparsify.layers import find_layers
    >>> layer, = find_layers(torch.nn.Linear(4, 2))
    >>> torch.equal(Magnitude()(layer), layer.parameter.detach().abs())
    True
    """

    name = "magnitude"

    def __call__(self, layer: Layer) -> Tensor:
        """Return ``|W|``."""
        return local(layer.parameter).abs()


class Random(Score):
    """A number drawn for each weight from the seed and the layer's name: the same on every device and every run.

    The numbers do not change from event to event, so the masks of a rising schedule are nested.
    """

    name = "random"

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def __call__(self, layer: Layer) -> Tensor:
        """Return uniform numbers in [0, 1)."""
        digest = hashlib.sha256(f"{self.seed}:{layer.name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        numbers = torch.rand(layer.shape, generator=generator)
        return own_part(numbers.to(local(layer.parameter).device), layer.parameter)


class _Learnt(Score):
    """Scores from gradients: a running sum over steps, ``sum = momentum * sum + term``."""

    def __init__(self, momentum: float) -> None:
        if not 0 <= momentum <= 1:
            raise ValueRangeError(message(f"momentum is {momentum!r}", "a number in [0, 1]"))
        self.momentum = momentum
        self._sums: dict[str, Tensor] = {}

    @staticmethod
    @abstractmethod
    def term(weight: Tensor, gradient: Tensor) -> Tensor:
        """Return what one step adds."""

    def __call__(self, layer: Layer) -> Tensor:
        """Return the running sum of the layer."""
        if layer.name not in self._sums:
            raise ValueRangeError(
                message(
                    f"the score {self.name!r} has seen no gradient of {layer.name!r}",
                    "one optimizer step or more before the first mask",
                    "attach the masks to the optimizer and start the schedule later",
                )
            )
        return self._sums[layer.name]

    @torch.no_grad()
    def observe(self, layers: Sequence[Layer], optimizer: Optimizer) -> None:
        """Add the term of this step; a step that a gradient scaler skips adds nothing."""
        # A fused optimizer gets scaled gradients, and is itself told to skip a step that overflowed.
        scale, overflow = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
        for layer in layers:
            weight, gradient = local(layer.parameter), gradient_part(layer.parameter)
            if gradient is None:
                continue
            term = self.term(weight, gradient if scale is None else gradient / scale).float()
            before = self._sums.get(layer.name)
            after = term if before is None else torch.add(term, before, alpha=self.momentum)
            if overflow is not None:
                after = torch.where(overflow > 0, torch.zeros_like(term) if before is None else before, after)
            self._sums[layer.name] = after

    def state_dict(self) -> dict[str, Tensor]:
        """Return the running sums by layer."""
        return {name: total.clone() for name, total in self._sums.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take back the running sums."""
        self._sums = {name: total.clone() for name, total in state.items()}


class Gradient(_Learnt):
    """The size of the gradient, ``|G|``; of the last step, or a running sum with `momentum`."""

    name = "gradient"

    def __init__(self, momentum: float = 0.0) -> None:
        super().__init__(momentum)

    @staticmethod
    def term(weight: Tensor, gradient: Tensor) -> Tensor:  # noqa: ARG004
        """Return what one step adds."""
        return gradient.abs()


class Taylor(_Learnt):
    """The first-order change of the loss when the weight becomes zero, ``|W · G|``."""

    name = "taylor"

    def __init__(self, momentum: float = 0.0) -> None:
        super().__init__(momentum)

    @staticmethod
    def term(weight: Tensor, gradient: Tensor) -> Tensor:
        """Return what one step adds."""
        return (weight * gradient).abs()


class Movement(_Learnt):
    """Movement pruning: ``-W · G`` summed over all steps; weights that shrink are pruned first.

    Meant for masks whose pruned weights go on learning (``pruned="train"``), or no pruned weight ever moves again.
    """

    name = "movement"

    def __init__(self, momentum: float = 1.0) -> None:
        super().__init__(momentum)

    @staticmethod
    def term(weight: Tensor, gradient: Tensor) -> Tensor:
        """Return what one step adds."""
        return -(weight * gradient)


def make_score(score: Score | str) -> Score:
    """Return a score from its name, or the score itself.

    >>> make_score("magnitude").name
    'magnitude'
    """
    if isinstance(score, Score):
        return score
    from sparta.sparsify.activations import ActivationWeighted

    known: dict[str, Callable[[], Score]] = {
        made.name: made for made in (Magnitude, Random, Gradient, Taylor, Movement, ActivationWeighted)
    }
    if score not in known:
        raise NameNotFoundError(did_you_mean(str(score), known, "score"))
    return known[score]()

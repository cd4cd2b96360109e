"""The sparsifier: score × pattern × allocation × schedule, over the layers of one model, around any training loop.

It makes masks at the schedule's events and lets :class:`~sparta.sparsify.masks.Masks` hold them in between. Call
:meth:`Sparsifier.step` once after each optimizer step, as a learning-rate scheduler's; everything that a run depends on
is then in :meth:`Sparsifier.state_dict`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from sparta.errors import ValueRangeError, message
from sparta.sparsify.allocation import Allocation, Uniform
from sparta.sparsify.layers import along_inputs, find_layers, without_frozen
from sparta.sparsify.masks import Gradients, Masks, OptimizerState, Pruned
from sparta.sparsify.project import make_masks
from sparta.sparsify.schedule import Schedule
from sparta.sparsify.scores import Score, make_score
from sparta.tesa.patterns import Pattern, as_pattern
from sparta.tesa.spec import Spec

__all__ = ["Sparsifier"]


class Sparsifier:
    """Prunes a model while it trains.

    Parameters
    ----------
    model
        Any module; wrapped ones (DDP, FSDP2, `torch.compile`) as well. Wrap and shard first.
    schedule
        How sparse when. A number is a constant schedule: that sparsity at the first :meth:`step`.
    score
        What to prune first: a :class:`~sparta.sparsify.scores.Score` or its name.
    pattern
        Where zeros may be: a pattern or its text form, such as ``"2:4"``. N:M runs along input channels.
    allocation
        How much per layer; uniform by default.
    include, ignore
        Names of parameters, globs or ``re:`` patterns; see :func:`~sparta.sparsify.layers.find_layers`. Frozen layers
        are left out unless `include` names them.
    gradients, pruned, optimizer_state
        What becomes of pruned weights; see :class:`~sparta.sparsify.masks.Masks`.

    Examples
    --------
    >>> import torch
    >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    >>> sparsifier = Sparsifier(model, Schedule.cubic(0.75, end=4)).attach(optimizer)
    >>> for _ in range(6):
    ...     optimizer.zero_grad()
    ...     model(torch.randn(2, 8)).square().sum().backward()
    ...     optimizer.step()
    ...     changed = sparsifier.step()
    >>> sparsifier.masks.sparsity
    0.75
    """

    def __init__(  # noqa: PLR0913 - one argument per axis
        self,
        model: nn.Module,
        schedule: Schedule | float,
        *,
        score: Score | str = "magnitude",
        pattern: Pattern | str = "unstructured",
        allocation: Allocation | None = None,
        include: Sequence[str] | str | None = None,
        ignore: Sequence[str] | str | None = None,
        gradients: Gradients = "masked",
        pruned: Pruned = "forget",
        optimizer_state: OptimizerState = "zero",
    ) -> None:
        self.schedule = schedule if isinstance(schedule, Schedule) else Schedule.constant(schedule)
        self.score = make_score(score)
        self.pattern = as_pattern(pattern)
        self.allocation = allocation or Uniform()
        found = find_layers(model, include, ignore)
        self.layers = without_frozen(found) if include is None else found
        for layer in self.layers:
            along_inputs(self.pattern, layer)
        self.position = 0
        self.masks = Masks(
            self.layers,
            gradients=gradients,
            pruned=pruned,
            optimizer_state=optimizer_state,
            before_step=lambda optimizer: self.score.observe(self.layers, optimizer),
        )

    def attach(self, *optimizers: Optimizer) -> Sparsifier:
        """Hold the masks at every step of these optimizers; returns itself."""
        self.masks.attach(*optimizers)
        return self

    def step(self) -> bool:
        """Count one training step; make new masks if the schedule has an event there, and return whether it had."""
        event = self.schedule.is_event(self.position)
        if event:
            self.update(self.schedule.at(self.position))
        self.position += 1
        return event

    def update(self, sparsity: float | None = None) -> None:
        """Make new masks now.

        Parameters
        ----------
        sparsity
            Fraction of all elements of the layers; None is the pattern's own, as of N:M.
        """
        with self.masks.exposed():
            made = make_masks(self.layers, self.score, self.pattern, sparsity, self.allocation)
        self.masks.set(made)

    def finish(self) -> Spec:
        """Let go of the optimizers and return what is pruned; the model is a plain model with zeros in it."""
        self.masks.detach()
        return self.masks.spec()

    def state_dict(self) -> dict[str, Any]:
        """Return everything the rest of the run depends on, beside the model's and the optimizer's own states."""
        return {"position": self.position, "masks": self.masks.state_dict(), "score": self.score.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what :meth:`state_dict` returned; load the model and the optimizer first."""
        missing = {"position", "masks", "score"} - state.keys()
        if missing:
            raise ValueRangeError(message(f"a state without {sorted(missing)}", "the state of a Sparsifier"))
        self.position = int(state["position"])
        self.masks.load_state_dict(state["masks"])
        self.score.load_state_dict(state["score"])

"""ProbMask: every weight has a probability of being kept, learnt with the weights under one budget for the network.

The probabilities are projected onto the budget after each step; samples sharpen as training goes on, and at the end
the highest probabilities become a mask with exactly the budget's weights. The one idea to know: the budget is on the
*sum of probabilities* over all layers, so that the layers themselves find out how sparse each should be.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sparta.errors import ValueRangeError, message
from sparta.scheduler.base import BaseScheduler, Exported, Setup, check_iteration
from sparta.scheduler.fake_sparse import ProbMaskFakeSparse
from sparta.scheduler.prepared import PreparedLayer
from sparta.scheduler.registry import register_scheduler
from sparta.sparsify import Schedule
from sparta.sparsify.shards import lowest_of
from sparta.tesa.select import check_sparsity, pruned_count

__all__ = ["ProbMaskPruneScheduler", "project_scores"]


@torch.no_grad()
def project_scores(scores: Sequence[Tensor], budget: float) -> float:
    """Project probabilities onto ``sum <= budget`` within [0, 1], in place; return the shift.

    The nearest such point is ``clamp(s - v, 0, 1)`` with the smallest v >= 0 that meets the budget.

    Examples
    --------
    >>> scores = torch.tensor([1.0, 0.9, 0.5, 0.1], dtype=torch.float64)
    >>> round(project_scores([scores], 1.5), 9), [round(s, 9) for s in scores.tolist()]
    (0.3, [0.7, 0.6, 0.2, 0.0])
    """

    def total(shift: float) -> float:
        return sum(float((s - shift).clamp(0, 1).sum(dtype=torch.float64)) for s in scores)

    low, high = 0.0, max((float(s.max()) for s in scores if s.numel()), default=0.0)
    shift = 0.0
    if total(0.0) > budget:
        for _ in range(60):
            shift = (low + high) / 2
            if total(shift) > budget:
                low = shift
            else:
                high = shift
        shift = high
    for s in scores:
        s.sub_(shift).clamp_(0, 1)
    return shift


@register_scheduler("ProbMaskPruneScheduler")
class ProbMaskPruneScheduler(BaseScheduler):
    """Learns which weights to keep.

    Parameters
    ----------
    setup
        The rest of the configuration: ``ProbMaskGenerator`` and ``ProbMaskFakeSparse``.
    prune_rate
        Sparsity at the end, over all pruned layers together.
    total_iterations
        Training iterations.
    warmup_iteration_stamps
        Iteration at which pruning begins.
    finetune_iteration_stamps
        Iteration from which the sparsity no longer rises.
    start_prune_rate
        Sparsity at the beginning of the ramp.
    no_prune_keyword, no_prune_layer
        Layers that stay dense; see :class:`~sparta.scheduler.base.BaseScheduler`.
    """

    def __init__(
        self,
        setup: Setup | None = None,
        prune_rate: float = 0.9,
        total_iterations: int = 10000,
        warmup_iteration_stamps: int | None = None,
        finetune_iteration_stamps: int | None = None,
        start_prune_rate: float = 0.0,
        no_prune_keyword: str | Sequence[str] = "",
        no_prune_layer: str | Sequence[str] = "",
    ) -> None:
        super().__init__(setup or Setup(fake_sparse=ProbMaskFakeSparse), no_prune_keyword, no_prune_layer)
        self.prune_rate = check_sparsity(prune_rate)
        begin = round(0.16 * total_iterations) if warmup_iteration_stamps is None else warmup_iteration_stamps
        end = round(0.6 * total_iterations) if finetune_iteration_stamps is None else finetune_iteration_stamps
        if not 0 <= begin <= end <= total_iterations or total_iterations < 1:
            raise ValueRangeError(
                message(
                    f"warm-up until {begin}, fine-tuning from {end}, {total_iterations} iterations",
                    "0 <= warmup_iteration_stamps <= finetune_iteration_stamps <= total_iterations",
                )
            )
        self.total_iterations = total_iterations
        self.schedule = Schedule.cubic(self.prune_rate, initial=check_sparsity(start_prune_rate), begin=begin, end=end)

    def prepare_sparse_model(self, model: nn.Module) -> nn.Module:
        """Give every weight a probability; build the optimizer after this, or pass yours to `init_optimizer`."""
        if not isinstance(self.setup.fake_sparse(torch.zeros(1, 1)), ProbMaskFakeSparse):
            raise ValueRangeError(message("ProbMaskPruneScheduler with another fake_sparse", "ProbMaskFakeSparse"))
        return super().prepare_sparse_model(model)

    def prune_model(self, model: nn.Module, iteration: int) -> None:
        """After optimizer step `iteration` (from 0): project the probabilities and set the next temperature."""
        self._check_prepared(model)
        check_iteration(iteration)
        self._refuse_shards()
        budget = sum(p.weight.numel() for p in self._pruned()) * (1 - self.schedule.at(iteration))
        project_scores([fake.scores.detach() for _, fake in self._probabilistic() if not fake.fixed], budget)
        progress = min(1.0, (iteration + 1) / self.total_iterations)
        for _, fake in self._probabilistic():
            fake.tau.fill_(1.0 / (0.97 * (1.0 - progress) + 0.03))

    @torch.no_grad()
    def fix_model_subnet(self, model: nn.Module) -> None:
        """Choose the hard masks: the highest probabilities of all layers, exactly as many as the final budget."""
        self._check_prepared(model)
        layers = [(p, fake) for p, fake in self._probabilistic() if not fake.fixed]
        if not layers:
            return
        # scores that are equal, as many are at 0 and 1, are told apart by the weight they keep
        ranks = _ranks([fake.scores.detach() for _, fake in layers], [p.weight.detach().abs() for p, _ in layers])
        count = pruned_count(sum(rank.numel() for rank in ranks), self.prune_rate)
        for (_, fake), pruned in zip(layers, lowest_of(ranks, count), strict=True):
            fake.fix(~pruned)

    def unfix_model_subnet(self, model: nn.Module) -> None:
        """Draw masks again."""
        self._check_prepared(model)
        for _, fake in self._probabilistic():
            fake.release()

    def freeze_model_weights(self, model: nn.Module) -> None:
        """Train the probabilities only."""
        self._require_grad(model, (p.weight for p in self._pruned()), needed=False)

    def unfreeze_model_weights(self, model: nn.Module) -> None:
        """Train the weights again."""
        self._require_grad(model, (p.weight for p in self._pruned()), needed=True)

    def freeze_model_subnet(self, model: nn.Module) -> None:
        """Train the weights only."""
        self._require_grad(model, (fake.scores for _, fake in self._probabilistic()), needed=False)

    def unfreeze_model_subnet(self, model: nn.Module) -> None:
        """Train the probabilities again."""
        self._require_grad(model, (fake.scores for _, fake in self._probabilistic()), needed=True)

    def export_sparse_model(self, model: nn.Module) -> Exported:
        """Choose the hard masks if they are not, bake them in, and make plain modules again."""
        self.fix_model_subnet(model)
        return super().export_sparse_model(model)

    def state_dict(self) -> dict[str, Any]:
        """Return the masks, temperatures and the state of the random numbers, which draw the masks to come."""
        taus = {p.name: float(fake.tau) for p, fake in self._probabilistic()}
        state = {**super().state_dict(), "tau": taus, "rng": torch.get_rng_state()}
        device = self._layers[0].weight.device if self._layers else torch.device("cpu")
        if device.type == "cuda":
            state["cuda_rng"] = torch.cuda.get_rng_state(device)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what :meth:`state_dict` returned; sets PyTorch's random state too, or resuming were not exact."""
        super().load_state_dict(state)
        for prepared, fake in self._probabilistic():
            fake.tau.fill_(state["tau"][prepared.name])
        torch.set_rng_state(state["rng"].cpu())
        if "cuda_rng" in state:
            torch.cuda.set_rng_state(state["cuda_rng"].cpu(), self._layers[0].weight.device)

    def _probabilistic(self) -> list[tuple[PreparedLayer, ProbMaskFakeSparse]]:
        return [(p, p.fake) for p in self._layers if isinstance(p.fake, ProbMaskFakeSparse)]

    def _require_grad(self, model: nn.Module, parameters: Iterable[Tensor], *, needed: bool) -> None:
        self._check_prepared(model)
        for parameter in parameters:
            parameter.requires_grad_(needed)


def _ranks(scores: Sequence[Tensor], magnitudes: Sequence[Tensor]) -> list[Tensor]:
    """Return ranks by score and, among equal scores, by magnitude: integers of the tensors' shapes."""
    device = scores[0].device
    flat = torch.cat([s.flatten().to(device) for s in scores])
    weight = torch.cat([m.flatten().to(device) for m in magnitudes])
    order = weight.argsort(stable=True)
    order = order[flat[order].argsort(stable=True)]
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=device)
    parts = torch.split(rank, [s.numel() for s in scores])
    return [part.reshape(s.shape).to(s.device) for part, s in zip(parts, scores, strict=True)]

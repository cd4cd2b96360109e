"""ProbMask: every weight has a probability of being kept, learnt with the weights under one budget for the network.

The probabilities are projected onto the budget after each step; samples sharpen as training goes on, and at the end the
highest probabilities become a mask with exactly the budget's weights. The budget is on the *sum of probabilities* over
all layers, so that the layers themselves find out how sparse each should be.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sparta.errors import ValueRangeError, message
from sparta.scheduler.base import BaseScheduler, Exported, Setup, check_iteration, take_config
from sparta.scheduler.fake_sparse import ProbMaskFakeSparse, Subnet
from sparta.scheduler.prepared import PreparedLayer
from sparta.scheduler.registry import register_scheduler
from sparta.sparsify import Schedule
from sparta.sparsify.logs import RECORDS
from sparta.sparsify.ranking import lowest_of
from sparta.sparsify.shards import Shards, local, shards_of, summed, whole
from sparta.spelling import also
from sparta.tesa.select import check_sparsity, pruned_count

__all__ = ["ProbMaskPruneScheduler", "project_scores"]

_HALVINGS = 32  # of an interval of length 1: finer than a probability in fp32
_SMALL = 1 << 22  # probabilities of which several shifted copies fit into memory


@torch.no_grad()
def project_scores(scores: Sequence[Tensor], budget: float) -> Tensor:
    """Project probabilities onto ``sum <= budget`` within [0, 1], in place; return the shift, float64.

    The nearest such point is ``clamp(s - v, 0, 1)`` with the smallest v >= 0 that meets the budget. It is found by
    halving an interval on the device, without waiting for it; of sharded probabilities only sums travel.

    Examples
    --------
    >>> scores = torch.tensor([1.0, 0.9, 0.5, 0.1], dtype=torch.float64)
    >>> round(float(project_scores([scores], 1.5)), 9), [round(s, 9) for s in scores.tolist()]
    (0.3, [0.7, 0.6, 0.2, 0.0])
    """
    spread = [shards_of(score) for score in scores]
    parts = [local(score) for score in scores]
    device = parts[0].device
    kinds = {shards.groups: shards for shards in spread}
    flat = {
        kind: torch.cat([p.flatten().to(device) for p, s in zip(parts, spread, strict=True) if s.groups == groups])
        for groups, kind in kinds.items()
    }

    def totals(shifts: Tensor) -> Tensor:
        """Return the sum of the probabilities at each of some shifts."""
        found = torch.zeros_like(shifts)
        for shards, values in flat.items():
            moved = (values - shifts.to(values.dtype).unsqueeze(1)).clamp_(0, 1)
            found = found + summed(moved.sum(1, dtype=torch.float64), shards)
        return found

    # a GPU waits for kernels to start rather than for small sums, so there several halvings are one round
    bits = 4 if device.type == "cuda" and sum(map(len, flat.values())) < _SMALL else 1
    steps = torch.linspace(0, 1, 2**bits + 1, dtype=torch.float64, device=device)
    low, high = torch.zeros(1, dtype=torch.float64, device=device), _highest(spread, parts, device).view(1)
    is_within = totals(low) <= budget
    for _ in range(_HALVINGS // bits):
        edges = low + (high - low) * steps
        place = (totals(edges[1:-1]) > budget).sum().view(1)  # sums fall as the shift rises
        low, high = edges.index_select(0, place), edges.index_select(0, place + 1)
    shift = torch.where(is_within, torch.zeros_like(high), high).squeeze(0)
    for part in parts:
        part.sub_(shift.to(part.device, part.dtype)).clamp_(0, 1)
    return shift


def _highest(spread: Sequence[Shards], parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the largest probability of all processes, or 0."""
    found = torch.zeros((), dtype=torch.float64, device=device)
    for part in parts:
        if part.numel():
            found = torch.maximum(found, part.max().to(device, torch.float64))
    import torch.distributed as dist

    for group in dict.fromkeys(group for shards in spread for group in shards.groups):
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    return found


class LikeliestWeights(Subnet):
    """The highest probabilities of all layers that are not fixed, exactly as many as the present budget.

    Parameters
    ----------
    layers
        What shares the budget. Probabilities that are equal, as many are at 0 and 1, are told apart by the magnitude
        of the weight.
    """

    def __init__(self, layers: Sequence[tuple[PreparedLayer, ProbMaskFakeSparse]]) -> None:
        super().__init__()
        self.layers = list(layers)
        self.sparsity = 0.0

    @torch.no_grad()
    def choose(self) -> None:
        """Write the masks into the layers."""
        layers = [(p, fake) for p, fake in self.layers if not fake.fixed]
        if not layers:
            return
        scores = [fake.scores for _, fake in layers]
        count = pruned_count(sum(score.numel() for score in scores), self.sparsity)
        pruned = _lowest_pairs(scores, [local(p.weight).abs() for p, _ in layers], count)
        for (_, fake), mask in zip(layers, pruned, strict=True):
            fake.mask.copy_(whole(~mask, fake.scores))


@register_scheduler("ProbMaskPruneScheduler")
class ProbMaskPruneScheduler(BaseScheduler):
    """Learns which weights to keep.

    Parameters
    ----------
    setup
        The rest of the configuration: ``ProbMaskGenerator`` and ``ProbMaskFakeSparse``.
    target_sparsity
        Sparsity at the end, over all pruned layers together; the documents call it ``prune_rate``.
    total_iterations
        Training iterations.
    warmup_iteration_stamps
        Iteration at which pruning begins.
    finetune_iteration_stamps
        Iteration from which the sparsity no longer rises.
    start_sparsity
        Sparsity at the beginning of the ramp.
    no_prune_keyword, no_prune_layer
        Layers that stay dense; see :class:`~sparta.scheduler.base.BaseScheduler`.
    """

    @also(
        prune_rate="target_sparsity",
        start_prune_rate="start_sparsity",
        total_iters="total_iterations",
        max_iters="total_iterations",
    )
    def __init__(
        self,
        setup: Setup | None = None,
        target_sparsity: float = 0.9,
        total_iterations: int = 10000,
        warmup_iteration_stamps: int | None = None,
        finetune_iteration_stamps: int | None = None,
        start_sparsity: float = 0.0,
        no_prune_keyword: str | Sequence[str] = "",
        no_prune_layer: str | Sequence[str] = "",
    ) -> None:
        super().__init__(setup or Setup(fake_sparse=ProbMaskFakeSparse), no_prune_keyword, no_prune_layer)
        self.target_sparsity = check_sparsity(target_sparsity)
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
        self._subnet = LikeliestWeights([])
        self.schedule = Schedule.cubic(
            self.target_sparsity, initial=check_sparsity(start_sparsity), begin=begin, end=end
        )

    def prepare_sparse_model(self, model: nn.Module, config: Mapping[str, Any] | None = None) -> nn.Module:
        """Give every weight a probability; build the optimizer after this, or pass yours to `init_optimizer`."""
        take_config(self, config)
        if not isinstance(self.setup.fake_sparse(torch.zeros(1, 1)), ProbMaskFakeSparse):
            raise ValueRangeError(message("ProbMaskPruneScheduler with another fake_sparse", "ProbMaskFakeSparse"))
        prepared = super().prepare_sparse_model(model)
        self._subnet = LikeliestWeights(self._probabilistic())
        for _, fake in self._probabilistic():
            fake.subnet = self._subnet
        return prepared

    def prune_model(self, model: nn.Module, iteration: int) -> None:
        """After optimizer step `iteration` (from 0): project the probabilities and set the next temperature."""
        self._check_prepared(model)
        check_iteration(iteration)
        learnt = [fake.scores for _, fake in self._probabilistic() if not fake.fixed]
        self._subnet.sparsity = self.schedule.at(iteration)
        if learnt:
            project_scores(learnt, sum(s.numel() for s in learnt) * (1 - self._subnet.sparsity))
        progress = min(1.0, (iteration + 1) / self.total_iterations)
        for _, fake in self._probabilistic():
            fake.tau.fill_(1.0 / (0.97 * (1.0 - progress) + 0.03))
        self._refresh()
        if iteration % max(1, self.total_iterations // RECORDS) == 0:
            self.log({"sparsity": self._subnet.sparsity}, iteration)

    @torch.no_grad()
    def fix_model_subnet(self, model: nn.Module) -> None:
        """Choose the hard masks: the highest probabilities of all layers, exactly as many as the final budget."""
        self._check_prepared(model)
        self._subnet.sparsity = self.target_sparsity
        self._subnet.choose()
        for _, fake in self._probabilistic():
            fake.fixed = True

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

    def compute_sparse_rate(self, model: nn.Module) -> float:
        """Return the fraction of zeros in the weights that an evaluation computes with, at the present budget."""
        self._check_prepared(model)
        self._subnet.choose()
        zeros = 0
        for prepared in self._layers:
            kept = prepared.fake.mask if isinstance(prepared.fake, ProbMaskFakeSparse) else True
            zeros += int(((prepared.value * kept) == 0).sum())
        return zeros / max(1, sum(prepared.weight.numel() for prepared in self._layers))

    def export_sparse_model(self, model: nn.Module) -> Exported:
        """Choose the hard masks if they are not, bake them in, and make plain modules again."""
        self.fix_model_subnet(model)
        return super().export_sparse_model(model)

    def state_dict(self) -> dict[str, Any]:
        """Return the masks, temperatures and the state of the random numbers, which draw the masks to come."""
        taus = {p.name: float(fake.tau) for p, fake in self._probabilistic()}
        rate = self._subnet.sparsity if self._layers else 0.0
        state = {**super().state_dict(), "tau": taus, "sparsity": rate, "rng": torch.get_rng_state()}
        device = self._layers[0].weight.device if self._layers else torch.device("cpu")
        if device.type == "cuda":
            state["cuda_rng"] = torch.cuda.get_rng_state(device)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what :meth:`state_dict` returned; sets PyTorch's random state too, or resuming were not exact."""
        super().load_state_dict(state)
        for prepared, fake in self._probabilistic():
            fake.tau.fill_(state["tau"][prepared.name])
        if "sparsity" in state:  # a state of version 0.1 has none; the next step of the schedule sets it
            self._subnet.sparsity = check_sparsity(float(state["sparsity"]))
        self._refresh()
        torch.set_rng_state(state["rng"].cpu())
        if "cuda_rng" in state:
            torch.cuda.set_rng_state(state["cuda_rng"].cpu(), self._layers[0].weight.device)

    def _probabilistic(self) -> list[tuple[PreparedLayer, ProbMaskFakeSparse]]:
        return [(p, p.fake) for p in self._layers if isinstance(p.fake, ProbMaskFakeSparse)]

    def _refresh(self) -> None:
        """Choose the masks again where the model is in evaluation already."""
        if any(not fake.training for _, fake in self._probabilistic()):
            self._subnet.choose()

    def _require_grad(self, model: nn.Module, parameters: Iterable[Tensor], *, needed: bool) -> None:
        self._check_prepared(model)
        for parameter in parameters:
            parameter.requires_grad_(needed)


def _lowest_pairs(scores: Sequence[Tensor], magnitudes: Sequence[Tensor], count: int) -> list[Tensor]:
    """Return masks of the `count` lowest by score and, among equal scores, by magnitude, of what is here."""
    spread = [shards_of(score) for score in scores]
    parts = [local(score) for score in scores]
    chosen = lowest_of(parts, count, spread)
    if count == 0:
        return chosen
    device = parts[0].device
    taken = [torch.where(mask, part, 0.0) for mask, part in zip(chosen, parts, strict=True)]  # scores are never below 0
    edge = _highest(spread, taken, device)
    below = [part < edge.to(part) for part in parts]
    tied = [part == edge.to(part) for part in parts]
    missing = count - sum(
        int(summed(torch.count_nonzero(mask), shards)) for mask, shards in zip(below, spread, strict=True)
    )
    more = lowest_of(magnitudes, missing, spread, among=tied)
    return [lower | extra for lower, extra in zip(below, more, strict=True)]

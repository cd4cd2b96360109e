"""ProbMask: what is evaluated is the network that the present budget pays for."""

import pytest
import torch

from scheduler.nets import batch, small_net
from sparta.scheduler import ProbMaskPruneScheduler


def test_probmask_evaluates_the_network_of_its_present_budget():
    """Probabilities that are all equal, below one half, stand for a fifth of the weights, not for none."""
    options = {"prune_rate": 0.8, "total_iterations": 40, "warmup_iteration_stamps": 0, "finetune_iteration_stamps": 20}
    scheduler = ProbMaskPruneScheduler(**options)
    model = scheduler.prepare_sparse_model(small_net())
    total = sum(score.numel() for score in scheduler.score_parameters())
    for iteration in (5, 30):
        scheduler.prune_model(model, iteration)
        model.eval()
        zeros = sum(int((prepared.effective == 0).sum()) for prepared in scheduler._layers)
        now = round(scheduler.schedule.at(iteration) * total)
        assert zeros == now
        assert scheduler.compute_sparse_rate(model.train()) == pytest.approx(now / total)
    with torch.no_grad():
        scheduler.score_parameters()[0].zero_()
    model.eval()
    assert not bool(model.stem.weight.any()), "the highest probabilities of all layers are kept"
    model.train()
    model.eval()
    seen = model(batch(0)[0])
    scheduler.fix_model_subnet(model)
    assert torch.equal(seen, model(batch(0)[0]))


def test_a_state_of_the_version_before_is_taken():
    options = {"prune_rate": 0.8, "total_iterations": 40, "warmup_iteration_stamps": 0, "finetune_iteration_stamps": 20}
    scheduler = ProbMaskPruneScheduler(**options)
    model = scheduler.prepare_sparse_model(small_net())
    scheduler.prune_model(model, 5)
    state = scheduler.state_dict()
    del state["sparsity"]
    scheduler.load_state_dict(state)
    scheduler.prune_model(model, 6)
    assert scheduler.compute_sparse_rate(model) == pytest.approx(scheduler.schedule.at(6), abs=0.01)

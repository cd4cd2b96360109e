"""STR: a run that prunes nothing says so, and a target sparsity is met while layers keep what they learnt."""

import pytest
import torch

from scheduler.nets import accuracy, small_net, step_of
from sparta.errors import ValueRangeError
from sparta.scheduler import build_sparse_scheduler

STR = {"mask_generator": {"type": "STRMaskGenerator"}, "fake_sparse": {"type": "STRFakeSparse"}}


def trained(kwargs, steps=40, fake=None):
    scheduler = build_sparse_scheduler(
        {
            **STR,
            "fake_sparse": {"type": "STRFakeSparse", "kwargs": fake or {}},
            "scheduler": {"type": "STRScheduler", "kwargs": kwargs},
        }
    )
    model = scheduler.prepare_sparse_model(small_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    for iteration in range(steps):
        step_of(model, optimizer, iteration)
        scheduler.prune_model(model, iteration)
    return scheduler, model


def test_the_defaults_prune_nothing_and_say_so():
    scheduler, model = trained({}, 3)
    with pytest.warns(UserWarning, match="target_sparsity"):
        _, spec = scheduler.export_sparse_model(model)
    assert spec.density == 1.0


@pytest.mark.parametrize("fake", [{}, {"sInit_value": -5}], ids=str)
def test_a_target_is_met(fake):
    scheduler, model = trained({"target_sparsity": 0.8, "total_iterations": 40}, fake=fake)
    rate = scheduler.compute_sparse_rate(model)
    model, spec = scheduler.export_sparse_model(model)
    assert rate == pytest.approx(0.8, abs=0.005)
    assert 1 - spec.density == pytest.approx(0.8, abs=0.005)
    assert accuracy(model) > 0.5


def test_the_sparsity_rises_and_learnt_differences_of_layers_stay():
    scheduler, model = trained({"target_sparsity": 0.8, "total_iterations": 40}, 0)
    scores = scheduler.score_parameters()
    with torch.no_grad():
        scores[0].add_(0.5)
    rates = []
    for iteration in (0, 10, 39):
        scheduler.prune_model(model, iteration)
        rates.append(scheduler.compute_sparse_rate(model))
        assert float((scores[0] - scores[1]).detach()) == pytest.approx(0.5, abs=1e-3)
    assert rates == sorted(rates)
    assert rates[-1] == pytest.approx(0.8, abs=0.005)


def test_bad_targets_are_refused():
    with pytest.raises(ValueRangeError, match="total_iterations"):
        trained({"target_sparsity": 0.8}, 0)
    with pytest.raises(ValueRangeError):
        trained({"target_sparsity": 1.5, "total_iterations": 10}, 0)

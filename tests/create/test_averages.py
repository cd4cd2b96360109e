"""Averages of the weights (EMA) beside a recipe: they follow the masks, and quantization does not disturb them."""

import copy

import pytest
import torch
from torch.optim import SGD
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from create.models import CNN, loss_of, prunable, sparsity
from sparta.create import initialize
from sparta.errors import NameNotFoundError, ValueRangeError

EPOCHS, STEPS = 4, 4


def train(model, optimizer, average, steps=EPOCHS * STEPS):
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        average.update_parameters(model)


def started(quantization):
    model = CNN()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    manager, _ = initialize(
        model,
        optimizer,
        STEPS,
        quantization=quantization,
        recipe_variables={"num_epochs": EPOCHS, "sparsity": 0.8},
    )
    return model, average, optimizer, manager


def test_an_average_outlives_the_beginning_of_quantization():
    model, average, optimizer, manager = started(quantization=True)
    train(model, optimizer, average)
    manager.finalize()
    assert int(average.n_averaged) == EPOCHS * STEPS
    assert bool(torch.isfinite(average(model.batch(0)[0])).all())


def test_an_average_that_follows_has_the_zeros_of_the_model():
    model, average, optimizer, manager = started(quantization=False)
    manager.follow(average)
    train(model, optimizer, average, STEPS * 3)
    inputs = model.batch(0)[0]
    average.eval()(inputs)
    gone = {name: weight == 0 for name, weight in prunable(model).items()}
    for name, weight in prunable(average.module).items():
        assert not bool(weight[gone[name]].any())
    train(model, optimizer, average, STEPS)
    saved = average.state_dict()
    assert all(not bool(saved[f"module.{name}"][model.get_parameter(name) == 0].any()) for name in gone)
    average.update_parameters(model)
    manager.finalize()
    assert sparsity(average.module) == pytest.approx(0.8, abs=0.01)
    manager.spec().check(average.module)
    assert not average._forward_pre_hooks, "nothing of the recipe stays"


def test_a_plain_copy_can_follow_and_another_model_cannot():
    model, _, _, manager = started(quantization=False)
    manager.follow(copy.deepcopy(model))
    with pytest.raises((NameNotFoundError, ValueRangeError)):
        manager.follow(torch.nn.Linear(4, 4))

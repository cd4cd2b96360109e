"""What is left out of pruning by default, and what is said about it."""

import pytest
import torch
from torch import nn
from torch.optim import SGD

from create.models import CNN, take_steps
from sparta.create import Manager, initialize, modifier_named
from sparta.scheduler import BaseScheduler
from sparta.sparsify import Sparsifier


@pytest.mark.parametrize("pruning", ["constant", False])
def test_a_layer_that_begins_as_zeros_learns_all_the_same(pruning):
    model = CNN()
    nn.init.zeros_(model.fc2.weight)
    with torch.no_grad():
        model.fc1.weight[:4] = 0
    optimizer = SGD(model.parameters(), lr=0.1)
    manager, optimizer = initialize(
        model, optimizer, 4, pruning=pruning, quantization=not pruning, recipe_variables={"num_epochs": 4}
    )
    with pytest.warns(UserWarning, match=r"fc2\.weight"):
        take_steps(model, optimizer, 16)
    manager.finalize()
    assert bool((model.fc2.weight != 0).any())
    assert not bool(model.fc1.weight[:4].any()), "zeros of a layer that has other values stay"


def frozen():
    model = CNN()
    model.conv1.requires_grad_(False)
    return model, SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def test_frozen_layers_are_left_out_of_recipes_and_named():
    model, optimizer = frozen()
    with pytest.warns(UserWarning, match=r"conv1\.weight"):
        manager, _ = initialize(model, optimizer, 4, quantization=False, recipe_variables={"num_epochs": 2})
    take_steps(model, optimizer, 8)
    manager.finalize()
    assert bool((model.conv1.weight != 0).all())
    assert "conv1.weight" not in manager.spec()


def test_frozen_layers_are_pruned_when_they_are_named_or_when_nothing_trains():
    model = CNN().requires_grad_(False)
    Manager([modifier_named("MagnitudePruning")(final_sparsity=0.5, end_epoch=0)]).apply(model)
    assert not bool((model.conv1.weight != 0).all())
    model, _ = frozen()
    entry = modifier_named("MagnitudePruning")(params=["conv1.weight"], final_sparsity=0.5, end_epoch=0)
    Manager([entry]).apply(model)
    assert int((model.conv1.weight == 0).sum()) == model.conv1.weight.numel() // 2


def test_frozen_layers_are_left_out_of_sparsifiers_and_schedulers():
    model, _ = frozen()
    with pytest.warns(UserWarning, match=r"conv1\.weight"):
        sparsifier = Sparsifier(model, 0.5)
    assert "conv1.weight" not in {layer.name for layer in sparsifier.layers}
    scheduler = BaseScheduler()
    with pytest.warns(UserWarning, match=r"conv1\.weight"):
        model = scheduler.prepare_sparse_model(model)
    scheduler.update_sparsity_per_layer(model, 0.5)
    assert bool((model.conv1.weight != 0).all())
    assert not bool((model.conv2.weight != 0).all())


@pytest.mark.parametrize("channels", [1, 3])
def test_a_stem_that_is_too_small_for_a_targets_blocks_stays_dense(channels):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(channels, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8, 4))
    optimizer = SGD(model.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match=r"0\.weight"):
        manager, _ = initialize(
            model, optimizer, 4, quantization=False, recipe_variables={"target": "vnni", "num_epochs": 2}
        )
    for _ in range(8):
        optimizer.zero_grad()
        model(torch.randn(2, channels, 5, 5)).square().mean().backward()
        optimizer.step()
    manager.finalize()
    assert bool((model[0].weight != 0).all())
    assert manager.spec().density == pytest.approx(0.2, abs=0.01)

"""Details of old recipes that were fine where they came from: they are read, with a word where something changes."""

import pytest
import torch
from torch import nn

from create.models import CNN, sparsity, take_steps
from sparta.create import Manager, Recipe, initialize


def read(text):
    return Recipe.from_yaml(f"modifiers:\n  - {text}")


def test_devices_of_mfac_are_left_out():
    with pytest.warns(UserWarning, match="available_gpus"):
        recipe = read("!MFACPruningModifier {final_sparsity: 0.5, end_epoch: 2, available_gpus: ['cuda:0']}")
    assert recipe.modifiers()[0].final_sparsity == 0.5


def test_an_initial_sparsity_above_the_final_one_is_the_final_one():
    with pytest.warns(UserWarning, match="init_sparsity"):
        recipe = read("!GMPruningModifier {init_sparsity: 0.25, final_sparsity: 0.03, end_epoch: 2}")
    assert recipe.modifiers()[0].init_sparsity == 0.03


@pytest.mark.parametrize("key", ["ignore", "exclude_module_types"])
def test_classes_that_a_model_lacks_may_be_left_out(key):
    recipe = read(f"!QuantizationModifier {{start_epoch: 0, {key}: [QuantizableBatchMatMul, LlamaRMSNorm]}}")
    model = nn.Sequential(nn.Linear(4, 4))
    initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), 2, recipe=recipe)


def test_a_manager_takes_a_recipe():
    recipe = Recipe.from_yaml("modifiers: [GlobalMagnitudePruning: {final_sparsity: 0.5, end_epoch: 2}]")
    manager = Manager(recipe)
    assert manager.recipe is recipe
    model = CNN()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager.attach(model, optimizer, 4)
    take_steps(model, optimizer, 8)
    manager.finalize()
    assert sparsity(model) == pytest.approx(0.5, abs=0.01)

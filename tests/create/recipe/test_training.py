"""Recipes that were read, generated or composed do in training what they say."""

import pytest
import torch
from torch import nn

from sparta.create import Manager
from sparta.create.recipe import Recipe, compose
from sparta.create.template import recipe_for
from sparta.tesa.patterns import NM

STEPS = 4


def cnn():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
    )


def train(recipe, model, epochs=None):
    """Train on noise and return the sparsity of each weight at the beginning of each epoch, and at the end."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    manager = Manager(recipe.modifiers(STEPS), recipe)
    manager.attach(model, optimizer, STEPS)
    trace = []
    for _ in range(epochs or manager.max_epochs):
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(torch.randn(4, 4, 8, 8)), torch.randint(0, 4, (4,)))
            loss.backward()
            optimizer.step()
            if step == 0:
                trace.append(zeros(model))
    manager.finalize()
    return [*trace, zeros(model)]


def zeros(model):
    weights = [module.weight for module in model.modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    return sum(int((weight == 0).sum()) for weight in weights) / sum(weight.numel() for weight in weights)


def test_a_tensorrt_recipe_survives_yaml_and_trains():
    recipe = Recipe.from_yaml(str(recipe_for(variables={"target": "tensorrt", "num_epochs": 3})))
    model = cnn()
    assert train(recipe, model)[-1] == 0.5
    for weight in (model[0].weight, model[5].weight):
        NM(2, 4).validate(weight != 0)


@pytest.mark.parametrize("epochs", [1, 2, 3])
def test_an_overridden_recipe_reaches_its_sparsity_in_time(epochs):
    recipe = recipe_for(variables={"sparsity": 0.6}).override({"num_epochs": epochs})
    trace = train(recipe, cnn())
    assert len(trace) == epochs + 1
    assert trace[-1] == pytest.approx(0.6, abs=2e-3)


def test_an_old_recipe_trains():
    recipe = Recipe.from_yaml("""
    num_epochs: 4
    training_modifiers:
      - !EpochRangeModifier {start_epoch: 0, end_epoch: eval(num_epochs)}
      - !SetLearningRateModifier {learning_rate: 0.02, start_epoch: 0}
    pruning_modifiers:
      - !GMPruningModifier
        params: ['re:5.w', 0.weight]
        init_sparsity: 0.25
        final_sparsity: 0.75
        start_epoch: 1
        end_epoch: eval(num_epochs / 2 + 1)
        update_frequency: 1
        inter_func: linear
    """)
    assert train(recipe, cnn()) == pytest.approx([0.0, 0.25, 0.5, 0.75, 0.75])


def test_a_composed_recipe_does_one_thing_after_the_other():
    first = Recipe.from_yaml("""
    modifiers:
      - EpochRange: {end_epoch: 2}
      - MagnitudePruning: {end_epoch: 1, init_sparsity: 0.0, final_sparsity: 0.5, update_frequency: 1}
    """)
    second = Recipe.from_yaml("""
    modifiers:
      - EpochRange: {end_epoch: 2}
      - MagnitudePruning: {end_epoch: 1, init_sparsity: 0.5, final_sparsity: 0.75, update_frequency: 1}
    """)
    assert train(compose(first, second), cnn()) == pytest.approx([0.0, 0.5, 0.5, 0.75, 0.75])


def test_steps_are_steps():
    recipe = Recipe.from_yaml("""
    modifiers:
      - EpochRange: {end_epoch: 12 steps}
      - MagnitudePruning: {start_epoch: 4 steps, end_epoch: 8 steps, update_frequency: 4 steps, init_sparsity: 0.25,
                           final_sparsity: 0.5}
    """)
    assert train(recipe, cnn()) == pytest.approx([0.0, 0.25, 0.5, 0.5])

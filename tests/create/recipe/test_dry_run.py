"""A dry run says what will happen, and leaves the model as it is."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from sparta.create.recipe import Recipe
from sparta.create.template import recipe_for
from sparta.errors import NameNotFoundError, ShapeError, ValueRangeError

RECIPE = Recipe.from_yaml("""
variables: {num_epochs: 8}
modifiers:
  - EpochRange: {end_epoch: "${num_epochs}"}
  - MagnitudePruning: {end_epoch: "${num_epochs / 2}", final_sparsity: 0.75, update_frequency: 0.5,
                       params: [conv.weight, "re:fc.*weight"]}
  - Quantization: {start_epoch: 6}
""")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3)
        self.fc = nn.Linear(8, 4)
        self.head = nn.Linear(4, 2, bias=False)


def test_windows_parameters_and_sparsities():
    forecast = RECIPE.dry_run(Net(), steps_per_epoch=10)
    assert forecast.epochs == 8
    prune = forecast.modifiers[1]
    assert (prune.name, prune.start, prune.end, prune.updates) == ("MagnitudePruning", 0.0, 4.0, 9)
    assert prune.parameters == ("conv.weight", "fc.weight")
    assert {layer.name: layer.sparsity for layer in forecast.layers} == {"conv.weight": 0.75, "fc.weight": 0.75}
    assert forecast.sparsity == 0.75
    assert forecast.notes == ()


def test_memory_is_counted_in_bytes():
    float_recipe = Recipe(tuple(replace(stage, entries=stage.entries[:2]) for stage in RECIPE.stages), RECIPE.variables)
    conv, fc = float_recipe.dry_run(Net().half()).layers
    assert (conv.dense_bytes, conv.sparse_bytes) == (8 * 4 * 9 * 2, 8 * 4 * 9 * 2 // 4 + 8 * 4 * 9 // 8)
    assert fc.sparse_bytes < fc.dense_bytes
    assert RECIPE.dry_run(Net()).training_bytes == {"MagnitudePruning: masks": 288 + 32}


def test_quantized_layers_have_fewer_bits():
    forecast = RECIPE.dry_run(Net())
    conv = forecast.layers[0]
    assert (conv.bits, conv.dense_bytes, conv.sparse_bytes) == (8, 4 * 288, 288 // 4 + 288 // 8)
    assert forecast.modifiers[2].parameters == ("conv", "fc", "head")
    narrow = Recipe.from_yaml(
        "modifiers: [ConstantPruning, Quantization: {scheme: {weights: {num_bits: 4}}, ignore: [fc]}]"
    )
    assert [(layer.bits, layer.sparse_bytes) for layer in narrow.dry_run(Net()).layers] == [(4, 144), (32, 128), (4, 4)]


def test_attention_is_quantized_as_one():
    recipe = Recipe.from_yaml("modifiers: [ConstantPruning, Quantization]")
    forecast = recipe.dry_run(nn.TransformerEncoderLayer(8, 2, 16))
    assert [layer.bits for layer in forecast.layers] == [8] * 4


def test_the_forecast_of_a_global_ranking_adds_up():
    recipe = Recipe.from_yaml("modifiers: [GlobalMagnitudePruning: {final_sparsity: 0.9, end_epoch: 3}]")
    forecast = recipe.dry_run(Net())
    sparsities = [layer.sparsity for layer in forecast.layers]
    assert forecast.sparsity == pytest.approx(0.9, abs=2e-3)
    assert len(set(sparsities)) > 1


@pytest.mark.parametrize("kind", ["magnitude", "acdc", "movement", "obs", "mfac", "structured", "rigl", "topkast"])
def test_every_kind_of_pruning_has_a_forecast(kind):
    forecast = recipe_for(kind, variables={"sparsity": 0.5}).dry_run(Net())
    assert forecast.sparsity == pytest.approx(0.5, abs=0.01)
    assert [layer.name for layer in forecast.layers] == ["conv.weight", "fc.weight", "head.weight"]
    assert any(name.endswith(": masks") for name in forecast.training_bytes)


def test_what_training_needs_beyond_the_dense_model():
    elements = 288 + 32 + 8
    needs = recipe_for("movement", distillation=True).dry_run(Net()).training_bytes
    assert needs["MovementPruning: scores"] == needs["MovementPruning: values of pruned weights"] == 4 * elements
    assert next(size for name, size in needs.items() if "its own teacher" in name) == 4 * (elements + 8 + 4)
    assert recipe_for("obs").dry_run(Net()).training_bytes["OBSPruning: inverse Fisher blocks"] == 4 * 50 * elements
    assert recipe_for("mfac").dry_run(Net()).training_bytes["MFACPruning: gradients"] == 4 * 64 * elements


def test_long_lists_of_parameters_are_cut_short():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(9)))
    assert "9: 0.weight ... 8.weight" in str(recipe_for().dry_run(model))


def test_names_that_need_not_match():
    recipe = Recipe.from_yaml(
        "modifiers: [TrainableParams: {params: [nothing], trainable: false, params_strict: false}]"
    )
    assert recipe.dry_run(Net()).modifiers[0].parameters == ()


def test_the_model_is_left_as_it_is():
    model = Net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    RECIPE.dry_run(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(parameter.grad is not None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_names_are_seen_through_wrappers():
    forecast = RECIPE.dry_run(nn.DataParallel(Net()))
    assert [layer.name for layer in forecast.layers] == ["conv.weight", "fc.weight"]


def test_include_and_ignore_limit_all_prunable():
    recipe = Recipe.from_yaml("modifiers: [MagnitudePruning: {final_sparsity: 0.5, end_epoch: 1}]")
    assert [layer.name for layer in recipe.dry_run(Net(), ignore="conv.*").layers] == ["fc.weight", "head.weight"]
    assert [layer.name for layer in recipe.dry_run(Net(), include="fc.weight").layers] == ["fc.weight"]


def test_zeros_that_are_there_are_what_constant_pruning_holds():
    model = Net()
    model.fc.weight.data[:2] = 0
    forecast = Recipe.from_yaml("modifiers: [ConstantPruning: {params: [fc.weight]}]").dry_run(model)
    assert [(layer.name, layer.sparsity) for layer in forecast.layers] == [("fc.weight", 0.5)]
    assert forecast.epochs == -1


def test_masks_that_are_let_go_do_not_count():
    text = "modifiers: [EpochRange: {end_epoch: 4}, MagnitudePruning: {final_sparsity: 0.5, end_epoch: 1, %s}]"
    assert Recipe.from_yaml(text % "leave_enabled: false").dry_run(Net()).layers == ()
    assert len(Recipe.from_yaml(text % "leave_enabled: true").dry_run(Net()).layers) == 3


def test_stages_are_named():
    staged = Recipe.from_yaml("stages: {one: {modifiers: [EpochRange: {end_epoch: 3}]}}")
    forecast = staged.dry_run(Net())
    assert forecast.modifiers[0].stage == "one"
    assert "one" in str(forecast)


def test_what_looks_wrong_is_noted():
    recipe = Recipe.from_yaml("""
    modifiers:
      - EpochRange: {end_epoch: 3}
      - MagnitudePruning: {end_epoch: 5, final_sparsity: 0.5, update_frequency: 0.01}
      - LearningRateFunction: {lr_func: linear, init_lr: 0.1, final_lr: 0, end_epoch: 2}
      - LearningRateFunction: {lr_func: linear, init_lr: 0.1, final_lr: 0, start_epoch: 1, end_epoch: 3}
    """)
    forecast = recipe.dry_run(Net(), steps_per_epoch=10)
    assert [note.split()[0] for note in forecast.notes] == [
        "MagnitudePruning",
        "MagnitudePruning",
        "LearningRateFunction",
    ]
    assert forecast.modifiers[1].updates == 51  # one a step, and the one at the end
    assert "past the end" in str(forecast)
    assert recipe.dry_run(Net()).modifiers[1].updates == 501


def test_rates_of_different_groups_do_not_clash():
    text = "LearningRateFunction: {lr_func: linear, init_lr: 0.1, final_lr: 0, end_epoch: 2, param_groups: [%d]}"
    recipe = Recipe.from_yaml(f"modifiers: [{text % 0}, {text % 1}]")
    assert recipe.dry_run(Net()).notes == ()


def test_it_prints_as_tables_and_converts_to_plain_data():
    forecast = RECIPE.dry_run(Net(), steps_per_epoch=10)
    text = str(forecast)
    assert text.startswith("8 epochs")
    assert "75.0%" in text
    assert "8×4×3×3" in text
    data = json.loads(json.dumps(forecast.to_dict()))
    assert data["modifiers"][1]["parameters"] == ["conv.weight", "fc.weight"]
    assert data["layers"][0]["shape"] == [8, 4, 3, 3]


def test_errors_come_before_training():
    typo = Recipe.from_yaml("modifiers: [MagnitudePruning: {final_sparsity: 0.5, end_epoch: 1, params: [conv.wieght]}]")
    with pytest.raises(NameNotFoundError, match=r"MagnitudePruning: .*did you mean 'conv.weight'"):
        typo.dry_run(Net())
    frozen = Recipe.from_yaml("modifiers: [TrainableParams: {params: [nothing], trainable: false}]")
    with pytest.raises(NameNotFoundError, match="TrainableParams"):
        frozen.dry_run(Net())
    large = Recipe.from_yaml("modifiers: [MagnitudePruning: {final_sparsity: 0.5, end_epoch: 1, mask_type: [64, 64]}]")
    with pytest.raises(ShapeError, match="larger than the tensor"):
        large.dry_run(Net())
    quantize = Recipe.from_yaml("modifiers: [Quantization: {ignore: [haed]}]")
    with pytest.raises(NameNotFoundError, match=r"Quantization: .*did you mean 'head'"):
        quantize.dry_run(Net())
    with pytest.raises(ValueRangeError, match="steps_per_epoch is 0"):
        RECIPE.dry_run(Net(), steps_per_epoch=0)
    with pytest.raises(NameNotFoundError, match="no parameter to prune"):
        Recipe.from_yaml("modifiers: [ConstantPruning]").dry_run(nn.LayerNorm(3))

"""Generated recipes: every choice builds, loads and applies; windows follow the epochs; every value has effect."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from sparta.create.recipe import Recipe
from sparta.create.template import LR_KINDS, PRUNING_KINDS, as_switch, pruning_kind, recipe_for
from sparta.create.variables import RecipeVariables
from sparta.errors import NameNotFoundError, ShapeError, ValueRangeError

MODIFIER = {
    "magnitude": "GlobalMagnitudePruning",
    "acdc": "ACDCPruning",
    "movement": "MovementPruning",
    "obs": "OBSPruning",
    "mfac": "MFACPruning",
    "structured": "StructuredPruning",
    "rigl": "RigLPruning",
    "topkast": "TopKASTPruning",
    "constant": "ConstantPruning",
}


def cnn():
    return nn.Sequential(
        nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
    )


def transformer():
    return nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)


def named(recipe):
    return {one.name: one for one in recipe.modifiers()}


# ---------------------------------------------------------------------- what is in it


def test_the_defaults():
    made = named(recipe_for())
    assert list(made) == ["EpochRange", "LearningRateFunction", "GlobalMagnitudePruning", "Quantization"]
    assert made["EpochRange"].epochs() == (0.0, 20.0)
    rate = made["LearningRateFunction"]
    assert (rate.lr_func, rate.init_lr, rate.final_lr, rate.epochs()) == ("linear", 1e-3, 1e-7, (0.0, 20.0))
    prune = made["GlobalMagnitudePruning"]
    assert (prune.init_sparsity, prune.final_sparsity, prune.epochs()) == (0.05, 0.8, (0.0, 7.5))
    assert (prune.params, prune.update_frequency, prune.leave_enabled) == ("__ALL_PRUNABLE__", 0.375, True)
    assert prune.spread_by == "lamp"
    asked = named(recipe_for(variables={"global_sparsity": True}))["GlobalMagnitudePruning"]
    assert (asked.allocation, asked.spread_by) == (None, "global")
    quantize = made["Quantization"]
    assert quantize.start_epoch == 15.0
    assert quantize.disable_quantization_observer_epoch == quantize.freeze_bn_stats_epoch == 17.5


@pytest.mark.parametrize("model", [None, cnn(), transformer()], ids=["no model", "cnn", "transformer"])
@pytest.mark.parametrize(("pruning", "quantization"), list(itertools.product([True, False], repeat=2)))
def test_all_combinations_build_load_and_foresee(pruning, quantization, model):
    recipe = recipe_for(pruning, quantization, model=model)
    assert Recipe.from_yaml(recipe.to_yaml()) == recipe
    names = set(named(recipe))
    assert ("GlobalMagnitudePruning" in names) == pruning
    assert ("ConstantPruning" in names) == (quantization and not pruning)
    assert ("Quantization" in names) == quantization
    forecast = recipe.dry_run(model or cnn(), steps_per_epoch=4)
    assert forecast.sparsity == pytest.approx(0.8 if pruning else 0.0, abs=0.01)
    assert forecast.notes == () or "less than a step" in forecast.notes[0]


@pytest.mark.parametrize("kind", sorted(MODIFIER))
@pytest.mark.parametrize("quantization", [True, False])
def test_every_kind_of_pruning_has_its_modifier(kind, quantization):
    recipe = recipe_for(kind, quantization)
    assert MODIFIER[kind] in named(recipe)
    assert Recipe.from_yaml(str(recipe)) == recipe
    assert set(MODIFIER) | {"none"} == set(PRUNING_KINDS)


def test_global_or_layer_by_layer():
    assert "MagnitudePruning" in named(recipe_for(variables={"global_sparsity": False}))
    assert named(recipe_for("acdc", variables={"global_sparsity": False}))["ACDCPruning"].global_sparsity is False
    assert named(recipe_for("movement"))["MovementPruning"].global_sparsity is False


@pytest.mark.parametrize("pruning", ["transfer", "sparse-transfer", "constant", "Sparse_Transfer"])
def test_transfer_is_constant(pruning):
    assert recipe_for(pruning) == recipe_for("constant") == recipe_for(False)
    assert named(recipe_for(pruning))["ConstantPruning"].epochs() == (-1.0, -1.0)


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        (True, "magnitude"),
        ("true", "magnitude"),
        ("TRUE", "magnitude"),
        ("gmp", "magnitude"),
        (None, "none"),
        (False, "none"),
        ("False", "none"),
        ("AC/DC", "acdc"),
    ],
)
def test_spellings_of_pruning(given, kind):
    assert pruning_kind(given) == kind


def test_quantization_as_text():
    assert recipe_for(quantization="True") == recipe_for()
    assert recipe_for(quantization="false") == recipe_for(quantization=False)
    assert as_switch("FALSE", "quantization") is False


def test_distillation_appears_if_asked():
    made = named(recipe_for(distillation=True, variables={"hardness": 0.9, "temperature": 5}))
    assert (made["Distillation"].hardness, made["Distillation"].temperature) == (0.9, 5.0)
    assert made["Distillation"].epochs() == (0.0, 20.0)
    plain = recipe_for()
    assert "Distillation" not in named(plain)
    assert not any("distillation" in name for name in plain.variables)


@pytest.mark.parametrize("kind", LR_KINDS)
def test_learning_rates(kind):
    recipe = recipe_for(
        lr=kind, variables={"init_lr": 0.5} if kind == "constant" else {"init_lr": 0.5, "final_lr": 0.1}
    )
    rate = named(recipe)["LearningRateFunction"]
    assert rate.lr_func == kind
    assert rate.rate_at(0.0) == 0.5
    assert rate.rate_at(20.0) == pytest.approx(0.5 if kind == "constant" else 0.1)
    assert named(recipe.override({"lr_func": "cosine"}))["LearningRateFunction"].lr_func == "cosine"


def test_the_learning_rate_can_be_left_alone():
    recipe = recipe_for(lr=None)
    assert "LearningRateFunction" not in named(recipe)
    assert "init_lr" not in recipe.variables


# ---------------------------------------------------------------------- windows


@pytest.mark.parametrize(
    ("epochs", "qat", "active"), [(20, 5, 7.5), (3, 2, 0.5), (15, 5, 5), (14, 2, 6), (100, 5, 47.5), (2, 4 / 3, 1 / 3)]
)
def test_how_epochs_are_shared_out(epochs, qat, active):
    for recipe in (recipe_for(variables={"num_epochs": epochs}), recipe_for().override({"num_epochs": epochs})):
        values = recipe.values()
        assert values["num_qat_epochs"] == pytest.approx(qat)
        assert values["num_pruning_active_epochs"] == pytest.approx(active)
        assert values["num_pruning_finetuning_epochs"] == pytest.approx(active)
        assert values["num_qat_finetuning_epochs"] == pytest.approx(qat / 2)
        assert values["pruning_update_frequency"] == pytest.approx(1 if active > 20 else active / 20)
        quantize = named(recipe)["Quantization"]
        assert quantize.start_epoch == pytest.approx(epochs - qat)
        assert quantize.freeze_bn_stats_epoch == pytest.approx(epochs - qat / 2)
        assert recipe.max_epochs == epochs


def test_without_quantization_half_the_epochs_prune():
    assert named(recipe_for(quantization=False))["GlobalMagnitudePruning"].epochs() == (0.0, 10.0)


@pytest.mark.parametrize("pruning", [False, "transfer"])
def test_without_pruning_quantization_starts_at_once(pruning):
    quantize = named(recipe_for(pruning))["Quantization"]
    assert (quantize.start_epoch, quantize.freeze_bn_stats_epoch) == (0.0, 2.5)


@settings(max_examples=40, deadline=None)
@given(
    epochs=st.floats(0.1, 300) | st.integers(1, 300),
    pruning=st.sampled_from(sorted(PRUNING_KINDS)),
    quantization=st.booleans(),
)
def test_overriding_the_epochs_is_generating_for_them_and_keeps_all_windows_inside(epochs, pruning, quantization):
    generated = recipe_for(pruning, quantization, variables={"num_epochs": epochs})
    overridden = recipe_for(pruning, quantization).override({"num_epochs": float(epochs)})
    assert generated == overridden
    for one in generated.modifiers():
        start, end = one.epochs()
        assert start <= epochs + 1e-9
        assert end <= epochs + 1e-9
        if one.kind in {"pruning", "structured"} and end >= 0 and quantization:
            assert end <= named(generated)["Quantization"].start_epoch + 1e-9


def test_acdc_has_whole_epochs():
    for epochs, active, phase in ((20, 7, 1), (100, 47, 5), (3, 0.5, 0.5)):
        prune = named(recipe_for("acdc", variables={"num_epochs": epochs}))["ACDCPruning"]
        assert (prune.end_epoch, prune.update_frequency) == (active, phase)
    assert named(recipe_for("acdc", quantization=False))["ACDCPruning"].end_epoch == 10


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("kind", sorted(PRUNING_KINDS))
def test_very_short_runs_work(epochs, kind):
    recipe = recipe_for(kind, variables={"num_epochs": epochs})
    assert recipe.max_epochs == epochs
    assert recipe.dry_run(cnn(), steps_per_epoch=10).epochs == epochs


# ---------------------------------------------------------------------- every value has effect


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        ("magnitude", "final_sparsity"),
        ("movement", "final_sparsity"),
        ("obs", "final_sparsity"),
        ("mfac", "final_sparsity"),
        ("structured", "final_sparsity"),
        ("rigl", "final_sparsity"),
        ("acdc", "compression_sparsity"),
        ("topkast", "forward_sparsity"),
    ],
)
def test_the_sparsity_asked_for_is_the_one_that_is_reached(kind, field):
    made = named(recipe_for(kind, variables={"sparsity": 0.5}))[MODIFIER[kind]]
    assert getattr(made, field) == 0.5
    changed = recipe_for(kind).override({"pruning_final_sparsity": 0.03})
    assert getattr(named(changed)[MODIFIER[kind]], field) == 0.03
    assert getattr(named(changed)[MODIFIER[kind]], "init_sparsity", 0.03) == 0.03  # never above the final one


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_epochs", 10),
        ("init_lr", 0.5),
        ("final_lr", 0.5),
        ("target", "vnni"),
        ("sparsity", 0.5),
        ("mask_type", "block4"),
        ("global_sparsity", False),
        ("hardness", 0.1),
        ("temperature", 7),
    ],
)
def test_every_variable_changes_what_the_modifiers_do(name, value):
    def all_fields(recipe):
        return [one.model_dump() for one in recipe.modifiers()]

    before = all_fields(recipe_for(distillation=True))
    assert all_fields(recipe_for(distillation=True, variables={name: value})) != before


def test_variables_as_schema_or_dictionary_make_equal_recipes():
    for values in ({"num_epochs": 5, "sparsity": 0.9}, {"target": "tensorrt"}, {}):
        assert recipe_for(variables=values) == recipe_for(variables=RecipeVariables(**values))


@pytest.mark.parametrize(
    ("choices", "name"),
    [
        ({"pruning": "constant", "variables": {"sparsity": 0.5}}, "sparsity"),
        ({"pruning": False, "variables": {"mask_type": "block4"}}, "mask_type"),
        ({"pruning": False, "quantization": False, "variables": {"target": "vnni"}}, "target"),
        ({"pruning": "movement", "variables": {"global_sparsity": True}}, "global_sparsity"),
        ({"variables": {"hardness": 0.9}}, "hardness"),
        ({"variables": {"temperature": 9}}, "temperature"),
        ({"lr": None, "variables": {"init_lr": 0.1}}, "init_lr"),
        ({"lr": None, "variables": {"final_lr": 0.1}}, "final_lr"),
        ({"lr": "constant", "variables": {"final_lr": 0.1}}, "final_lr"),
    ],
)
def test_a_value_without_effect_is_warned_of(choices, name):
    with pytest.warns(UserWarning, match=f"{name} has no effect"):
        recipe_for(**choices)


# ---------------------------------------------------------------------- hardware


def test_tensorrt_derives_its_mask_and_its_scheme_and_survives_yaml():
    recipe = Recipe.from_yaml(recipe_for(variables={"target": "tensorrt"}).to_yaml())
    prune, quantize = recipe.modifiers()[2:]
    assert (prune.name, prune.mask_type, prune.final_sparsity) == ("MagnitudePruning", "2:4", 0.5)
    assert quantize.scheme == "tensorrt"
    for model in (cnn(), transformer()):
        assert recipe.dry_run(model).sparsity == 0.5


def test_vnni_derives_its_mask():
    assert named(recipe_for(variables={"target": "vnni"}))["GlobalMagnitudePruning"].mask_type == "block4"


def test_structured_pruning_takes_whole_channels():
    assert named(recipe_for("structured"))["StructuredPruning"].mask_type == "filter"
    for mask, expected in (("channel", "channel"), ("channel:1", "channel"), ("filter", "filter")):
        made = recipe_for("structured", variables={"mask_type": mask})
        assert named(made)["StructuredPruning"].mask_type == expected
    assert named(recipe_for("structured", variables={"target": "nvidia-hopper"}))["StructuredPruning"]
    for values in ({"mask_type": "2:4"}, {"target": "tensorrt"}):
        with pytest.raises(ValueRangeError, match="filter or channel"):
            recipe_for("structured", variables=values)


def test_rigl_prunes_single_weights():
    with pytest.raises(ValueRangeError, match="unstructured"):
        recipe_for("rigl", variables={"target": "tensorrt"})


def test_with_a_model_the_mask_is_checked_against_its_layers():
    model = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 64))
    with pytest.raises(ShapeError, match=r"0\.weight"):
        recipe_for(variables={"mask_type": "block:64x64"}, model=model)
    recipe_for(variables={"mask_type": "block:64x64"}, model=model, ignore="0.weight")
    recipe_for(variables={"mask_type": "block:64x64"}, model=model, include="1.weight")
    with pytest.raises(NameNotFoundError, match="no parameter to prune"):
        recipe_for(model=nn.LayerNorm(3))


# ---------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("choices", "error", "says"),
    [
        ({"pruning": "magnitud"}, NameNotFoundError, "did you mean 'magnitude'"),
        ({"pruning": 1}, NameNotFoundError, "kind of pruning '1'"),
        ({"quantization": "maybe"}, ValueRangeError, "quantization is 'maybe'"),
        ({"quantization": 1}, ValueRangeError, "quantization is 1"),
        ({"distillation": None}, ValueRangeError, "distillation is None"),
        ({"lr": "linea"}, NameNotFoundError, "did you mean 'linear'.*None leaves it alone"),
        ({"variables": {"epochs": 3}}, NameNotFoundError, "did you mean 'num_epochs'"),
    ],
)
def test_bad_choices_are_refused(choices, error, says):
    with pytest.raises(error, match=says):
        recipe_for(**choices)


def test_an_exponential_rate_needs_an_end_above_zero():
    with pytest.raises(ValueRangeError, match="exponential"):
        recipe_for(lr="exponential", variables={"final_lr": 0}).modifiers()


def test_one_shot_applies_the_end_of_the_recipe():
    from sparta.create import Manager

    for quantization in (True, False):
        model = cnn()
        Manager(recipe_for(quantization=quantization).modifiers()).apply(model)
        weights = [model[0].weight, model[5].weight]
        zeros = sum(int((weight == 0).sum()) for weight in weights) / sum(weight.numel() for weight in weights)
        assert zeros > 0.75
        assert any("Quantized" in type(module).__mro__[1].__name__ for module in model.modules()) == quantization
        assert torch.isfinite(model(torch.randn(2, 4, 8, 8))).all()


def test_acdc_begins_with_a_dense_warm_up_and_has_a_longer_last_dense_phase():
    for epochs, warm_up, drawn in ((20, 1, "DDCDDCCC"), (100, 9, "")):
        prune = named(recipe_for("acdc", variables={"num_epochs": epochs}))["ACDCPruning"]
        assert prune.start_epoch == warm_up
        assert prune.long_last_dense_phase
        if drawn:
            assert "".join("C" if prune.is_compressed(epoch) else "D" for epoch in range(8)) == drawn
    assert named(recipe_for("acdc", variables={"num_epochs": 3}))["ACDCPruning"].start_epoch == 0

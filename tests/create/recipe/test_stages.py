"""Composing: names, shifted epochs, pinned ends, and variables that keep their meaning."""

import pytest

from sparta.create.recipe import Recipe, compose
from sparta.errors import ValueRangeError

PRUNE = Recipe.from_yaml("""
variables: {num_epochs: 10, active: "${num_epochs / 2}"}
metadata: {author: someone}
modifiers:
  - EpochRange: {end_epoch: "${num_epochs}"}
  - ConstantPruning
  - MagnitudePruning: {start_epoch: 1, end_epoch: "${active}", final_sparsity: 0.8}
""")
QUANTIZE = Recipe.from_yaml("""
variables: {num_epochs: 4}
modifiers:
  - EpochRange: {end_epoch: "${num_epochs}"}
  - SetLearningRate: {learning_rate: 0.1}
  - Quantization: {start_epoch: 1, disable_quantization_observer_epoch: "${num_epochs / 2}", freeze_bn_stats_epoch: 3}
""")
STAGED = Recipe.from_yaml("""
variables: {num_epochs: 3, half: "${num_epochs / 2}"}
stages:
  one:
    variables: {num_epochs: 6}
    modifiers: [EpochRange: {end_epoch: "${num_epochs}"}]
  two:
    modifiers: [EpochRange: {start_epoch: 6, end_epoch: "${6 + half}"}]
""")


def spans(recipe):
    return {name: [one.epochs() for one in modifiers] for name, modifiers in recipe.staged_modifiers()}


def test_flat_and_flat():
    both = compose(PRUNE, QUANTIZE)
    assert spans(both) == {
        "stage_0": [(0.0, 10.0), (-1.0, 10.0), (1.0, 5.0)],  # the endless ConstantPruning ends where the next begins
        "stage_1": [(10.0, 14.0), (10.0, -1.0), (11.0, 13.0)],
    }
    quantization = both.modifiers()[-1]
    assert quantization.disable_quantization_observer_epoch == 12.0
    assert quantization.freeze_bn_stats_epoch == 13.0
    assert both.max_epochs == 14


def test_staged_and_flat():
    assert spans(compose(STAGED, QUANTIZE)) == {
        "one": [(0.0, 6.0)],
        "two": [(6.0, 7.5)],
        "stage_2": [(8.0, 12.0), (8.0, -1.0), (9.0, 11.0)],
    }


def test_flat_and_staged():
    assert spans(compose(PRUNE, STAGED)) == {
        "pre_one": [(0.0, 10.0), (-1.0, 10.0), (1.0, 5.0)],
        "one": [(10.0, 16.0)],
        "two": [(16.0, 17.5)],
    }


def test_staged_and_staged():
    renamed = Recipe.from_dict({"stages": {"three": {"modifiers": [{"EpochRange": {"end_epoch": 2}}]}}})
    assert spans(compose(STAGED, renamed)) == {"one": [(0.0, 6.0)], "two": [(6.0, 7.5)], "three": [(8.0, 10.0)]}


def test_three_in_a_row_follow_each_other():
    row = compose(compose(QUANTIZE, PRUNE), QUANTIZE)
    assert [stage.name for stage in row.stages] == ["stage_0", "stage_1", "stage_2"]
    assert row.max_epochs == 18
    assert spans(compose(QUANTIZE, compose(PRUNE, QUANTIZE), names=("first", "unused")))["stage_1"][0] == (14.0, 18.0)


def test_quantization_is_never_given_an_end():
    both = compose(QUANTIZE, PRUNE)
    assert next(one for one in both.modifiers() if one.name == "Quantization").end_epoch == -1


def test_shared_names_are_refused():
    with pytest.raises(ValueRangeError, match="two stages called"):
        compose(STAGED, STAGED)
    with pytest.raises(ValueRangeError, match="two stages called 'a'"):
        compose(PRUNE, QUANTIZE, names=("a", "a"))


def test_names_can_be_chosen():
    both = compose(PRUNE, QUANTIZE, names=("prune", "quantize"))
    assert [stage.name for stage in both.stages] == ["prune", "quantize"]


def test_each_keeps_its_own_variables_and_stays_symbolic():
    both = compose(PRUNE, QUANTIZE).override({"stage_0.num_epochs": 20})
    assert spans(both)["stage_0"][2] == (1.0, 10.0)
    assert spans(both)["stage_1"][0] == (20.0, 24.0)  # moved along
    assert compose(PRUNE, QUANTIZE).override({"num_epochs": 2}).max_epochs == 5  # both, and the freeze at 3 behind them


def test_a_variable_that_a_stage_shadows_means_in_it_what_it_meant():
    assert spans(compose(STAGED, QUANTIZE))["two"] == [(6.0, 7.5)]
    assert STAGED.values()["half"] == 1.5


def test_a_composed_recipe_prints_and_parses():
    both = compose(PRUNE, STAGED)
    again = Recipe.from_yaml(str(both))
    assert again == both
    assert spans(again) == spans(both)


def test_metadata_of_both_is_kept():
    assert compose(PRUNE, QUANTIZE).metadata == {"author": "someone"}
    other = QUANTIZE.with_metadata({"author": "other"})
    with pytest.warns(UserWarning, match="which stays"):
        assert compose(PRUNE, other).metadata == {"author": "someone"}


def test_nothing_follows_a_recipe_without_an_end():
    endless = Recipe.from_yaml("modifiers: [ConstantPruning]")
    with pytest.raises(ValueRangeError, match="has no end"):
        compose(endless, QUANTIZE).modifiers()

"""Recipe variables: documented, checked, derived from the target, and never ignored."""

import pytest

from sparta.create.variables import TARGETS, RecipeVariables, as_variables
from sparta.errors import NameNotFoundError, ValueRangeError
from sparta.scheduler.hardware import DEVICES
from sparta.tesa.patterns import Block, Channel, Unstructured, parse_pattern


def test_the_defaults():
    assert RecipeVariables().model_dump() == {
        "num_epochs": 20.0,
        "init_lr": 1e-3,
        "final_lr": 1e-7,
        "target": None,
        "sparsity": 0.8,
        "mask_type": "unstructured",
        "global_sparsity": True,
        "allocation": None,
        "hardness": 0.5,
        "temperature": 2.0,
    }


def test_every_variable_has_help():
    text = RecipeVariables.help()
    for name, field in RecipeVariables.model_fields.items():
        assert field.description
        assert name in text
        assert field.description in text


@pytest.mark.parametrize(
    ("target", "mask"), [("vnni", "block4"), ("tensorrt", "2:4"), ("nvidia-hopper", "2:4"), ("generic", "unstructured")]
)
def test_the_target_decides_the_mask(target, mask):
    assert RecipeVariables(target=target).mask_type == mask


def test_a_mask_that_the_target_also_takes_may_be_given():
    assert RecipeVariables(target="nvidia-hopper", mask_type="block:64x64").pattern == Block(64, 64)
    assert RecipeVariables(target="vnni", mask_type=[1, 4]).pattern == Block(1, 4)
    assert RecipeVariables(target="generic", mask_type="filter").pattern == Channel(0)


def test_a_mask_that_does_not_pay_on_the_target_is_refused():
    for target, mask in (("vnni", "2:4"), ("tensorrt", "unstructured"), ("tensorrt", "block4")):
        with pytest.raises(ValueRangeError, match=f"does not pay on the target '{target}'"):
            RecipeVariables(target=target, mask_type=mask)


def test_the_presets_of_the_schedulers_are_targets():
    assert set(DEVICES) <= set(TARGETS)
    for name, device in DEVICES.items():
        ours = {str(RecipeVariables(target=name, mask_type=mask).pattern) for mask in TARGETS[name]}
        assert {str(parse_pattern(pattern)) for pattern in device.patterns} <= ours


def test_groups_have_a_sparsity_of_their_own():
    variables = RecipeVariables(mask_type="1:4")
    assert (variables.sparsity, variables.global_sparsity) == (0.75, False)
    assert RecipeVariables(mask_type="2:4", sparsity=0.75).sparsity == 0.75
    with pytest.raises(ValueRangeError, match=r"which prunes 0\.5"):
        RecipeVariables(mask_type="2:4", sparsity=0.4)
    with pytest.raises(ValueRangeError, match="says how sparse each layer is"):
        RecipeVariables(mask_type="2:4", global_sparsity=True)


def test_derived_values_survive_a_copy():
    for given in ({"target": "tensorrt"}, {"mask_type": "1:4"}, {"num_epochs": 3, "sparsity": 0.5}):
        variables = RecipeVariables(**given)
        assert RecipeVariables(**variables.model_dump()).model_dump() == variables.model_dump()


@pytest.mark.parametrize(
    ("mask", "pattern"),
    [("unstructured", Unstructured()), ("channel", Channel(1)), ("filter", Channel(0)), ([4, 1], Block(4, 1))],
)
def test_masks(mask, pattern):
    assert RecipeVariables(mask_type=mask).pattern == pattern


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({"num_epoch": 3}, NameNotFoundError, "did you mean 'num_epochs'.*known: .*temperature"),
        ({"pruning": True}, NameNotFoundError, "unknown recipe variable 'pruning'"),
        ({"target": "vnny"}, NameNotFoundError, "did you mean 'vnni'"),
        ({"mask_type": "blok:4x4"}, NameNotFoundError, "unknown pattern"),
        ({"mask_type": [1, 2, 3]}, ValueRangeError, "mask_type"),
        ({"mask_type": "4:2"}, ValueRangeError, "n kept of m"),
        ({"sparsity": 1.0}, ValueRangeError, "sparsity is 1.0"),
        ({"sparsity": -0.1}, ValueRangeError, "sparsity is -0.1"),
        ({"sparsity": "most"}, ValueRangeError, "sparsity is 'most'"),
        ({"num_epochs": 0}, ValueRangeError, "num_epochs is 0"),
        ({"num_epochs": float("inf")}, ValueRangeError, "num_epochs is inf"),
        ({"init_lr": -1}, ValueRangeError, "init_lr is -1"),
        ({"final_lr": float("nan")}, ValueRangeError, "final_lr is nan"),
        ({"hardness": 1.5}, ValueRangeError, "hardness is 1.5"),
        ({"temperature": 0}, ValueRangeError, "temperature is 0"),
    ],
)
def test_bad_values_are_refused(given, error, says):
    with pytest.raises(error, match=says):
        RecipeVariables(**given)
    with pytest.raises(error, match=says):
        as_variables(given)


def test_other_types_are_refused():
    with pytest.raises(ValueRangeError, match="recipe_variables is a list"):
        as_variables([("num_epochs", 3)])
    assert as_variables(None) == RecipeVariables() == as_variables({})


def test_variables_do_not_change():
    with pytest.raises(ValueError, match="frozen"):
        RecipeVariables().num_epochs = 3

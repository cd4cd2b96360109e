"""The result object: tables, reasons, data, and every error a user can cause."""

import json

import pytest
import torch
from torch import nn

from sparta import Spec, TeSA
from sparta.errors import CheckError, NameNotFoundError, ShapeError, ValueRangeError
from sparta.propagation import compact, propagate, rule
from sparta.propagation.checking import check_equal
from sparta.propagation.compact import masked_tensors


@pytest.fixture
def pruned():
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    with torch.no_grad():
        model[2].weight[:, 2:4] = 0
    return model, torch.randn(3, 4)


def test_it_tells_before_after_and_why(pruned):
    result = propagate(*pruned)
    text = str(result)
    assert "0.weight" in text
    assert "6×4" in text
    assert "4×4" in text
    assert "8 dead at linear" in text
    assert "observes 16 of 24" in result.why("0.weight")
    assert "4 of 6 indices stay" in result.why("0.weight")
    assert result.why("relu").startswith("relu")
    data = json.loads(json.dumps(result.to_dict()))
    assert data["tensors"]["0.weight"]["after"] == pytest.approx(16 / 24)
    assert data["parameters"] > data["parameters_compact"]
    assert "PropagationResult" in repr(result)


def test_a_name_that_is_not_there(pruned):
    with pytest.raises(NameNotFoundError, match=r"did you mean '0\.weight'"):
        propagate(*pruned).why("0.weigth")


def test_a_spec_for_another_model(pruned):
    with pytest.raises(NameNotFoundError):
        propagate(*pruned, Spec({"fc.weight": TeSA.dense((2, 2))}))
    with pytest.raises(ShapeError):
        propagate(*pruned, Spec({"0.weight": TeSA.dense((2, 2))}))


def test_a_spec_that_contradicts_itself_on_tied_weights():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    one, two = TeSA.constant((2, 2), 1.0), TeSA.constant((2, 2), 0.0)
    with pytest.raises(CheckError, match="tied"):
        propagate(model, torch.randn(1, 2), Spec({"0.weight": one, "1.weight": two}))


def test_a_layer_that_is_zero_in_the_model_itself_keeps_one_channel(pruned):
    model, x = pruned
    with torch.no_grad():
        model[2].weight.zero_()
    small = compact(model, x)
    assert small.get_parameter("0.weight").shape == (1, 4)
    torch.testing.assert_close(small(x), model(x))


@pytest.mark.parametrize("round_to", [0, -1, 1.5, True])
def test_round_to_must_be_a_positive_number(pruned, round_to):
    with pytest.raises(ValueRangeError, match="round_to"):
        propagate(*pruned).compact(round_to)


def test_meta_models_need_a_spec():
    with pytest.raises(ValueRangeError, match="pass `spec`"):
        propagate(nn.Linear(2, 2, device="meta"), torch.randn(1, 2, device="meta"))


def test_an_unknown_direction_of_a_rule():
    with pytest.raises(ValueRangeError, match="direction 'forwards'"):
        rule("forwards", torch.ops.aten.relu.default)


def test_the_check_notices_a_wrong_model(pruned):
    result = propagate(*pruned)
    small = result.compact()
    masked = masked_tensors(result.captured, result.facts)
    assert check_equal(result.captured, masked, small) < 1e-5
    with torch.no_grad():
        small.get_parameter("0.bias").add_(1)
    with pytest.raises(CheckError, match="differ"):
        check_equal(result.captured, masked, small)
    with pytest.raises(CheckError, match="gives"):
        check_equal(result.captured, masked, nn.Linear(4, 3))


def test_the_original_model_is_left_alone(pruned):
    model, x = pruned
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    compact(model, x, Spec({"0.weight": TeSA.from_mask(torch.tensor([[1], [0], [1], [1], [1], [0]]).expand(6, 4))}))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_the_function_stands_in_the_top_package():
    import sparta

    assert sparta.propagate is propagate

"""A quantised sparse layer is a drop-in for inference: near the dense layer, exact in integers, by any kernel."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import sparta
from sparta.errors import NameNotFoundError, ShapeError, ValueRangeError
from sparta.nn import SparseInt8Linear
from sparta.testing import block_mask


def made(inputs=24, outputs=12, *, tokens=33, density=0.4, bias=True, **grid):
    """A layer with its dense original, mask and inputs."""
    torch.manual_seed(0)
    dense = nn.Linear(inputs, outputs, bias=bias)
    mask = torch.rand(outputs, inputs) < density
    x = torch.randn(tokens, inputs) + 0.5
    layer = SparseInt8Linear.from_float(dense, mask, **(grid or {"calibration": x}))
    return layer, dense, mask, x


def on_grids(layer, x):
    """What the layer's integers stand for, multiplied in float64."""
    zero, scale = int(layer.input_zero_point), float(layer.input_scale)
    real = (layer.quantize(x).double() - zero) * scale
    y = real @ (layer.weight.double() * layer.weight_scale.double()[:, None]).t()
    return y if layer.bias is None else y + layer.bias.double()


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 40),
    st.integers(1, 40),
    st.sampled_from([(0,), (), (1,), (2, 3), (17,)]),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.sampled_from(["int8", "uint8"]),
    st.booleans(),
)
def test_results_are_those_of_the_rounded_layer(inputs, outputs, lead, density, format, bias):
    dense = nn.Linear(max(inputs, 1), outputs, bias=bias)
    mask = torch.rand(dense.weight.shape) < density
    x = 3 * torch.randn(*lead, max(inputs, 1))
    layer = SparseInt8Linear.from_float(dense, mask, calibration=x, input_format=format)
    y = layer(x)
    assert y.shape == (*lead, outputs)
    torch.testing.assert_close(y.double(), on_grids(layer, x), rtol=1e-5, atol=1e-5)
    # Half a step of every input and weight, at most.
    step = float(layer.input_scale) / 2 * dense.weight.abs().sum(1) + x.abs().sum(-1, keepdim=True) * (
        layer.weight_scale / 2
    )
    exact = nn.functional.linear(x, dense.weight * mask, dense.bias)
    assert bool(((y - exact).abs() <= 1.1 * step + 1e-4).all())
    before = [layer.quantize(x), y]
    assert torch.equal(layer(before[0]), y)


@pytest.mark.parametrize("name", ["dense", "onednn-int8", "torch-int8", "cpu-int8"])
@pytest.mark.parametrize("format", ["int8", "uint8"])
def test_every_implement_gives_the_same(name, format):
    layer, _, _, x = made(input_scale=0.03, input_zero_point=5, input_format=format)
    before = layer(x)
    config = next((s for s in layer.get_search_space(x).samples() if s["_name"] == name), None)
    if config is None:
        pytest.skip(f"{name} is not available here")
    layer.build((x,), config)
    torch.testing.assert_close(layer(x), before, rtol=1e-6, atol=1e-5)
    assert torch.equal(layer(x), layer(layer.quantize(x)))
    assert torch.equal(layer(x.half()), layer(x.half().float()))
    assert layer(x.reshape(3, 11, 24)).shape == (3, 11, 12)
    twin = copy.deepcopy(layer)
    assert torch.equal(twin(x), layer(x))


@pytest.mark.parametrize("inputs", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("format", ["int8", "uint8"])
def test_rows_that_are_too_short_for_the_library_are_filled_up(inputs, format, monkeypatch):
    library = torch._int_mm

    def wrong_for_short_rows(x, weight):  # as on processors that multiply four integers at a time
        sums = library(x, weight)
        return sums + 1000 if x.shape[1] < 4 else sums

    dense, x = nn.Linear(inputs, 5), torch.randn(7, inputs)
    mask = torch.rand(5, inputs) < 0.8
    layer = SparseInt8Linear.from_float(dense, mask, calibration=x, input_format=format)
    before = layer(x)
    monkeypatch.setattr(torch, "_int_mm", wrong_for_short_rows)
    layer.build(x, {"_name": "torch-int8"})
    assert layer.choice.implement == "torch-int8"
    assert torch.equal(layer(x), before)


def test_every_token_may_have_a_grid_of_its_own():
    dense, mask = nn.Linear(24, 12), torch.rand(12, 24) < 0.5
    x = torch.randn(5, 3, 24) * torch.tensor([1e-3, 1.0, 100.0])[:, None]  # one grid for all would lose the first
    layer = SparseInt8Linear.from_float(dense, mask, dynamic=True)
    exact = nn.functional.linear(x, dense.weight * mask, dense.bias)
    before = layer(x)
    assert bool(((before - exact).abs() <= 0.05 * x.abs().amax(-1, keepdim=True) + 1e-4).all())
    for name in ("dense", "torch-int8", "cpu-int8"):
        config = next(s for s in layer.get_search_space(x).samples() if s["_name"] == name)
        layer.build((x,), config)
        torch.testing.assert_close(layer(x), before, rtol=1e-5, atol=1e-5)
    assert "a scale for each token" in repr(layer)
    with pytest.raises(ValueRangeError, match=r"torch\.int8"):
        layer(torch.zeros(2, 24, dtype=torch.int8))
    with pytest.raises(ValueRangeError, match="one of them"):
        SparseInt8Linear(torch.ones(2, 4, dtype=torch.int8), torch.ones(2))


def test_it_is_tuned_and_built_like_any_other():
    mask = block_mask((64, 64), (4, 4), 0.9, seed=0)
    model = nn.Sequential(SparseInt8Linear.from_float(nn.Linear(64, 64), mask, input_scale=0.05), nn.ReLU())
    x = torch.rand(32, 64)
    before = model(x)
    configs = sparta.nn.tune(model, (x,), max_trials=3, progress=False)
    assert model[0].ready
    torch.testing.assert_close(model(x), before, rtol=1e-5, atol=1e-5)
    sparta.nn.build(model, (x,), configs)
    torch.testing.assert_close(model(x), before, rtol=1e-5, atol=1e-5)
    assert "density 0.1" in repr(model)


def test_state_travels_and_another_mask_or_grid_undoes_what_was_built():
    layer, dense, mask, x = made()
    layer.build((x,), {"_name": "torch-int8"})
    other = SparseInt8Linear.from_float(dense, mask, input_scale=1.0)
    other.build((x,), {"_name": "torch-int8"})
    other.load_state_dict(layer.state_dict())
    assert not other.ready
    assert torch.equal(other(x), layer(x))
    layer.load_state_dict(other.state_dict())
    assert layer.ready


def test_new_integers_are_packed_again():
    layer, _, _, x = made(bias=False)
    config = next(s for s in layer.get_search_space(x).samples() if s["_name"] == "dense")
    layer.build((x,), config)
    before = layer(x)
    layer.weight.neg_()
    assert torch.equal(layer(x), -before)


def test_torch_compile_takes_it_whole():
    layer, _, _, x = made()
    layer.build((x,), {"_name": "dense"})
    fast = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(fast(x), layer(x))


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: SparseInt8Linear.from_float(nn.ReLU(), input_scale=1.0), ValueRangeError, "torch.nn.Linear"),
        (lambda: SparseInt8Linear.from_float(nn.Linear(4, 2)), ValueRangeError, "one of them"),
        (lambda: made(input_scale=0.0), ValueRangeError, "a scale above 0"),
        (lambda: made(input_scale=1.0, input_zero_point=256), ValueRangeError, "0 to 255"),
        (lambda: made(input_scale=1.0, input_format="int9"), NameNotFoundError, "did you mean 'int8'"),
        (lambda: made(calibration=torch.ones(2, 24), input_format="int9"), NameNotFoundError, "did you mean 'int8'"),
        (lambda: made(calibration=torch.ones(2, 23)), ShapeError, "calibration input"),
        (lambda: made(calibration=[torch.full((2, 24), torch.inf)]), ValueRangeError, "NaN or inf"),
        (
            lambda: SparseInt8Linear.from_float(nn.Linear(4, 2), torch.ones(4, 2), input_scale=1.0),
            ShapeError,
            "weight_mask of shape",
        ),
        (lambda: SparseInt8Linear(torch.ones(2, 4), torch.ones(2), input_scale=1.0), ShapeError, "int8"),
        (
            lambda: SparseInt8Linear(torch.ones(2, 4, dtype=torch.int8), torch.ones(3), input_scale=1.0),
            ShapeError,
            "weight_scale of shape",
        ),
    ],
)
def test_wrong_layers_say_what_is_allowed(call, error, says):
    with pytest.raises(error, match=says):
        call()


def test_wrong_inputs_say_what_is_allowed():
    layer, _, _, x = made()
    with pytest.raises(ShapeError, match="an input of shape"):
        layer(x[:, :5])
    with pytest.raises(ValueRangeError, match=r"torch\.int64"):
        layer(x.long())
    with pytest.raises(ShapeError, match="an example input"):
        layer.tune((x[:, :5],))

"""ThresholdLinear computes the dense layer of an input whose small elements are 0, however much it reads."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from sparta.errors import ShapeError, ValueRangeError
from sparta.nn import ThresholdLinear


def layer_of(inputs, outputs, threshold=0.0, bias=True, seed=0):
    torch.manual_seed(seed)
    dense = nn.Linear(inputs, outputs, bias=bias)
    return dense, ThresholdLinear(dense, threshold)


def expected_of(dense, x, threshold):
    return functional.linear(torch.where(x.abs() > threshold, x, 0), dense.weight, dense.bias)


@given(
    tokens=st.integers(0, 10), inputs=st.integers(1, 40), outputs=st.integers(1, 20),
    threshold=st.sampled_from([0.0, 0.7, 2.0, 100.0]), bias=st.booleans(), seed=st.integers(0, 9),
)  # fmt: skip
def test_it_is_the_dense_layer_of_the_thresholded_input(tokens, inputs, outputs, threshold, bias, seed):
    dense, layer = layer_of(inputs, outputs, threshold, bias, seed)
    x = torch.randn(inputs, tokens).t()  # strided on purpose
    expected = expected_of(dense, x, threshold)
    torch.testing.assert_close(layer(x), expected)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), expected)


def test_few_live_inputs_and_other_weights_do_not_meet():
    dense, layer = layer_of(64, 8, threshold=1.0)
    x = torch.zeros(2, 3, 64)
    x[0, 1, 5], x[1, 2, 60] = 2.0, -3.0
    with torch.no_grad():
        layer.weight[:, 7] = torch.nan  # of an input that is small: it must not be read
        y = layer(x)
        dense.weight.copy_(layer.weight.nan_to_num())
        torch.testing.assert_close(y, expected_of(dense, x, 1.0))
        x[0, 0, 3] = torch.nan
        assert layer(x)[0, 0].isnan().all()
        assert layer(x)[1].isfinite().all()


def test_gradients_are_those_of_the_formula():
    dense, layer = layer_of(12, 5, threshold=0.5)
    x = torch.randn(3, 12, requires_grad=True)
    mine = torch.autograd.grad(layer(x).square().sum(), [x, layer.weight, layer.bias])
    assert not mine[0][x.abs() <= 0.5].any()
    theirs = torch.autograd.grad(expected_of(dense, x, 0.5).square().sum(), [x, dense.weight, dense.bias])
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("sparsity", [0.0, 0.3, 0.5, 1.0])
def test_calibration_makes_the_share_that_was_asked_for(sparsity):
    _, layer = layer_of(50, 4)
    samples = [torch.randn(10, 50), torch.randn(3, 2, 50)]
    threshold = layer.calibrate(samples, sparsity)
    assert threshold == layer.threshold
    elements = torch.cat([x.flatten() for x in samples])
    assert (elements.abs() <= threshold).float().mean().item() == pytest.approx(sparsity)


def test_it_says_why_all_weights_are_read():
    _, layer = layer_of(8, 4)
    x = torch.zeros(1, 8)
    assert "autograd" in layer.reason(x)
    with torch.no_grad():
        assert not layer.reason(x)
        assert "9 tokens" in layer.reason(torch.zeros(9, 8))
        assert "not on meta" in layer.to("meta").reason(x.to("meta"))


def test_it_compiles_as_one_graph():
    dense, layer = layer_of(8, 4, threshold=0.5)
    x = torch.randn(2, 8)
    with torch.no_grad():
        y = torch.compile(layer, fullgraph=True, backend="eager")(x)
    torch.testing.assert_close(y, expected_of(dense, x, 0.5))


def test_state_goes_round_and_the_weight_keeps_its_order():
    dense, layer = layer_of(8, 4, threshold=0.25)
    _, other = layer_of(8, 4, seed=1)
    other.load_state_dict(layer.state_dict())
    assert other.threshold == 0.25
    assert torch.equal(other.weight, dense.weight)
    assert other.to(torch.float64).weight.t().is_contiguous()
    assert layer.state_dict()["weight"].shape == dense.weight.shape
    assert "threshold=0.25" in repr(layer)


def test_what_does_not_fit_is_refused():
    _, layer = layer_of(8, 4)
    with pytest.raises(ShapeError, match="input of shape"):
        layer(torch.zeros(2, 7))
    for value in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueRangeError, match="threshold of"):
            layer.threshold = value
    with pytest.raises(ValueRangeError, match="sparsity of"):
        layer.calibrate(torch.zeros(1, 8), 1.5)
    for samples in ([], torch.zeros(0, 8), torch.full((1, 8), torch.nan)):
        with pytest.raises(ValueRangeError, match="finite samples"):
            layer.calibrate(samples)

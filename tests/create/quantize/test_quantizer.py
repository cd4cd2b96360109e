"""The quantizer's properties: the grid covers the range, zero is on it, rounding errs by half a step."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparta.create.quantize import QuantizationArgs, Quantizer
from sparta.create.quantize.fake_quantize import fake_quantize, grid_of_range, to_integers

finite = st.floats(-1e6, 1e6, width=32)
some_args = st.builds(QuantizationArgs, num_bits=st.integers(2, 8), symmetric=st.booleans())


@given(values=st.lists(finite, min_size=1, max_size=30), args=some_args)
@settings(max_examples=80)
def test_every_value_of_the_range_is_rounded_to_within_half_a_step_and_zero_to_zero(values, args):
    tensor = torch.tensor([*values, 0.0])
    quantizer = Quantizer(args, moving=False)
    rounded = quantizer(tensor)
    scale, zero_point = quantizer.grid()
    assert args.quant_min <= zero_point <= args.quant_max
    # A whole zero point may shift an asymmetric grid by up to half a step at the ends of the range.
    reach = 0.5 if args.symmetric else 1.0
    assert ((rounded - tensor).abs() <= scale * reach * 1.001 + 1e-30).all()
    assert (rounded[tensor == 0] == 0).all()


@given(values=st.lists(finite, min_size=1, max_size=30), args=some_args)
def test_integers_give_back_the_rounded_tensor_bit_for_bit(values, args):
    tensor = torch.tensor(values)
    scale, zero_point = grid_of_range(tensor.min(), tensor.max(), args)
    integers = to_integers(tensor, scale, zero_point, args)
    assert integers.dtype == args.dtype
    assert integers.min() >= args.quant_min
    assert integers.max() <= args.quant_max
    again = (integers.to(torch.int32) - zero_point).float() * scale
    assert torch.equal(again, fake_quantize(tensor, scale, zero_point, args))


def test_rounding_twice_is_rounding_once():
    quantizer = Quantizer(QuantizationArgs(strategy="channel"), axis=0, channels=5, moving=False)
    once = quantizer(torch.randn(5, 7))
    scale, zero_point = quantizer.grid()
    assert torch.equal(fake_quantize(once, scale, zero_point, quantizer.args, 0), once)


@pytest.mark.parametrize("axis", [0, 1])
def test_each_channel_has_its_own_scale(axis):
    weight = torch.randn(4, 6, 3) * torch.tensor([1.0, 1e3, 1e-3, 1e-6]).reshape(4, 1, 1)
    weight = weight.transpose(0, axis)
    quantizer = Quantizer(QuantizationArgs(), axis=axis, channels=4, moving=False)
    rounded = quantizer(weight)
    error = (rounded - weight).abs().amax([d for d in range(3) if d != axis])
    size = weight.abs().amax([d for d in range(3) if d != axis])
    assert (error <= size / 127 / 2 * 1.001).all()


def test_the_gradient_passes_inside_the_range_and_stops_outside():
    values = torch.tensor([-2.0, -0.5, 0.0, 0.3, 2.0], requires_grad=True)
    fake_quantize(values, torch.tensor(1 / 127), torch.tensor(0), QuantizationArgs()).sum().backward()
    assert values.grad.tolist() == [0, 1, 1, 1, 0]


def test_the_range_of_an_activation_is_a_moving_average_of_training_batches():
    quantizer = Quantizer(QuantizationArgs(averaging=0.25), moving=True)
    batches = [torch.randn(10) * scale for scale in (1.0, 3.0, 0.5)]
    low = high = None
    for batch in batches:
        quantizer(batch)
        low = batch.min() if low is None else low + 0.25 * (batch.min() - low)
        high = batch.max() if high is None else high + 0.25 * (batch.max() - high)
    assert quantizer.low.item() == pytest.approx(low.item())
    assert quantizer.high.item() == pytest.approx(high.item())


def test_evaluation_does_not_move_the_range_of_an_activation():
    quantizer = Quantizer(QuantizationArgs(), moving=True)
    quantizer(torch.randn(10))
    before = quantizer.low.clone()
    quantizer.eval()(torch.randn(10) * 100)
    assert torch.equal(quantizer.low, before)


def test_a_quantizer_that_has_seen_nothing_takes_the_first_batch_even_in_evaluation_and_even_frozen():
    quantizer = Quantizer(QuantizationArgs(), moving=True).eval()
    quantizer.observing = False
    quantizer(torch.tensor([-1.0, 2.0]))
    quantizer(torch.tensor([-9.0, 9.0]))
    assert (quantizer.low.item(), quantizer.high.item()) == (-1, 2)


def test_a_batch_that_overflowed_does_not_spoil_the_range():
    quantizer = Quantizer(QuantizationArgs(), moving=True)
    quantizer(torch.tensor([math.inf, 1.0]))
    quantizer(torch.tensor([-1.0, 1.0]))
    quantizer(torch.tensor([-math.inf, math.nan]))
    assert (quantizer.low.item(), quantizer.high.item()) == (-1, 1)
    assert quantizer(torch.tensor([0.5])).isfinite().all()


@pytest.mark.parametrize("values", [torch.zeros(3, 4), torch.full((3, 4), 1e-45), torch.empty(0, 4), torch.ones(())])
@pytest.mark.parametrize("symmetric", [True, False])
def test_odd_tensors_come_through(values, symmetric):
    rounded = Quantizer(QuantizationArgs(symmetric=symmetric), moving=True)(values)
    assert rounded.shape == values.shape
    assert rounded.isfinite().all()


def test_any_stride_gives_the_same():
    weight = torch.randn(6, 5, 4)
    first = Quantizer(QuantizationArgs(), axis=0, channels=6, moving=False)
    second = Quantizer(QuantizationArgs(), axis=0, channels=6, moving=False)
    strided = weight.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    assert torch.equal(first(weight), second(strided))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_are_rounded_in_float32_and_come_back_as_they_were(dtype):
    values = torch.randn(40).to(dtype)
    quantizer = Quantizer(QuantizationArgs(), moving=True)
    rounded = quantizer(values)
    assert rounded.dtype == dtype
    assert quantizer.low.dtype == torch.float32
    assert torch.equal(rounded, Quantizer(QuantizationArgs(), moving=True)(values.float()).to(dtype))


def test_ranges_stay_float32_when_the_model_is_cast():
    quantizer = Quantizer(QuantizationArgs(), moving=True)
    quantizer(torch.randn(10))
    assert quantizer.half().low.dtype == torch.float32
    assert "8 bits" in repr(quantizer)

"""Quantization: integers that stand for real numbers, one class for inputs, outputs and modules."""

import pytest
import torch

from sparta.errors import NameNotFoundError, ValueRangeError
from sparta.specialize.int8_linear.quantization import RANGES, Quantization
from sparta.specialize.int8_linear.quantized import OP
from sparta.specialize.kernel_spec import KernelSpec
from sparta.tesa.attribute import TeSA


@pytest.mark.parametrize("format", RANGES)
@pytest.mark.parametrize(("low", "high"), [(-3.0, 5.0), (0.0, 9.0), (-7.0, -1.0), (2.0, 4.0), (0.0, 0.0)])
def test_both_formats_cover_the_same_numbers_and_hold_zero(format, low, high):
    grid = Quantization.covering(low, high, format)
    ends = torch.tensor([min(low, 0.0), 0.0, max(high, 0.0)])
    assert (grid.rounded(ends) - ends).abs().max() <= grid.scale
    assert grid.rounded(torch.zeros(1)).item() == 0.0
    assert grid.integers(ends).dtype == grid.dtype
    assert grid.scale == Quantization.covering(low, high).scale


@pytest.mark.parametrize("width", [1e-45, 1e-40, 1.2e-38, 1e-30])
def test_very_small_numbers_are_rounded_to_numbers(width):
    grid = Quantization.covering(0.0, width)
    x = torch.linspace(0.0, width, 9)
    assert (grid.rounded(x) - x).abs().max() <= grid.scale


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_scales_that_are_none_are_refused(scale):
    with pytest.raises(ValueRangeError, match="a scale above 0"):
        Quantization(scale)


def test_zero_points_outside_and_other_formats_are_refused():
    with pytest.raises(ValueRangeError, match="-128 to 127"):
        Quantization(1.0, 128, "int8")
    with pytest.raises(NameNotFoundError, match="int8"):
        Quantization.covering(0.0, 1.0, "int9")


def test_kernel_specs_of_older_versions_name_the_operation_as_they_did():
    spec = KernelSpec(OP, {"weight": TeSA.dense((4, 4), format="int8")})
    for name in ("quantised_linear", "quantized_linear"):
        assert KernelSpec.from_dict({**spec.to_dict(), "op": name}) == spec


def test_tokens_have_grids_of_their_own():
    grid, x = Quantization.per_token(), torch.randn(5, 16) * torch.logspace(-40, 38, 5)[:, None]
    integers, scales = grid.token_integers(x)
    assert integers.dtype == torch.int8
    assert scales.shape == (5, 1)
    assert integers[1:].abs().amax(1).tolist() == [127] * 4  # the first is too small for its largest to be 127
    assert bool(((grid.rounded(x) - x).abs() <= scales / 2 * 1.001).all())
    assert Quantization.from_dict(grid.to_dict()) == grid
    assert "input_dynamic" not in Quantization(0.5).to_dict()


def test_no_number_is_the_least_integer_of_a_static_grid_and_shows_in_a_dynamic_one():
    x = torch.tensor([[torch.nan, torch.inf, -torch.inf, 0.5]])
    assert Quantization(0.1).integers(x).tolist() == [[-128, 127, -128, 5]]
    assert Quantization(0.1, 3, "uint8").integers(x).tolist() == [[0, 255, 0, 8]]
    assert not bool(Quantization.per_token().token_integers(x)[1].isfinite().any())


def test_a_dynamic_grid_has_no_numbers_of_its_own():
    with pytest.raises(ValueRangeError, match="per_token"):
        Quantization(0.5, dynamic=True)
    with pytest.raises(ValueRangeError, match="token_integers"):
        Quantization.per_token().integers(torch.ones(2))

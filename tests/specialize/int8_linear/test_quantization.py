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
    old = {**spec.to_dict(), "op": "quantised_linear"}
    assert KernelSpec.from_dict(old) == spec

"""Packed matrices compute what their weights say, in every form, for any number of tokens."""

import pytest
import torch

from sparta.errors import FileFormatError, ShapeError, ValueRangeError
from sparta.generation.matrices import FORMS, best_form, packed, quantized, restored
from sparta.specialize.cpu import load, runnable_isas

SHAPES = ((1, 1), (5, 3), (17, 33), (64, 100), (37, 8))


def weights(rows, inputs, density, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, inputs, generator=generator) < density
    return torch.randn(rows, inputs, generator=generator) * mask


@pytest.mark.parametrize("isa", runnable_isas())
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("int8", [False, True])
def test_products_are_those_of_the_dense_weight(isa, form, int8):
    library = load(isa)
    for rows, inputs in SHAPES:
        for density in (0.0, 0.3, 1.0):
            weight, bias = weights(rows, inputs, density), torch.randn(rows)
            matrix = packed(weight, bias=bias, int8=int8, form=form)
            for tokens in (1, 2, 9, 25, 50):
                x = torch.randn(tokens, inputs)
                expected = x.double() @ matrix.weight().double().t() + bias
                least = 2e-3 if int8 and tokens == 1 else 1e-4  # where x may be rounded to 16 bits
                torch.testing.assert_close(matrix.multiply(x, library).double(), expected, atol=least, rtol=1e-4)


@pytest.mark.parametrize("form", FORMS)
def test_fp32_keeps_every_weight(form):
    weight = weights(37, 41, 0.4)
    assert torch.equal(packed(weight, form=form).weight(), weight)


@pytest.mark.parametrize("form", FORMS)
def test_int8_rounds_to_half_a_step_at_most(form):
    weight = weights(37, 41, 0.4)
    _, scales = quantized(weight)
    gap = (packed(weight, int8=True, form=form).weight() - weight).abs()
    assert bool((gap <= scales[:, None] * 0.5001).all())


def test_a_live_weight_that_rounds_to_zero_stays_live():
    weight = torch.tensor([[100.0, 1e-6, 0.0, 5.0]])
    mask = torch.tensor([[True, True, False, True]])
    matrix = packed(weight, mask, int8=True, form="bitmap")
    assert torch.equal(matrix.mask(), mask)
    assert torch.equal(restored((1, 4), "bitmap", matrix.tensors()).mask(), mask)


def test_any_stride_and_leading_dims():
    weight = weights(6, 10, 0.5)
    matrix, x = packed(weight.t().contiguous().t()), torch.randn(10, 4, 3).permute(1, 2, 0)
    torch.testing.assert_close(matrix.multiply(x), x @ weight.t())
    assert matrix.multiply(torch.empty(0, 10)).shape == (0, 6)


def test_infinite_inputs_reach_what_they_reach_in_dense():
    weight = torch.tensor([[0.0, 2.0], [1.0, 1.0]])
    x = torch.tensor([[float("inf"), 1.0]])
    for form in FORMS:
        assert packed(weight, form=form).multiply(x)[0, 1] == float("inf")


def test_forms_follow_the_mask():
    blocks = torch.rand(16, 64).lt(0.3).repeat_interleave(4, 0)
    assert best_form(blocks, 4) == "columns:4"
    assert best_form(torch.rand(64, 64) < 0.5, 1) == "bitmap"
    half = torch.rand(16, 64).lt(0.5).repeat_interleave(4, 0)
    assert best_form(half, 1) == "columns:4"
    assert best_form(half, 1, expands=True) == "bitmap"
    assert best_form(torch.rand(16, 64).lt(0.2).repeat_interleave(4, 0), 1, expands=True) == "columns:4"
    assert best_form(torch.rand(64, 64) < 0.99, 4) == "dense"


def test_wrong_arguments():
    with pytest.raises(ValueRangeError, match="form"):
        packed(torch.eye(2), form="rows")
    with pytest.raises(ShapeError, match="matrix"):
        packed(torch.ones(3))
    with pytest.raises(ShapeError, match=r"allowed: \(\.\.\., 2\)"):
        packed(torch.eye(2)).multiply(torch.ones(1, 3))


def damaged(form, name, value):
    tensors = packed(weights(8, 16, 0.5), form=form, int8=True).tensors()
    return {**tensors, name: value}


@pytest.mark.parametrize(
    ("form", "name", "value"),
    [
        ("bitmap", "values", torch.zeros(3, dtype=torch.int8)),
        ("bitmap", "marks", torch.full((8, 2), 255, dtype=torch.uint8)),
        ("bitmap", "scales", torch.ones(3)),
        ("dense", "values", torch.zeros(8 * 16)),
        ("columns:4", "marks", torch.full((4,), 60000, dtype=torch.uint16)),
        ("columns:4", "starts", torch.tensor([0, 5, 1])),
        ("rows", "values", torch.zeros(1, dtype=torch.int8)),
    ],
)
def test_a_file_that_does_not_fit_together_is_refused(form, name, value):
    tensors = damaged(form if form in FORMS else "dense", name, value)
    with pytest.raises(FileFormatError, match="does not fit together"):
        restored((8, 16), form, tensors)

"""Weights in few bits: what is stored stands for what was rounded, and the mask outlives the rounding."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparta.errors import NameNotFoundError, ShapeError, ValueRangeError
from sparta.specialize.implement import implement_named, implements_of
from sparta.specialize.kernel_spec import Epilogue, KernelSpec
from sparta.specialize.scaled_linear.problem import scaled_problem
from sparta.specialize.scaled_linear.spec import (
    FP8,
    LARGEST,
    OP,
    codes_of,
    fp8_rows,
    group_of,
    reference,
    rounded_rows,
    rounded_weight,
    scaled_linear_spec,
    scaled_weight,
)
from sparta.tesa.attribute import TeSA
from sparta.testing import check


@settings(max_examples=60)
@given(
    st.tuples(st.integers(1, 40), st.integers(1, 300)),
    st.sampled_from(sorted(LARGEST)),
    st.sampled_from([None, 1, 16, 128, "tensor"]),
    st.sampled_from([0.0, 0.5, 1.0]),
)
def test_rounding_is_near_keeps_the_mask_and_is_found_again(shape, format, group, sparsity):
    weight = torch.randn(shape) * torch.logspace(-3, 3, shape[0])[:, None]
    mask = torch.rand(shape) >= sparsity
    given_group = None if group == "tensor" else group
    tesa = scaled_weight(weight, TeSA.from_mask(mask), format, group=given_group, per_tensor=group == "tensor")
    assert torch.equal(tesa.mask(), mask)
    codes, scales = codes_of(weight, tesa)
    assert scales.shape == (shape[0], -(-shape[1] // group_of(tesa)))
    rounded = rounded_weight(weight, tesa)
    assert not rounded[~mask].any()
    spread = scales.repeat_interleave(group_of(tesa), 1)[:, : shape[1]]
    step = spread * (codes.float().abs().clamp(min=2**-6) * 2**-3 if format == FP8 else 1)
    assert (((rounded - torch.where(mask, weight, 0)).abs() <= 0.5001 * step) | ~mask).all()
    # What lies on the grid is found again, also through bf16.
    again, _ = codes_of(rounded.bfloat16(), tesa)
    assert torch.equal(again.float(), codes.float())


def test_values_beyond_the_grid_saturate_and_what_is_not_finite_is_told():
    weight = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    tesa = scaled_weight(weight)
    codes, _ = codes_of(torch.tensor([[9.0, -9.0], [torch.nan, torch.inf]]), tesa)
    assert codes[0].tolist() == [448.0, -448.0]
    assert codes[1].float().isnan().all()
    assert scaled_weight(torch.tensor([[torch.inf, 2.0]])).scale.dense()[0, 0].item() == pytest.approx(2 / 448)
    for format in ("int8", "int4"):
        with pytest.raises(ValueRangeError, match="not finite"):
            codes_of(torch.full((2, 2), torch.nan), scaled_weight(weight, format=format))
        saturated, _ = codes_of(weight * 100, scaled_weight(weight, format=format))
        assert saturated.unique().tolist() == [LARGEST[format]]


def test_rows_are_rounded_with_their_own_scales():
    x = torch.randn(5, 64) * torch.logspace(-30, 30, 5)[:, None]
    x[2] = 0
    rounded = rounded_rows(x)
    assert ((rounded - x).norm(dim=1) <= 0.04 * x.norm(dim=1)).all()
    assert torch.equal(rounded_rows(rounded), rounded)
    codes, scales = fp8_rows(torch.tensor([[torch.nan, 1.0], [torch.inf, 1.0]]))
    assert not (codes.float() * scales).isfinite().any(1).all()
    assert rounded_rows(torch.tensor([[1.0, 1000.0]]), scale=0.5).tolist() == [[1.0, 224.0]]


def test_bad_input_is_refused():
    weight = torch.randn(4, 8)
    with pytest.raises(NameNotFoundError, match="fp8_e4m3"):
        scaled_weight(weight, format="fp9")
    with pytest.raises(ShapeError):
        scaled_weight(weight, TeSA.dense((4, 4)))
    with pytest.raises(ValueRangeError, match="group"):
        scaled_weight(weight, group=0)
    with pytest.raises(ValueRangeError, match="without scales"):
        scaled_linear_spec(TeSA.dense((4, 8), format=FP8), 1)
    with pytest.raises(ValueRangeError, match="zero points"):
        group_of(TeSA.dense((4, 8)).with_format("int8", scale=1.0, zero_point=3))
    with pytest.raises(ValueRangeError, match="input_scale"):
        scaled_linear_spec(scaled_weight(weight), 1, input_scale=1.0)
    with pytest.raises(NameNotFoundError, match="activations"):
        scaled_linear_spec(scaled_weight(weight), 1, activations="int8")
    with pytest.raises(ShapeError, match="as it was scaled"):
        codes_of(torch.randn(8, 4), scaled_weight(weight))
    with pytest.raises(ValueRangeError, match="cast it"):
        reference(scaled_linear_spec(scaled_weight(weight), 1), weight, torch.randn(1, 8))


def test_a_spec_is_written_and_read():
    spec = scaled_linear_spec(scaled_weight(torch.randn(4, 256), group=128), 3, activations=FP8, input_scale=0.5)
    again = KernelSpec.from_dict(spec.to_dict())
    assert again == spec
    assert group_of(again["weight"]) == 128


@pytest.mark.parametrize("activations", [None, FP8])
def test_dense_runs_everywhere_and_others_say_why_not(activations):
    weight, x, bias = torch.randn(32, 64), torch.randn(5, 64), torch.randn(32)
    tesa = scaled_weight(weight, TeSA.from_mask(torch.rand(32, 64) < 0.3), "int4", group=16)
    epilogue = Epilogue(bias=True, activation="gelu", residual=True)
    spec = scaled_linear_spec(tesa, 5, torch.float32, activations=activations, epilogue=epilogue, device="cpu")
    residual = torch.randn(5, 32)
    problem = scaled_problem(spec, weight, x, bias, residual)
    kernel = implement_named("dense", OP).build(spec, {})
    problem.check(kernel.run(kernel.pack(weight), *problem.inputs), "dense")
    for implement in implements_of(OP):
        answer = implement.answer(spec)
        assert answer or answer.reason, implement.name
        assert bool(answer) == (implement.name == "dense"), implement.name


def test_the_reference_is_the_rounded_layer():
    weight, x = torch.randn(16, 32), torch.randn(3, 32)
    tesa = scaled_weight(weight, format="int8")
    spec = scaled_linear_spec(tesa, 3, torch.float32, epilogue=Epilogue(activation="relu"))
    expected = (x.double() @ rounded_weight(weight, tesa).double().t()).relu()
    check(reference(spec, weight, x), expected, reduction=32)

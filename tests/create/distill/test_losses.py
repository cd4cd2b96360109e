"""The losses against torch's own, their closed-form gradients against autograd, and what counts as an output."""

from collections import OrderedDict
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from sparta.create.distill import feature_loss, heads_of, soft_target_gradient, soft_target_loss
from sparta.errors import NameNotFoundError, ShapeError, ValueRangeError

shapes = st.lists(st.integers(1, 5), min_size=1, max_size=4)
temperatures = st.floats(0.25, 20)


@given(shape=shapes, temperature=temperatures)
def test_the_loss_is_torchs_divergence_averaged_over_distributions(shape, temperature):
    student, teacher = torch.randn(shape), torch.randn(shape)
    expected = functional.kl_div(
        torch.log_softmax(student / temperature, -1), torch.softmax(teacher / temperature, -1), reduction="sum"
    )
    expected = expected * temperature**2 / (student.numel() / shape[-1])
    assert soft_target_loss(student, teacher, temperature).item() == pytest.approx(expected.item(), abs=1e-4, rel=1e-4)


@given(shape=shapes, temperature=temperatures)
def test_the_gradient_is_the_derivative_of_the_loss(shape, temperature):
    student, teacher = torch.randn(shape, requires_grad=True), torch.randn(shape)
    soft_target_loss(student, teacher, temperature).backward()
    found = soft_target_gradient(student.detach(), teacher, temperature)
    assert torch.allclose(found, student.grad, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_are_compared_in_float32(dtype):
    student, teacher = torch.randn(4, 7).to(dtype), torch.randn(4, 7).to(dtype)
    assert soft_target_gradient(student, teacher, 2.0).dtype == torch.float32
    assert soft_target_loss(student, teacher, 2.0) == soft_target_loss(student.float(), teacher.float(), 2.0)


def test_an_empty_batch_has_no_loss():
    assert soft_target_loss(torch.empty(0, 3), torch.empty(0, 3), 2.0) == 0


def test_other_shapes_are_refused():
    with pytest.raises(ShapeError, match="distill_output_keys"):
        soft_target_loss(torch.zeros(2, 3), torch.zeros(2, 4), 1.0)
    with pytest.raises(ShapeError, match="project_features"):
        feature_loss(torch.zeros(2, 3), torch.zeros(2, 4), normalize=True, epsilon=0)


def test_features_are_compared_relative_to_the_teacher():
    student, teacher = torch.randn(3, 4), torch.randn(3, 4)
    plain = feature_loss(student, teacher, normalize=False, epsilon=0)
    assert plain.item() == pytest.approx(functional.mse_loss(student, teacher).item())
    relative = feature_loss(student * 100, teacher * 100, normalize=True, epsilon=0)
    assert relative.item() == pytest.approx((plain / teacher.square().mean()).item(), rel=1e-5)


class Named(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


class TestHeads:
    tensor, scalar, whole = torch.zeros(2, 3), torch.tensor(1.0), torch.zeros(2, dtype=torch.int64)

    @pytest.mark.parametrize(
        ("outputs", "keys", "expected"),
        [
            (tensor, None, [""]),
            ({"loss": scalar, "logits": tensor, "hidden": tensor}, None, ["logits"]),
            ({"a": tensor, "b": tensor, "loss": scalar, "n": whole}, None, ["a", "b"]),
            ({"loss": scalar, "logits": tensor, "hidden": tensor}, ["hidden"], ["hidden"]),
            (OrderedDict(a=tensor), None, ["a"]),
            ((tensor, None, scalar, tensor), None, ["0", "3"]),
            ([tensor, tensor], [1], ["1"]),
            (Named(tensor, tensor), None, ["0", "1"]),
        ],
    )
    def test_which_outputs_are_heads(self, outputs, keys, expected):
        assert list(heads_of(outputs, keys)) == expected

    def test_what_is_not_there_is_an_error(self):
        with pytest.raises(NameNotFoundError, match="did you mean 'logits'"):
            heads_of({"logits": self.tensor}, ["logit"])
        with pytest.raises(ValueRangeError, match="a tensor"):
            heads_of({"states": (self.tensor,)}, ["states"])
        with pytest.raises(ValueRangeError, match="no tensor to distil"):
            heads_of({"loss": self.scalar})
        with pytest.raises(ValueRangeError, match="a mapping or a sequence"):
            heads_of(3.0)

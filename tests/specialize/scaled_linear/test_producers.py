"""Norms and gated products that round what they make compute what the two steps do, in Triton's interpreter."""

import pytest
import torch
from torch.nn import functional

from sparta.specialize.scaled_linear.producers import rounded_gate, rounded_norm
from sparta.specialize.scaled_linear.spec import fp8_rows

pytest.importorskip("triton")
round_on_gpu = pytest.importorskip("sparta.specialize.scaled_linear.input_kernels").round_on_gpu
kernels = pytest.importorskip("sparta.specialize.scaled_linear.producer_kernels")
pytestmark = pytest.mark.skipif(not kernels.INTERPRETED, reason="needs Triton's interpreter")


def agree(codes, scales, expected, scale):
    """Compare with a token rounded by itself: a sum in another order may move a number over an edge."""
    exact, exact_scales = fp8_rows(expected, scale)
    torch.testing.assert_close(scales, exact_scales.flatten(), rtol=1e-2, atol=0)
    # The interpreter loses the carry where a number is rounded up to a power of two.
    kept = (exact.float().abs().log2().frac() != 0) & (codes.float().abs().log2().frac() != 0)
    gap = (codes.float() * scales[:, None] - exact.float() * exact_scales)[kept]
    assert float(gap.norm()) <= 0.02 * float(expected.float().norm())


@pytest.mark.parametrize("scale", [None, 2**-5])
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("rms", [True, False])
@pytest.mark.parametrize("inputs", [7, 64, 1000])
def test_norms(inputs, rms, keep, scale):
    torch.manual_seed(0)
    x = 3 * torch.randn(5, 2 * inputs).half()[:, :inputs]
    weight, bias = torch.rand(inputs).half(), None if rms else torch.randn(inputs).half()
    codes, scales, made = kernels.norm_on_gpu(x, weight, bias, 1e-3, scale, rms=rms, keep=keep)
    sizes = (inputs,)
    expected = (
        functional.rms_norm(x, sizes, weight, 1e-3) if rms else functional.layer_norm(x, sizes, weight, bias, 1e-3)
    )
    agree(codes, scales, expected, scale)
    if keep:
        torch.testing.assert_close(made, expected, rtol=2e-3, atol=2e-3)
    plain = kernels.norm_on_gpu(x, None, None, 1e-3, scale, rms=rms, keep=True)[2]
    alone = functional.rms_norm(x, sizes, None, 1e-3) if rms else functional.layer_norm(x, sizes, None, None, 1e-3)
    torch.testing.assert_close(plain, alone, rtol=2e-3, atol=2e-3)


@pytest.mark.filterwarnings("ignore:invalid value")  # NumPy's own, in the interpreter
@pytest.mark.parametrize("rms", [True, False])
@pytest.mark.parametrize("inputs", [7, 64, 1000])
def test_norms_that_are_not_rounded(inputs, rms):
    torch.manual_seed(0)
    x = 3 * torch.randn(5, 2 * inputs).half()[:, :inputs]
    x[1, 2], x[2, 3], x[3] = torch.nan, torch.inf, 0
    weight, bias = torch.rand(inputs).half(), None if rms else torch.randn(inputs).half()
    sizes = (inputs,)
    for each, shift in ((weight, bias), (None, None)):
        made = kernels.plain_norm_on_gpu(x, each, shift, 1e-3, rms=rms)
        expected = (
            functional.rms_norm(x.double(), sizes, None if each is None else each.double(), 1e-3)
            if rms
            else functional.layer_norm(
                x.double(), sizes, *(None if t is None else t.double() for t in (each, shift)), 1e-3
            )
        )
        torch.testing.assert_close(made.double(), expected, rtol=2e-3, atol=2e-3, equal_nan=True)


@pytest.mark.parametrize("scale", [None, 2**-5])
@pytest.mark.parametrize("activate", [True, False])
def test_gates_of_one_product(activate, scale):
    torch.manual_seed(0)
    gate, up = torch.randn(5, 2 * 72).half().split(72, 1)
    codes, scales, made = kernels.gate_on_gpu(gate, up, scale, activate=activate, keep=True)
    expected = (functional.silu(gate) if activate else gate) * up
    torch.testing.assert_close(made, expected, rtol=2e-3, atol=2e-3)
    agree(codes, scales, expected, scale)


@pytest.mark.filterwarnings("ignore:invalid value")  # NumPy's own, in the interpreter
def test_the_scale_tells_what_is_not_finite():
    x = torch.randn(4, 64).half()
    x[0, 3], x[1, 5], x[2] = torch.nan, -torch.inf, 0
    _, scales = round_on_gpu(x, None)
    _, others, _ = kernels.gate_on_gpu(x, torch.ones_like(x), None, activate=False, keep=False)
    for found in (scales, others):
        torch.testing.assert_close(found, fp8_rows(x)[1].flatten(), equal_nan=True)


def test_away_from_a_gpu_the_steps_run_one_after_the_other():
    x, up = torch.randn(2, 3, 16), torch.randn(2, 3, 16)
    codes, scales, made = rounded_norm(x, None, None, 1e-5, rms=False, keep=True)
    expected, others = fp8_rows(functional.layer_norm(x, (16,), eps=1e-5))
    assert torch.equal(codes.float(), expected.float())
    assert torch.equal(scales, others.flatten())
    assert torch.equal(made, functional.layer_norm(x, (16,), eps=1e-5))
    codes, scales, made = rounded_gate(x, up, activate=True)
    assert torch.equal(made, functional.silu(x) * up)
    assert torch.equal(codes.float(), fp8_rows(made)[0].float())
    wide, _, _ = rounded_gate(x, up[:1, :1], activate=False)
    assert wide.shape == x.shape

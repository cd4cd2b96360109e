"""What follows a dense product of a weight's gradient, under Triton's interpreter: dead weights, sums of grad."""

import pytest
import torch

pytest.importorskip("triton")

from sparta.specialize.linear.dense_gradient import dense_gradient

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("tokens", "n", "k"), [(300, 100, 70), (1, 33, 300), (0, 5, 7), (513, 64, 64), (3, 0, 4)])
def test_dead_weights_have_no_gradient_and_grad_is_summed(tokens, n, k, bias):
    grad, x = torch.randn(tokens, 2 * n, device=DEVICE)[:, :n], torch.randn(tokens, k, device=DEVICE)
    dead = torch.rand(n, k, device=DEVICE) < 0.5
    found, sums = dense_gradient(grad, x, dead, bias=bias)
    assert torch.equal(found, (grad.t() @ x).masked_fill(dead, 0))
    assert (sums is not None) == bias
    if sums is not None:
        torch.testing.assert_close(sums, grad.sum(0))


def test_what_is_not_finite_is_hidden_where_weights_are_dead_only():
    grad, x = torch.randn(20, 40, device=DEVICE), torch.randn(20, 30, device=DEVICE)
    grad[3, 7], x[5, 11] = torch.nan, torch.inf
    dead = torch.rand(40, 30, device=DEVICE) < 0.5
    found, sums = dense_gradient(grad, x, dead, bias=True)
    assert not found[dead].any()
    assert not found[7][~dead[7]].isfinite().any()
    assert not found[:, 11][~dead[:, 11]].isfinite().any()
    assert sums is not None
    assert sums.isnan().nonzero().flatten().tolist() == [7]

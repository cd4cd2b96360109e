"""Products with a fixed sparse matrix of many heads, or on the left, run without its zeros."""

import pytest
import torch
from torch import nn

import sparta
from compiler.conftest import forcing
from sparta.compiler.run.ops import without_operators


class Heads(nn.Module):
    """One matrix a head, on the right or on the left."""

    def __init__(self, shape=(4, 32, 16), *, left=False, transposed=False):
        super().__init__()
        mask = sparta.testing.block_mask(shape[-2:], (8, 8), 0.6, seed=0)
        self.weight = nn.Parameter(torch.randn(shape) * mask)
        self.left, self.transposed = left, transposed

    def forward(self, x):
        weight = self.weight.mT if self.transposed else self.weight
        return torch.relu(weight @ x if self.left else x @ weight)


def targets(fast):
    return [str(node.target) for node in fast.graph.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (Heads(), (4, 8, 32)),
        (Heads(), (3, 4, 8, 32)),
        (Heads(left=True), (4, 16, 8)),
        (Heads((32, 16), left=True), (5, 16, 8)),
        (Heads(transposed=True), (4, 8, 16)),
    ],
)
def test_a_fixed_matrix_is_skipped_where_it_is_zero(model, shape, tmp_path):
    x = torch.randn(shape)
    with forcing("blocks"):
        fast = sparta.compile(model.eval(), x, tune="off")
    assert "sparta.fixed_product.default" in targets(fast)
    torch.testing.assert_close(fast(x), model(x).detach(), rtol=1e-4, atol=1e-4)
    (row,) = fast.report.rows()
    assert (row["op"], row["implement"]) == ("batch_matmul", "blocks")
    fast.save(tmp_path / "b.sparta")
    torch.testing.assert_close(sparta.load(tmp_path / "b.sparta")(x), fast(x))
    agree = torch.compile(fast.graph, backend="aot_eager")(x)[0]
    torch.testing.assert_close(agree, fast(x))
    without_operators(fast.graph.graph)
    fast.graph.recompile()
    torch.testing.assert_close(fast.graph(x)[0], model(x).detach())


def test_a_matrix_on_the_right_is_a_linear_layer():
    model, x = Heads((32, 16)), torch.randn(5, 8, 32)
    with forcing("cpu"):
        fast = sparta.compile(model.eval(), x, tune="off")
    assert fast.report.rows()[0]["op"] == "linear"
    torch.testing.assert_close(fast(x), model(x).detach(), rtol=1e-4, atol=1e-4)


def test_measured_and_dense_with_a_reason(own_stores):
    model, x = Heads(), torch.randn(4, 8, 32)
    with torch.no_grad():
        model.weight.copy_(torch.randn(4, 32, 16))
    fast = sparta.compile(model.eval(), x, budget_s=5)
    assert "nothing is pruned" in fast.report.full
    torch.testing.assert_close(fast(x), model(x).detach(), rtol=1e-4, atol=1e-4)

"""A mixture of experts of ours compiles as one op with its own kernel; a loop in plain PyTorch stays what it is."""

import pytest
import torch
from torch import nn

import sparta
from compiler.conftest import forcing
from sparta.compiler.run.ops import without_operators
from sparta.errors import ValueRangeError
from sparta.nn import DynamicSparseMoE


class Routed(nn.Module):
    def __init__(self, *, gated=True, bias=True):
        super().__init__()
        self.router = nn.Linear(16, 4)
        self.moe = DynamicSparseMoE([nn.Linear(16, 16, bias=bias) for _ in range(4)])
        self.out = nn.Linear(16, 8)
        self.gated = gated

    def forward(self, x):
        gates, ids = torch.softmax(self.router(x), -1).topk(2, -1)
        return self.out(self.moe(x, ids, gates if self.gated else None) + x)


def experts_call(fast):
    (node,) = [n for n in fast.graph.graph.nodes if n.target is torch.ops.sparta.experts.default]
    return node


@pytest.mark.parametrize("options", [{}, {"gated": False}, {"bias": False}])
def test_experts_are_one_call(options, tmp_path):
    model, x = Routed(**options).eval(), torch.randn(3, 7, 16)
    with forcing("sorted"):
        fast = sparta.compile(model, x, tune="off")
    assert "sorted" in str(experts_call(fast).args[-1])
    assert "_run" not in vars(model.moe)  # the model itself is as it was
    torch.testing.assert_close(fast(x), model(x).detach(), rtol=1e-4, atol=1e-5)
    (row,) = [row for row in fast.report.rows() if row["op"] == "moe"]
    assert row["implement"] == "sorted"
    fast.save(tmp_path / "m.sparta")
    torch.testing.assert_close(sparta.load(tmp_path / "m.sparta")(x), fast(x))


def test_what_the_module_was_built_with_stays_if_nothing_is_measured():
    model, x = Routed().eval(), torch.randn(9, 16)
    ids = torch.randint(0, 4, (9, 2))
    model.moe.build({"_name": "sorted"}, (x, ids))
    fast = sparta.compile(model, x, tune="off")
    assert "sorted" in str(experts_call(fast).args[-1])
    torch.testing.assert_close(fast(x), model(x).detach(), rtol=1e-4, atol=1e-5)


def test_experts_need_python():
    fast = sparta.compile(Routed().eval(), torch.randn(9, 16), tune="off")
    with pytest.raises(ValueRangeError, match="mixture of experts"):
        without_operators(fast.graph.graph)


def test_measured(own_stores):
    model, x = Routed().eval(), torch.randn(64, 16)
    fast = sparta.compile(model, x, budget_s=5)
    (row,) = [row for row in fast.report.rows() if row["op"] == "moe"]
    assert row["why"]
    torch.testing.assert_close(fast(x), model(x).detach(), rtol=1e-4, atol=1e-5)


def test_any_number_of_tokens():
    model, x = Routed().eval(), torch.randn(12, 16)
    with forcing("sorted"):
        fast = sparta.compile(model, x, tune="off", dynamic_shapes=({0: torch.export.Dim("n", min=2, max=64)},))
    for rows in (2, 33):
        other = torch.randn(rows, 16)
        torch.testing.assert_close(fast(other), model(other).detach(), rtol=1e-4, atol=1e-5)


class Loop(nn.Module):
    """Every expert on every token, as plain PyTorch."""

    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(16, 3), nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        gates = torch.softmax(self.router(x), -1)
        return sum(gates[:, i, None] * expert(x) for i, expert in enumerate(self.experts))


class Gathering(Loop):
    """Each expert on its own tokens, whose number is known only at run time."""

    def forward(self, x):
        ids = self.router(x).argmax(-1)
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (ids == number).nonzero()[:, 0]
            result = result.index_add(0, rows, expert(x[rows]))
        return result


@pytest.mark.parametrize("kind", [Loop, Gathering])
def test_a_loop_over_experts_is_linear_layers(kind):
    model, x = kind().eval(), torch.randn(9, 16)
    fast = sparta.compile(model, x, tune="off")
    assert {row["op"] for row in fast.report.rows()} == {"linear"}
    torch.testing.assert_close(fast(x), model(x).detach(), rtol=1e-4, atol=1e-5)

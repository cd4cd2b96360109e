"""On CUDA, `sparta.prune` and `sparta.plan` do what they do on the CPU."""

import copy

import pytest
import torch
from torch import nn

import sparta
from oneshot.models import make, tokens
from planning.plans import transformer
from sparta.oneshot import prune

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

DEVICE = "cuda"


@pytest.mark.parametrize(("pattern", "sparsity"), [("2:4", None), ("4x1", 0.5), ("unstructured", 0.7)])
@pytest.mark.parametrize("method", ["wanda", "sparsegpt", "alps"])
def test_errors_are_those_of_the_cpu(method, pattern, sparsity):
    here, there = make(), make()
    _, log = prune(here, tokens(), pattern, sparsity, method=method)
    spec, found = prune(there, tokens(), pattern, sparsity, method=method, device=DEVICE)
    assert not any(parameter.is_cuda for parameter in there.parameters()), "it goes back to where it was"
    spec.check(there)
    assert [layer.density for layer in found] == [layer.density for layer in log]
    for a, b in zip(found, log, strict=True):
        assert a.error == pytest.approx(b.error, rel=0.1), a.name


def test_blocks_are_refined():
    model = make().to(DEVICE)
    spec, log = prune(model, [batch.to(DEVICE) for batch in tokens()], "2:4", refine="block")
    assert log.method == "alps+block"
    spec.check(model)


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(8, 64, 3, padding=1), nn.BatchNorm2d(64)
        self.second, self.head = nn.Conv2d(64, 64, 3, padding=1), nn.Linear(64, 16)

    def forward(self, x):
        x = torch.relu(self.norm(self.first(x)))
        return self.head(torch.relu(self.second(x)).mean((2, 3)))


@pytest.mark.parametrize("kind", ["heads", "convolutions"])
def test_a_plan_is_applied_and_compiled(kind):
    torch.manual_seed(0)
    model, shape = (transformer(), (2, 8, 32)) if kind == "heads" else (Convolutions().eval(), (4, 8, 16, 16))
    model = model.to(DEVICE)
    data = [torch.randn(shape, device=DEVICE) for _ in range(3)]
    plan = sparta.plan(model, data[0], data, max_loss=0.3, patterns=["channels", "4x1"], budget_s=20)
    assert plan.loss <= 0.3
    pruned = copy.deepcopy(model)
    plan.apply(pruned)
    plan.spec.check(pruned)
    fast = plan.compile(pruned, budget_s=10)
    with torch.no_grad():
        torch.testing.assert_close(fast(data[1]), pruned(data[1]), rtol=1e-2, atol=1e-2)


def test_single_layers_become_bfloat16():
    model = transformer().to(DEVICE)
    data = [torch.randn(2, 8, 32, device=DEVICE) for _ in range(3)]
    plan = sparta.plan(model, data[0], data, max_loss=0.1, patterns=["2:4"], precisions="bf16", budget_s=20)
    plan.assignment = dict.fromkeys(["1.gate.weight", "1.up.weight"], sparta.planning.Option("dense", None, "bf16"))
    fast = plan.compile(tune="off")
    with torch.no_grad():
        torch.testing.assert_close(fast(data[1]), model(data[1]), rtol=2e-2, atol=2e-2)

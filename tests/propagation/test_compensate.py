"""Structured pruning with data: the closed form against a direct solution, and never worse than leaving it out."""

import pytest
import torch
from torch import nn

from propagation.architectures import build
from sparta.propagation import prune_structured

torch.manual_seed(0)
BASIS = torch.randn(6, 16)


def batch(rows=256):
    return torch.randn(rows, 6) @ BASIS


def change(model, small, data):
    with torch.no_grad():
        gaps = torch.cat([(small(x) - model(x)).flatten() for x in data])
        whole = torch.cat([model(x).flatten() for x in data])
    return float(gaps.norm() / whole.norm())


def mlp(bias=True):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 5, bias=bias)).eval()


@pytest.mark.parametrize("bias", [True, False])
def test_the_weights_are_those_of_least_squares(bias):
    model, data = mlp(bias), [batch() for _ in range(4)]
    small, report = prune_structured(model, batch(3), 0.5, data=iter(data))
    assert report.folded == 1
    assert f"folded into {report.folded}" in str(report)
    kept = torch.ones(32, dtype=torch.bool)
    kept[list(report.slots[0].removed)] = False
    with torch.no_grad():
        hidden = torch.cat([model[1](model[0](x)) for x in data]).double()
        target = torch.cat([model(x) for x in data]).double()
    inputs = torch.cat([hidden[:, kept], torch.ones(len(hidden), 1).double()], 1) if bias else hidden[:, kept]
    best = torch.linalg.lstsq(inputs, target).solution
    least = float((inputs @ best - target).norm() / target.norm())
    assert change(model, small, data) == pytest.approx(report.change, rel=1e-3)
    assert report.change == pytest.approx(least, rel=0.02), "as good as the best weights that there are"
    plain = prune_structured(model, batch(3), 0.5, data=data, compensate=False)[1]
    assert plain.folded == 0
    assert report.change < 0.5 * plain.change


@pytest.mark.parametrize("padding", [0, 1])
def test_convolutions(padding):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 4, 3, padding=padding)
    ).eval()  # fmt: skip
    mix = torch.randn(3, 2)
    data = [torch.einsum("oc,bchw->bohw", mix, torch.randn(8, 2, 9, 9)) for _ in range(3)]
    plain = prune_structured(model, data[0], 0.5, data=data, compensate=False)[1]
    small, report = prune_structured(model, data[0], 0.5, data=data)
    assert report.folded == 1
    assert report.change < 0.9 * plain.change
    assert small.get_parameter("3.weight").shape == (4, 8, 3, 3)
    assert torch.equal(model[3].weight, model[3].weight.detach()), "the model itself is left alone"


def test_heads_are_folded_through_the_output_projection():
    pytest.importorskip("transformers")
    model, inputs = build("gpt2")
    torch.manual_seed(0)
    data = [{"input_ids": torch.randint(0, 60, (4, 8))} for _ in range(4)]
    plain = prune_structured(model, inputs, 0.5, granularity="head", data=data, compensate=False)[1]
    report = prune_structured(model, inputs, 0.5, granularity="head", data=data)[1]
    assert report.folded == 2
    assert report.change < plain.change


def test_all_inputs_gone_leaves_their_mean():
    model, data = mlp(), [batch()]
    small, report = prune_structured(model, batch(3), 1.0, data=data, allow_empty=True)
    with torch.no_grad():
        mean = model(data[0]).mean(0)
    torch.testing.assert_close(small(data[0])[0], mean, rtol=1e-3, atol=1e-3)
    assert report.change < 1


def test_activations_that_are_not_finite_fold_nothing():
    model = mlp()
    _, report = prune_structured(model, batch(3), 0.5, data=[torch.full((2, 16), torch.inf)])
    assert report.folded == 0

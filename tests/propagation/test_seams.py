"""Seams: a layer between neighbours that carry more than it needs gathers what it reads and scatters what it writes."""

import pytest
import torch
from torch import nn

from sparta.propagation import propagate


class Stream(nn.Module):
    """Linear layers and convolutions on a residual stream that no one can narrow."""

    def __init__(self, *, bias):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16, bias=bias), nn.Linear(16, 16, bias=bias)
        self.third, self.fourth = nn.Conv1d(5, 6, 3, padding=1, bias=bias), nn.Conv1d(6, 5, 3, padding=1, bias=bias)

    def forward(self, x):
        x = x + self.first(x)
        x = x + self.second(x)
        y = self.third(x)
        return x + self.fourth(y) + y[:, :5]


def planted(*, bias):
    model = Stream(bias=bias)
    with torch.no_grad():
        model.first.weight[::2] = 0
        model.second.weight[:, 3:9] = 0
        model.second.weight[12:] = 0
        model.third.weight[2:4] = 0
        model.fourth.weight[:, 1:3] = 0
        model.fourth.weight[1:3] = 0
    return model


def shapes(model):
    return {name: tuple(p.shape) for name, p in model.named_parameters() if "weight" in name}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("round_to", [1, 4])
def test_it_is_the_same_function_with_smaller_layers(bias, round_to):
    model, x = planted(bias=bias), torch.randn(2, 5, 16)
    small = propagate(model, x).compact(round_to, seams=0.1)
    torch.testing.assert_close(small(x), model(x))
    found = shapes(small)
    if round_to == 1:
        wanted = {"first": (9, 16), "second": (13, 10), "third": (5, 5, 3), "fourth": (4, 4, 3)}
    else:
        wanted = {"first": (12, 16), "second": (16, 12), "third": (6, 5, 3), "fourth": (4, 4, 3)}
    assert found == {f"{name}.weight": shape for name, shape in wanted.items()}
    for name, parameter in small.named_parameters():
        origin = small.mapping[name]
        assert torch.equal(origin.take(model.get_parameter(origin.name)), parameter)
    small(x).sum().backward()
    assert all(p.grad is not None for p in small.parameters())


def test_only_where_it_pays():
    model, x = planted(bias=True), torch.randn(2, 5, 16)
    whole = shapes(model)
    result = propagate(model, x)
    assert shapes(result.compact(seams=None)) == whole
    assert shapes(result.compact()) == whole  # a few multiply-adds an element are not worth moving it
    assert shapes(result.compact(seams=8))["second.weight"] == (16, 10)


def test_a_weight_that_is_used_twice_stays_whole():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x):
            return x + self.fc(x + self.fc(x))

    model, x = Twice(), torch.randn(3, 8)
    with torch.no_grad():
        model.fc.weight[::2] = 0
    small = propagate(model, x).compact(seams=0.1)
    assert shapes(small) == {"fc.weight": (8, 8)}
    torch.testing.assert_close(small(x), model(x))


class Bottleneck(nn.Module):
    """Constant channels go into a new bias of the layer behind them, which has rows without a live weight too."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(4, 8, 1, bias=False), nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 4, 1, bias=False)

    def forward(self, x):
        return x + self.second(torch.relu(self.norm(self.first(x))))


def test_a_bias_that_was_made_for_constants_is_added_behind_the_seam():
    model, x = Bottleneck().eval(), torch.randn(2, 4, 5, 5)
    with torch.no_grad():
        model.norm.bias.fill_(0.5)
        model.first.weight[:3] = 0  # constant channels: relu of the norm's shift
        model.second.weight[1:3, 3:] = 0  # rows that only the constants reach
    small = propagate(model, x).compact(seams=0.01)
    torch.testing.assert_close(small(x), model(x))
    assert shapes(small)["second.weight"][1] == 5

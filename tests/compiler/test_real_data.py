"""Real accuracy is kept: a model trained sparse on real data classifies as the masked dense model does."""

import pytest
import torch
from torch import nn

import sparta
from compiler.conftest import forcing

load_digits = pytest.importorskip("sklearn.datasets").load_digits


def mlp():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.GELU(), nn.Linear(64, 10))


class Cnn(nn.Module):
    """A residual network for images of 8×8."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 16, 3, 1, 1), nn.BatchNorm2d(16), nn.ReLU6())
        self.body = nn.Sequential(
            nn.Conv2d(16, 32, 1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 16, 3, 1, 1), nn.BatchNorm2d(16)
        )
        self.head = nn.Sequential(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(256, 10))

    def forward(self, x):
        x = self.stem(x)
        return self.head(torch.relu(self.body(x) + x))


@pytest.mark.parametrize("make", [mlp, Cnn])
def test_predictions_are_those_of_the_masked_model(make):
    torch.manual_seed(0)
    data = load_digits()
    x, y = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(data.target)
    order = torch.randperm(len(x))
    train, test = order[:1300], order[1300:]
    model = make()
    names = [name for name, p in model.named_parameters() if p.dim() > 1 and p.shape[0] % 4 == 0 and p[0].numel() > 9]
    spec = sparta.Spec.from_pattern(model, sparta.Block(4, 1), 0.75, include=names)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(6):
        for batch in torch.randperm(len(train)).split(64):
            spec.apply(model)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[train[batch]]), y[train[batch]]).backward()
            optimizer.step()
    spec.apply(model)
    model.eval()
    with forcing():
        fast = sparta.compile(model, x[test], spec, tune="off")
    with torch.no_grad():
        masked, compiled = model(x[test]), fast(x[test])
    assert len(fast.report.plan.sparse) == len(names)
    assert float((masked.argmax(1) == y[test]).float().mean()) > 0.9  # it did learn
    # Where the two best classes are closer than rounding, either may come first.
    best = masked.topk(2).values
    clear = best[:, 0] - best[:, 1] > 1e-3 * masked.abs().max()
    assert bool(clear.float().mean() > 0.98)
    assert torch.equal(compiled.argmax(1)[clear], masked.argmax(1)[clear])

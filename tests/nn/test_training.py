"""A sparse model trains on real data (handwritten digits) exactly as its masked dense twin does."""

import copy

import pytest
import torch
from torch import nn

from sparta import Block, Spec, Unstructured
from sparta.nn import operators_of, swap, tune


@pytest.fixture(scope="module")
def digits():
    datasets = pytest.importorskip("sklearn.datasets", reason="scikit-learn carries the digits")
    images, labels = datasets.load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    return (x[:1400], y[:1400]), (x[1400:], y[1400:])


def train(model, data, masks=None, epochs=6):
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    x, y = data
    for epoch in range(epochs):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
            if masks is not None:
                masks.apply(model)
    return model


def accuracy(model, data):
    with torch.no_grad():
        return (model(data[0]).argmax(-1) == data[1]).float().mean().item()


@pytest.mark.parametrize("pattern", [Unstructured(), Block(4, 1)], ids=str)
def test_sparse_training_reaches_the_accuracy_of_masked_dense_training(digits, pattern):
    training, held_out = digits
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))
    spec = Spec.from_pattern(dense, pattern, 0.8, include=["0.weight", "2.weight"])
    spec.apply(dense)
    sparse = copy.deepcopy(dense)
    swap(sparse, spec)
    tune(sparse, training[0][:64], backward=True, max_trials=4)
    assert len(operators_of(sparse)) == 2

    train(dense, training, masks=spec)
    train(sparse, training)
    spec.check(sparse)  # pruned weights are exactly zero, and nobody had to put them back
    reached, wanted = accuracy(sparse.eval(), held_out), accuracy(dense.eval(), held_out)
    assert wanted > 0.9
    assert abs(reached - wanted) < 0.02

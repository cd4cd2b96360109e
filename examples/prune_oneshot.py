"""One-shot: a trained classifier is pruned to 1:4 in one pass over some data, by several methods, without training.

Run it with ``python examples/prune_oneshot.py``. It takes a few seconds and shows what the data is good for: at the
same number of zeros, methods that look at the inputs lose less.
"""

from __future__ import annotations

import copy

import torch
from torch import nn

import sparta
from sparta.tables import table

CLASSES, WIDTH = 10, 64


def samples(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return points around one centre per class, with strongly correlated coordinates, and their classes."""
    shape = torch.Generator().manual_seed(0)
    mix = torch.randn(WIDTH, WIDTH, generator=shape) / WIDTH**0.5
    centres = torch.randn(CLASSES, WIDTH, generator=shape)
    drawn = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (count,), generator=drawn)
    points = centres[labels] + 1.5 * torch.randn(count, WIDTH, generator=drawn)
    return points @ mix, labels


def trained() -> nn.Module:
    """Return a small classifier, trained for a few hundred steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, CLASSES))
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    points, labels = samples(4096, 1)
    for step in range(300):
        rows = torch.arange(128) + step * 128 % 4096
        loss = nn.functional.cross_entropy(model(points[rows]), labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    """Return the share of held-out points that are classified rightly."""
    points, labels = samples(4096, 2)
    return float((model(points).argmax(1) == labels).double().mean())


def main() -> None:
    """Prune by each method and print accuracy and the mean error of the layers."""
    dense = trained()
    calibration = list(samples(1024, 3)[0].split(128))
    rows: list[list[object]] = [["dense", "", f"{accuracy(dense):.3f}"]]
    for method in ("magnitude", "wanda", "sparsegpt", "alps"):
        model = copy.deepcopy(dense)
        spec, log = sparta.prune(model, calibration, "1:4", method=method, ignore="4.weight")
        spec.check(model)
        errors = [layer.error for layer in log if layer.error is not None]
        rows.append([method, f"{sum(errors) / len(errors):.3f}", f"{accuracy(model):.3f}"])
    print(log)
    print()
    print(table(["method", "error of the layers", "accuracy"], rows, "1:4, three quarters of the weights are zero"))


if __name__ == "__main__":
    main()

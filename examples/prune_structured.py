"""Structured pruning in one call: remove half of the heads and neurons of a small transformer, and see what changed.

Run it with ``python examples/prune_structured.py``. It needs no GPU, no data and a few seconds.
"""

from __future__ import annotations

import torch
from torch import nn

from sparta.propagation import prune_structured


def encoder() -> nn.Module:
    """Return two transformer layers and a head."""
    layers = [nn.TransformerEncoderLayer(64, 8, 256, batch_first=True) for _ in range(2)]
    return nn.Sequential(*layers, nn.Linear(64, 10)).eval()


def main() -> None:
    """Prune by the norm of the weights, then layer by layer, and tell what each costs."""
    torch.manual_seed(0)
    model, x = encoder(), torch.randn(4, 16, 64)
    data = [torch.randn(4, 16, 64) for _ in range(3)]

    print("1. Half of all heads and neurons\n")
    small, report = prune_structured(model, x, 0.5, data=data)
    print(report)

    print("\n2. Neurons of one layer only\n")
    _, report = prune_structured(model, x, {"0.linear1": 0.75}, granularity="neuron", data=data)
    print(report)

    print("\n3. It is a model like any other: train it further\n")
    optimizer = torch.optim.SGD(small.parameters(), 0.1)
    with torch.no_grad():
        wanted = model(x)
    for step in range(3):
        loss = (small(x) - wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"   step {step}: distance to the original {loss.item():.4f}")


if __name__ == "__main__":
    main()

"""Propagate and compact: plant zeros in a small residual network, see what follows, and run the smaller model.

Run it with ``python examples/propagate_and_compact.py``. It needs no GPU, no data and a few seconds.
"""

from __future__ import annotations

import time

import torch
from torch import nn

from sparta.propagation import propagate


class Block(nn.Module):
    """An inverted residual: expand, filter each channel, project, add."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.expand = nn.Sequential(nn.Conv2d(width, hidden, 1, bias=False), nn.BatchNorm2d(hidden), nn.Hardswish())
        self.filter = nn.Sequential(
            nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden, bias=False), nn.BatchNorm2d(hidden), nn.Hardswish()
        )
        self.project = nn.Conv2d(hidden, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x plus what the block makes of it."""
        y: torch.Tensor = self.project(self.filter(self.expand(x)))
        return x + y


def network() -> nn.Module:
    """Return a stem, three blocks and a head."""
    blocks = [Block(32, 128) for _ in range(3)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)]
    return nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1), *blocks, *head).eval()


def plant(model: nn.Module) -> None:
    """Zero half of the hidden channels of each block, at one end of the block or at the other."""
    for module in model.modules():
        if isinstance(module, Block):
            channels = torch.randperm(128)
            with torch.no_grad():
                module.project.weight[:, channels[:32]] = 0
                module.filter[0].weight[channels[32:64]] = 0


def milliseconds(model: nn.Module, x: torch.Tensor, runs: int = 5) -> float:
    """Return the fastest of a few runs."""
    times = []
    with torch.no_grad():
        for _ in range(runs):
            start = time.perf_counter()
            model(x)
            times.append(time.perf_counter() - start)
    return 1e3 * min(times)


def main() -> None:
    """Run the whole path."""
    torch.manual_seed(0)
    model, x = network(), torch.randn(4, 3, 64, 64)
    plant(model)

    result = propagate(model, x)
    print("1. What follows from the zeros\n")
    print(result)
    print("\n2. Why, for one tensor\n")
    print(result.why("1.filter.0.weight"))

    small = result.compact()
    print("\n3. The compact model: checked against the masked one before it was handed over\n")
    with torch.no_grad():
        difference = (small(x) - model(x)).abs().max().item()
    sizes = [sum(p.numel() for p in m.parameters()) for m in (model, small)]
    print(f"   parameters {sizes[0]} -> {sizes[1]}, outputs differ by {difference:.1g}")
    print(f"   {milliseconds(model, x):.1f} ms -> {milliseconds(small, x):.1f} ms on this machine")


if __name__ == "__main__":
    main()

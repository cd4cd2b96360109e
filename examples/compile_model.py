"""Compile: a pruned model becomes a faster one with the same numbers, is saved, and comes back.

Run it with ``python examples/compile_model.py``. The first run compiles the C++ kernels for this machine (some seconds,
if there is a compiler); without one every layer stays dense, and the report says so. The second run finds what the
first one measured.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import nn

import sparta


class Block(nn.Module):
    """A feed-forward block with a residual, as in a transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x plus what the block makes of it."""
        y: torch.Tensor = self.down(nn.functional.gelu(self.up(self.norm(x))))
        return x + y


def main() -> None:
    """Prune, compile, compare, save, load."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(256) for _ in range(3)], nn.Linear(256, 10)).eval()
    sparta.Spec.from_pattern(model, sparta.Block(4, 1), 0.9, include=["*.up.weight", "*.down.weight"]).apply(model)
    x = torch.randn(64, 256)

    fast = sparta.compile(model, x, budget_s=60)
    print(fast.report)

    with torch.no_grad():
        difference = (fast(x) - model(x)).abs().max().item()
    print(f"\nlargest difference from the original: {difference:.2g}")

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.sparta"
        fast.save(path)
        dense = sum(p.numel() * p.element_size() for p in model.parameters())
        print(f"saved {path.stat().st_size / 2**20:.2f} MiB; the dense weights are {dense / 2**20:.2f} MiB")
        print(f"loaded, it returns the same: {torch.equal(sparta.load(path)(x), fast(x))}")


if __name__ == "__main__":
    main()

"""Sparse and int8 from one call: digits are classified in fp32, then in int8 with the same blocks.

The data are the handwritten digits that scikit-learn carries. The metric decides which layers may be rounded.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

import sparta


def digits() -> tuple[Tensor, Tensor]:
    """Return 8×8 images as rows, and labels."""
    from sklearn.datasets import load_digits

    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    return torch.tensor(data.images, dtype=torch.float32).flatten(1)[order] / 16, torch.tensor(data.target)[order]


def main() -> None:
    """Train dense, prune in blocks, train on with the mask held, compile in both precisions."""
    torch.manual_seed(0)
    x, y = digits()
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    spec: sparta.Spec | None = None
    for step in range(240):
        if step == 120:
            spec = sparta.Spec.from_pattern(model, sparta.Block(4, 4), 0.8, ignore="4.weight")
        batch = torch.randint(0, 1400, (128,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
        if spec is not None:
            spec.apply(model)

    def accuracy(candidate: nn.Module) -> float:
        with torch.no_grad():
            return float((candidate(x[1400:]).argmax(1) == y[1400:]).float().mean())

    model.eval()
    batches = [x[at : at + 64] for at in range(0, 512, 64)]
    plain = sparta.compile(model, batches[0], spec, budget_s=15)
    small = sparta.compile(
        model,
        batches[0],
        spec,
        precision="int8",
        calibration=batches,
        metric=accuracy,
        max_loss=0.01,
        budget_s=15,
    )
    print(small.report)
    with tempfile.TemporaryDirectory() as folder:
        for name, fast in (("fp32", plain), ("int8", small)):
            path = Path(folder) / f"{name}.sparta"
            fast.save(path)
            size = path.stat().st_size / 1024
            print(f"{name}: accuracy {accuracy(fast):.3f}, {size:.0f} KiB")
        again = sparta.load(Path(folder) / "int8.sparta")
        print(f"loaded: accuracy {accuracy(again):.3f}")


if __name__ == "__main__":
    main()

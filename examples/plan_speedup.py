"""Plan: which layers of a classifier to prune, how much and in which pattern, so that it is faster on this machine.

Run it with ``python examples/plan_speedup.py``. It takes some ten seconds: the options of each layer are timed, the
best combination is computed, compiled and measured, and the table of options corrected by what was measured.
"""

from __future__ import annotations

import torch
from torch import nn

import sparta

WIDTH, CLASSES = 256, 10


def samples(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return points around one centre per class, and their classes."""
    centres = torch.randn(CLASSES, WIDTH, generator=torch.Generator().manual_seed(0))
    drawn = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (count,), generator=drawn)
    return centres[labels] + 3.0 * torch.randn(count, WIDTH, generator=drawn), labels


def trained() -> nn.Module:
    """Return a classifier, trained for some steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, CLASSES))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    points, labels = samples(4096, 1)
    for step in range(60):
        rows = torch.arange(128) + step * 128 % 4096
        loss = nn.functional.cross_entropy(model(points[rows]), labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    """Return the share of held-out points that are classified rightly."""
    points, labels = samples(2048, 2)
    return float((model(points).argmax(1) == labels).double().mean())


def main() -> None:
    """Plan, print what each layer becomes, prune, and compare."""
    model, example = trained(), samples(32, 3)[0]
    before = accuracy(model)
    plan = sparta.plan(
        model, example, list(samples(512, 4)[0].split(64)), speedup=1.3, patterns=["4x1", "channels"], budget_s=12
    )
    print(plan.report())
    if plan.met:
        plan.apply(model)
        plan.spec.check(model)
    print(f"\naccuracy: dense {before:.3f}, {'pruned as planned' if plan.met else 'as it was'} {accuracy(model):.3f}")


if __name__ == "__main__":
    main()

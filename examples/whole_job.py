"""The whole job on real data: train, sparsify, propagate, compact, compile, verify, save, load elsewhere, measure.

Run it with ``make demo``. The data are the handwritten digits that scikit-learn carries. Every number in the table at
the end was measured in this run, on this machine.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from copy import deepcopy
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import sparta
from sparta.tables import table
from sparta.testing import compare

EPOCHS, BATCH, WIDTH = 12, 64, 1024
SPARSITY = 0.95
SERVED = 256  # images that are classified at once when latency is measured


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return 8×8 images and labels, for training and for testing."""
    from sklearn.datasets import load_digits

    data = load_digits()
    x, y = torch.tensor(data.images, dtype=torch.float32).flatten(1) / 16, torch.tensor(data.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, test = order[:1400], order[1400:]
    return x[train], y[train], x[test], y[test]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, epochs: int) -> None:
    """Train as any script does; what a recipe adds, it adds from the optimizer's steps."""
    model.train()
    for epoch in range(epochs):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(BATCH):
            optimizer.zero_grad()
            functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
    model.eval()


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Return the share of images that are classified rightly."""
    with torch.no_grad():
        return float((model(x).argmax(1) == y).float().mean())


def in_a_fresh_process(artifact: Path, x: Tensor, folder: Path) -> Tensor:
    """Load an artifact in another process, run it there, and return what it returned."""
    torch.save(x, folder / "x.pt")
    script = (
        "import sys, torch, sparta; fast = sparta.load(sys.argv[1]); "
        "torch.save(fast(torch.load(sys.argv[2])), sys.argv[3])"
    )
    arguments = [str(artifact), str(folder / "x.pt"), str(folder / "y.pt")]
    subprocess.run([sys.executable, "-c", script, *arguments], check=True)  # noqa: S603 - an argument list, no shell
    return torch.load(folder / "y.pt")


def main() -> None:
    """Do the job and print its table."""
    torch.manual_seed(0)
    torch.set_flush_denormal(True)  # Adam's averages of vanishing gradients would slow the CPU down
    x, y, test_x, test_y = digits()
    served = test_x[:SERVED]
    model = nn.Sequential(
        nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10)
    )  # fmt: skip
    train(model, torch.optim.Adam(model.parameters(), lr=1e-3), x, y, EPOCHS)
    dense, dense_accuracy = deepcopy(model), accuracy(model, test_x, test_y)
    print(f"dense: {dense_accuracy:.1%} of {len(test_x)} test images\n\nsparsify (a recipe around the same loop) ...")

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    manager, optimizer = sparta.create.initialize(
        model, optimizer, -(-len(x) // BATCH), quantization=False,
        recipe_variables={"num_epochs": EPOCHS, "sparsity": SPARSITY, "mask_type": [8, 1]},
    )  # fmt: skip
    train(model, optimizer, x, y, manager.max_epochs)
    manager.finalize()
    spec = manager.spec()
    sparse_accuracy = accuracy(model, test_x, test_y)
    print(f"sparse: {sparse_accuracy:.1%}, density {spec.density:.3f}")
    print("\npropagate (what follows for every other tensor) ...")

    batches = ({0: torch.export.Dim.DYNAMIC},)  # any number of images
    result = sparta.propagate(model, served, spec, dynamic_shapes=batches)
    small = result.compact()
    before, after = (sum(p.numel() for p in m.parameters()) for m in (model, small))
    print(f"compact: {before} -> {after} parameters, {accuracy(small, test_x, test_y):.1%}\n\ncompile ...")

    fast = sparta.compile(model, served, spec, dynamic_shapes=batches)
    print(fast.report, "\n")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        artifact = folder / "digits.sparta"
        fast.save(artifact)
        elsewhere = in_a_fresh_process(artifact, test_x, folder)
        torch.testing.assert_close(elsewhere, fast(test_x), rtol=1e-4, atol=1e-5)
        loaded_accuracy = float((elsewhere.argmax(1) == test_y).float().mean())
        size = artifact.stat().st_size
    with torch.no_grad():
        differ = int((model(test_x).argmax(1) != elsewhere.argmax(1)).sum())
    print(f"predictions that differ from those of the masked dense model: {differ} of {len(test_x)}\n")
    runs = {"dense": dense, "masked": model, "sparta": fast}
    with torch.no_grad():
        times = compare({name: (lambda run=run: run(served)) for name, run in runs.items()}, max_seconds=3)
    ms = {name: times[name].median for name in runs}
    mebibytes = sum(p.numel() * p.element_size() for p in model.parameters()) / 2**20
    measured = {
        "trained dense": (dense_accuracy, mebibytes, ms["dense"]),
        "trained sparse, run dense": (sparse_accuracy, mebibytes, ms["masked"]),
        "compiled, loaded in a fresh process": (loaded_accuracy, size / 2**20, ms["sparta"]),
    }
    rows = [
        [name, f"{right:.1%}", f"{mib:.2f}", f"{took:.3f}", f"{ms['dense'] / took:.2f}"]
        for name, (right, mib, took) in measured.items()
    ]
    print(table(["model", "accuracy", "MiB", f"ms for {SERVED} images", "speed-up"], rows))


if __name__ == "__main__":
    main()

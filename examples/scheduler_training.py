"""Sparsity-aware training: one small network, trained under each of the schedulers, beside dense.

Run it with ``python examples/scheduler_training.py``; it takes well under a minute on one core. The data are made up
(which colour of an image is brightest), so that the example needs nothing but this package; the loop is the one you
have.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sparta.scheduler import AmbaLevelPruneScheduler, build_sparse_scheduler
from sparta.tables import table

STEPS = 60


def network() -> nn.Module:
    """Return a small convolutional network for 3 × 8 × 8 images and 4 classes."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 4),
    )


def batch(step: int, size: int = 32) -> tuple[Tensor, Tensor]:
    """Return images and the colour that is brightest in each, or 3 for none."""
    generator = torch.Generator().manual_seed(step)
    labels = torch.randint(0, 4, (size,), generator=generator)
    images = 0.5 * torch.randn(size, 3, 8, 8, generator=generator)
    for image, label in zip(images, labels.tolist(), strict=True):
        image[label : label + 1] += 0.4
    return images, labels


def accuracy(model: nn.Module) -> float:
    """Return the accuracy on images that were not trained on."""
    model.eval()
    images, labels = batch(10_000, 500)
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).float().mean())


CONFIGS = {
    "levels up to 80 %": {
        "mask_generator": {"type": "NormalMaskGenerator"},
        "fake_sparse": {"type": "FakeSparse"},
        "scheduler": {
            "type": "AmbaLevelPruneScheduler",
            "kwargs": {
                "total_iters": STEPS,
                "sparsity_table": [40, 60, 80],
                "default_input_shape": [1, 3, 8, 8],
                "output_dir": None,
                "save_dir": None,
            },
        },
    },
    "2:4": {"scheduler": {"type": "AmpereScheduler", "kwargs": {"mask_calculator": "m4n2_1d", "verbosity": 0}}},
    "learnt thresholds": {
        "mask_generator": {"type": "STRMaskGenerator"},
        "fake_sparse": {"type": "STRFakeSparse", "kwargs": {"sInit_value": -5}},
        "scheduler": {"type": "BaseScheduler"},
    },
    "learnt probabilities, 80 %": {
        "mask_generator": {"type": "ProbMaskGenerator"},
        "fake_sparse": {"type": "ProbMaskFakeSparse"},
        "scheduler": {
            "type": "ProbMaskPruneScheduler",
            "kwargs": {"prune_rate": 0.8, "total_iterations": STEPS},
        },
    },
    "ADMM, 80 %": {
        "scheduler": {"type": "ADMMScheduler", "kwargs": {"rho": 0.001}},
        "sparsity": {"target_sparsity": 0.8, "uniform": True},
    },
}


def train(config: dict[str, object]) -> tuple[float, float]:
    """Train under the scheduler of `config`; return the sparsity and the accuracy of the exported model."""
    scheduler = build_sparse_scheduler(config)
    model = scheduler.prepare_sparse_model(network())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    if isinstance(scheduler, AmbaLevelPruneScheduler):
        scheduler.set_lr_scheduler(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS // 3))
    if hasattr(scheduler, "before_run"):
        scheduler.before_run(model, iters_per_epoch=4, max_iters=STEPS)
    scheduler.init_optimizer(optimizer)
    for step in range(STEPS):
        images, labels = batch(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        scheduler.prune_model(model, step)
    model, spec = scheduler.export_sparse_model(model)
    spec.check(model)
    return 1 - spec.density, accuracy(model)


def train_dense() -> float:
    """Train the same network as it is; return its accuracy."""
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for step in range(STEPS):
        images, labels = batch(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return accuracy(model)


def main() -> None:
    """Print one table: scheduler, sparsity of the pruned weights, accuracy."""
    rows: list[list[object]] = [["dense", 0.0, train_dense()]]
    for name, config in CONFIGS.items():
        rows.append([name, *train(config)])
    print(table(["training", "sparsity", "accuracy"], rows))


if __name__ == "__main__":
    main()

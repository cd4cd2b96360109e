"""What does holding masks cost? The share of a ResNet-18 training step, on CIFAR-sized images, on one device.

Run with ``python benchmarks/training/overhead.py``, or ``--device cuda``. Copies of one network train side by side, a
step of each in turn, so that drift of the machine hits all alike; medians are compared. "held" is what ``Sparsifier``
and ``AmpereScheduler`` do (zeros in the weights, kept by the hooks of the optimizer), "fake sparsity" what the other
schedulers do (the mask in the forward pass). The goal is less than 3 % of a step.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import save
from sparta.scheduler import AmbaLevelPruneScheduler
from sparta.sparsify import Sparsifier
from sparta.testing import compare

GOAL = 0.03


class Block(nn.Module):
    """Two 3 x 3 convolutions with batch norms around a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output; shape (N, C, H, W)."""
        y = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


def resnet18(width: int = 64) -> nn.Sequential:
    """Return ResNet-18 with the 3 x 3 stem that small images want: 11.2 million parameters at the usual width."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    before = width
    for stage in range(4):
        after = width * 2**stage
        layers += [Block(before, after, 1 if stage == 0 else 2), Block(after, after, 1)]
        before = after
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 10))


def training_step(
    kind: str, width: int, sparsity: float, data: tuple[Tensor, Tensor], *, amp: bool
) -> Callable[[], None]:
    """Return one training step of a fresh network that is dense, "held" or under "fake sparsity"."""
    images, labels = data
    torch.manual_seed(0)
    model = resnet18(width).to(images.device)
    after: Callable[[int], Any] = lambda _: None  # noqa: E731
    if kind.startswith("fake"):
        options = {"prun_algo": 0, "output_dir": None, "save_dir": None}
        scheduler = AmbaLevelPruneScheduler(total_iters=1 << 30, sparsity_table=[100 * sparsity], **options)
        model = scheduler.prepare_sparse_model(model)
        after = lambda step: scheduler.prune_model(model, step)  # noqa: E731
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, weight_decay=5e-4)
    if kind.startswith("held"):
        gradients = "dense" if "dense" in kind else "masked"
        sparsifier = Sparsifier(model, sparsity, gradients=gradients).attach(optimizer)
        after = lambda _: sparsifier.step()  # noqa: E731
    done = [0]

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(images.device.type, torch.bfloat16, enabled=amp):
            loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        after(done[0])
        done[0] += 1

    return step


def measure(options: argparse.Namespace, *, amp: bool) -> dict[str, Any]:
    """Return the medians of all kinds of steps and their overheads over the dense one."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(options.batch, 3, 32, 32, generator=generator).to(options.device)
    labels = torch.randint(0, 10, (options.batch,), generator=generator).to(options.device)
    kinds = ("dense", "held", "held, dense gradients", "fake sparsity")
    steps = {kind: training_step(kind, options.width, options.sparsity, (images, labels), amp=amp) for kind in kinds}
    comparison = compare(
        steps, warmup=options.warmup, iters=options.steps, max_seconds=options.seconds, device=options.device
    )
    print(f"{'bf16 autocast' if amp else 'fp32'}\n{comparison}")
    dense = comparison["dense"].median
    return {
        kind: {
            "median_ms": comparison[kind].median,
            "spread_ms": comparison[kind].spread,
            "steps": len(comparison[kind].samples),
            "overhead": comparison[kind].median / dense - 1,
        }
        for kind in kinds
    }


def main() -> None:
    """Measure in fp32 and under autocast, and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, help="images a step; 64 on the CPU and 256 on a GPU")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--sparsity", type=float, default=0.9)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=120.0, help="longest time for each precision")
    parser.add_argument("--out", type=Path, help="folder for the JSON instead of benchmarks/results")
    options = parser.parse_args()
    is_cuda = options.device.startswith("cuda")
    options.batch = options.batch or (256 if is_cuda else 64)
    results = {
        "network": f"ResNet-18, width {options.width}",
        "batch": options.batch,
        "sparsity": options.sparsity,
        "goal": GOAL,
        "fp32": measure(options, amp=False),
        "bf16 autocast": measure(options, amp=True),
    }
    device = torch.cuda.get_device_name() if is_cuda else f"{platform.machine()} cpu"
    print(f"saved {save('training_overhead', device, results, folder=options.out)}")


if __name__ == "__main__":
    main()

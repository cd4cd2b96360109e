"""How much faster is a training step of a whole model with sparse layers? ViT-B, against what Amdahl's law allows.

Run with ``python benchmarks/gpu/training_model.py`` (two minutes). The model is ViT-B's twelve layers with patches of
16 on images of 224, in bf16, blocks of 64 at 90 % in every linear layer of an encoder layer; a step is forward, loss,
backward and AdamW. Dense and sparse steps take turns, eagerly and replayed from CUDA graphs. Amdahl's law allows what
is left when the linear layers, forward and backward, take their density of the time that they take densely, measured
one by one.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import sparta
from sparta.tables import table
from sparta.testing import block_mask

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "compiler"))

from networks import EncoderLayer
from training_step import graphed, paired, step_of

from record import save

TARGET = 0.85  # of what Amdahl's law allows
_CLASSES, _PATCH, _IMAGE = 1000, 16, 224


class Vit(nn.Module):
    """ViT-B: patches, positions, encoder layers, and a head on the mean."""

    def __init__(self, layers: int, width: int = 768, heads: int = 12) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, _PATCH, _PATCH)
        self.positions = nn.Parameter(torch.randn(1, (_IMAGE // _PATCH) ** 2, width) * 0.02)
        self.layers = nn.Sequential(*(EncoderLayer(width, heads, 4 * width) for _ in range(layers)))
        self.head = nn.Linear(width, _CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Return (B, classes) for (B, 3, 224, 224)."""
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        y: Tensor = self.head(self.layers(x).mean(1))
        return y


def spec_of(model: Vit, sparsity: float, block: int) -> sparta.Spec:
    """Return which blocks are kept; layers of one shape have one mask, so that they are tuned once."""
    return sparta.Spec(
        {
            f"{name}.weight": sparta.TeSA.from_mask(block_mask(tuple(layer.weight.shape), (block, block), sparsity))
            for name, layer in model.named_modules()
            if isinstance(layer, nn.Linear) and name.startswith("layers.")
        }
    )


def training_step(model: nn.Module, images: Tensor, labels: Tensor) -> Callable[[], None]:
    """Return a step: forward, loss, backward, AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=images.is_cuda, capturable=images.is_cuda)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        functional.cross_entropy(model(images).float(), labels).backward()
        optimizer.step()

    return step


def linear_milliseconds(model: Vit, tokens: int) -> float:
    """Return what forward and backward of all dense linear layers of the encoder take, each measured alone."""
    shapes = Counter(tuple(m.weight.shape) for m in model.layers.modules() if isinstance(m, nn.Linear))
    total = 0.0
    for (n, k), count in shapes.items():
        layer = nn.Linear(k, n).to("cuda", torch.bfloat16)
        x = torch.randn(tokens, k, device="cuda", dtype=torch.bfloat16).requires_grad_()
        step = graphed(step_of(layer, x, torch.randn(tokens, n, device="cuda", dtype=torch.bfloat16)))
        total += count * paired(step, step)[0]
    return total


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the steps of both models."""
    torch.manual_seed(0)
    dense = Vit(options.layers).to("cuda", torch.bfloat16)
    sparse = deepcopy(dense)
    modules = sparta.nn.swap(sparse, spec_of(sparse, options.sparsity, 64))
    images = torch.randn(options.batch, 3, _IMAGE, _IMAGE, device="cuda", dtype=torch.bfloat16)
    labels = torch.randint(_CLASSES, (options.batch,), device="cuda")
    tokens, known = options.batch * (_IMAGE // _PATCH) ** 2, {}
    for module in modules.values():
        x = torch.randn(tokens, module.in_features, device="cuda", dtype=torch.bfloat16)
        module.tune(x, backward=True, store=False, budget_s=options.budget, known=known)
        del x
    steps = [training_step(model.train(), images, labels) for model in (sparse, dense)]
    ours, theirs, ratios = paired(*steps)
    replays = paired(*[graphed(step) for step in steps])
    linear, density = linear_milliseconds(dense, tokens), 1 - options.sparsity
    bound = replays[1] / (replays[1] - linear + linear * density)
    implements = Counter(str(module.choice.implement) for module in modules.values())
    runs = ", ".join(f"{count} {name}" for name, count in implements.items())
    return {
        "layers": options.layers, "batch": options.batch, "sparsity": options.sparsity, "runs": runs,
        "ms": ours, "dense_ms": theirs, "ratio": statistics.median(ratios), "graphed_ms": replays[0],
        "graphed_dense_ms": replays[1], "graphed_ratio": statistics.median(replays[2]), "linear_ms": linear,
        "bound": bound, "target": TARGET * bound,
    }  # fmt: skip


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None, help="folder of the results")
    parser.add_argument("--budget", type=float, default=8.0, help="seconds to tune one shape of layers")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--sparsity", type=float, default=0.9)
    options = parser.parse_args()
    row = measured(options)
    print(table(list(row), [[f"{v:.3f}" if isinstance(v, float) else v for v in row.values()]]))
    print(save("training_model", torch.cuda.get_device_name(), {"steps": [row]}, options.out))


if __name__ == "__main__":
    main()

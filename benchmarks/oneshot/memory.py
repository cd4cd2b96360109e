"""Does a memory cap hold? A model of random weights, larger than the cap, is pruned from disk to disk.

Run with ``python benchmarks/oneshot/memory.py`` for 4 GiB of weights under a cap of 2 GiB (some 12 GB of disk and a
quarter of an hour), or ``--gib 0.25 --cap 0.15`` for a quick check. What is measured is the growth of the process
beyond what it takes after importing everything.
"""

from __future__ import annotations

import argparse
import platform
import resource
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
import sparta
from record import RESULTS, save
from sparta.oneshot import empty_weights

QUESTION = "oneshot_memory"


class Block(nn.Module):
    """A block with the weights of a transformer's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 2 * width, bias=False), nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the hidden state after this block."""
        for layer in self.mix:
            x = x + 0.1 * torch.tanh(layer(x))
        return x + 0.1 * self.down(torch.relu(self.up(x)))


def model_of(width: int, blocks: int) -> nn.Module:
    """Return the model, whose parameters take no memory."""
    with empty_weights():
        return nn.Sequential(*(Block(width) for _ in range(blocks)))


def peak_bytes() -> int:
    """Return the most memory that this process had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    """Write the weights, prune, and store what it took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=4.0)
    parser.add_argument("--cap", type=float, default=2.0, help="GiB")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--method", default="wanda")
    parser.add_argument("--folder", type=Path, help="where the files go; a temporary folder by default")
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    blocks = max(2, round(given.gib * 2**30 / (8 * given.width**2 * 4)))
    model = model_of(given.width, blocks)
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        weights, output = Path(folder) / "weights", Path(folder) / "pruned"
        weights.mkdir()
        for number, block in enumerate(model):
            tensors = {f"{number}.{n}": torch.randn(p.shape) / given.width**0.5 for n, p in block.named_parameters()}
            save_file(tensors, weights / f"model-{number:05d}.safetensors")
            del tensors
        data = [torch.randn(1, 128, given.width) for _ in range(4)]
        sparta.prune(model_of(16, 2), [torch.randn(4, 16)], "2:4", weights=_tiny(folder), output=Path(folder) / "tiny")
        before, started = peak_bytes(), time.perf_counter()
        cap = int(given.cap * 2**30)
        _, log = sparta.prune(
            model, data, "2:4", method=given.method, memory=cap, weights=weights, output=output, progress=True
        )
        seconds = time.perf_counter() - started
    results = {
        "weights_gib": sum(p.numel() for p in model.parameters()) * 4 / 2**30,
        "cap_gib": given.cap,
        "grown_gib": max(0, peak_bytes() - before) / 2**30,
        "process_gib": peak_bytes() / 2**30,
        "method": log.method,
        "minutes": seconds / 60,
    }
    print(results)
    save(QUESTION, f"{platform.machine()} CPU", results, given.results)
    if results["grown_gib"] > given.cap:
        raise SystemExit("the cap did not hold")


def _tiny(folder: str) -> Path:
    """Return the folder of a model that is pruned first, so that everything is loaded before measuring."""
    path = Path(folder) / "small"
    path.mkdir()
    with torch.no_grad():
        names = {
            f"{i}.{n}": torch.randn(p.shape) for i, b in enumerate(model_of(16, 2)) for n, p in b.named_parameters()
        }
    save_file(names, path / "model.safetensors")
    return path


if __name__ == "__main__":
    main()

"""What does pruning cost a sharded run? Time of a step and memory of a process, at one, two and four processes.

Run with ``python benchmarks/training/scale.py``; ``--large`` is the test of memory (`make scale`): a billion weights in
bfloat16 over four processes, which take about 14 GiB together. A stack of decoder blocks is made on the meta device,
sharded by FSDP2 block by block, and only then given memory and numbers, so no process ever holds it whole. It trains
dense for some steps, then with one call of `sparta.create.initialize`: first steps in which the masks change, then
steps that only hold them. The processes share this machine's cores, so their steps are compared with the dense ones of
the same run, not with fewer processes. Memory is the most that any process had; it is an error where pruning added more
than `ALLOWED` times the weights of one process and of one block as float32, which scores of a gathered model would be
beyond.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[1]))
import sparta
from record import RESULTS, save
from sparta.sparsify import find_layers
from sparta.sparsify.shards import local
from sparta.tables import table

QUESTION = "training_scale"
ALLOWED = 3.5
STORED = ("kind", "processes", "parameters", "zeros", "dense_ms", "changing_ms", "held_ms", "part_mib", "dense_mib",
          "added_mib", "allowed_mib")  # fmt: skip
KINDS = ("magnitude", "rigl")


class Block(nn.Module):
    """A decoder block: attention and a gated MLP, each with a norm before it."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.heads = max(1, width // 64)
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output; shape (N, tokens, width)."""
        shape = (*x.shape[:2], self.heads, -1)
        q, k, v = (part.reshape(shape).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        y = self.norm2(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


def stack(parameters: float, width: int) -> nn.Sequential:
    """Return blocks of a width, with about so many weights together, on the meta device."""
    inner = width * 11 // 4
    blocks = max(1, round(parameters / (4 * width**2 + 3 * width * inner)))
    with torch.device("meta"):
        return nn.Sequential(*(Block(width, inner) for _ in range(blocks)))


def sharded(given: argparse.Namespace, seed: int) -> nn.Sequential:
    """Return the stack, cut over all processes; memory is taken for this process's part alone."""
    model = stack(given.parameters, given.width).to(getattr(torch, given.dtype))
    for block in model:
        fully_shard(block)
    fully_shard(model)
    model.to_empty(device="cpu")
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            local(parameter).normal_(0, 0.02) if parameter.dim() > 1 else local(parameter).fill_(1)
    return model


def peak_mib() -> float:
    """Return the most memory that this process ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def work(rank: int, store: str, processes: int, given: argparse.Namespace, kind: str, out: str) -> None:
    """Train in one of the processes; the first of them writes what it found."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=processes)
    found: dict[str, Any] = {"import_mib": peak_mib()}
    model = sharded(given, rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    found["built_mib"] = peak_mib()

    def steps(count: int) -> list[float]:
        taken = []
        for number in range(count):
            generator = torch.Generator().manual_seed(number * processes + rank)
            x = torch.randn(1, given.tokens, given.width, generator=generator).to(getattr(torch, given.dtype))
            began = time.perf_counter()
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            taken.append(1e3 * (time.perf_counter() - began))
        return taken

    found["dense_ms"] = median(steps(given.steps + 1)[1:])
    found["dense_mib"] = peak_mib()
    variables = {"num_epochs": 1, "sparsity": 0.8}
    manager, _ = sparta.create.initialize(
        model, optimizer, 2 * given.steps, pruning=kind, quantization=False, recipe_variables=variables
    )
    found["changing_ms"] = median(steps(given.steps))
    found["held_ms"] = median(steps(given.steps))
    found["sparse_mib"] = peak_mib()
    layers = find_layers(model)
    found["zeros"] = manager.pruning_modifiers[0].masks.sparsity
    found["parameters"] = sum(layer.parameter.numel() for layer in layers)
    found["part_mib"] = sum(local(layer.parameter).numel() * 4 for layer in layers) / 2**20
    found["block_mib"] = sum(p.numel() * 4 for p in model[0].parameters()) / 2**20
    gathered: list[Any] = [None] * processes
    dist.all_gather_object(gathered, found)
    if rank == 0:
        highest = {key: max(each[key] for each in gathered) for key in found}
        Path(out).write_text(json.dumps({"processes": processes, "kind": kind, **highest}))
    dist.barrier()
    dist.destroy_process_group()


def measured(processes: int, kind: str, given: argparse.Namespace) -> dict[str, Any]:
    """Return what the processes found, the largest of each figure."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (f"{folder}/store", processes, given, kind, f"{folder}/out"), nprocs=processes)
        found: dict[str, Any] = json.loads(Path(folder, "out").read_text())
    found["added_mib"] = found["sparse_mib"] - found["dense_mib"]
    found["allowed_mib"] = ALLOWED * (found["part_mib"] + found["block_mib"])
    return found


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print the table."""
    keys = ("dense_ms", "changing_ms", "held_ms", "part_mib", "built_mib", "dense_mib", "sparse_mib", "allowed_mib")
    lines = [
        [row["kind"], row["processes"], f"{row['parameters'] / 1e6:.0f} M", f"{100 * row['zeros']:.1f} %"]
        + [f"{row[key]:.0f}" for key in keys]
        for row in rows
    ]
    print(table(["kind", "processes", "weights", "zeros", *(key.replace("_", " ") for key in keys)], lines))


def main() -> None:
    """Measure every number of processes, and store each when it is done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=2e7)
    parser.add_argument("--width", type=int, default=512, help="of the blocks, a multiple of 64")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--kinds", nargs="+", default=list(KINDS))
    parser.add_argument("--steps", type=int, default=6, help="of each of the three parts")
    parser.add_argument("--tokens", type=int, default=64, help="of each process in a step")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--large", action="store_true", help="a billion weights over four processes, one step of each")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
    given = parser.parse_args()
    if given.large:
        given.parameters, given.width, given.processes, given.kinds = 1e9, 2048, [4], ["magnitude"]
        given.steps, given.tokens, given.dtype = 1, 8, "bfloat16"
    rows: list[dict[str, Any]] = []
    for kind in given.kinds:
        for processes in given.processes:
            rows.append(measured(processes, kind, given))
            results = {
                "steps": given.steps,
                "tokens": given.tokens,
                "dtype": given.dtype,
                "rows": [{key: row[key] for key in STORED} for row in rows],
            }
            save(f"{QUESTION}_large" if given.large else QUESTION, f"{platform.machine()} cpu", results, given.out)
    show(rows)
    beyond = [row for row in rows if row["added_mib"] > row["allowed_mib"]]
    if beyond:
        raise SystemExit(f"pruning took {[round(row['added_mib']) for row in beyond]} MiB: too much")


if __name__ == "__main__":
    main()

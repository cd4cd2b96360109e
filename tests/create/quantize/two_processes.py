"""Run by a test: quantization-aware training under DDP, each process with data of its own."""

import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sparta.create import quantize
from sparta.create.manager import Manager
from sparta.create.modifiers import modifier_named


def worker(rank, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = Manager([modifier_named("Quantization")(start_epoch=0.5)])
    manager.attach(model, optimizer, 4)
    for step in range(6):
        optimizer.zero_grad()
        inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank)) * (1 + rank)
        model(inputs).square().mean().backward()
        optimizer.step()
    ranges = torch.stack([r.reshape(2, -1)[:, 0] for r in quantize.quantization_state(model)["ranges"].values()])
    gathered = [torch.empty_like(ranges) for _ in range(2)]
    dist.all_gather(gathered, ranges)
    if rank == 0 and torch.equal(*gathered) and gathered[0].isfinite().all():
        print("ranges agree")  # noqa: T201 - read by the test
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(worker, (sys.argv[1],), nprocs=2)

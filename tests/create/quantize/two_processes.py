"""Run by a test: quantization-aware training under DDP and FSDP2, each process with data of its own."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import pairs
from sparta.create import quantize
from sparta.create.manager import Manager
from sparta.create.modifiers import modifier_named


def trained(wrap, rank):
    torch.manual_seed(0)
    model = wrap(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = Manager([modifier_named("Quantization")(start_epoch=0.5), modifier_named("Distillation")()])
    manager.attach(model, optimizer, 4, teacher=nn.Linear(6, 3))
    for step in range(6):
        optimizer.zero_grad()
        inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank)) * (1 + rank)
        model(inputs).square().mean().backward()
        optimizer.step()
    return model, manager


def sharded(model):
    for layer in (model[0], model[2]):
        fully_shard(layer)
    return fully_shard(model)


def work(rank):
    found = []
    for wrap in (DistributedDataParallel, sharded):
        model, manager = trained(wrap, rank)
        ranges = torch.cat([r.reshape(-1) for r in quantize.quantization_state(model)["ranges"].values()])
        gathered = [torch.empty_like(ranges) for _ in range(2)]
        dist.all_gather(gathered, ranges)
        assert torch.equal(*gathered), "both processes have the same ranges"
        assert gathered[0].isfinite().all()
        assert manager.distillation_modifiers[0].idle() == ""
        assert manager.spec()["0.weight"].scale.cells.numel() == 8
        found.append(gathered[0])
    assert torch.allclose(*found, atol=1e-5), "sharded or not"
    if rank == 0:
        print("ranges agree")  # noqa: T201 - read by the test


if __name__ == "__main__":
    pairs.spawn(work)

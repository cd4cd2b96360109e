"""Run by a test: train with a recipe under DDP and FSDP2 in two processes, and in one, and compare all masks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from sparta.create import initialize
from sparta.sparsify.shards import local, own_part

STEPS = 2
RUNS = {
    "ddp": ("magnitude", "movement", "mfac", "obs"),
    "fsdp": ("acdc", "topkast"),
}


def network():
    torch.manual_seed(0)
    # in double precision the order of sums over processes moves no mask
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def data(step, rank, world):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 12, generator=generator).double().chunk(world)[rank]


@torch.no_grad()
def zero_some(model):
    for parameter in model.parameters():
        if parameter.dim() == 2:
            kept = torch.ones(parameter.shape, dtype=torch.bool)
            kept[:, ::3] = False
            local(parameter).mul_(own_part(kept, parameter))


def train(model, kind, rank, world):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    options = {}
    if kind in {"obs", "sensitivity"}:
        bare, fresh = getattr(model, "module", model), iter(range(1000, 10**6))
        options["loss_closure"] = lambda: bare(data(next(fresh), rank, world)).square().mean()
    variables = {"num_epochs": 4} if kind == "constant" else {"num_epochs": 4, "sparsity": 0.7}
    if kind == "constant":
        zero_some(model)
    if kind == "sensitivity":
        kind, variables = "magnitude", {**variables, "allocation": "sensitivity"}
    manager, _ = initialize(
        model, optimizer, STEPS, pruning=kind, quantization=False, recipe_variables=variables, **options
    )
    if kind in {"obs", "mfac"}:
        manager.pruning_modifiers[0].num_grads = 3
    for step in range(manager.max_epochs * STEPS):
        optimizer.zero_grad()
        model(data(step, rank, world)).square().mean().backward()
        optimizer.step()
    spec = manager.spec()
    manager.finalize()
    return {name: tesa.mask() for name, tesa in spec.items()}


def work(rank, report):
    for wrap, kinds in RUNS.items():
        for kind in kinds:
            expected = train(network(), kind, 0, 1)
            model = network()
            if wrap == "ddp":
                model = DistributedDataParallel(model)
            else:
                for layer in model:
                    if isinstance(layer, nn.Linear):
                        fully_shard(layer)
                fully_shard(model)
            found = train(model, kind, rank, 2)
            same = list(found) == list(expected) and all(torch.equal(found[name], expected[name]) for name in found)
            gathered = [None, None]
            dist.all_gather_object(gathered, {name: mask.tolist() for name, mask in found.items()})
            if rank == 0:
                with open(report, "a") as file:  # noqa: PTH123
                    alike = gathered[0] == gathered[1]
                    file.write(f"{wrap} {kind} ranks={alike} same={same}\n")

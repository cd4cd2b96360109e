"""Run by a test: train a pruned model under FSDP2 and under DDP in two processes, and in one, and compare all masks."""

import copy
import sys

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import pairs
from sparta.sparsify import ERK, Global, Magnitude, Schedule, Sparsifier, find_layers, make_masks
from sparta.sparsify.allocation import Energy, lamp
from sparta.sparsify.shards import own_part, whole

RUNS = {
    "uniform": {},
    "global": {"allocation": Global()},
    "global l2": {"allocation": Global(normalize="l2", max_sparsity=0.9)},
    "erk movement": {"allocation": ERK(), "score": "movement", "pruned": "train"},
    "random": {"score": "random"},
    "2:4": {"pattern": "2:4"},
    "channel": {"pattern": "channel:0"},
    "block": {"pattern": "block:2x2"},
}
PLACED = {
    "global": ("unstructured", 0.6, Global()),
    "floor": ("unstructured", 0.9, Global(max_sparsity=0.92, normalize="l1")),
    "all": ("unstructured", 1.0, Global()),
    "lamp": ("unstructured", 0.6, lamp()),
    "energy": ("unstructured", 0.6, Energy()),
    "2:4": ("2:4", None, None),
    "2:4 gradual": ("2:4", 0.3, Global()),
    "3:5": ("3:5", None, None),
    "rows": ("channel:0", 0.5, None),
    "columns": ("channel:1", 0.5, Global()),
    "blocks": ("block:2x3", 0.5, None),
    "blocks, global": ("block:4x2", 0.5, Global()),
    "2:2:8": ("2:2:8", None, None),
}
SCARCE = {"global": Global(), "l2": Global(normalize="l2"), "lamp": lamp()}
SCHEDULE = Schedule.cubic(0.5, begin=1, end=4, every=2)


def network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4))
    with torch.no_grad():  # many ties, which must be broken alike everywhere
        for parameter in model.parameters():
            parameter.copy_((parameter * 8).round() / 8)
    return model


def train(model, sparsifier, optimizer, rank, world):
    for step in range(7):
        x = torch.randn(8, 12, generator=torch.Generator().manual_seed(step))
        x = x.chunk(world)[rank]
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        sparsifier.step()
    return {name: whole(sparsifier.masks[name], layer.parameter) for name, layer in sparsifier.masks.layers.items()}


def start(model, options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return Sparsifier(model, SCHEDULE, **options).attach(optimizer), optimizer


def work(rank, report):
    for name, options in RUNS.items():
        alone = network()
        expected = train(alone, *start(alone, copy.deepcopy(options)), 0, 1)
        sharded = network()
        for layer in (sharded[0], sharded[2], sharded[4]):
            fully_shard(layer)
        fully_shard(sharded)
        parallel = DistributedDataParallel(network())
        for kind, model in (("fsdp", sharded), ("ddp", parallel)):
            sparsifier, optimizer = start(model, copy.deepcopy(options))
            masks = train(model, sparsifier, optimizer, rank, 2)
            same = masks.keys() == expected.keys() and all(torch.equal(masks[k], expected[k]) for k in masks)
            zero = all(
                bool((p.full_tensor() if kind == "fsdp" else p).detach()[~masks[n.removeprefix("module.")]].eq(0).all())
                for n, p in model.named_parameters()
                if n.endswith("weight")
            )
            density = sparsifier.masks.spec().density
            if rank == 0:
                with open(report, "a") as file:  # noqa: PTH123
                    file.write(f"{name} {kind} same={same} zero={zero} density={density:.4f}\n")


def placed(rank, report):
    """Compare masks of weights that are cut by rows, by columns, unevenly, and not at all, in one budget."""
    mesh = init_device_mesh("cpu", (2,))
    plain = network()
    parallel = parallelize_module(network(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    columns = network()
    for layer in (columns[0], columns[2]):
        fully_shard(layer, mesh=mesh, shard_placement_fn=lambda p: Shard(p.dim() - 1))
    for name, (pattern, sparsity, allocation) in PLACED.items():
        expected = make_masks(find_layers(plain), Magnitude(), pattern, sparsity, allocation)
        for kind, model in (("tensor parallel", parallel), ("columns", columns)):
            layers = find_layers(model)
            made = make_masks(layers, Magnitude(), pattern, sparsity, allocation)
            full = {layer.name: whole(made[layer.name], layer.parameter) for layer in layers}
            same = full.keys() == expected.keys() and all(torch.equal(full[k], expected[k]) for k in full)
            back = all(torch.equal(own_part(full[x.name], x.parameter), made[x.name]) for x in layers)
            if rank == 0:
                with open(report, "a") as file:  # noqa: PTH123
                    file.write(f"{name}, {kind} same={same and back}\n")


def scarce(rank, report):
    """Compare masks of layers of which the second process holds nothing."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 1))
    sharded = copy.deepcopy(plain)
    for layer in sharded:
        fully_shard(layer)
    for name, allocation in SCARCE.items():
        expected = make_masks(find_layers(plain), Magnitude(), "unstructured", 0.5, allocation)
        layers = find_layers(sharded)
        made = make_masks(layers, Magnitude(), "unstructured", 0.5, allocation)
        same = all(torch.equal(whole(made[x.name], x.parameter), expected[x.name]) for x in layers)
        if rank == 0:
            with open(report, "a") as file:  # noqa: PTH123
                file.write(f"scarce, {name} same={same}\n")


def all_of_it(rank, report):
    work(rank, report)
    placed(rank, report)
    scarce(rank, report)


if __name__ == "__main__":
    pairs.spawn(all_of_it, sys.argv[1])

"""Run by a test: every kind of pruning in four processes, under FSDP2 and with tensor parallelism, against one process.

In the second form the processes are a mesh of two by two: layers are cut by columns and by rows along one of its dims,
one layer is whole, and FSDP2 cuts all of them along the other.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from create.two_processes import network, train

KINDS = ("magnitude", "movement", "acdc", "rigl", "topkast", "structured", "obs", "mfac", "constant", "sensitivity")
FRESH = ("obs", "sensitivity")  # what runs the model between the steps of the training


def sharded():
    model = network()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    return fully_shard(model)


def one_unit():
    """Return a model whose weights FSDP2 keeps whole between the passes."""
    return fully_shard(network())


def parallel():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = parallelize_module(network(), mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return fully_shard(model, mesh=mesh["data"])


def work(rank, report, kinds, parallel_kinds):
    runs = [("fsdp", kind) for kind in kinds] + [("tensor", kind) for kind in parallel_kinds]
    runs += [("unit", kind) for kind in FRESH]
    for wrap, kind in runs:
        model = {"fsdp": sharded, "tensor": parallel, "unit": one_unit}[wrap]()
        found = train(model, kind, rank // 2, 2) if wrap == "tensor" else train(model, kind, rank, 4)
        gathered = [None] * 4
        dist.all_gather_object(gathered, {name: mask.tolist() for name, mask in found.items()})
        if rank:
            continue
        expected = train(network(), kind, 0, 1)
        same = list(found) == list(expected) and all(torch.equal(found[name], expected[name]) for name in found)
        with Path(report).open("a") as file:
            file.write(f"{wrap} {kind} ranks={all(one == gathered[0] for one in gathered)} same={same}\n")

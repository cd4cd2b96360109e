"""Run by a test: every kind of pruning under FSDP2 in four processes, and in one, and all masks compared."""

import sys

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import pairs
from create.two_processes import network, train

KINDS = ("magnitude", "movement", "acdc", "rigl", "topkast", "structured", "obs", "mfac", "constant")


def sharded():
    model = network()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    return fully_shard(model)


def work(rank, report, kinds):
    for kind in kinds:
        found = train(sharded(), kind, rank, 4)
        gathered = [None] * 4
        dist.all_gather_object(gathered, {name: mask.tolist() for name, mask in found.items()})
        if rank:
            continue
        expected = train(network(), kind, 0, 1)
        names = list(found) == list(expected)
        equal = sum(int((found[name] == mask).sum()) for name, mask in expected.items() if names)
        agree = equal / sum(mask.numel() for mask in expected.values())
        counts = [int(mask.sum()) for mask in found.values()] == [int(mask.sum()) for mask in expected.values()]
        alike = all(one == gathered[0] for one in gathered)
        with open(report, "a") as file:  # noqa: PTH123
            file.write(f"{kind} names={names} ranks={alike} counts={counts} agree={agree >= 0.97}\n")


if __name__ == "__main__":
    pairs.spawn(work, sys.argv[1], sys.argv[2:] or KINDS, processes=4)

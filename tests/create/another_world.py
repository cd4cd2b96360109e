"""Run by a test: a sharded run is saved by four processes, goes on in two, and ends with the masks of one process.

Weights and the optimizer are saved by `torch.distributed.checkpoint`, the manager's state beside them.
"""

import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import pairs
from create.four_processes import sharded
from create.two_processes import STEPS, data, network
from sparta.create import initialize

KINDS = ("magnitude", "movement", "topkast", "mfac")
EPOCHS = 4


def begun(model, kind):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    variables = {"num_epochs": EPOCHS, "sparsity": 0.7}
    manager, _ = initialize(model, optimizer, STEPS, pruning=kind, quantization=False, recipe_variables=variables)
    return manager, optimizer


def steps(model, optimizer, numbers, rank, world):
    for step in numbers:
        optimizer.zero_grad()
        model(data(step, rank, world)).square().mean().backward()
        optimizer.step()


def first_half(rank, folder):
    for kind in KINDS:
        model = sharded()
        manager, optimizer = begun(model, kind)
        steps(model, optimizer, range(EPOCHS * STEPS // 2), rank, 4)
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=f"{folder}/{kind}")
        state = manager.state_dict()
        if rank == 0:
            torch.save(state, f"{folder}/{kind}.state")


def second_half(rank, folder, report):
    for kind in KINDS:
        model = sharded()
        manager, optimizer = begun(model, kind)
        weights, moments = get_state_dict(model, optimizer)
        saved = {"model": weights, "optimizer": moments}
        dcp.load(saved, checkpoint_id=f"{folder}/{kind}")
        set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
        manager.load_state_dict(torch.load(f"{folder}/{kind}.state", weights_only=True))
        steps(model, optimizer, range(EPOCHS * STEPS // 2, EPOCHS * STEPS), rank, 2)
        found = {name: tesa.mask() for name, tesa in manager.spec().items()}
        manager.finalize()
        if rank == 0:
            whole = network()
            alone, optimizer = begun(whole, kind)
            steps(whole, optimizer, range(EPOCHS * STEPS), 0, 1)
            expected = {name: tesa.mask() for name, tesa in alone.spec().items()}
            equal = sum(int((found[name] == mask).sum()) for name, mask in expected.items())
            agree = equal / sum(mask.numel() for mask in expected.values())
            with Path(report).open("a") as file:
                file.write(f"{kind} agree={agree >= 0.97}\n")


if __name__ == "__main__":
    pairs.spawn(first_half, sys.argv[1], processes=4)
    pairs.spawn(second_half, sys.argv[1], sys.argv[2], processes=2)

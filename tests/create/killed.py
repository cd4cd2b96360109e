"""Run by a test: a sharded run of four processes is killed between two checkpoints, and goes on in two processes.

Weights and the optimizer are saved by `torch.distributed.checkpoint`, the manager's state beside them. What was done
after the last checkpoint is lost, as it is in life, and is done again by the processes that go on. In the end the masks
and the weights are those of one process that nobody killed.
"""

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from create.four_processes import parallel, sharded
from create.two_processes import STEPS, data, network
from sparta.create import initialize
from sparta.sparsify.shards import local, whole

KINDS = ("magnitude", "rigl", "obs", "mfac", "structured")
ALL_KINDS = (*KINDS, "movement", "acdc", "topkast")
EPOCHS = 4
SAVED, KILLED = 4, 6  # steps; 8 is the end


class Training:
    """One run: a model, its optimizer and the manager, in one or several processes."""

    def __init__(self, model, kind, rank, world):
        self.model, self.rank, self.world, self.step = model, rank, world, 0
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        variables = {"num_epochs": EPOCHS, "sparsity": 0.7}
        closure = {"loss_closure": self.fresh_loss} if kind == "obs" else {}
        self.manager, _ = initialize(
            model, self.optimizer, STEPS, pruning=kind, quantization=False, recipe_variables=variables, **closure
        )
        self.drawn = 0
        if kind in {"obs", "mfac"}:
            self.manager.pruning_modifiers[0].num_grads = 3

    def fresh_loss(self):
        self.drawn += 1  # which batches are drawn depends on the step alone
        return self.loss(1000 * (self.step + 1) + self.drawn)

    def loss(self, number):
        return self.model(data(number, self.rank, self.world)).square().mean()

    def train(self, until):
        for self.step in range(self.step, until):  # noqa: B020
            self.drawn = 0
            self.optimizer.zero_grad()
            self.loss(self.step).backward()
            self.optimizer.step()
        self.step = until

    def save(self, folder):
        weights, moments = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)
        state = self.manager.state_dict()
        if self.rank == 0:
            torch.save(state, f"{folder}/manager.pt")

    def load(self, folder):
        weights, moments = get_state_dict(self.model, self.optimizer)
        saved = {"model": weights, "optimizer": moments}
        dcp.load(saved, checkpoint_id=folder)
        set_state_dict(self.model, self.optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
        self.manager.load_state_dict(torch.load(f"{folder}/manager.pt", weights_only=True))
        self.step = SAVED

    def masks(self):
        return {name: tesa.mask() for name, tesa in self.manager.spec().items()}

    def weights(self):
        return [whole(local(parameter), parameter) for parameter in self.model.parameters()]


def until_killed(rank, folder, kinds):
    """Train every kind beyond its checkpoint, say so, and go on until the end comes."""
    for kind in kinds:
        run = Training(sharded(), kind, rank, 4)
        run.train(SAVED)
        run.save(f"{folder}/{kind}")
        run.train(KILLED)
    dist.barrier()
    Path(folder, f"beyond.{rank}").touch()
    while True:
        run.loss(0).backward()


def afterwards(rank, folder, report, kinds):
    for kind in kinds:
        run = Training(sharded(), kind, rank, 2)
        run.load(f"{folder}/{kind}")
        run.train(EPOCHS * STEPS)
        found, ended = run.masks(), run.weights()
        if rank:
            continue
        alone = Training(network(), kind, 0, 1)
        alone.train(EPOCHS * STEPS)
        expected = alone.masks()
        same = list(found) == list(expected) and all(torch.equal(found[name], expected[name]) for name in found)
        near = all(torch.allclose(a, b, atol=1e-6) for a, b in zip(ended, alone.weights(), strict=True))
        with Path(report).open("a") as file:
            file.write(f"{kind} masks={same} weights={near}\n")


def from_another_mesh(rank, folder, report):
    """Save with tensor parallelism in a mesh of two by two, load cut by rows over four processes."""
    run = Training(parallel(), "magnitude", rank // 2, 2)
    run.train(SAVED)
    run.rank = rank  # one of the four writes the manager's state
    run.save(f"{folder}/mesh")
    dist.barrier()
    run = Training(sharded(), "magnitude", rank, 4)
    run.load(f"{folder}/mesh")
    run.train(EPOCHS * STEPS)
    found = run.masks()
    if rank == 0:
        alone = Training(network(), "magnitude", 0, 1)
        alone.train(EPOCHS * STEPS)
        same = all(torch.equal(found[name], mask) for name, mask in alone.masks().items())
        with Path(report).open("a") as file:
            file.write(f"mesh masks={same}\n")

"""Pruning while a model is trained in parts: tensor parallel layers, FSDP2 over them, and checkpoints for any mesh.

Run with ``torchrun --nproc-per-node 4 examples/sharded_training.py 2``: two of four processes share each layer, and two
such pairs share the data. Alone it is a mesh of one process, with the same masks. A second run with another number of
processes goes on where the first one was stopped, or killed.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import sparta

FOLDER = Path("sharded-run")
STEPS, EPOCHS = 20, 6


class Block(nn.Module):
    """Two linear layers around a shortcut: the first is cut by outputs, the second by inputs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output, of the shape of its input."""
        return x + self.down(torch.relu(self.up(self.norm(x))))


if "RANK" in os.environ:
    dist.init_process_group("gloo")
else:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
rank, world = dist.get_rank(), dist.get_world_size()
tensor = int(sys.argv[1]) if sys.argv[1:] and world > 1 else 1
mesh = init_device_mesh("cpu", (world // tensor, tensor), mesh_dim_names=("data", "tensor"))

# a model, distributed as ever: whole, on the meta device, or of another library
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), Block(32), Block(32), nn.Linear(32, 2))
for block in model[1:3]:
    parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(block, mesh=mesh["data"])
fully_shard(model, mesh=mesh["data"])
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

# one call, after the model is distributed; thresholds are found over all processes, and no weight is gathered for them
variables = {"num_epochs": EPOCHS, "sparsity": 0.9, "init_lr": 3e-3}
manager, optimizer = sparta.create.initialize(model, optimizer, STEPS, quantization=False, recipe_variables=variables)

finished = sorted(FOLDER.glob("*/manager.pt"), key=lambda path: int(path.parent.name))
if finished:
    weights, moments = get_state_dict(model, optimizer)
    saved = {"model": weights, "optimizer": moments}
    dcp.load(saved, checkpoint_id=finished[-1].parent)
    set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
    manager.load_state_dict(torch.load(finished[-1], weights_only=True))

for step in range(manager.step, STEPS * EPOCHS):
    inputs = torch.randn(64, 16, generator=torch.Generator().manual_seed(step))
    inputs = inputs.chunk(world // tensor)[mesh["data"].get_local_rank()]
    labels = (inputs[:, :4].sum(1) > 0).long()
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs), labels)
    loss.backward()
    optimizer.step()
    if (step + 1) % 40 == 0:
        weights, moments = get_state_dict(model, optimizer)
        folder = FOLDER / str(step + 1)
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)
        state = manager.state_dict()  # by all processes together; the same in each
        if rank == 0:  # last, and in one move: a checkpoint with this file is whole
            torch.save(state, folder / "manager.part")
            (folder / "manager.part").rename(folder / "manager.pt")

spec = manager.spec()
manager.finalize()
if rank == 0:
    print(f"{world} processes, {tensor} of them for each layer: loss {loss.item():.3f}")
    print(f"{1 - spec.density:.1%} of the weights are zero")
dist.destroy_process_group()

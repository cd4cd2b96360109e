"""Run by a test: the schedulers under DDP and FSDP2 in two processes, beside one process with the same data."""

import sys

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import pairs
from sparta.scheduler import BaseScheduler, build_sparse_scheduler

STEPS = 6
CONFIGS = {
    "levels": {
        "scheduler": {
            "type": "AmbaLevelPruneScheduler",
            "kwargs": {"total_iters": STEPS, "sparsity_table": [30, 60], "output_dir": None, "save_dir": None},
        }
    },
    "ampere": {"scheduler": {"type": "AmpereScheduler", "kwargs": {"verbosity": 0, "alignment": [4, 4]}}},
    "ampere 2d": {
        "scheduler": {
            "type": "AmpereScheduler",
            "kwargs": {"mask_calculator": "m4n2_2d_best", "verbosity": 0, "alignment": [4, 4]},
        }
    },
    "str": {
        "mask_generator": {"type": "STRMaskGenerator"},
        "fake_sparse": {"type": "STRFakeSparse", "kwargs": {"sInit_value": -3}},
        "scheduler": {"type": "STRScheduler"},
    },
    "admm": {"scheduler": {"type": "ADMMScheduler"}, "sparsity": {"target_sparsity": 0.5, "uniform": False}},
    "admm filters": {
        "mask_generator": {"type": "NormalMaskGenerator", "kwargs": {"structured": True}},
        "scheduler": {"type": "ADMMScheduler"},
        "sparsity": {"target_sparsity": 0.5, "uniform": True},
    },
    "probmask": {
        "mask_generator": {"type": "ProbMaskGenerator"},
        "fake_sparse": {"type": "ProbMaskFakeSparse", "kwargs": {"score_init_constant": 0.9}},
        "scheduler": {"type": "ProbMaskPruneScheduler", "kwargs": {"prune_rate": 0.6, "total_iterations": STEPS}},
    },
}


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4))


def train(name, wrap, rank, world):
    """Train with the scheduler `name`; return the zeros of all weights, gathered, and the measured sparsity."""
    scheduler = build_sparse_scheduler(CONFIGS[name])
    model = network()
    if wrap is fully_shard and name.startswith("ampere"):  # nothing is added to the model, so shard first
        model = wrap(model)
        scheduler.prepare_sparse_model(model)
    else:
        model = wrap(scheduler.prepare_sparse_model(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if name.startswith("admm"):
        scheduler.before_run(model, 1, STEPS)
    scheduler.init_optimizer(optimizer)
    torch.manual_seed(7)  # every process draws the same masks, as one would
    for step in range(STEPS):
        x = torch.randn(8, 12, generator=torch.Generator().manual_seed(step)).chunk(world)[rank]
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        scheduler.prune_model(model, step)
    if name == "probmask":
        scheduler.fix_model_subnet(model)
    rate = scheduler.compute_sparse_rate(model)
    if name.startswith("ampere"):
        masks = {key: tesa.mask() for key, tesa in scheduler.export_sparse_model(model).spec.items()}
    else:
        masks = {prepared.name: prepared.effective != 0 for prepared in scheduler._layers}
    return masks, rate


def export_after_evaluation():
    """FSDP2 holds gathered weights after an evaluation; what is exported then is the sharded ones all the same."""
    scheduler = BaseScheduler()
    model = fully_shard(scheduler.prepare_sparse_model(network()))
    x = torch.randn(4, 12, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model(x)
        scheduler.update_sparsity_per_layer(model, 0.5)
        expected = model(x)
        model, spec = scheduler.export_sparse_model(model)
        plain = network()
        plain.load_state_dict({name: value.full_tensor() for name, value in model.state_dict().items()})
        return torch.equal(plain(x), expected), spec.density == 0.5


def work(rank, report):
    for name in CONFIGS:
        expected, wanted = train(name, lambda model: model, 0, 1)
        for kind, wrap in (("ddp", DistributedDataParallel), ("fsdp", fully_shard)):
            masks, rate = train(name, wrap, rank, 2)
            same = masks.keys() == expected.keys() and all(torch.equal(masks[k], expected[k]) for k in masks)
            line = f"{name} {kind} same={same} rate={rate == wanted}"
            if rank == 0:
                with open(report, "a") as file:  # noqa: PTH123
                    file.write(line + "\n")
    same, exact = export_after_evaluation()
    if rank == 0:
        with open(report, "a") as file:  # noqa: PTH123
            file.write(f"export fsdp same={same} rate={exact}\n")


if __name__ == "__main__":
    pairs.spawn(work, sys.argv[1])

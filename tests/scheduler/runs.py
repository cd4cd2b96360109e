"""Whole trainings with each scheduler; run as a script, it resumes all of them from a file, in a process of its own."""

import sys

import torch

from scheduler.nets import small_net, step_of
from sparta.scheduler import build_sparse_scheduler

STEPS = 12
LEVELS = {"total_iters": STEPS, "sparsity_table": [30, 60, 80], "output_dir": None, "save_dir": None}
PROB = {"mask_generator": {"type": "ProbMaskGenerator"}, "fake_sparse": {"type": "ProbMaskFakeSparse"}}
CONFIGS = {
    "levels": {"scheduler": {"type": "AmbaLevelPruneScheduler", "kwargs": LEVELS}},
    "ampere": {
        "scheduler": {"type": "AmpereScheduler", "kwargs": {"allow_recompute_mask": True, "verbosity": 0}},
    },
    "str": {
        "mask_generator": {"type": "STRMaskGenerator"},
        "fake_sparse": {"type": "STRFakeSparse", "kwargs": {"sInit_value": -5}},
        "scheduler": {"type": "STRScheduler"},
    },
    "probmask": {
        **PROB,
        "scheduler": {"type": "ProbMaskPruneScheduler", "kwargs": {"prune_rate": 0.75, "total_iterations": STEPS}},
    },
    "admm": {"scheduler": {"type": "ADMMScheduler"}, "sparsity": {"target_sparsity": 0.75, "uniform": False}},
}


class Run:
    """A whole training with one of the schedulers, as a script would have it."""

    def __init__(self, name, *, compiled=False):
        self.scheduler = build_sparse_scheduler(CONFIGS[name])
        self.model = self.scheduler.prepare_sparse_model(small_net(width=16))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, weight_decay=0.1)
        self.lr = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 4)
        self.call = torch.compile(self.model, backend="aot_eager", fullgraph=True) if compiled else self.model
        if name == "levels":
            self.scheduler.set_lr_scheduler(self.lr)
        self.name = name

    def begin(self):
        if self.name == "admm":
            self.scheduler.before_run(self.model, 2, STEPS)
        return self.attach()

    def attach(self):
        if self.name in {"ampere", "admm"}:
            self.scheduler.init_optimizer(self.optimizer)
        return self

    def go(self, iterations):
        for iteration in iterations:
            step_of(self.call, self.optimizer, iteration)
            self.scheduler.prune_model(self.model, iteration)
            self.lr.step()
        return self

    def parts(self):
        return self.model, self.optimizer, self.lr, self.scheduler

    def resume(self, states):
        for part, state in zip(self.parts(), states, strict=True):
            part.load_state_dict(state)
        return self.attach()


if __name__ == "__main__":
    torch.set_num_threads(1)
    finished = {}
    for scheduler, (cut, states) in torch.load(sys.argv[1], weights_only=True).items():
        run = Run(scheduler).resume(states).go(range(cut, STEPS))
        finished[scheduler] = run.scheduler.export_sparse_model(run.model).model.state_dict()
    torch.save(finished, sys.argv[2])

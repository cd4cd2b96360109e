"""How accurate are sparse models? Each scheduler and sparsity beside dense, trained for real, several seeds.

Run with ``python benchmarks/training/accuracy.py`` for scikit-learn's digits, or with ``--data FOLDER`` for MNIST and,
where the folder has it, Fashion-MNIST (see ``data.py``), ``--device cuda`` for a GPU, ``--jobs N`` for several
trainings at a time, ``--images N`` to train with fewer images in as many steps. All
methods start from the same dense model and train for as many steps with the same optimizer; "dense" goes on too, so
nobody gains from training longer. Accuracies are those of the exported, plain model on the test images; the number of
zeros is counted there and held to what was asked for.
"""

from __future__ import annotations

import argparse
import copy
import multiprocessing
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import save
from sparta.scheduler import AmpereScheduler, ProbMaskPruneScheduler, build_sparse_scheduler
from sparta.sparsify import find_layers
from sparta.tables import table
from training.data import Images, load, names_of_data
from training.methods import Method, expected_zeros, methods

LEARNING_RATE = 0.05
HARDENING = 0.8  # share of a ProbMask training after which its mask is fixed


@dataclass(frozen=True)
class Plan:
    """How much training: a batch size, epochs of the dense model before, and of each method after."""

    batch: int
    dense_epochs: int
    epochs: int


SMALL = Plan(64, 20, 28)  # for the digits
LARGE = {"mlp": Plan(500, 10, 14), "cnn": Plan(500, 4, 7)}  # for 60,000 images, in batches of this share of them


class MLP(nn.Module):
    """Two hidden layers, their sizes multiples of what sparse tensor cores want."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.stem = nn.Linear(side * side, 256)
        self.hidden = nn.Linear(256, 128)
        self.head = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of images of shape (N, 1, H, W)."""
        x = torch.relu(self.stem(x.flatten(1)))
        return self.head(torch.relu(self.hidden(x)))


class CNN(nn.Module):
    """Three convolutions, two of them with a stride, and two linear layers."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 3, stride=2, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(16)
        self.middle = nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(32)
        self.last = nn.Conv2d(32, 32, 3, padding=1, bias=False)
        self.norm3 = nn.BatchNorm2d(32)
        self.wide = nn.Linear(32 * (-(-side // 4)) ** 2, 64)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of images of shape (N, 1, H, W)."""
        x = torch.relu(self.norm1(self.stem(x)))
        x = torch.relu(self.norm2(self.middle(x)))
        x = torch.relu(self.norm3(self.last(x)))
        return self.head(torch.relu(self.wide(x.flatten(1))))


MODELS = {"mlp": MLP, "cnn": CNN}


def batches(data: Images, size: int, steps: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield `steps` batches, epoch after epoch, each in a new order that depends on the seed alone."""
    count = len(data.train_labels)
    generator = torch.Generator().manual_seed(seed)
    done = 0
    while done < steps:
        order = torch.randperm(count, generator=generator).to(data.train_labels.device)
        for start in range(0, count - size + 1, size):
            if done == steps:
                return
            chosen = order[start : start + size]
            yield data.train_images[chosen], data.train_labels[chosen]
            done += 1


@torch.no_grad()
def accuracy(model: nn.Module, data: Images) -> float:
    """Return the share of test images in the right class, in percent."""
    was_training = model.training
    model.eval()
    right = (model(data.test_images).argmax(1) == data.test_labels).double().mean()
    model.train(was_training)
    return 100 * float(right)


def make_optimizer(parameters: list[nn.Parameter], weight_decay: float) -> torch.optim.Optimizer:
    """Return the optimizer that every training uses."""
    return torch.optim.SGD(
        parameters, lr=LEARNING_RATE, momentum=0.9, nesterov=True, weight_decay=weight_decay, foreach=True
    )


def train_dense(model: nn.Module, data: Images, plan: Plan, steps: int, seed: int, weight_decay: float = 5e-4) -> None:
    """Train a dense model with one cosine."""
    optimizer = make_optimizer(list(model.parameters()), weight_decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for images, labels in batches(data, plan.batch, steps, seed):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        schedule.step()


def retrain(model: nn.Module, data: Images, plan: Plan, method: Method, steps: int, seed: int) -> list[dict[str, Any]]:
    """Retrain with one method; return a row for each sparsity it passes through."""
    if method.config is None:
        train_dense(model, data, plan, steps, seed)
        return [measured(model, data, method, None)]
    scheduler: Any = build_sparse_scheduler(method.config)
    model = scheduler.prepare_sparse_model(model)
    levels = len(method.asked) if method.name.startswith("levels") else 1
    optimizers = optimizers_of(model, scheduler, method)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizers[0], -(-steps // levels))
    steps_per_epoch = len(data.train_labels) // plan.batch
    begin(scheduler, model, optimizers[0], schedule, (min(steps_per_epoch, steps), steps))
    ends = {(level + 1) * steps // levels: percent for level, percent in enumerate(method.asked[:-1])}
    rows = []
    for step, (images, labels) in enumerate(batches(data, plan.batch, steps, seed)):
        for each in optimizers:
            each.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        for each in optimizers:
            each.step()
        if isinstance(scheduler, ProbMaskPruneScheduler) and step == round(HARDENING * steps):
            scheduler.fix_model_subnet(model)
        scheduler.prune_model(model, step)
        schedule.step()
        if method.recompute and step % steps_per_epoch == 0 and step < steps // 2:
            scheduler.compute_sparse_masks()
        if levels > 1 and step + 1 in ends:
            rows.append(measured(model, data, method, ends[step + 1]))
    exported = scheduler.export_sparse_model(model).model
    return [*rows, measured(exported, data, method, method.asked[-1] if method.asked else None)]


def optimizers_of(
    model: nn.Module,
    scheduler: Any,
    method: Method,
) -> list[torch.optim.Optimizer]:
    """Return the optimizer of the weights and, where probabilities are learnt, theirs."""
    scores = [] if isinstance(scheduler, AmpereScheduler) else scheduler.score_parameters()
    own = {id(score) for score in scores}
    optimizer = make_optimizer([p for p in model.parameters() if id(p) not in own], method.weight_decay)
    if isinstance(scheduler, ProbMaskPruneScheduler):
        return [optimizer, torch.optim.Adam(scores, lr=6e-3, foreach=True)]
    if scores:
        optimizer.add_param_group({"params": scores, "weight_decay": method.threshold_decay})
    return [optimizer]


def begin(
    scheduler: Any,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: Any,
    run: tuple[int, int],
) -> None:
    """Make the calls that some of the schedulers want before the first step."""
    if hasattr(scheduler, "set_lr_scheduler"):
        scheduler.set_lr_scheduler(schedule)
    if hasattr(scheduler, "before_run"):
        scheduler.before_run(model, *run)
    if isinstance(scheduler, AmpereScheduler) or hasattr(scheduler, "before_run"):
        scheduler.init_optimizer(optimizer)


def measured(model: nn.Module, data: Images, method: Method, percent: int | None) -> dict[str, Any]:
    """Return what is to be known of a model as it is now: its accuracy, and its zeros, counted."""
    model.eval()
    # a weight under fake sparsity is what the layer computes with, a plain one itself
    weights = {
        f"{name}.weight": module.weight.detach()
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d)
    }
    zeros = sum(int((weight == 0).sum()) for weight in weights.values())
    total = sum(weight.numel() for weight in weights.values())
    wanted = (
        None
        if percent is None
        else expected_zeros(method, percent, {name: tuple(weight.shape) for name, weight in weights.items()})
    )
    model.train()
    return {
        "asked": None if percent is None else percent / 100,
        "sparsity": zeros / total,
        "exact": None if wanted is None else zeros == wanted,
        "accuracy": accuracy(model, data),
    }


@dataclass(frozen=True)
class Job:
    """All methods for one model and one seed: they share the dense model they start from."""

    model: str
    seed: int
    folder: Path | None
    data: str
    images: int | None
    device: str
    scale: float
    threads: int | None
    only: str


def plan_of(job: Job, images: int) -> Plan:
    """Return how much training: as many steps for fewer images, in smaller batches."""
    if job.data == "digits":
        return SMALL
    large = LARGE[job.model]
    return replace(large, batch=max(1, large.batch * images // 60_000))


def work(job: Job) -> list[dict[str, Any]]:
    """Train a dense model, then every method from it."""
    if job.threads:
        torch.set_num_threads(job.threads)
    data = load(job.folder, job.device, job.data, job.images)
    plan = plan_of(job, len(data.train_labels))
    per_epoch = len(data.train_labels) // plan.batch
    dense_steps, steps = (max(7, round(job.scale * epochs * per_epoch)) for epochs in (plan.dense_epochs, plan.epochs))
    torch.manual_seed(job.seed)
    start = MODELS[job.model](data.train_images.shape[-1]).to(job.device)
    train_dense(start, data, plan, dense_steps, job.seed)
    found = []
    for method in methods(steps):
        if job.only not in method.name:
            continue
        torch.manual_seed(job.seed)
        began = time.perf_counter()
        rows = retrain(copy.deepcopy(start), data, plan, method, steps, 1000 + job.seed)
        seconds = time.perf_counter() - began
        found += [
            {"data": job.data, "model": job.model, "method": method.name, "seed": job.seed, "seconds": seconds, **row}
            for row in rows
        ]
        last = rows[-1]
        print(
            f"{job.data} {job.model} seed {job.seed} {method.name:32} sparsity {last['sparsity']:.4f} "
            f"accuracy {last['accuracy']:.2f} ({seconds:.0f} s)",
            flush=True,
        )
    return found


def gathered(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put the seeds of a model, method and sparsity together."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row["seed"]):
        groups.setdefault((row["model"], row["method"], row.get("allocation"), row["asked"]), []).append(row)
    made = []
    for (model, method, allocation, asked), group in groups.items():
        accuracies = [row["accuracy"] for row in group]
        made.append(
            {
                "model": model,
                "method": method,
                **({} if allocation is None else {"allocation": allocation}),
                "asked": asked,
                "sparsity": statistics.mean(row["sparsity"] for row in group),
                "exact": None if group[0]["exact"] is None else all(row["exact"] for row in group),
                "accuracy": statistics.mean(accuracies),
                "spread": statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0,
                "accuracies": accuracies,
            }
        )
    return made


def main() -> None:
    """Train everything, print the table and save it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with MNIST and Fashion-MNIST; without it the digits")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time")
    parser.add_argument("--threads", type=int, help="CPU threads of each job")
    parser.add_argument("--images", type=int, help="train with the first so many, where all take too long")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the epochs, to try the script")
    parser.add_argument("--only", default="", help="methods whose name contains this; not saved")
    parser.add_argument("--out", type=Path, help="folder for the JSON instead of benchmarks/results")
    options = parser.parse_args()
    names = names_of_data(options.data)
    jobs = [
        Job(
            model,
            seed,
            options.data,
            name,
            options.images,
            options.device,
            options.scale,
            options.threads,
            options.only,
        )
        for model in reversed(options.models)  # the slowest first
        for seed in range(options.seeds)
        for name in names
    ]
    began = time.perf_counter()
    if options.jobs > 1:
        with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
            rows = [row for done in as_completed([pool.submit(work, job) for job in jobs]) for row in done.result()]
    else:
        rows = [row for job in jobs for row in work(job)]
    for name in names:
        finish(name, [row for row in rows if row["data"] == name], options, time.perf_counter() - began)


def finish(name: str, rows: list[dict[str, Any]], options: argparse.Namespace, seconds: float) -> None:
    """Print the table of one data set, and save it unless only some methods were asked for."""
    rows = [row for model in options.models for row in gathered(rows) if row["model"] == model]
    print(
        table(
            ["model", "method", "asked", "sparsity", "exact", "accuracy", "spread"],
            [
                [r["model"], r["method"], r["asked"], f"{r['sparsity']:.4f}", r["exact"]]
                + [f"{r[key]:.2f}" for key in ("accuracy", "spread")]
                for r in rows
            ],
            title=name,
        )
    )
    if options.only:
        return
    data = load(options.data, "cpu", name, options.images)
    device = torch.cuda.get_device_name() if options.device.startswith("cuda") else f"{platform.machine()} cpu"
    side = data.train_images.shape[-1]
    results = {
        "data": name,
        "seeds": options.seeds,
        "scale": options.scale,
        "train_images": len(data.train_labels),
        "seconds": seconds,
        "parameters": {m: sum(x.parameter.numel() for x in find_layers(MODELS[m](side))) for m in options.models},
        "rows": rows,
    }
    print(f"saved {save(f'training_accuracy_{name}', device, results, folder=options.out)}")


if __name__ == "__main__":
    main()

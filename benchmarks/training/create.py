"""What does one call of `sparta.create.initialize` cost in accuracy? Its recipes beside dense, on real data.

Run with ``python benchmarks/training/create.py`` for scikit-learn's digits; with ``--data FOLDER`` for MNIST (see
``data.py``) and, where the folder has ``fashion.npz`` with the same four arrays, Fashion-MNIST; ``--device cuda`` for a
GPU; ``--quick`` to try it on a CPU. Every method starts from the same dense model, trained before, and trains for the
20 epochs of the default recipe with the same optimizer; "dense" goes on for as long, so nobody gains from training
longer. Only ``sparsity`` and what a row names differ from the defaults. Accuracies are those of the finished model on
test images that nothing was chosen by, weights and activations rounded to 8 bits where it is quantized; zeros are
counted and held to what was asked for. ``gmp`` is ``magnitude`` under another name; it stands for ranking each layer
alone here. "Reference" rows are the same algorithms in plain PyTorch (``references.py``). Every row is written to
``create_rows.jsonl`` in the folder of the results when it is done; ``--continue`` leaves out those that stand there.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import multiprocessing
import platform
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import RESULTS, save
from sparta.create import initialize, recipe_for
from sparta.sparsify import find_layers
from sparta.tables import table
from training.accuracy import MODELS, accuracy, batches, gathered
from training.data import Images, load, names_of_data
from training.references import REFERENCES, SPREAD

SAMPLES = 16  # images of a fresh batch for second-order pruning
TRANSFER = "other data"


@dataclass(frozen=True)
class Method:
    """One row of the comparison: arguments for `initialize`, and variables for its recipe besides the sparsity."""

    name: str
    arguments: Mapping[str, Any]
    variables: Mapping[str, Any] = field(default_factory=dict)
    start: str = "dense"
    reference: str | None = None

    @property
    def allocation(self) -> str:
        """How the sparsity is spread over the layers: as asked, or the kind's own way."""
        kind = self.arguments.get("pruning", True)
        if self.reference is not None:
            return SPREAD[self.reference]
        if kind in {False, "constant"}:
            return ""
        recipe = recipe_for(kind, quantization=False, variables=self.variables)
        return str(recipe.modifiers()[-1].spread_by)


DENSE = (
    Method("dense", {"pruning": False, "quantization": False}),
    Method("dense, quantized", {"pruning": False}),
    Method("dense, from other data", {"pruning": False, "quantization": False}, start=TRANSFER),
)
SPARSE = (
    Method("default recipe: magnitude, quantized", {}),
    Method("the same, distilled", {"distillation": True}),
    Method("magnitude", {"quantization": False}),
    Method("magnitude, distilled", {"quantization": False, "distillation": True}),
    Method("gmp, layer by layer", {"pruning": "gmp", "quantization": False}, {"global_sparsity": False}),
    *(
        Method(kind, {"pruning": kind, "quantization": False})
        for kind in ("acdc", "movement", "obs", "mfac", "rigl", "topkast")
    ),
    *(
        Method(kind, {"pruning": kind, "quantization": False}, {"allocation": allocation})
        for kind, allocations in {
            "magnitude": ("global", "erk", "sensitivity"),
            "acdc": ("global",),
            "movement": ("global", "uniform"),
            "obs": ("erk",),
            "mfac": ("erk",),
            "rigl": ("uniform",),
            "topkast": ("global", "uniform"),
        }.items()
        for allocation in allocations
    ),
    *(Method(f"{name}, reference", {}, reference=name) for name in REFERENCES),
    Method("constant, from other data", {"pruning": "constant", "quantization": False}, start=TRANSFER),
)
OTHER = {"mnist": "fashion", "fashion": "mnist"}


@dataclass(frozen=True)
class Plan:
    """How much is trained, and where."""

    folder: Path | None
    device: str
    epochs: int = 20
    dense_epochs: int = 10
    steps: int = 30
    images: int | None = None
    only: tuple[str, ...] = ()
    threads: int | None = None
    rows: Path | None = None


@dataclass(frozen=True, order=True)
class Job:
    """What one process does in one go: all methods for a seed, a network, a data set and a sparsity."""

    seed: int
    model: str
    data: str
    percent: int  # 0: the dense methods


# ---------------------------------------------------------------------- data


@functools.cache
def images(name: str, plan: Plan) -> Images:
    """Return a data set, cut short if the plan says so."""
    return load(plan.folder, plan.device, name, plan.images)


# ---------------------------------------------------------------------- training


def train(
    model: nn.Module, data: Images, steps_per_epoch: int, epochs: int, seed: int, arguments: Mapping[str, Any]
) -> nn.Module:
    """Train as any script would, with one call of `initialize` before it; return the finished model."""
    size = len(data.train_labels) // steps_per_epoch
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, foreach=True)
    torch.manual_seed(seed)
    model.train()
    manager, optimizer = initialize(model, optimizer, steps_per_epoch, seed=seed, **arguments)
    for inputs, labels in batches(data, size, epochs * steps_per_epoch, 1000 + seed):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    manager.finalize()
    return model.eval()


def fresh_loss(model: nn.Module, data: Images, seed: int) -> Callable[[], Tensor]:
    """Return a function that returns the loss of some images drawn by chance."""
    device = data.train_labels.device
    generator = torch.Generator(device).manual_seed(seed)

    def loss() -> Tensor:
        chosen = torch.randint(len(data.train_labels), (SAMPLES,), generator=generator, device=device)
        return nn.functional.cross_entropy(model(data.train_images[chosen]), data.train_labels[chosen])

    return loss


def start_of(job: Job, data: Images, plan: Plan) -> nn.Module:
    """Return the dense model that the methods start from."""
    torch.manual_seed(job.seed)
    model = MODELS[job.model](data.train_images.shape[-1]).to(plan.device)
    dense = {**DENSE[0].arguments, "recipe_variables": {"num_epochs": plan.dense_epochs}}
    return train(model, data, plan.steps, plan.dense_epochs, job.seed, dense)


def transferred(job: Job, plan: Plan) -> nn.Module:
    """Return what is fine-tuned: the model of the other data set, sparse as the job wants it."""
    data = images(OTHER[job.data], plan)
    model = start_of(job, data, plan)
    if not job.percent:
        return model
    variables = {"num_epochs": plan.epochs, "sparsity": job.percent / 100}
    return train(model, data, plan.steps, plan.epochs, job.seed, {"quantization": False, "recipe_variables": variables})


def arguments_of(method: Method, job: Job, plan: Plan) -> dict[str, Any]:
    """Return the arguments of `initialize`."""
    variables = {"num_epochs": plan.epochs, **method.variables}
    if job.percent and method.start == "dense":
        variables["sparsity"] = job.percent / 100
    return {**method.arguments, "recipe_variables": variables}


def work(job: Job, plan: Plan) -> list[dict[str, Any]]:
    """Train the dense model, then every method from it."""
    if plan.threads:
        torch.set_num_threads(plan.threads)
    data = images(job.data, plan)
    chosen = [
        method
        for method in (SPARSE if job.percent else DENSE)
        if (method.start == "dense" or OTHER.get(job.data) in names_of_data(plan.folder))
        and (not plan.only or any(part in method.name for part in plan.only))
    ]
    starts: dict[str, nn.Module] = {}
    rows = stored(plan.rows, job)
    done = {(row["method"], row["allocation"]) for row in rows}
    for method in chosen:
        if (method.name, method.allocation) in done:
            continue
        began = time.perf_counter()
        if method.start not in starts:
            starts[method.start] = start_of(job, data, plan) if method.start == "dense" else transferred(job, plan)
        model = retrained(copy.deepcopy(starts[method.start]), data, method, job, plan)
        row = {
            "model": job.model,
            "method": method.name,
            "allocation": method.allocation,
            "seed": job.seed,
            **measured(model, data, job.percent),
            "seconds": time.perf_counter() - began,
        }
        rows.append(row)
        if plan.rows is not None:
            with plan.rows.open("a") as file:  # one short write: processes do not mix
                file.write(json.dumps({"data": job.data, "percent": job.percent, **row}) + "\n")
        print(
            f"{job.data} {job.model} seed {job.seed} {method.name:38} {method.allocation:11} "
            f"sparsity {row['sparsity']:.4f} accuracy {row['accuracy']:.2f} ({row['seconds']:.1f} s)",
            flush=True,
        )
    return rows


def retrained(model: nn.Module, data: Images, method: Method, job: Job, plan: Plan) -> nn.Module:
    """Return the model, trained by the package or by the reference."""
    if method.reference is not None:
        torch.manual_seed(job.seed)
        steps = plan.epochs * plan.steps
        size = len(data.train_labels) // plan.steps
        given = batches(data, size, steps, 1000 + job.seed)
        return REFERENCES[method.reference](model, given, steps, job.percent / 100)
    arguments = arguments_of(method, job, plan)
    if method.name == "obs" or method.allocation == "sensitivity":
        arguments["loss_closure"] = fresh_loss(model, data, job.seed)
    return train(model, data, plan.steps, plan.epochs, job.seed, arguments)


def stored(path: Path | None, job: Job) -> list[dict[str, Any]]:
    """Return the rows of a job that an earlier run wrote."""
    if path is None or not path.exists():
        return []
    key = (job.seed, job.model, job.data, job.percent)
    rows = [json.loads(line) for line in path.read_text().splitlines() if line]
    mine = [row for row in rows if (row["seed"], row["model"], row["data"], row["percent"]) == key]
    return [{name: value for name, value in row.items() if name not in {"data", "percent"}} for row in mine]


def measured(model: nn.Module, data: Images, percent: int) -> dict[str, Any]:
    """Return the accuracy of a finished model, and its zeros, counted."""
    weights = [layer.parameter.detach() for layer in find_layers(model)]
    zeros = sum(int((weight == 0).sum()) for weight in weights)
    sparsity = zeros / sum(weight.numel() for weight in weights)
    return {
        "asked": percent / 100 if percent else None,
        "sparsity": sparsity,
        "exact": abs(sparsity - percent / 100) < 1e-3 if percent else None,
        "accuracy": accuracy(model, data),
    }


# ---------------------------------------------------------------------- the whole


def results(done: Mapping[Job, list[dict[str, Any]]], data: str, plan: Plan, seconds: float) -> dict[str, Any]:
    """Return what is saved for one data set, of the seeds that are complete."""
    rows = [row for job in sorted(done) if job.data == data for row in done[job]]
    found = images(data, plan)
    grouped = gathered(rows)
    return {
        "data": data,
        "seeds": min((len(row["accuracies"]) for row in grouped), default=0),
        "epochs": plan.epochs,
        "dense_epochs": plan.dense_epochs,
        "steps_per_epoch": plan.steps,
        "batch": len(found.train_labels) // plan.steps,
        "train_images": len(found.train_labels),
        "test_images": len(found.test_labels),
        "seconds": seconds,
        "rows": [row for model in MODELS for row in grouped if row["model"] == model],
    }


def finished(jobs: list[Job], plan: Plan, at_a_time: int) -> Iterable[tuple[Job, list[dict[str, Any]]]]:
    """Yield jobs and their rows as they are done, first seeds first."""
    if at_a_time == 1:
        for job in jobs:
            yield job, work(job, plan)
        return
    with ProcessPoolExecutor(at_a_time, multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(work, job, plan): job for job in jobs}
        for done in as_completed(running):
            yield running[done], done.result()


def options_given() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with MNIST and Fashion-MNIST; without it the digits")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--percents", nargs="+", type=int, default=[80, 90, 95], help="sparsities")
    parser.add_argument("--jobs", type=int, help="trainings at a time; by default 12 on a GPU, 1 on a CPU")
    parser.add_argument("--threads", type=int, help="CPU threads of each job; by default 1 if there are several")
    parser.add_argument("--quick", action="store_true", help="one seed, 80 %%, 10 epochs, 6,000 images; not for tables")
    parser.add_argument("--steps", type=int, default=30, help="steps of an epoch, in batches as large as that takes")
    parser.add_argument("--images", type=int, help="train with the first so many, where all take too long")
    parser.add_argument("--epochs", type=int, help="other than the 20 of the default recipe")
    parser.add_argument(
        "--only", nargs="+", default=[], help="methods whose names contain one of these; saved only with --out"
    )
    parser.add_argument("--continue", dest="goes_on", action="store_true", help="leave out rows that are stored")
    parser.add_argument("--out", type=Path, help="folder for the JSON instead of benchmarks/results")
    return parser.parse_args()


def main() -> None:
    """Train everything, print the tables and save them, first whenever a seed is complete."""
    options = options_given()
    at_a_time = options.jobs or (12 if options.device.startswith("cuda") else 1)
    threads = options.threads or (1 if at_a_time > 1 else None)
    plan = Plan(options.data, options.device, steps=options.steps, images=options.images, only=tuple(options.only),
                threads=threads)  # fmt: skip
    seeds, percents = range(options.seeds), options.percents
    if options.quick:
        seeds, percents, plan = range(1), [80], replace(plan, epochs=10, dense_epochs=5, images=6000)
    if options.epochs:
        plan = replace(plan, epochs=options.epochs)
    file = (options.out or RESULTS) / "create_rows.jsonl"
    if options.out or not options.only:
        file.parent.mkdir(parents=True, exist_ok=True)
        plan = replace(plan, rows=file)
        if not options.goes_on:
            file.unlink(missing_ok=True)
    names = names_of_data(plan.folder)
    jobs = [
        Job(seed, model, name, percent)
        for seed in seeds
        for model in reversed(options.models)  # the slowest first
        for percent in [*percents, 0]
        for name in names
    ]
    device = torch.cuda.get_device_name() if options.device.startswith("cuda") else f"{platform.machine()} cpu"
    began = time.perf_counter()
    done: dict[Job, list[dict[str, Any]]] = {}
    for job, rows in finished(jobs, plan, at_a_time):
        done[job] = rows
        complete = {seed for seed in seeds if all(other in done for other in jobs if other.seed == seed)}
        if job.seed in complete and (options.out or not options.only):
            whole = {other: rows for other, rows in done.items() if other.seed in complete}
            for name in names:
                found = results(whole, name, plan, time.perf_counter() - began)
                save(f"create_accuracy_{name}", device, found, folder=options.out)
    for name in names:
        show(results(done, name, plan, time.perf_counter() - began))
    file.unlink(missing_ok=True)  # all of it stands in the results


def show(found: Mapping[str, Any]) -> None:
    """Print the table of one data set."""
    print(f"{found['data']}, {found['seeds']} seeds, {found['seconds']:.0f} s")
    print(
        table(
            ["model", "method", "allocation", "asked", "sparsity", "exact", "accuracy", "spread"],
            [
                [row["model"], row["method"], row["allocation"], row["asked"], f"{row['sparsity']:.4f}", row["exact"]]
                + [f"{row[key]:.2f}" for key in ("accuracy", "spread")]
                for row in found["rows"]
            ],
        )
    )


if __name__ == "__main__":
    main()

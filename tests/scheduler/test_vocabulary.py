"""One word for one thing: all schedulers take the same names, older ones mean the same, and all of them log."""

import inspect
from pathlib import Path

import pytest
import torch
from torch import nn

from sparta.errors import NameNotFoundError, ValueRangeError
from sparta.scheduler import ADMMScheduler, AmpereScheduler, build_sparse_scheduler
from sparta.scheduler.registry import FAKE_SPARSES, MASK_GENERATORS, SCHEDULERS
from sparta.sparsify import History

PROBMASK = {"mask_generator": {"type": "ProbMaskGenerator"}, "fake_sparse": {"type": "ProbMaskFakeSparse"}}
STR = {"mask_generator": {"type": "STRMaskGenerator"}, "fake_sparse": {"type": "STRFakeSparse"}}
QUIET = {"output_dir": None, "save_dir": None}


def built(kind, parts=(), **kwargs):
    return build_sparse_scheduler({**dict(parts), "scheduler": {"type": kind, "kwargs": kwargs}})


CASES = {
    "levels": ("AmbaLevelPruneScheduler", {}, QUIET),
    "probabilities": ("ProbMaskPruneScheduler", PROBMASK, {}),
    "thresholds": ("STRScheduler", STR, {}),
}


@pytest.mark.parametrize("older", ["total_iters", "max_iters", "total_iterations"])
@pytest.mark.parametrize("case", CASES)
def test_the_number_of_iterations_has_one_name_and_its_older_ones(case, older):
    kind, parts, kwargs = CASES[case]
    made = built(kind, parts, target_sparsity=0.8, **{older: 50}, **kwargs)
    assert made.total_iterations == 50


def test_the_target_is_one_fraction_everywhere():
    levels = built("AmbaLevelPruneScheduler", total_iterations=50, target_sparsity=0.55, **QUIET)
    assert levels.levels == (0.3, 0.4, 0.5, 0.55)
    assert built("AmbaLevelPruneScheduler", **QUIET).levels[-1] == 0.9
    assert built("ProbMaskPruneScheduler", PROBMASK, prune_rate=0.8).target_sparsity == 0.8
    assert built("ProbMaskPruneScheduler", PROBMASK, target_sparsity=0.8).target_sparsity == 0.8
    assert built("ADMMScheduler", target_sparsity=0.8, uniform=False).target_sparsity == 0.8
    older = build_sparse_scheduler(
        {"scheduler": {"type": "ADMMScheduler"}, "sparsity": {"target_sparsity": 0.8, "uniform": False}}
    )
    assert (older.target_sparsity, older.uniform) == (0.8, False)


def test_two_names_of_one_thing_are_refused():
    with pytest.raises(ValueRangeError, match="one of them"):
        built("ProbMaskPruneScheduler", PROBMASK, prune_rate=0.8, target_sparsity=0.8)
    with pytest.raises(ValueRangeError, match="one of them"):
        built("AmbaLevelPruneScheduler", sparsity_table=[50], target_sparsity=0.5, **QUIET)
    with pytest.raises(ValueRangeError, match="one of them"):
        build_sparse_scheduler(
            {
                "scheduler": {"type": "ADMMScheduler", "kwargs": {"target_sparsity": 0.5}},
                "sparsity": {"target_sparsity": 0.5},
            }
        )
    with pytest.raises(NameNotFoundError, match="did you mean 'target_sparsity'"):
        built("ProbMaskPruneScheduler", PROBMASK, target_sparsty=0.8)


def test_keys_for_trained_models_say_where_they_belong():
    with pytest.raises(ValueRangeError, match="prune_by_config"):
        build_sparse_scheduler({"set_sparsity": "ERK", "target_sparsity": 0.5})


def trained(scheduler, steps=20):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8))
    history = History()
    scheduler.add_logger(history)
    model = scheduler.prepare_sparse_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if isinstance(scheduler, ADMMScheduler):
        scheduler.before_run(model, 2, total_iterations=steps)
    if isinstance(scheduler, ADMMScheduler | AmpereScheduler):
        scheduler.init_optimizer(optimizer)
    for iteration in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 16)).square().mean().backward()
        optimizer.step()
        scheduler.prune_model(model, iteration)
    return history


@pytest.mark.parametrize(
    ("kind", "parts", "kwargs"),
    [
        ("AmbaLevelPruneScheduler", {}, {"target_sparsity": 0.5, "total_iterations": 20, **QUIET}),
        ("ProbMaskPruneScheduler", PROBMASK, {"target_sparsity": 0.5, "total_iterations": 20}),
        ("STRScheduler", STR, {"target_sparsity": 0.5, "total_iterations": 20}),
        ("ADMMScheduler", {}, {"target_sparsity": 0.5}),
        ("AmpereScheduler", {}, {"alignment": (1, 1), "verbosity": 0}),
    ],
)
def test_every_scheduler_logs_its_sparsity(kind, parts, kwargs):
    history = trained(built(kind, parts, **kwargs))
    found = [record["sparsity"] for record in history if "sparsity" in record]
    assert found[-1] == pytest.approx(0.5, abs=0.02)
    assert found == sorted(found)


def test_the_guide_names_every_keyword_argument():
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "schedulers.md").read_text()
    missing = []
    for registry in (SCHEDULERS, MASK_GENERATORS, FAKE_SPARSES):
        for name, made in registry._types.items():
            if not made.__module__.startswith("sparta."):
                continue
            parameters = list(inspect.signature(made).parameters)[registry._given :]
            missing += [f"{name}.{one}" for one in parameters if f"`{one}`" not in guide]
    assert not missing


def test_preparing_takes_a_configuration_as_the_document_has_it():
    scheduler = built("AmbaLevelPruneScheduler", total_iterations=4, sparsity_table=[50, 75], **QUIET)
    config = {
        "scheduler": {"type": "AmbaLevelPruneScheduler", "kwargs": {"total_iters": 2, "sparsity_table": [25], **QUIET}}
    }
    model = scheduler.prepare_sparse_model(nn.Linear(8, 8), config)
    assert (scheduler.levels, scheduler.total_iterations) == ((0.25,), 2)
    scheduler.prune_model(model, 0)
    assert scheduler.compute_sparse_rate(model) == 0.25
    with pytest.raises(ValueRangeError, match="already"):
        scheduler.prepare_sparse_model(model, config)
    with pytest.raises(ValueRangeError, match="the same scheduler"):
        built("AmpereScheduler").prepare_sparse_model(nn.Linear(8, 8), config)

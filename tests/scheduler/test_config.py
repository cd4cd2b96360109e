"""Configurations: everything is checked before anything happens, and users add their own types."""

import pytest
import torch
from torch import nn

from scheduler.nets import small_net
from sparta.errors import NameNotFoundError, ValueRangeError
from sparta.scheduler import (
    ADMMScheduler,
    AmpereScheduler,
    BaseScheduler,
    FakeSparse,
    MaskGenerator,
    ProbMaskPruneScheduler,
    STRScheduler,
    build_sparse_scheduler,
    register_fake_sparse,
    register_mask_generator,
    register_scheduler,
)

PROB = {"mask_generator": {"type": "ProbMaskGenerator"}, "fake_sparse": {"type": "ProbMaskFakeSparse"}}
STR = {"mask_generator": {"type": "STRMaskGenerator"}, "fake_sparse": {"type": "STRFakeSparse"}}


def ampere(**kwargs):
    return {"scheduler": {"type": "AmpereScheduler", "kwargs": kwargs}}


def normal(**kwargs):
    return {"mask_generator": {"type": "NormalMaskGenerator", "kwargs": kwargs}}


@pytest.mark.parametrize(
    ("config", "made"),
    [
        ({}, BaseScheduler),
        ({"scheduler": {"type": "AmpereScheduler"}}, AmpereScheduler),
        ({"scheduler": {"type": "STRScheduler", "kwargs": None}, **STR}, STRScheduler),
        ({"scheduler": {"type": "ProbMaskPruneScheduler"}, **PROB}, ProbMaskPruneScheduler),
        (
            {"scheduler": {"type": "ADMMScheduler"}, "sparsity": {"target_sparsity": 0.5, "uniform": True}},
            ADMMScheduler,
        ),
        ({"fake_sparse": {"type": "DefaultFakeSparse", "kwargs": {"mask_is_static": True}}}, BaseScheduler),
        (
            {"mask_generator": {"type": "NormalMaskGenerator", "kwargs": {"structured": True, "func": "p1"}}},
            BaseScheduler,
        ),
        ({"leaf_module": [nn.Conv2d], "fuse_bn": True}, BaseScheduler),
    ],
)
def test_every_type_can_be_built_and_prepares_a_model(config, made):
    scheduler = build_sparse_scheduler(config)
    assert type(scheduler) is made
    model = scheduler.prepare_sparse_model(small_net())
    assert model(torch.randn(2, 3, 8, 8)).shape == (2, 4)


@pytest.mark.parametrize("kind", ["NMMaskGenerator", "FPGMMaskGenerator", "NuclearMaskGenerator"])
def test_every_mask_generator_prunes(kind):
    scheduler = build_sparse_scheduler({"mask_generator": {"type": kind}})
    model = scheduler.prepare_sparse_model(small_net())
    scheduler.update_sparsity_per_layer(model, 0.5)
    assert 0.4 < scheduler.compute_sparse_rate(model) < 0.6


@pytest.mark.parametrize(
    ("config", "error", "text"),
    [
        ({"schedule": {}}, NameNotFoundError, "did you mean 'scheduler'"),
        ({"scheduler": {"typ": "x"}}, NameNotFoundError, "did you mean 'type'"),
        ({"scheduler": {"type": "AmbaLevelScheduler"}}, NameNotFoundError, "did you mean 'AmbaLevelPruneScheduler'"),
        ({"mask_generator": {"type": "NormalMask"}}, NameNotFoundError, "did you mean 'NormalMaskGenerator'"),
        ({"fake_sparse": {"type": "STRFakeSparce"}}, NameNotFoundError, "did you mean 'STRFakeSparse'"),
        (ampere(verbose=1), NameNotFoundError, "verbosity"),
        (ampere(verbosity="loud"), ValueRangeError, "verbosity is 'loud'"),
        (ampere(mask_calculator="m4n2"), NameNotFoundError, "m4n2_1d"),
        ({**STR, "fake_sparse": {"type": "STRFakeSparse", "kwargs": {"sInit": -5}}}, NameNotFoundError, "sInit_value"),
        (normal(func="p3"), ValueRangeError, "func is 'p3'"),
        ({"mask_generator": {"type": "STRMaskGenerator"}}, ValueRangeError, "FakeSparse with the mask_generator STR"),
        ({"fake_sparse": {"type": "STRFakeSparse"}}, ValueRangeError, "allowed: STRMaskGenerator"),
        ({"scheduler": "AmpereScheduler"}, ValueRangeError, "scheduler is 'AmpereScheduler'"),
        ({"scheduler": {"type": 3}}, ValueRangeError, "a text as 'type'"),
        ({"leaf_module": ["Conv2d"]}, ValueRangeError, "leaf_module has 'Conv2d'"),
        ({"leaf_module": "Conv2d"}, ValueRangeError, "leaf_module has 'Conv2d'"),
        ({"fuse_bn": "yes"}, ValueRangeError, "fuse_bn is 'yes'"),
        ({"sparsity": {"target_sparsit": 0.5}}, NameNotFoundError, "did you mean 'target_sparsity'"),
        ({"sparsity": 0.5}, ValueRangeError, "sparsity is 0.5"),
        ({"sparsity": {"target_sparsity": 0.5}}, ValueRangeError, "'sparsity' with BaseScheduler"),
        ({"scheduler": {"type": "ADMMScheduler"}}, ValueRangeError, "without a sparsity"),
        ([], ValueRangeError, "the configuration is a list"),
    ],
)
def test_what_is_wrong_is_named(config, error, text):
    with pytest.raises(error, match=text):
        build_sparse_scheduler(config)


def test_users_register_their_own_types():
    @register_mask_generator("FirstMaskGenerator")
    class FirstMaskGenerator(MaskGenerator):
        def __init__(self, keep: int = 1):
            self.keep = keep

        def generate_mask(self, weight, sparsity, input_axis=1):
            mask = torch.zeros_like(weight, dtype=torch.bool)
            mask.view(-1)[: self.keep] = True
            return mask

    @register_fake_sparse("LoudFakeSparse")
    class LoudFakeSparse(FakeSparse):
        pass

    @register_scheduler("OnceScheduler")
    class OnceScheduler(BaseScheduler):
        def __init__(self, setup, at: int):
            super().__init__(setup)
            self.at = at

        def prune_model(self, model, iteration):
            if iteration == self.at:
                self.update_sparsity_per_layer(model, 0.5)

    config = {
        "mask_generator": {"type": "FirstMaskGenerator", "kwargs": {"keep": 2}},
        "fake_sparse": {"type": "LoudFakeSparse"},
        "scheduler": {"type": "OnceScheduler", "kwargs": {"at": 1}},
    }
    scheduler = build_sparse_scheduler(config)
    model = scheduler.prepare_sparse_model(nn.Linear(4, 4))
    scheduler.prune_model(model, 0)
    assert scheduler.compute_sparse_rate(model) == 0
    scheduler.prune_model(model, 1)
    assert scheduler.compute_sparse_rate(model) == 14 / 16
    with pytest.raises(ValueRangeError, match="kwargs of OnceScheduler: at is missing"):
        build_sparse_scheduler({"scheduler": {"type": "OnceScheduler"}})
    with pytest.raises(ValueRangeError, match="already registered"):
        register_mask_generator("NormalMaskGenerator")(FirstMaskGenerator)

"""Configurations for trained models: each key has its effect, and what cannot run says why."""

import copy
import warnings

import pytest
import torch
from torch import nn

from sparta.errors import SpartaError, ValueRangeError
from sparta.recovery import prune_by_config


@pytest.fixture
def model():
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(3)]
    return nn.Sequential(nn.Linear(8, 16), *blocks, nn.Linear(16, 4))


@pytest.fixture
def data():
    torch.manual_seed(1)
    return [torch.randn(32, 8) for _ in range(4)]


def shares(model):
    return {name: float((p == 0).float().mean()) for name, p in model.named_parameters() if p.dim() > 1}


def total(model):
    weights = [p for p in model.parameters() if p.dim() > 1]
    return sum(int((w == 0).sum()) for w in weights) / sum(w.numel() for w in weights)


RUNS = {
    "uniform": {"set_sparsity": "Uniform", "target_sparsity": 0.5},
    "erk": {"set_sparsity": "ERK", "target_sparsity": 0.5, "erk_power_scale": 0.5},
    "the older switch": {"USE_ERK": True, "target_sparsity": 0.5},
    "magnitude": {"set_sparsity": "Magnitude", "target_sparsity": 0.5},
    "normalized": {"set_sparsity": "L2Normalized", "target_sparsity": 0.5, "max_sparsity": 0.7},
    "in the document's place": {"sparsity": {"target_sparsity": 0.5, "uniform": True}},
    "a generator's own sparsity is overwritten": {
        "mask_generator": {"type": "NormalMaskGenerator", "kwargs": {"sparsity": 0.9}}, "target_sparsity": 0.5},
    "progressive": {"set_sparsity": "ERK", "progressive": {"sparsity_tables": [0.25, 0.5]}},
    "2:4": {"mask_generator": {"type": "NMMaskGenerator"}},
    "layers": {"target_sparsity": 0.5, "reconstruction": {"pattern": "layer", "use_dense_inps": False}},
    "blocks": {"target_sparsity": 0.5, "cali_batchsize": 32, "reconstruction": {"pattern": "block"}},
    "masks alone": {"target_sparsity": 0.5, "mask_only": True, "reconstruction": {"pattern": "block"}},
}  # fmt: skip
REFUSED = {
    "no sparsity": ({}, "target_sparsity"),
    "a typo": ({"target_sparsty": 0.5}, "did you mean 'target_sparsity'"),
    "another spread": ({"set_sparsity": "LAMP", "target_sparsity": 0.5}, "set_sparsity"),
    "learnt thresholds": ({"mask_generator": {"type": "FCPTSMaskGenerator"}}, "learns a threshold per layer"),
    "learnt masks": ({"mask_generator": {"type": "STRMaskGenerator"}}, "train with a scheduler"),
    "percent": ({"target_sparsity": 50}, "a sparsity of 50"),
    "falling": ({"progressive": {"sparsity_tables": [0.5, 0.25]}}, "rising"),
    "another part": ({"target_sparsity": 0.5, "reconstruction": {"pattern": "model"}}, "reconstruction"),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_configuration_runs(name, model, data):
    spec, _ = prune_by_config(model, data, RUNS[name])
    assert total(model) == pytest.approx(0.5, abs=0.01)
    spec.check(model)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_says_why(name, model, data):
    config, reason = REFUSED[name]
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(SpartaError) as error:
        prune_by_config(model, data, config)
    assert reason in str(error.value)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_layers_can_be_left_out_and_capped(model, data):
    config = {**RUNS["normalized"], "no_prune_layer_list": ["4"], "target_sparsity": 0.65}
    prune_by_config(model, data, config)
    found = shares(model)
    assert found["4.weight"] == 0
    assert max(found.values()) <= 0.7 + 1e-6


def test_reconstruction_brings_the_outputs_nearer(model, data):
    def error(config):
        changed = copy.deepcopy(model)
        _, log = prune_by_config(changed, data, config)
        with torch.no_grad():
            return sum(float((changed(x) - model(x)).square().mean()) for x in data), log

    bare, _ = error({"target_sparsity": 0.5})
    layers, _ = error(RUNS["layers"])
    blocks, log = error(RUNS["blocks"])
    assert layers < bare
    assert blocks < bare
    assert len(log.stages) == 5


def test_reconstruction_needs_data_and_tells_what_it_leaves_out(model, data):
    with pytest.raises(ValueRangeError, match="without data"):
        prune_by_config(model, None, RUNS["blocks"])
    config = {"target_sparsity": 0.5, "reconstruction": {"pattern": "layer", "weight_lr": 1e-5}}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        prune_by_config(model, data, config)
    assert any("weight_lr" in str(one.message) for one in seen)

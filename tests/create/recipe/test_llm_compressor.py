"""llm-compressor's recipes run where there is a method for them, and are refused with the reason elsewhere."""

import copy
import warnings

import pytest
import torch
from torch import nn

from create.recipe.llm_compressor_files import REFUSED, RUNS, TinyLlama
from sparta.create import Manager, Recipe
from sparta.create.quantize.prepare import is_quantized, quantized_layers
from sparta.errors import SpartaError, ValueRangeError


@pytest.fixture(scope="module")
def start():
    torch.manual_seed(0)
    return TinyLlama()


@pytest.fixture(scope="module")
def data():
    generator = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(0, 32, (2, 12), generator=generator)} for _ in range(3)]


def read(text):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Recipe.from_yaml(text)


def applied(text, model, data):
    manager = Manager(read(text))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        manager.apply(model, data=data)
    return manager


def zeros(model, name):
    return float((model.get_parameter(name) == 0).float().mean())


def test_the_corpus_is_counted():
    assert (len(RUNS), len(REFUSED)) == (46, 21)
    assert sum("OneShotPruning" in names for _, names in RUNS.values()) == 17
    assert sum("Quantization" in names for _, names in RUNS.values()) == 28


@pytest.mark.parametrize("name", RUNS)
def test_a_recipe_runs_on_a_model(name, start, data):
    text, names = RUNS[name]
    recipe = read(text)
    assert [entry.name for entry in recipe.modifiers()] == names
    assert read(str(recipe)).modifiers() == recipe.modifiers()
    model = copy.deepcopy(start)
    manager = applied(text, model, data)
    assert is_quantized(model) == ("Quantization" in names)
    if "OneShotPruning" in names:
        assert manager.spec().density < 1
        manager.spec().check(model)
    with torch.no_grad():
        assert model(**data[0]).isfinite().all()


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_is_refused_with_the_reason(name):
    text, reason = REFUSED[name]
    with pytest.raises(SpartaError) as error:
        read(text)
    assert reason in str(error.value)


def test_targets_and_ignore_choose_the_layers(start, data):
    model = copy.deepcopy(start)
    applied(RUNS["by names of blocks"][0], model, data)
    assert zeros(model, "model.layers.0.mlp.up_proj.weight") == 0.5
    assert zeros(model, "model.layers.1.mlp.up_proj.weight") == zeros(model, "lm_head.weight") == 0.0
    model = copy.deepcopy(start)
    applied(RUNS["without a class"][0], model, data)
    assert zeros(model, "model.layers.0.mlp.up_proj.weight") == 0.0
    assert zeros(model, "model.layers.0.self_attn.q_proj.weight") == 0.5


def test_pruned_weights_stay_zero_when_the_others_are_rounded_with_compensation(start, data):
    model = copy.deepcopy(start)
    manager = applied(RUNS["pruned, trained, rounded"][0], model, data)
    name = "model.layers.0.mlp.up_proj.weight"
    weight = model.get_parameter(name)
    groups = weight.reshape(-1, 4)
    assert ((groups != 0).sum(1) <= 2).all()
    assert str(manager.spec()[name].format) == "int4"
    assert len(weight[0].unique()) <= 15


def test_several_groups_give_several_precisions(start, data):
    model = copy.deepcopy(start)
    applied(RUNS["two groups"][0], model, data)
    found = {name: layer.scheme.weights.num_bits for name, layer in quantized_layers(model).items()}
    assert found["model.layers.0.mlp.down_proj"] == 8
    assert found["model.layers.0.mlp.up_proj"] == 4
    assert "lm_head" not in found
    model = copy.deepcopy(start)
    applied(RUNS["two modifiers"][0], model, data)
    inputs = {name: layer.scheme.input_activations is not None for name, layer in quantized_layers(model).items()}
    assert inputs["model.layers.0.mlp.down_proj"]
    assert not inputs["model.layers.0.self_attn.q_proj"]


def test_compensation_rounds_better_than_each_weight_alone(start, data):
    outputs = {}
    for name in ("GPTQModifier", "QuantizationModifier"):
        text = RUNS["gptq, 4 bits a channel"][0].replace("GPTQModifier", name)
        model = copy.deepcopy(start)
        applied(text, model, data)
        with torch.no_grad():
            outputs[name] = sum(float((model(**batch) - start(**batch)).square().mean()) for batch in data)
    assert outputs["GPTQModifier"] < 0.8 * outputs["QuantizationModifier"]


def test_smoothing_changes_weights_and_not_what_is_computed(start, data):
    model = copy.deepcopy(start)
    model.model.layers[0].input_layernorm.weight.data[3] = 40.0
    before = copy.deepcopy(model)
    recipe = read(RUNS["smooth with mappings"][0])
    manager = Manager([recipe.modifiers()[0]])
    manager.apply(model, data=data)
    norm, old = model.model.layers[0].input_layernorm.weight, before.model.layers[0].input_layernorm.weight
    assert norm[3] < old[3]
    with torch.no_grad():
        torch.testing.assert_close(model(**data[0]), before(**data[0]))


def test_a_norm_that_a_residual_reads_is_left_alone(data):
    class PostNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

        def forward(self, x):
            x = self.norm(x)
            return x + self.linear(x)

    from sparta.create.quantize.smooth import smooth

    torch.manual_seed(0)
    model = PostNorm()
    before = copy.deepcopy(model.state_dict())
    inputs = [torch.randn(4, 8) * torch.tensor([50.0, 1, 1, 1, 1, 1, 1, 1])]
    assert smooth(model, inputs) == {}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("name", ["2:4 of all linear layers", "gptq, 8 bits", "smooth, then rounded"])
def test_what_needs_data_says_so(name, start):
    with pytest.raises(ValueRangeError, match="data="):
        applied(RUNS[name][0], copy.deepcopy(start), None)


def test_a_recipe_prunes_inside_a_training_run(data):
    from sparta.create import initialize

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    inputs = torch.randn(32, 16)
    text = RUNS["2:4 of all linear layers"][0]
    manager, _ = initialize(model, optimizer, 4, recipe=read(text), data=[(inputs, inputs[:, :4])])
    for _ in range(4):
        optimizer.zero_grad()
        (model(inputs) - inputs[:, :4]).square().mean().backward()
        optimizer.step()
    manager.finalize()
    assert manager.spec().density == 0.5
    assert zeros(model, "0.weight") == 0.5


def test_a_stream_is_read_once_and_no_further_than_needed(start, data):
    def stream():
        for number in range(1000):
            seen.append(number)
            yield data[number % 3]

    seen = []
    entries = read(RUNS["smooth, then gptq"][0]).modifiers()
    for entry in entries:
        entry.num_calibration_steps = 2
    manager = Manager(entries)
    manager.apply(copy.deepcopy(start), data=stream())
    assert seen == [0, 1]

"""Real architectures with zeros planted at random in rows and columns: equal outputs, fewer parameters and FLOPs."""

import os

import pytest
import torch
from torch.utils import _pytree as pytree

from propagation.architectures import TRANSFORMERS, WRITTEN, build, flops, plant
from sparta import Spec, TeSA
from sparta.propagation import propagate, prune_structured
from sparta.propagation.groups import find_slots

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
# CI takes some of each kind; SPARTA_LONG=1 takes all of them, and `make zoo` more than a hundred.
SHORT = ("resnet18", "mobilenetv2", "bert", "llama", "gpt2", "vit", "mixtral grouped_mm", "hubert")
NAMES = [name for name in (*WRITTEN, *TRANSFORMERS) if name in SHORT or os.environ.get("SPARTA_LONG")]


def called(model, inputs):
    with torch.no_grad():
        return pytree.tree_leaves(model(**inputs) if isinstance(inputs, dict) else model(inputs))


def others(inputs):
    """Return other inputs of the same kind."""

    def other(t):
        return torch.randn_like(t) if t.is_floating_point() else t.roll(1, -1)

    return pytree.tree_map(other, inputs)


def close(small, model, inputs):
    for one, two in zip(called(small, inputs), called(model, inputs), strict=True):
        if isinstance(two, torch.Tensor):
            torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-4)


@pytest.fixture(params=NAMES)
def architecture(request):
    if request.param in TRANSFORMERS:
        pytest.importorskip("transformers")
    return request.param, *build(request.param)


def test_planted_zeros(architecture):
    name, model, inputs = architecture
    plant(model)
    result = propagate(model, inputs)
    small = result.compact(allow_empty=True)
    close(small, model, inputs)
    close(small, model, others(inputs))
    data = result.to_dict()
    assert data["parameters_compact"] < 0.95 * data["parameters"]
    if name != "mixtral grouped_mm":  # whose product is an op that the counter does not know
        assert flops(small, inputs) < 0.95 * flops(model, inputs)
    assert not data["notes"], "every op of these models has a rule"
    assert str(data["parameters_compact"]) in result.table()


def test_structured_pruning(architecture):
    name, model, inputs = architecture
    data = [inputs, others(inputs)]
    small, report = prune_structured(model, inputs, 0.5, data=data)
    assert report.samples == 2
    assert all(slot.after == slot.before - slot.before // 2 for slot in report.slots)
    assert report.parameters_compact < 0.75 * report.parameters
    sizes = {key: tensor.numel() for key, tensor in model.named_parameters()}
    for slot in report.slots:
        for key in slot.tensors:
            if key in sizes and key in dict(small.named_parameters()):
                assert small.get_parameter(key).numel() < sizes[key], (name, slot.name, key)
    change = [
        (one - two).norm() / two.norm()
        for batch in data
        for one, two in zip(called(small, batch), called(model, batch), strict=True)
        if isinstance(two, torch.Tensor)
    ]
    assert min(change) * 0.99 <= report.change <= max(change) * 1.01


def slots_of(name):
    model, inputs = build(name)
    result = propagate(model, inputs)
    return {(slot.kind, slot.name): slot for slot in find_slots(result.facts, result.captured.graph)}, model


def test_heads_that_share_keys_and_values_go_together():
    pytest.importorskip("transformers")
    slots, model = slots_of("llama")
    slot = slots["head", "model.layers.0.self_attn.k_proj.weight"]
    assert len(slot.groups) == 2
    first = slot.groups[0].slices
    prefix = "model.layers.0.self_attn."
    found = {key.removeprefix(prefix): flags.nonzero().flatten().tolist() for (key, _), flags in first.items()}
    assert found == {
        "q_proj.weight": list(range(16)),
        "k_proj.weight": list(range(4)),
        "v_proj.weight": list(range(4)),
        "o_proj.weight": list(range(16)),
    }
    del model


def test_a_fused_projection_loses_the_head_in_queries_keys_and_values():
    pytest.importorskip("transformers")
    slots, _ = slots_of("gpt2")
    slot = slots["head", "transformer.h.0.attn.c_attn.weight"]
    rows = slot.groups[1].slices["transformer.h.0.attn.c_attn.bias", 0].nonzero().flatten().tolist()
    assert rows == [*range(8, 16), *range(40, 48), *range(72, 80)]


def test_a_depthwise_layer_goes_with_its_neighbours():
    slots, _ = slots_of("mobilenetv2")
    slot = slots["channel", "features.4.layers.0.weight"]
    assert {key for key, _ in slot.groups[0].slices} >= {
        "features.4.layers.0.weight",
        "features.4.layers.1.running_mean",
        "features.4.layers.3.weight",
        "features.4.layers.6.weight",
    }


def test_every_granularity_of_a_llama():
    pytest.importorskip("transformers")
    model, inputs = build("llama")
    kinds = {"neuron", "head", "width", "query", "stream"}
    small, report = prune_structured(model, inputs, 0.5, granularity=sorted(kinds))
    assert {slot.kind for slot in report.slots} == kinds
    assert report.parameters_compact < 0.3 * report.parameters
    assert called(small, inputs)[0].shape == called(model, inputs)[0].shape


def test_a_llama_of_billions_on_the_meta_device_needs_no_memory_for_it():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(num_hidden_layers=2, use_cache=False)  # the width of 7B
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).eval()
    hidden = torch.arange(config.intermediate_size) % 2 == 0
    heads = (torch.arange(config.hidden_size) // 128) % 4 > 0
    spec = Spec(
        {
            **{
                f"model.layers.{i}.mlp.down_proj.weight": TeSA.from_mask(hidden.expand(config.hidden_size, -1))
                for i in range(2)
            },
            **{
                f"model.layers.{i}.self_attn.o_proj.weight": TeSA.from_mask(heads.expand(config.hidden_size, -1))
                for i in range(2)
            },
        }
    )
    result = propagate(model, {"input_ids": torch.zeros(1, 128, dtype=torch.long, device="meta")}, spec)
    small = result.compact()
    layer = "model.layers.1."
    assert small.get_parameter(layer + "mlp.gate_proj.weight").shape == (5504, 4096)
    assert small.get_parameter(layer + "self_attn.q_proj.weight").shape == (3072, 4096)
    assert small.get_parameter(layer + "self_attn.k_proj.weight").is_meta
    assert max(known.cells for known in result.facts.known.values()) < 2**20

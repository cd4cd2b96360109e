"""Models of transformers with random weights: chains are found, heads are left out, caches do not disturb."""

import copy

import pytest
import torch

from sparta.oneshot import prune
from sparta.oneshot.stages import find_chain
from sparta.oneshot.targets import find_targets

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def llama():
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, vocab_size=64, max_position_embeddings=32)
    return transformers.LlamaForCausalLM(config), "model.layers.0", 14


def gpt2():
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=32)
    return transformers.GPT2LMHeadModel(config), "transformer.h.0", 8


def bert():
    config = transformers.BertConfig(**SIZES, vocab_size=64, max_position_embeddings=32)
    return transformers.BertModel(config), "encoder.layer.0", 13


@pytest.mark.parametrize("make", [llama, gpt2, bert])
def test_a_model_of_transformers(make):
    torch.manual_seed(0)
    model, first, layers = make()
    model.eval()
    dense = copy.deepcopy(model)
    data = [{"input_ids": torch.randint(0, 64, (2, 12))} for _ in range(3)]
    chain = find_chain(model, find_targets(model), data[0])
    assert chain is not None
    assert chain.names[0] == first
    cached = getattr(model.config, "use_cache", None)
    spec, log = prune(model, data, "2:4", method="sparsegpt")
    assert getattr(model.config, "use_cache", None) == cached
    spec.check(model)
    assert len(spec) == layers
    assert not any("lm_head" in name for name in spec)
    assert all(entry.error < entry.error_before for entry in log)
    plain = copy.deepcopy(dense)
    prune(plain, None, "2:4")
    with torch.no_grad():
        outputs = [m(**data[0], use_cache=False)[0] for m in (dense, model, plain)]
    assert (outputs[1] - outputs[0]).norm() < (outputs[2] - outputs[0]).norm()


def test_refining_the_blocks_of_a_language_model():
    torch.manual_seed(0)
    model, *_ = llama()
    data = [torch.randint(0, 64, (2, 12)) for _ in range(3)]
    spec, log = prune(model.eval(), data, "4x1", 0.5, method="alps", refine="block")
    spec.check(model)
    assert log.method == "alps+block"

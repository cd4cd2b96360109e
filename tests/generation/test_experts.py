"""Experts of transformers: compiled sparse and in int8, generating the same tokens, saved and loaded."""

import pytest
import torch
import transformers

import sparta
from generation.language_models import SIZES, STACK
from sparta.generation import compile_generator
from sparta.generation.experts import PackedExperts

GREEDY = {"max_new_tokens": 5, "do_sample": False}


def mixtral():
    config = transformers.MixtralConfig(**SIZES, **STACK, num_key_value_heads=2, num_local_experts=4)
    return transformers.MixtralForCausalLM(config)


def qwen2_moe():
    config = transformers.Qwen2MoeConfig(
        **SIZES,
        **STACK,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    )
    return transformers.Qwen2MoeForCausalLM(config)


def gpt_oss():
    config = transformers.GptOssConfig(
        **SIZES, **STACK, num_key_value_heads=2, head_dim=8, num_local_experts=4, num_experts_per_tok=2
    )
    return transformers.GptOssForCausalLM(config)


def pruned(make):
    torch.manual_seed(5)
    model = make().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
            if parameter.dim() == 3:
                parameter.mul_(torch.rand_like(parameter) < 0.3)
    return model


@pytest.mark.parametrize("make", [mixtral, qwen2_moe, gpt_oss])
def test_sparse_experts_generate_the_same_tokens_and_are_saved(make, ids, tmp_path):
    model = pruned(make)
    fast = sparta.compile(model, ids, tune="off")
    assert sum(isinstance(module, PackedExperts) for module in fast.modules()) == 2
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **GREEDY}
    expected = model.generate(**given)
    assert torch.equal(fast.generate(**given), expected)
    assert set(fast.state_dict()) == set(model.state_dict())
    fast.save(tmp_path / "model.sparta")
    again = sparta.load(tmp_path / "model.sparta")
    assert torch.equal(again.generate(**given), expected)
    assert sum(isinstance(module, PackedExperts) for module in again.modules()) == 2


def test_experts_in_int8(ids):
    model = pruned(mixtral)
    fast = compile_generator(model, ids, tune="off", precision="int8")
    assert all(module.int8 for module in fast.modules() if isinstance(module, PackedExperts))
    with torch.no_grad():
        expected = model(ids).logits
        assert (fast(ids).logits - expected).norm() < 0.1 * expected.norm()


def test_dense_experts_stay_as_they_are(ids):
    fast = sparta.compile(mixtral().eval(), ids, tune="off")
    assert not any(isinstance(module, PackedExperts) for module in fast.modules())

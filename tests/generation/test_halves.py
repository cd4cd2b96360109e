"""Language models as they come from the hub, in bfloat16 or float16: decode programs, and files that load again."""

import copy

import pytest
import torch

import sparta
from generation.language_models import pruned

GREEDY = {"max_new_tokens": 20, "do_sample": False}


def attended(ids):
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.mark.parametrize("precision", [None, "int8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_decoder_in_fewer_bits_is_computed_in_float32(ids, dtype, precision):
    model = pruned("llama").to(dtype)
    state, told = copy.deepcopy(model.state_dict()), model.config.dtype
    fast = sparta.compile(model, ids, tune="off", precision=precision)
    assert fast.program is not None
    assert any("in float32 what the model computes in" in note for note in fast.report.notes)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert (model.config.dtype, fast.config.dtype) == (told, torch.float32)
    if precision is None:
        wide = copy.deepcopy(model).float()
        assert torch.equal(fast.generate(**attended(ids), **GREEDY), wide.generate(**attended(ids), **GREEDY))
        torch.testing.assert_close(fast(ids).logits, wide(ids).logits, atol=1e-4, rtol=1e-4)
    embeds = model.get_input_embeddings()(ids)
    assert embeds.dtype == dtype
    found = fast(inputs_embeds=embeds, output_hidden_states=True)  # a call of the model's own code
    torch.testing.assert_close(found.logits, fast(ids).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_files_keep_the_dtype(name, ids, tmp_path):
    model = pruned(name).bfloat16()
    fast = sparta.compile(model, ids, tune="off")
    fast.save(tmp_path / "model.sparta")
    again = sparta.load(tmp_path / "model.sparta")
    assert {key: t.dtype for key, t in again.state_dict().items()} == {k: t.dtype for k, t in fast.state_dict().items()}
    assert torch.equal(again.generate(**attended(ids), **GREEDY), fast.generate(**attended(ids), **GREEDY))

"""Language models that look at pictures: what is one token more is transformers' own matter, and so it stays."""

import pytest
import torch
import transformers

import sparta

STACK = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}


@pytest.fixture(scope="module")
def both():
    torch.manual_seed(0)
    rotary = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
    text = {
        "vocab_size": 128,
        "num_key_value_heads": 2,
        "rope_parameters": rotary,
        "pad_token_id": 0,
        "eos_token_id": 2,
    }
    sight = {"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 32, "patch_size": 4, "mlp_ratio": 2}
    names = {"image_token_id": 120, "video_token_id": 121, "vision_start_token_id": 122, "vision_end_token_id": 123}
    config = transformers.Qwen2VLConfig(text_config={**STACK, **text}, vision_config=sight, **names)
    model = transformers.Qwen2VLForConditionalGeneration(config).eval()
    sparta.Spec.from_pattern(model, "4x1", 0.75).apply(model)
    return model, sparta.compile(model, asked(4), tune="off")


def asked(tokens):
    """Return a question of so many tokens with a picture of 4 by 4 patches, which are 4 tokens."""
    words = torch.randint(3, 110, (1, tokens), generator=torch.Generator().manual_seed(tokens))
    picture = torch.tensor([[122, 120, 120, 120, 120, 123]])
    ids = torch.cat([words, picture, words], 1)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == 120).long(),
        "pixel_values": torch.randn(16, 96, generator=torch.Generator().manual_seed(0)),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
    }


@pytest.mark.parametrize("ways", [{"do_sample": False}, {"num_beams": 2}, {"do_sample": True, "top_k": 5}], ids=str)
def test_tokens_after_a_picture(both, ways):
    results = []
    for model in both:
        torch.manual_seed(0)
        results.append(model.generate(**asked(6), max_new_tokens=6, **ways))
    assert torch.equal(*results)


def test_a_file_of_one_that_sees(both, tmp_path):
    model, fast = both
    fast.save(tmp_path / "model.sparta")
    again = sparta.load(tmp_path / "model.sparta")
    with torch.no_grad():
        torch.testing.assert_close(again(**asked(5)).logits, model(**asked(5)).logits, atol=1e-5, rtol=1e-4)
    assert torch.equal(*(each.generate(**asked(4), max_new_tokens=5, do_sample=False) for each in (model, again)))

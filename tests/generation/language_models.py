"""Tiny language models of every kind that is compiled here."""

import torch
import transformers

import sparta

SIZES = {"vocab_size": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
STACK = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def llama(**more):
    config = transformers.LlamaConfig(**SIZES, **STACK, num_key_value_heads=2, tie_word_embeddings=True, **more)
    return transformers.LlamaForCausalLM(config).eval()


def qwen2():
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES, **STACK, num_key_value_heads=2)).eval()


def qwen3():
    config = transformers.Qwen3Config(**SIZES, **STACK, num_key_value_heads=2, head_dim=16)
    return transformers.Qwen3ForCausalLM(config).eval()


def mistral():
    config = transformers.MistralConfig(**SIZES, **STACK, num_key_value_heads=2, sliding_window=None)
    return transformers.MistralForCausalLM(config).eval()


def gpt2():
    config = transformers.GPT2Config(**SIZES, n_embd=32, n_layer=2, n_head=4, n_positions=128)
    return transformers.GPT2LMHeadModel(config).eval()


def t5():
    config = transformers.T5Config(
        **SIZES, d_model=32, d_ff=64, d_kv=8, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config).eval()


def bart():
    layers = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    config = transformers.BartConfig(
        **SIZES,
        **layers,
        d_model=32,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        decoder_start_token_id=2,
        forced_eos_token_id=None,
    )
    return transformers.BartForConditionalGeneration(config).eval()


def mixtral():
    config = transformers.MixtralConfig(**SIZES, **STACK, num_key_value_heads=2, num_local_experts=4)
    return transformers.MixtralForCausalLM(config).eval()


MODELS = {each.__name__: each for each in (llama, qwen2, qwen3, mistral, gpt2, t5, bart, mixtral)}
PROGRAMS = ("llama", "qwen2", "qwen3", "mistral")


def pruned(name, pattern=None, sparsity=0.75):
    """Return a model by name with its weights pruned, the same at every call."""
    torch.manual_seed(7)
    model = MODELS[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)  # larger margins between tokens than those of a fresh model
    sparta.Spec.from_pattern(model, pattern or sparta.Block(4, 1), sparsity).apply(model)
    return model

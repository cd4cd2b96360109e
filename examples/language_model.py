"""A language model: pruned, compiled with its `generate`, in float32 and in int8, saved and loaded.

Run it with ``python examples/language_model.py``. It takes a tiny Llama with random weights; pass a folder or the name
of a model of transformers to take that one: ``python examples/language_model.py FOLDER``.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
import transformers

import sparta


def model_and_prompt() -> tuple[torch.nn.Module, torch.Tensor]:
    """Return the model that was asked for and the tokens of a prompt."""
    torch.manual_seed(0)
    if len(sys.argv) > 1:
        model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
        tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1])
        return model.eval(), tokenizer("The history of the steam engine", return_tensors="pt")["input_ids"]
    config = transformers.LlamaConfig(
        vocab_size=200,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
    )
    return transformers.LlamaForCausalLM(config).eval(), torch.randint(3, 200, (1, 8))


def main() -> None:
    """Prune, compile, generate, save, load."""
    model, prompt = model_and_prompt()
    sparta.Spec.from_pattern(model, sparta.Block(4, 1), 0.8).apply(model)
    ways = {"max_new_tokens": 16, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    expected = model.generate(prompt, **ways)

    fast = sparta.compile(model, prompt, budget_s=20)
    print(fast.report)
    print("the same tokens:", torch.equal(fast.generate(prompt, **ways), expected))

    small = sparta.compile(model, prompt, precision="int8", tune="off")
    print(small.report.notes[-1])
    path = Path(tempfile.mkdtemp()) / "model.sparta"
    small.save(path)
    again = sparta.load(path)
    print("the same after loading:", torch.equal(again.generate(prompt, **ways), small.generate(prompt, **ways)))


if __name__ == "__main__":
    main()

"""The architectures of the propagation benchmarks at their real widths, shared by its scripts; weights are random."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from propagation.architectures import Experts, MobileNetV2, ResNet, UNet

Built = tuple[nn.Module, Any]


def _ids(length: int, vocabulary: int) -> torch.Tensor:
    return torch.randint(0, vocabulary, (1, length))


def _bert(*, base: bool, layers: int) -> Built:
    from transformers import BertConfig, BertForSequenceClassification

    size = {} if base else {"hidden_size": 256, "num_attention_heads": 8, "intermediate_size": 1024}
    config = BertConfig(num_hidden_layers=layers, **size)
    return BertForSequenceClassification(config), {"input_ids": _ids(128, 30000)}


def _vit(layers: int) -> Built:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(num_hidden_layers=layers)), {"pixel_values": torch.randn(1, 3, 224, 224)}


def _gpt2(layers: int) -> Built:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=layers, use_cache=False)), {"input_ids": _ids(128, 50000)}


def _llama(*, shared: bool) -> Built:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=512, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2 if shared else 8,
        intermediate_size=1376, vocab_size=8000, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config), {"input_ids": _ids(128, 8000)}


def _hubert() -> Built:
    from transformers import HubertConfig, HubertModel

    return HubertModel(HubertConfig(num_hidden_layers=4)), {"input_values": torch.randn(1, 16000)}


def _mixtral() -> Built:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=256, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2, intermediate_size=512,
        vocab_size=8000, num_local_experts=4, use_cache=False,
    )  # fmt: skip
    model = MixtralForCausalLM(config)
    model.set_experts_implementation("batched_mm")
    return model, {"input_ids": _ids(32, 8000)}


MODELS: dict[str, Callable[[], Built]] = {
    "ResNet-18": lambda: (ResNet((2, 2, 2, 2), basic=True, classes=1000), torch.randn(1, 3, 224, 224)),
    "ResNet-50": lambda: (ResNet((3, 4, 6, 3), basic=False, classes=1000), torch.randn(1, 3, 224, 224)),
    "MobileNetV2": lambda: (MobileNetV2(classes=1000), torch.randn(1, 3, 224, 224)),
    "U-Net": lambda: (UNet(64), torch.randn(1, 2, 128, 128)),
    "ViT-base": lambda: _vit(12),
    "BERT-base": lambda: _bert(base=True, layers=12),
    "GPT-2": lambda: _gpt2(12),
    "Llama, 8 heads": lambda: _llama(shared=False),
    "Llama, 8 heads share 2": lambda: _llama(shared=True),
    "HuBERT, 4 layers": _hubert,
    "Mixtral, 2 layers": _mixtral,
    "mixture of experts": lambda: (Experts(256, 1024, 4), torch.randn(1, 128, 256)),
}
SMALL = ("U-Net", "mixture of experts")
"""What a smoke run takes."""


def build(name: str, seed: int = 0) -> Built:
    """Return a model in eval mode with statistics that are not those of a new model, and an example input."""
    torch.manual_seed(seed)
    model, inputs = MODELS[name]()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_(std=0.1)
                module.running_var.uniform_(0.5, 1.5)
    return model.eval(), inputs


def called(model: nn.Module, inputs: Any) -> torch.Tensor:
    """Return the first output of a model."""
    with torch.no_grad():
        out = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    found: torch.Tensor = out if isinstance(out, torch.Tensor) else next(iter(out.values()))
    return found

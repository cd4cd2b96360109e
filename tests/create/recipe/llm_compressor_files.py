"""Recipes in every form that llm-compressor's examples and tests have, and a small model with the names they use.

Each is what a user of it may have on disk: what comes of it is the modifiers that run, or words of the refusal.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

SPARSE = """
{stage}:
  {group}:
    {name}:
      sparsity: {sparsity}
      {extra}
      mask_structure: "{structure}"
      targets: {targets}
"""
LINEAR = '["Linear"]'
GPTQ_8 = """
quant_stage:
  quant_modifiers:
    {name}:
      ignore: ["lm_head"]
      config_groups:
        group_0:
          weights: {{num_bits: {bits}, type: {kind}, symmetric: {symmetric}, strategy: {strategy}}}
          {inputs}
          targets: {targets}
"""


def _sparse(name="SparseGPTModifier", sparsity="0.5", structure="2:4", targets=LINEAR, extra="block_size: 128"):
    return SPARSE.format(
        stage="test_stage", group="obcq_modifiers", name=name, sparsity=sparsity, structure=structure, targets=targets,
        extra=extra,
    )  # fmt: skip


def _quant(name="GPTQModifier", bits=8, kind="int", symmetric="true", strategy="channel", inputs="", targets=LINEAR):
    return GPTQ_8.format(
        name=name, bits=bits, kind=kind, symmetric=symmetric, strategy=strategy, inputs=inputs, targets=targets
    )


def _scheme(name, scheme, targets="Linear"):
    return (
        f"quant_stage:\n  quant_modifiers:\n    {name}:\n      ignore: [lm_head]\n"
        f"      scheme: {scheme}\n      targets: {targets}"
    )


STATIC = "input_activations: {num_bits: 8, type: int, symmetric: false, strategy: tensor}"
DYNAMIC = "input_activations: {num_bits: 8, type: int, symmetric: true, strategy: token, dynamic: true}"
SMOOTH = """
quant_stage:
  quant_modifiers:
    SmoothQuantModifier:
      smoothing_strength: 0.8
      {mappings}
    {name}:
      ignore: ["lm_head"]
      scheme: W8A8
      targets: Linear
"""
SMOOTH_MAPPINGS = """mappings:
        - [["re:.*q_proj", "re:.*k_proj", "re:.*v_proj"], "re:.*input_layernorm"]
        - [["re:.*gate_proj", "re:.*up_proj"], "re:.*post_attention_layernorm"]"""
TWO_STAGES = """
sparsity_stage:
  run_type: oneshot
  sparsity_modifiers:
    SparseGPTModifier: {{sparsity: 0.5, mask_structure: "2:4", targets: ["Linear"], ignore: ["re:.*lm_head"]}}
finetuning_stage:
  run_type: train
  finetuning_modifiers:
    ConstantPruningModifier: {{targets: ['re:.*q_proj.weight', 're:.*down_proj.weight'], start: 0}}
quantization_stage:
  run_type: oneshot
  quantization_modifiers:
    GPTQModifier:
      ignore: ["lm_head"]
      config_groups:
        group_0:
          weights: {{num_bits: {bits}, type: int, symmetric: true, strategy: {strategy}{group}}}
          targets: ["Linear"]
"""
ALTERNATING = """
first_stage:
  run_type: oneshot
  modifiers: {SparseGPTModifier: {sparsity: 0.5, percdamp: 0.01, mask_structure: "0:0", targets: [Linear]}}
train_stage:
  run_type: train
  pruning_modifiers: {ConstantPruningModifier: {targets: '__ALL__', start: 0}}
next_stage:
  run_type: oneshot
  modifiers: {SparseGPTModifier: {sparsity: 0.75, percdamp: 0.01, mask_structure: "0:0", targets: [Linear]}}
"""
TWO_GROUPS = """
quant_stage:
  quant_modifiers:
    QuantizationModifier:
      ignore: ["lm_head"]
      config_groups:
        group_0:
          weights: {num_bits: 4, type: int, symmetric: true, strategy: channel}
          targets: ["Linear"]
        group_1:
          weights: {num_bits: 8, type: int, symmetric: true, strategy: channel}
          targets: ["re:.*down_proj"]
"""
TWO_MODIFIERS = """
quant_stage:
  quant_modifiers:
    QuantizationModifier: {ignore: [lm_head], scheme: W8A16, targets: ["re:.*self_attn.(k|q|o|v)_proj$"]}
    GPTQModifier: {ignore: [lm_head], scheme: W8A8, targets: ["re:.*mlp.(down|gate|up)_proj$"], block_size: 128}
"""
OLDER = """
test_stage:
  quant_modifiers:
    QuantizationModifier:
      ignore: [model.layers.0.mlp.down_proj, LlamaRotaryEmbedding, LlamaRMSNorm, SiLU, MatMulOutput_QK, lm_head]
      scheme_overrides:
        Linear:
          weights: {num_bits: 8, symmetric: true, strategy: tensor}
          input_activations: {num_bits: 8, symmetric: false, strategy: tensor}
          output_activations: null
        Embedding: {weights: {num_bits: 8, symmetric: true, strategy: tensor}, input_activations: null}
"""
MAGNITUDE = """
s_stage:
  s_modifiers:
    MagnitudePruningModifier:
      {init_sparsity: 0.0, final_sparsity: 0.5, targets: __ALL_PRUNABLE__, start: 0, end: 0, update: 1.0}
"""
DISTILLED = """
s_stage:
  s_modifiers:
    OutputDistillationModifier:
      {targets: ['re:model.layers.\\d+$'], comparison: kl_divergence, orig_scale: 1.0, distill_scale: 1.0}
"""

RUNS: dict[str, tuple[str, list[str]]] = {
    "2:4 of all linear layers": (_sparse(), ["OneShotPruning"]),
    "half of them": (_sparse(structure="0:0"), ["OneShotPruning"]),
    "1 pruned of 4": (_sparse(structure="1:4", sparsity="0.25"), ["OneShotPruning"]),
    "by names of blocks": (
        _sparse(structure="0:0", targets="[model.layers.0]", extra="sequential_update: False"), ["OneShotPruning"]),
    "by patterns of blocks": (
        _sparse(structure="0:0", targets='["re:.*model.layers.0$"]', extra="preserve_sparsity_mask: True"),
        ["OneShotPruning"]),
    "by a class of blocks": (_sparse(targets="[LlamaDecoderLayer]"), ["OneShotPruning"]),
    "by a weight": (_sparse(targets="['re:model.layers.1.mlp.gate_proj.weight']"), ["OneShotPruning"]),
    "without the head": (_sparse(extra='ignore: ["re:.*lm_head"]'), ["OneShotPruning"]),
    "without a class": (_sparse(extra="ignore: [LlamaMLP]"), ["OneShotPruning"]),
    "damped": (_sparse(extra="dampening_frac: 0.001"), ["OneShotPruning"]),
    "older damping": (_sparse(extra="percdamp: 0.01"), ["OneShotPruning"]),
    "wanda": (_sparse("WandaPruningModifier"), ["OneShotPruning"]),
    "wanda, unstructured": (_sparse("WandaPruningModifier", "0.75", "0:0"), ["OneShotPruning"]),
    "sequential targets": (_sparse(extra="sequential_targets: [LlamaDecoderLayer]"), ["OneShotPruning"]),
    "gptq, 8 bits": (_quant(), ["Quantization"]),
    "gptq, 4 bits a channel": (_quant(bits=4), ["Quantization"]),
    "gptq, asymmetric": (_quant(symmetric="false", inputs=STATIC), ["Quantization"]),
    "gptq, one scale": (_quant(strategy="tensor", inputs=STATIC), ["Quantization"]),
    "gptq, dynamic inputs": (_quant(inputs=DYNAMIC), ["Quantization"]),
    "gptq of a layer": (_quant(targets='["re:.*model.layers.0.self_attn.q_proj"]'), ["Quantization"]),
    "gptq, W8A8": (_scheme("GPTQModifier", "W8A8"), ["Quantization"]),
    "gptq, W8A16": (_scheme("GPTQModifier", "W8A16"), ["Quantization"]),
    "rounded, W8A8": (_scheme("QuantizationModifier", "W8A8"), ["Quantization"]),
    "rounded, INT8": (_scheme("QuantizationModifier", "INT8"), ["Quantization"]),
    "rounded, W8A16": (_scheme("QuantizationModifier", "W8A16"), ["Quantization"]),
    "rounded, FP8": (_scheme("QuantizationModifier", "FP8"), ["Quantization"]),
    "rounded, FP8_DYNAMIC": (_scheme("QuantizationModifier", "FP8_DYNAMIC"), ["Quantization"]),
    "fp8 weights": (_quant("QuantizationModifier", kind="float"), ["Quantization"]),
    "fp8 weights, one scale": (_quant("QuantizationModifier", kind="float", strategy="tensor"), ["Quantization"]),
    "linear and embedding": (_scheme("QuantizationModifier", "W8A16", "[Linear, Embedding]"), ["Quantization"]),
    "a mapping of presets": (_scheme("QuantizationModifier", "{W8A16: [Linear]}"), ["Quantization"]),
    "a mapping as scheme": (_scheme("QuantizationModifier", "{weights: {num_bits: 8}}"), ["Quantization"]),
    "smooth, then gptq": (SMOOTH.format(mappings="", name="GPTQModifier"), ["SmoothQuant", "Quantization"]),
    "smooth, then rounded": (SMOOTH.format(mappings="", name="QuantizationModifier"), ["SmoothQuant", "Quantization"]),
    "smooth with mappings": (
        SMOOTH.format(mappings=SMOOTH_MAPPINGS, name="GPTQModifier"), ["SmoothQuant", "Quantization"]),
    "pruned, trained, rounded": (
        TWO_STAGES.format(bits=4, strategy="channel", group=""), ["OneShotPruning", "ConstantPruning", "Quantization"]),
    "pruned twice": (ALTERNATING, ["OneShotPruning", "ConstantPruning", "OneShotPruning"]),
    "two groups": (TWO_GROUPS, ["Quantization"]),
    "two modifiers": (TWO_MODIFIERS, ["Quantization"]),
    "older fields": (OLDER, ["Quantization"]),
    "sparse, then gptq in one stage": (
        _sparse() + "    GPTQModifier: {scheme: W8A16, targets: [Linear], ignore: [lm_head]}",
        ["OneShotPruning", "Quantization"]),
    "without a stage": ("quant_modifiers:\n  QuantizationModifier: {scheme: W8A16, targets: Linear}", ["Quantization"]),
    "a list of modifiers": (
        "s_stage:\n  s_modifiers:\n    - QuantizationModifier: {scheme: W8A16, targets: Linear}", ["Quantization"]),
    "magnitude": (MAGNITUDE, ["MagnitudePruning"]),
    "constant": (
        "s_stage: {s_modifiers: {ConstantPruningModifier: {targets: ['re:.*weight']}}}", ["ConstantPruning"]),
    "distilled": (DISTILLED, ["Distillation"]),
}  # fmt: skip
"""What runs, and as which modifiers."""

REFUSED: dict[str, tuple[str, str]] = {
    "AWQ": (_scheme("AWQModifier", "W4A16_ASYM"), "AWQModifier needs scales searched per group"),
    "AWQ and GPTQ": (
        "q_stage:\n  q_modifiers:\n    AWQModifier: {duo_scaling: true}\n    GPTQModifier: {scheme: W8A8}",
        "AWQModifier needs scales searched per group"),
    "AutoRound": (_scheme("AutoRoundModifier", "W8A8"), "rounding learnt by gradient descent"),
    "SpinQuant": ("q_stage: {q_modifiers: {SpinQuantModifier: {rotations: [R1]}}}", "rotations"),
    "QuIP": ("q_stage: {q_modifiers: {QuIPModifier: {}}}", "rotations"),
    "equalization": ("q_stage: {q_modifiers: {LogarithmicEqualizationModifier: {}}}", "logarithms"),
    "REAP": ("q_stage: {q_modifiers: {REAPModifier: {}}}", "experts"),
    "W4A16": (_scheme("GPTQModifier", "W4A16"), "a scale for each group of weights"),
    "W4A16, rounded": (_scheme("QuantizationModifier", "W4A16"), "a scale for each group of weights"),
    "FP8_BLOCK": (_scheme("QuantizationModifier", "FP8_BLOCK"), "a scale for each group of weights"),
    "NVFP4": (_scheme("QuantizationModifier", "NVFP4"), "a scale for each group of weights"),
    "MXFP4": (_scheme("QuantizationModifier", "MXFP4"), "a scale for each group of weights"),
    "groups of 128": (_quant(bits=4, strategy="group, group_size: 128"), "a scale for each group of weights"),
    "groups after 2:4": (
        TWO_STAGES.format(bits=4, strategy="group", group=", group_size: 128"), "a scale for each group of weights"),
    "float of 4 bits": (_quant("QuantizationModifier", bits=4, kind="float"), "the type 'float' of 4 bits"),
    "a quantized cache": (
        _quant() + "      kv_cache_scheme: {num_bits: 8, type: float}", "the cache of keys and values"),
    "owl": (_sparse(structure="0:0", extra="sparsity_profile: owl"), "sparsity_profile is 'owl'"),
    "a sparsity for each layer": (_sparse(structure="0:0", sparsity="[0.5, 0.6]"), "sparsity is [0.5, 0.6]"),
    "quantize within SparseGPT": (_sparse(extra="quantize: True"), "quantize of SparseGPTModifier"),
    "a modifier nobody knows": ("q_stage: {q_modifiers: {SparseGTPModifier: {}}}", "SparseGPTModifier"),
    "a field nobody knows": (_sparse(extra="sparsty: 0.5"), "sparsity"),
}  # fmt: skip
"""What is refused, and words of the reason."""


class LlamaRMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class LlamaAttention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return self.o_proj(nn.functional.scaled_dot_product_attention(query, key, value))


class LlamaMLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class LlamaDecoderLayer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = LlamaRMSNorm(width), LlamaRMSNorm(width)
        self.self_attn, self.mlp = LlamaAttention(width), LlamaMLP(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Inner(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(32, width)
        self.layers = nn.ModuleList([LlamaDecoderLayer(width) for _ in range(2)])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return x


class TinyLlama(nn.Module):
    """Two blocks with the names of Llama's parts."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.model = Inner(width)
        self.lm_head = nn.Linear(width, 32, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.lm_head(self.model(input_ids))

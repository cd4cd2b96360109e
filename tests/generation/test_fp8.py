"""Language models in fp8: what is rounded, what keeps its weight, and what they are compared with."""

import pytest
import torch

import sparta
from sparta.errors import ValueRangeError
from sparta.generation import api, fp8, layers
from sparta.generation.layers import SparseLayer, kernel_of, layer_spec
from sparta.specialize.tuning.select import DENSE, Choice

transformers = pytest.importorskip("transformers")


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    made = transformers.LlamaForCausalLM(config).bfloat16().eval()
    include = [f"model.layers.{at}.mlp.{name}_proj.weight" for at in range(2) for name in ("gate", "up", "down")]
    sparta.Spec.from_pattern(made, sparta.NM(2, 4), include=include).apply(made)
    return made


@pytest.fixture
def anywhere(monkeypatch):
    """Let models in fp8 run here, with kernels of fp8 in all layers but queries."""
    monkeypatch.setattr(api, "fp8_obstacle", lambda _model: "")

    def chosen(layer, tesa, rows, _session, _share):
        if layer.out_features == 32 and tesa.density == 1 and chosen.calls % 7 == 0:
            chosen.calls += 1
            return None
        chosen.calls += 1
        choices = {count: (layer_spec(layer, tesa, count), Choice(DENSE, {}, "forced")) for count in rows}
        return kernel_of(layer, tesa, choices)

    chosen.calls = 0
    monkeypatch.setattr(layers, "_chosen", chosen)


def test_every_linear_layer_is_rounded_but_the_last_and_patterns_stay(model, anywhere, tmp_path):
    ids = torch.randint(3, 96, (2, 7))
    fast = sparta.compile(model, {"input_ids": ids}, precision="fp8", tune="off")
    put = {name: module for name, module in fast.named_modules() if isinstance(module, SparseLayer)}
    assert len(put) == 12  # of 14, two of which keep their weights
    assert not any("lm_head" in name for name in put)
    for name, layer in put.items():
        known = layer.kernel.fused.weight
        assert str(known.format) == "fp8_e4m3"
        assert known.density == (0.5 if "mlp" in name else 1.0)
        before = model.get_submodule(name).weight.detach()
        assert 0 < float((layer.weight.detach() - before).norm() / before.norm()) < 0.05
    kept = [name for name, module in fast.named_modules() if type(module) is torch.nn.Linear]
    assert all(torch.equal(fast.get_submodule(name).weight, model.get_submodule(name).weight) for name in kept)
    assert fast.report.certificate.passed
    assert any(note.startswith("fp8: logits of the example differ") for note in fast.report.notes)
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    assert fast.generate(ids, **options).shape == model.generate(ids, **options).shape
    with pytest.raises(ValueRangeError, match="compile it again"):
        fast.save(tmp_path / "model.sparta")


def test_a_loss_beyond_what_is_allowed_leaves_the_model_as_it_was(model, anywhere):
    ids = torch.randint(3, 96, (2, 7))
    fast = sparta.compile(model, {"input_ids": ids}, precision="fp8", tune="off", max_loss=0.0)
    assert any(note.startswith("not in fp8") for note in fast.report.notes)
    assert fast.provenance["precision"] == "as given"
    assert torch.equal(fast.model.layers[0].mlp.up_proj.weight, model.model.layers[0].mlp.up_proj.weight)


def test_rounded_inputs_are_simulated_where_kernels_round_them(model, monkeypatch):
    layer = model.model.layers[0].mlp.up_proj
    tesa = fp8.round_weights(model, {})["model.layers.0.mlp.up_proj"]
    x = torch.randn(3, 32).bfloat16()
    sparse = SparseLayer(layer, kernel_of(layer, tesa, {3: (layer_spec(layer, tesa, 3), Choice(DENSE, {}, ""))}))
    plain = fp8._Simulated(sparse)(x)
    torch.testing.assert_close(plain, sparse(x))
    monkeypatch.setattr(fp8, "FP8_IMPLEMENTS", frozenset({DENSE}))
    assert not torch.equal(fp8._Simulated(sparse)(x), plain)


def test_it_says_what_fp8_needs(model):
    with pytest.raises(ValueRangeError, match=r"a model on cpu.*precision='int8'"):
        sparta.compile(model, {"input_ids": torch.ones(1, 4, dtype=torch.int64)}, precision="fp8")

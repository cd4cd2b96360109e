"""Masked adapters: nothing changes at first, what is trained is what is merged, and the zeros stay."""

from copy import deepcopy

import pytest
import torch
from torch import nn

import sparta
from sparta.errors import CheckError, FileFormatError, NameNotFoundError, ShapeError, SpartaError, ValueRangeError
from sparta.recovery import add_lora


def gpt2_layer():
    """Return the linear layer of GPT-2: its weight is inputs × outputs."""
    layer = pytest.importorskip("transformers.pytorch_utils").Conv1D(12, 8)
    nn.init.normal_(layer.weight, std=0.3)
    return nn.Sequential(layer)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.mha = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.mha(x, x, x, need_weights=False)[0]


MODELS = {
    "linear": (lambda: nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 4)), (5, 8)),
    "conv": (lambda: nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2)), (2, 4, 8, 8)),
    "transposed": (lambda: nn.ConvTranspose1d(4, 8, 3), (2, 4, 6)),
    "Conv1D": (gpt2_layer, (5, 8)),
    "attention": (Attention, (2, 5, 8)),
}


def trained(model, x, adapters, steps=5):
    optimizer = torch.optim.Adam(adapters.parameters(), lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        (model(x) - 1).square().mean().backward()
        optimizer.step()


def sparse(kind, pattern="unstructured", sparsity=0.5):
    torch.manual_seed(0)
    make, shape = MODELS[kind]
    model = make()
    spec = sparta.Spec.from_pattern(model, pattern, sparsity)
    spec.apply(model)
    return model, spec, torch.randn(shape)


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_zeros_survive_and_the_merged_model_is_the_trained_one(kind, dora):
    model, spec, x = sparse(kind)
    plain = model(x).detach()
    adapters = add_lora(model, spec, rank=2, dora=dora)
    torch.testing.assert_close(model(x).detach(), plain)
    trained(model, x, adapters)
    learnt = model(x).detach()
    assert (learnt - plain).abs().max() > 1e-2
    adapters.merge()
    torch.testing.assert_close(model(x).detach(), learnt)
    assert sparta.Spec.from_zeros(model) == spec
    assert not [name for name, _ in model.named_parameters() if "lora" in name or "parametrizations" in name]


@pytest.mark.parametrize("pattern", ["2:4", "4x1"])
def test_patterns_survive(pattern):
    model, spec, x = sparse("linear", pattern, None if pattern == "2:4" else 0.5)
    adapters = add_lora(model, rank=3)
    trained(model, x, adapters)
    adapters.merge()
    spec.check(model)


def test_the_base_is_frozen_and_thawed():
    model, spec, x = sparse("linear")
    model[0].bias.requires_grad_(False)
    before = deepcopy(model.state_dict())
    adapters = add_lora(model, spec, rank=2)
    trained(model, x, adapters)
    assert all(("lora" in name) == parameter.requires_grad for name, parameter in model.named_parameters())
    adapters.remove()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not model[0].bias.requires_grad
    assert model[0].weight.requires_grad


def test_weights_in_half_precision_are_adapted_in_float32():
    model, spec, x = sparse("linear")
    model, x = model.bfloat16(), x.bfloat16()
    adapters = add_lora(model, spec, rank=2, dora=True)
    trained(model, x, adapters)
    assert {parameter.dtype for parameter in adapters.parameters()} == {torch.float32}
    adapters.merge()
    spec.check(model)
    assert model[0].weight.dtype == torch.bfloat16


def test_rows_that_are_all_zero_stay_so():
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    spec = sparta.Spec.from_pattern(model, "channel:0", 0.5)
    spec.apply(model)
    adapters = add_lora(model, spec, dora=True)
    trained(model, torch.randn(4, 8), adapters)
    adapters.merge()
    spec.check(model)
    assert model.weight.isfinite().all()


def test_save_and_load(tmp_path):
    model, spec, x = sparse("linear")
    other = deepcopy(model)
    adapters = add_lora(model, spec, rank=2)
    trained(model, x, adapters)
    adapters.save(tmp_path / "adapters.safetensors")
    loaded = add_lora(other, spec, rank=2, seed=7)
    loaded.load(tmp_path / "adapters.safetensors")
    assert torch.equal(other(x), model(x))
    loaded.remove()
    with pytest.raises(FileFormatError, match="rank"):
        add_lora(other, spec, rank=3).load(tmp_path / "adapters.safetensors")


def test_a_dense_layer_that_is_named_gets_an_adapter_too():
    model, spec, x = sparse("linear")
    adapters = add_lora(model, spec.select("0.weight"), rank=2, include=["0.weight", "2.weight"])
    assert adapters.to_dict()["2.weight"]["density"] == 1.0
    assert "0.weight" in str(adapters)
    assert len(adapters) == 2
    trained(model, x, adapters)
    adapters.merge()
    spec.select("0.weight").check(model)


def test_shared_weights_are_left_out_with_a_word():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    sparta.Spec.from_pattern(model, "2:4").apply(model)
    with pytest.warns(UserWarning, match="shared"):
        adapters = add_lora(model)
    assert list(adapters) == ["2.weight"]


def test_what_is_refused():
    model, spec, _ = sparse("linear")
    with pytest.raises(ValueRangeError, match="no sparse layer"):
        add_lora(nn.Linear(4, 4))
    with pytest.raises(ValueRangeError, match="rank is 0"):
        add_lora(model, spec, rank=0)
    with pytest.raises(ValueRangeError, match="alpha"):
        add_lora(model, spec, alpha=-1.0)
    with pytest.raises(NameNotFoundError):
        add_lora(model, spec, include="3.weight")
    with pytest.raises(ShapeError, match="two dims"):
        add_lora(model, spec, include="0.bias")
    with pytest.raises(CheckError, match=r"spec\.apply"):
        add_lora(nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 4)), spec)
    adapters = add_lora(model, spec)
    with pytest.raises(ValueRangeError, match="has adapters"):
        add_lora(model, None)
    with torch.no_grad():
        adapters.parameters()[1].fill_(torch.nan)
    with pytest.raises(ValueRangeError, match="NaN"):
        adapters.merge()
    adapters.remove()
    with pytest.raises(SpartaError, match="before"):
        adapters.merge()


def bytes_of(model):
    """Return the memory of everything that a model holds, each storage once."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("base", ["int8", "fp8"])
@pytest.mark.parametrize("kind", MODELS)
def test_a_base_in_8_bits_keeps_the_zeros_and_is_merged_as_it_was_trained(kind, base, dora):
    model, spec, x = sparse(kind)
    plain, weights = model(x).detach(), {name: p.detach().clone() for name, p in model.named_parameters()}
    adapters = add_lora(model, spec, rank=4, base=base, dora=dora)
    assert {row["base"] for row in adapters.to_dict().values()} == {base}
    assert torch.allclose(model(x), plain, atol=0.05 * float(plain.abs().max()))
    trained(model, x, adapters)
    expected = model(x).detach()
    adapters.merge()
    spec.check(model)
    assert torch.allclose(model(x), expected, atol=1e-6)
    for name, parameter in model.named_parameters():
        assert parameter.is_contiguous()
        assert name in spec or torch.equal(parameter, weights[name])


@pytest.mark.parametrize(("base", "error"), [("int8", 0.5 / 127), ("fp8", 2**-4)])
def test_a_base_in_8_bits_takes_a_quarter_of_the_memory_and_comes_back_rounded(base, error):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
    spec = sparta.Spec.from_pattern(model, "2:4")
    spec.apply(model)
    before, weight = bytes_of(model), model[0].weight.detach().clone()
    adapters = add_lora(model, spec, rank=1, base=base)
    masks = 2 * 256 * 256  # a byte for each weight, which adapters of any base have
    assert bytes_of(model) - masks < 0.3 * before
    assert model.state_dict()["0.parametrizations.weight.0.values"].element_size() == 1
    adapters.remove()
    spec.check(model)
    assert model[0].weight.requires_grad
    scale = weight.abs().amax(1, keepdim=True)
    assert float(((model[0].weight.detach() - weight).abs() / scale).max()) <= error * (1 + 1e-5)


def test_live_weights_that_round_to_zero_are_still_learnt():
    model = nn.Linear(8, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0] + [1e-5] * 7, [0.0] * 4 + [1.0] * 4]))
    spec = sparta.Spec.from_zeros(model)
    adapters = add_lora(model, spec, rank=2, base="int8")
    trained(model, torch.randn(16, 8), adapters)
    adapters.merge()
    spec.check(model)
    assert int((model.weight != 0).sum()) == 12


def test_an_unknown_form_of_the_base_is_named():
    model, spec, _ = sparse("linear")
    with pytest.raises(NameNotFoundError, match="did you mean 'int8'"):
        add_lora(model, spec, base="int")

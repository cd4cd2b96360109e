"""Export: the plain model computes what the quantised one does, integers and spec say the same, files come back."""

import pytest
import torch
from torch import nn

from create.quantize.nets import NETS, make_cnn, train
from sparta import Block, Spec, Unstructured
from sparta.create import quantize
from sparta.create.quantize.fold import conv_norm_pairs
from sparta.errors import FileFormatError, ValueRangeError
from sparta.files import load_tensors, save_tensors

WEIGHTS = {
    "per channel": {"strategy": "channel"},
    "per tensor": {"strategy": "tensor"},
    "asymmetric per channel": {"strategy": "channel", "symmetric": False},
    "asymmetric per tensor": {"symmetric": False},
    "4 bits": {"strategy": "channel", "num_bits": 4},
}


def trained(net, scheme, frozen=False):
    make, batch_of = net
    model = make()
    quantize.prepare(model, scheme)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, batch_of, optimizer, 3)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):  # of both signs, and one channel off
            module.weight.data.normal_()
            module.weight.data[2] = 0
            module.bias.data.normal_()
    if frozen:
        quantize.freeze_observers(model)
        train(model, batch_of, optimizer, 2, first=3)
    return model.eval(), batch_of(6, 77)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("weights", sorted(WEIGHTS))
def test_the_plain_model_computes_what_the_quantized_one_does(net, weights, frozen):
    model, inputs = trained(net, {"weights": WEIGHTS[weights]}, frozen=frozen)
    plain, spec = quantize.export(model)
    assert torch.allclose(plain(inputs), model(inputs), atol=1e-5)
    assert quantize.is_quantized(model), "the model is left as it is"
    spec.check(plain)


@pytest.mark.parametrize("weights", sorted(WEIGHTS))
def test_integers_scales_and_weights_are_one_thing(net, weights):
    model, _ = trained(net, {"weights": WEIGHTS[weights]})
    exported = quantize.export(model)
    state = exported.model.state_dict()
    assert exported.weights.keys() <= state.keys()
    for name, weight in exported.weights.items():
        assert weight.integers.dtype in {torch.int8, torch.uint8}
        assert torch.equal(weight.dequantized(), state[name])
        tesa = exported.spec[name]
        assert tesa.format.bits == (4 if weights == "4 bits" else 8)
        grid = [tesa.scale.dense(), tesa.zero_point.dense()]
        again = (weight.integers.double() - grid[1]) * grid[0]
        assert torch.allclose(again.float(), state[name], rtol=1e-6)
        assert bool(tesa.mask()[state[name] != 0].all())  # and those that were rounded to zero


def test_norms_are_folded_away_exactly_and_the_modules_are_plain():
    model, inputs = trained(NETS["cnn"], "default")
    exported = quantize.export(model)
    assert exported.folded == ("1",)
    assert [type(module) for module in exported.model] == [
        nn.Identity if isinstance(module, nn.BatchNorm2d) else type(module) for module in make_cnn()
    ]
    assert not exported.model[0].weight[2].any(), "a norm of scale 0 leaves a channel of zeros"
    kept = quantize.export(model, fold_batch_norms=False)
    assert kept.folded == ()
    assert torch.allclose(kept.model(inputs), exported.model(inputs), atol=1e-5)


def test_with_one_scale_for_a_weight_training_rounds_the_folded_weight():
    model, _ = trained(NETS["cnn"], "deepsparse")
    exported = quantize.export(model)
    assert exported.weights["0.weight"].scale.dim() == 0
    with pytest.raises(ValueRangeError, match="fold_batch_norms=True"):
        quantize.export(model, fold_batch_norms=False)
    apart = make_cnn()
    quantize.prepare(apart, "deepsparse", fold_batch_norms=False)
    apart(torch.randn(4, 3, 8, 8))
    assert quantize.export(apart, fold_batch_norms=False).folded == ()


def test_sparsity_survives(net):
    make, batch_of = net
    model = make()
    pruned = Spec.from_pattern(model, Unstructured(), 0.8)
    pruned.apply(model)
    quantize.prepare(model)
    quantize.calibrate(model, [batch_of(8, 0)])
    plain, spec = quantize.export(model)
    pruned.check(plain)
    for name in pruned:
        assert spec[name].sparsity >= pruned[name].sparsity


def test_files_come_back_and_damage_is_noticed(net, tmp_path):
    make, _ = net
    model, inputs = trained(net, "default")
    exported = quantize.export(model)
    exported.save(tmp_path / "model.safetensors")
    again = quantize.load_exported(tmp_path / "model.safetensors", make())
    assert torch.equal(again.model(inputs), exported.model(inputs))
    assert again.spec == exported.spec
    assert {n: vars(a) for n, a in again.activations.items()} == {n: vars(a) for n, a in exported.activations.items()}
    with pytest.raises(FileFormatError, match="pass the model it was exported from"):
        quantize.load_exported(tmp_path / "model.safetensors", nn.Linear(3, 3))
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "bad.safetensors").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(FileFormatError, match="damaged"):
        quantize.load_exported(tmp_path / "bad.safetensors", make())


@pytest.mark.parametrize(
    "change",
    [
        lambda payload: payload.pop("folded"),
        lambda payload: payload["weights"]["weight"].update(axis="last"),
        lambda payload: payload["weights"]["weight"]["args"].update(num_bits=64),
        lambda payload: payload["activations"]["input"].update(scale="wide"),
        lambda payload: payload.update(activations=[1, 2]),
        lambda payload: payload.update(folded=["nowhere.at.all"]),
    ],
)
def test_a_file_of_a_stranger_is_read_or_refused(tmp_path, change):
    model = nn.Linear(8, 8)
    quantize.prepare(model)
    model(torch.randn(4, 8))
    quantize.export(model).save(tmp_path / "model.safetensors")
    tensors, payload = load_tensors(tmp_path / "model.safetensors", "quantized-model", 2)
    change(payload)
    save_tensors(tmp_path / "model.safetensors", "quantized-model", 2, tensors, payload)
    with pytest.raises(FileFormatError, match=r"model\.safetensors"):
        quantize.load_exported(tmp_path / "model.safetensors", nn.Linear(8, 8))


def test_integers_take_a_quarter_of_the_file(tmp_path):
    model = nn.Linear(256, 256)
    quantize.prepare(model)
    quantize.export(model).save(tmp_path / "model.safetensors")
    assert (tmp_path / "model.safetensors").stat().st_size < 256 * 256 * 1.2


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.embed(tokens))


@pytest.mark.parametrize("ignore", [(), ("embed",)])
def test_tied_weights_stay_tied_only_where_both_are_quantized_alike(ignore):
    model = Tied()
    quantize.prepare(model, "weights_only", ignore=ignore)
    plain, _ = quantize.export(model)
    tokens = torch.arange(12)
    assert torch.allclose(plain(tokens), model.eval()(tokens), atol=1e-6)
    assert (plain.head.weight is plain.embed.weight) == (not ignore)


def test_a_plain_model_cannot_be_exported():
    with pytest.raises(ValueRangeError, match="not quantised"):
        quantize.export(nn.Linear(2, 2))


class Residual(nn.Module):
    """The convolution's output goes two ways, so its norm cannot be folded."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)
        self.norm_first, self.norm_second = nn.BatchNorm2d(3), nn.BatchNorm2d(3)

    def forward(self, images):
        middle = self.first(images)
        return self.norm_second(self.second(self.norm_first(middle))) + middle


class Untraceable(Residual):
    def forward(self, images):
        return super().forward(images) if images.sum() > 0 else images


def test_only_norms_that_alone_use_a_convolution_are_folded():
    assert conv_norm_pairs(Residual()) == [("second", "norm_second")]
    assert conv_norm_pairs(Untraceable()) == []
    inside = nn.ModuleDict({"stem": nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))})
    assert conv_norm_pairs(inside) == [("stem.0", "stem.1")], "an order that is plain without tracing"
    assert conv_norm_pairs(nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3, track_running_stats=False))) == []
    model, images = Residual(), torch.randn(4, 3, 5, 5)
    quantize.prepare(model, "weights_only")
    model(images)
    assert torch.allclose(quantize.export(model).model(images), model.eval()(images), atol=1e-5)


@pytest.mark.parametrize("conv", [nn.ConvTranspose2d(4, 6, 3), nn.ConvTranspose2d(4, 6, 3, groups=2)])
def test_transposed_convolutions_fold_along_their_own_axis(conv):
    model = nn.Sequential(conv, nn.BatchNorm2d(6))
    model[1].weight.data.normal_()
    model[1].running_var.uniform_(0.5, 2)
    quantize.prepare(model, "weights_only")
    images = torch.randn(2, 4, 5, 5)
    exported = quantize.export(model)
    assert torch.allclose(exported.model(images), model.eval()(images), atol=1e-5)
    assert exported.folded == (("1",) if conv.groups == 1 else ())


def test_weights_that_round_to_zero_stay_live_in_their_blocks(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    spec = Spec.from_pattern(model, Block(4, 1), 0.8)
    spec.apply(model)
    with torch.no_grad():
        model[0].weight[:, 5] *= 1e-5
        model[0].weight[:, 9] *= 1e-5
    mask = spec["0.weight"].mask()
    quantize.prepare(model)
    quantize.calibrate(model, [torch.randn(8, 64)])
    for exported in (quantize.export(model), quantize.export(model, spec=spec)):
        integers = exported.weights["0.weight"].integers
        assert int((integers[mask] == 0).sum()) > 0
        assert torch.equal(exported.spec["0.weight"].mask(), mask)
        assert exported.spec["0.weight"].describe_pattern() == "block 4×1"
    exported.save(tmp_path / "model.safetensors")
    fresh = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    assert quantize.load_exported(tmp_path / "model.safetensors", fresh).spec == exported.spec
    tensors, payload = load_tensors(tmp_path / "model.safetensors", "quantized-model", 2)
    for wrong in (tensors["0.weight::live"][:, :3], tensors["0.weight::live"].float()):
        changed = {**tensors, "0.weight::live": wrong}
        save_tensors(tmp_path / "other.safetensors", "quantized-model", 2, changed, payload)
        with pytest.raises(FileFormatError, match="live weights"):
            quantize.load_exported(tmp_path / "other.safetensors", fresh)

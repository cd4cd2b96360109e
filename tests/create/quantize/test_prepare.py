"""Switching quantization on in place: parameters, keys and optimizers notice nothing; the forward pass does."""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from create.quantize.nets import make_cnn, make_transformer, train
from sparta.create import quantize
from sparta.create.quantize.layers import QuantizedLayer
from sparta.create.quantize.prepare import named_modules, plan, quantized_layers, quantizers
from sparta.errors import NameNotFoundError, ShapeError, ValueRangeError
from sparta.sparsify import Masks, find_layers


def test_parameters_stay_the_same_objects_under_the_same_keys(net):
    make, batch_of = net
    model = make()
    parameters, keys = dict(model.named_parameters()), list(model.state_dict())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    quantize.prepare(model)
    train(model, batch_of, optimizer, 2)
    assert list(model.state_dict()) == keys
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    for layer in quantized_layers(model).values():
        for name, parameter in layer.named_parameters(recurse=False):
            assert getattr(layer, name) is parameter


def test_the_forward_pass_changes_a_little_and_only_while_it_is_on(net):
    make, batch_of = net
    model = make().eval()
    inputs = batch_of(4, 0)
    dense = model(inputs)
    quantize.prepare(model)
    quantized = model(inputs)
    assert not torch.equal(quantized, dense)
    assert (quantized - dense).abs().max() < 0.1 * dense.abs().max()
    quantize.restore(model)
    assert torch.equal(model(inputs), dense)
    assert not any(isinstance(module, QuantizedLayer | quantize.Quantizer) for module in model.modules())
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_checkpoints_from_before_and_after_load_into_fresh_models_of_either_kind(net):
    make, batch_of = net
    before, after = make(), make()
    quantize.prepare(after)
    train(after, batch_of, torch.optim.SGD(after.parameters(), lr=0.1), 3)
    for source in (before, after):
        plain, quantized = make(), make()
        quantize.prepare(quantized)
        for target in (plain, quantized):
            target.load_state_dict(source.state_dict())
            assert all(torch.equal(a, b) for a, b in zip(target.parameters(), source.parameters(), strict=True))
    fresh = make()
    quantize.prepare(fresh)
    fresh.load_state_dict(after.state_dict())
    quantize.load_quantization_state(fresh, quantize.quantization_state(after))
    inputs = batch_of(4, 9)
    assert torch.equal(fresh.eval()(inputs), after.eval()(inputs))


def test_pruned_weights_stay_exactly_zero_through_training_and_in_the_forward_pass(net):
    make, batch_of = net
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    masks = Masks(find_layers(model)).attach(optimizer)
    masks.set({name: torch.rand(layer.shape) > 0.7 for name, layer in masks.layers.items()})
    quantize.prepare(model)
    train(model, batch_of, optimizer, 4)
    for name, layer in masks.layers.items():
        pruned = ~masks[name]
        rounded = layer.module.rounded(layer.attribute)
        assert pruned.any()
        assert (layer.parameter[pruned] == 0).all()
        assert (rounded[pruned] == 0).all()


@given(sparsity=st.floats(0, 1), bits=st.integers(2, 8), symmetric=st.booleans(), channel=st.booleans())
@settings(max_examples=30)
def test_zero_stays_zero_on_every_grid(sparsity, bits, symmetric, channel):
    layer = nn.Linear(12, 6)
    mask = torch.rand(6, 12) >= sparsity
    layer.weight.data *= mask
    strategy = "channel" if channel else "tensor"
    quantize.prepare(layer, {"weights": {"num_bits": bits, "symmetric": symmetric, "strategy": strategy}})
    assert (layer.rounded("weight")[~mask] == 0).all()


@pytest.mark.parametrize(
    "make",
    [
        lambda: (nn.Conv1d(4, 6, 3), torch.randn(2, 4, 9)),
        lambda: (nn.Conv2d(4, 6, 3, groups=2, padding="same", padding_mode="reflect"), torch.randn(2, 4, 9, 9)),
        lambda: (nn.Conv3d(2, 3, 2, bias=False), torch.randn(2, 2, 4, 4, 4)),
        lambda: (nn.ConvTranspose1d(4, 6, 3), torch.randn(2, 4, 9)),
        lambda: (nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1, groups=2), torch.randn(2, 4, 5, 5)),
        lambda: (nn.ConvTranspose3d(2, 3, 2), torch.randn(2, 2, 4, 4, 4)),
        lambda: (nn.Embedding(10, 6, padding_idx=0), torch.randint(0, 10, (3, 4))),
        lambda: (nn.Linear(6, 4), torch.randn(0, 6)),
    ],
)
def test_every_kind_of_layer_runs_its_own_forward_with_rounded_weights_and_learns(make):
    layer, inputs = make()
    quantize.prepare(layer)
    output = layer(inputs)
    rounded = layer.rounded("weight").detach()
    reference = copy.deepcopy(layer)
    seen = layer.input_quantizer.eval()(inputs) if hasattr(layer, "input_quantizer") and inputs.numel() else inputs
    quantize.restore(reference)
    reference.weight.data.copy_(rounded)
    assert torch.allclose(output, reference(seen), atol=1e-6)
    output.sum().backward()
    assert layer.weight.grad is not None
    levels = rounded.shape[layer.weight_quantizer.axis]
    assert layer.weight_quantizer.low.shape == (levels,)


@pytest.mark.parametrize("kdim", [None, 8])
def test_attention_rounds_its_projections_and_every_distinct_input(kdim):
    attention = nn.MultiheadAttention(16, 4, batch_first=True, kdim=kdim, vdim=kdim)
    query, memory = torch.randn(2, 5, 16), torch.randn(2, 7, kdim or 16)
    dense, _ = attention(query, memory, memory)
    quantize.prepare(attention)
    output, weights = attention(query, key=memory, value=memory, need_weights=True)
    assert weights.shape == (2, 5, 7)
    assert not torch.equal(output, dense)
    assert (output - dense).abs().max() < 0.1
    output.sum().backward()
    assert attention.out_proj.weight.grad.abs().sum() > 0
    names = [name for name, quantizer in quantizers(attention) if quantizer.calibrated]
    expected = {"input_quantizer", "key_quantizer", "out_proj.weight_quantizer"}
    expected |= {"in_proj_weight_quantizer"} if kdim is None else {f"{n}_proj_weight_quantizer" for n in "qkv"}
    assert set(names) == expected


def test_self_attention_in_evaluation_takes_no_path_around_the_quantizers():
    model = make_transformer().eval()
    tokens = torch.randint(0, 20, (3, 6))
    quantize.prepare(model)
    with torch.no_grad():
        fused = model(tokens)
    assert torch.allclose(fused, model(tokens), atol=1e-6)
    assert all(quantizer.calibrated for name, quantizer in quantizers(model) if "linear1" in name)


def test_the_linear_layer_of_gpt2_has_its_channels_on_the_other_axis():
    utils = pytest.importorskip("transformers.pytorch_utils")
    model = nn.Sequential(utils.Conv1D(6, 4))
    quantize.prepare(model)
    assert model[0].weight_quantizer.low.shape == (6,)
    model(torch.randn(2, 4)).sum().backward()
    assert type(quantize.export(model).model[0]) is utils.Conv1D


@pytest.mark.parametrize("scheme", ["default", "deepsparse", "tensorrt", "weights_only"])
def test_presets_train(net, scheme):
    make, batch_of = net
    model = make()
    report = quantize.prepare(model, scheme)
    train(model, batch_of, torch.optim.SGD(model.parameters(), lr=0.1), 2)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert str(report)
    assert report.to_dict()["layers"]


def test_outputs_are_rounded_where_asked():
    model = nn.Sequential(nn.Linear(4, 64))
    quantize.prepare(model, {"output_activations": {"num_bits": 2}})
    assert model(torch.randn(16, 4)).unique().numel() <= 3
    attention = nn.MultiheadAttention(8, 2)
    quantize.prepare(attention, {"output_activations": {"num_bits": 2}})
    inputs = torch.randn(5, 2, 8)
    assert attention(inputs, inputs, inputs)[0].unique().numel() <= 3


class TestChoosing:
    def test_ignore_include_and_overrides_by_name_class_and_pattern(self):
        model = make_transformer()
        report = plan(
            model, ignore=["head", "Embedding"], overrides={"re:encoder.*linear2": None, "encoder": "tensorrt"}
        )
        assert "head" not in report.layers
        assert "embed" not in report.layers
        assert report.left["head"] == "as asked"
        assert report.layers["encoder.layers.0.linear2"] == quantize.PRESETS["tensorrt"], "later entries win"
        assert set(plan(model, include=["encoder.layers.1"]).layers) == {
            f"encoder.layers.1.{name}" for name in ("self_attn", "self_attn.out_proj", "linear1", "linear2")
        }

    def test_overrides_can_leave_a_layer_out(self):
        model = make_cnn()
        report = quantize.prepare(model, overrides={"7": None, "Conv2d": {"weights": {"num_bits": 4}}})
        assert set(report.layers) == {"0", "3"}
        assert model[0].weight_quantizer.args.num_bits == 4
        assert type(model[7]) is nn.Linear

    @pytest.mark.parametrize(
        "arguments", [{"ignore": "heed"}, {"include": ["heed"]}, {"overrides": {"heed": None}}, {"ignore": "re:zzz.*"}]
    )
    def test_a_name_that_matches_nothing_is_an_error_unless_not_strict(self, arguments):
        with pytest.raises(NameNotFoundError, match="unknown module"):
            quantize.prepare(make_transformer(), **arguments)
        if "include" not in arguments:
            assert quantize.prepare(make_transformer(), **arguments, strict=False).layers

    def test_what_cannot_be_quantized_is_left_with_a_reason(self):
        class Own(nn.Linear):
            def forward(self, values):
                return super().forward(values) + 1

        model = nn.ModuleDict(
            {
                "own": Own(2, 2),
                "norm": nn.Embedding(4, 2, max_norm=1.0),
                "sparse": nn.Embedding(4, 2, sparse=True),
                "lstm": nn.LSTM(2, 2),
                "fine": nn.Linear(2, 2),
            }
        )
        report = quantize.prepare(model)
        assert set(report.layers) == {"fine"}
        assert set(report.left) == {"own", "norm", "sparse", "lstm"}
        assert "forward of its own" in report.left["own"]

    def test_a_model_with_nothing_to_quantize_is_refused(self):
        with pytest.raises(ValueRangeError, match="nothing to quantise"):
            quantize.prepare(nn.Sequential(nn.ReLU()))
        with pytest.raises(ValueRangeError, match="LSTM is not supported"):
            quantize.prepare(nn.Sequential(nn.LSTM(2, 2)))

    def test_preparing_twice_is_refused(self):
        model = make_cnn()
        quantize.prepare(model)
        with pytest.raises(ValueRangeError, match="already quantised"):
            quantize.prepare(model)

    def test_wrappers_are_seen_through(self):
        model = nn.DataParallel(torch.compile(make_cnn(), backend="eager"))
        report = quantize.prepare(model)
        assert set(report.layers) == {"0", "3", "7"}
        assert "" in named_modules(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_trains_and_keeps_ranges_in_float32(net, dtype):
    make, batch_of = net
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    quantize.prepare(model)
    before = [parameter.clone() for parameter in model.parameters()]
    for step in range(2):
        with torch.autocast("cpu", dtype=dtype):
            outputs = model(batch_of(8, step))
        assert outputs.dtype == dtype
        outputs.float().square().mean().backward()
        optimizer.step()
    assert all(quantizer.low.dtype == torch.float32 for _, quantizer in quantizers(model))
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def trained_compiled_and_not(make, batch_of, backend):
    torch._dynamo.reset()
    model, plain = make(), make()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    compiled(batch_of(4, 0))
    plain(batch_of(4, 0))  # batch norms saw it too
    quantize.prepare(compiled)
    quantize.prepare(plain)
    for step in range(1, 3):
        outputs, reference = compiled(batch_of(4, step)), plain(batch_of(4, step))
        assert torch.allclose(outputs, reference, atol=1e-5)
    outputs.sum().backward()
    reference.sum().backward()
    for (name, found), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.allclose(found.grad, expected.grad, atol=1e-4), name
    ranges, expected = (quantize.quantization_state(m)["ranges"] for m in (model, plain))
    assert all(torch.allclose(ranges[name], expected[name], atol=1e-5) for name in expected)


def test_one_graph_under_compile_before_and_after_the_start(net):
    trained_compiled_and_not(*net, backend="eager")


def test_compiled_graphs_move_the_ranges():
    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))

    trained_compiled_and_not(
        make, lambda n, _: torch.randn(n, 6, generator=torch.Generator().manual_seed(n)), "aot_eager"
    )


def test_copies_and_pickles_are_quantized_and_independent(net):
    make, batch_of = net
    model = make()
    quantize.prepare(model)
    model(batch_of(4, 0))
    quantize.freeze_statistics(model)
    inputs = batch_of(4, 1)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301 - our own bytes
        assert torch.equal(twin.eval()(inputs), model.eval()(inputs))
        quantize.restore(twin)
        assert quantize.is_quantized(model)


class TestCalibrating:
    def test_it_sets_ranges_and_leaves_modes_weights_and_statistics_alone(self, net):
        make, batch_of = net
        model = make()
        next(module for module in model.modules() if not list(module.children())).eval()
        modes = {name: module.training for name, module in model.named_modules()}
        state = copy.deepcopy(model.state_dict())
        quantize.prepare(model)
        assert quantize.calibrate(model, (batch_of(4, seed) for seed in range(9)), steps=3) == 3
        assert {name: module.training for name, module in model.named_modules() if name in modes} == modes
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
        assert any(quantizer.calibrated for _, quantizer in quantizers(model) if quantizer.moving)

    @pytest.mark.parametrize("wrap", [lambda x: x, lambda x: (x, None), lambda x: {"input": x}])
    def test_batches_of_all_kinds(self, wrap):
        model = nn.Linear(4, 2)
        quantize.prepare(model)
        quantize.calibrate(model, [wrap(torch.tensor([[-1.0, 0.0, 2.0, 0.5]]))])
        assert model.input_quantizer.high.item() == 2

    def test_a_forward_of_ones_own(self):
        model = nn.Linear(4, 2)
        quantize.prepare(model)
        quantize.calibrate(model, ["ignored"], forward=lambda m, _: m(torch.ones(1, 4)))
        assert model.input_quantizer.high.item() == 1

    def test_no_batch_or_no_step_is_an_error(self):
        model = nn.Linear(4, 2)
        quantize.prepare(model)
        with pytest.raises(ValueRangeError, match="no batch"):
            quantize.calibrate(model, [])
        with pytest.raises(ValueRangeError, match="1 or more"):
            quantize.calibrate(model, [torch.ones(1, 4)], steps=0)


class TestFreezing:
    def test_frozen_ranges_do_not_move_for_weights_and_activations(self, net):
        make, batch_of = net
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        quantize.prepare(model)
        train(model, batch_of, optimizer, 1)
        quantize.freeze_observers(model)
        before = quantize.quantization_state(model)["ranges"]
        train(model, batch_of, optimizer, 2, first=1)
        after = quantize.quantization_state(model)["ranges"]
        assert all(torch.equal(before[name], after[name]) for name in before)
        quantize.freeze_observers(model, frozen=False)
        train(model, batch_of, optimizer, 1, first=3)
        moved = quantize.quantization_state(model)["ranges"]
        assert any(not torch.equal(before[name], moved[name]) for name in before)

    def test_frozen_norms_keep_their_statistics_through_train_and_go_on_learning(self):
        model = make_cnn()
        train(model, lambda n, s: torch.randn(n, 3, 8, 8), torch.optim.SGD(model.parameters(), lr=0.1), 1)
        quantize.freeze_statistics(model)
        mean, scale = model[1].running_mean.clone(), model[1].weight.clone()
        train(model, lambda n, s: torch.randn(n, 3, 8, 8), torch.optim.SGD(model.parameters(), lr=0.1), 2)
        assert torch.equal(model[1].running_mean, mean)
        assert not torch.equal(model[1].weight, scale)
        assert isinstance(model[1], nn.BatchNorm2d)
        quantize.unfreeze_statistics(model)
        train(model, lambda n, s: torch.randn(n, 3, 8, 8), torch.optim.SGD(model.parameters(), lr=0.1), 1)
        assert not torch.equal(model[1].running_mean, mean)


class TestState:
    def test_a_state_for_another_preparation_is_refused(self):
        model, other = make_cnn(), make_cnn()
        quantize.prepare(model)
        quantize.prepare(other, ignore="7")
        state = quantize.quantization_state(model)
        with pytest.raises(NameNotFoundError, match=r"7\.input_quantizer"):
            quantize.load_quantization_state(other, state)
        with pytest.raises(ValueRangeError, match="version"):
            quantize.load_quantization_state(model, {"version": 9})
        third = make_cnn()
        quantize.prepare(third, "deepsparse")
        with pytest.raises(ShapeError, match="ranges"):
            quantize.load_quantization_state(third, state)

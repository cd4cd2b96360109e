"""Sparse convolutions are drop-ins: same results, same parameters, masked gradients, whatever kernel was chosen."""

import copy

import pytest
import torch
from torch import nn

import sparta
from sparta.errors import ShapeError, SpartaError, ValueRangeError
from sparta.nn import SparseConv1d, SparseConv2d, swap
from sparta.specialize.conv.op import ConvState
from sparta.specialize.conv.spec import conv_spec
from sparta.specialize.kernel_spec import Epilogue
from sparta.specialize.tuning.select import build
from sparta.tesa.attribute import TeSA
from sparta.testing import check

CPU = {"_name": "cpu", "tile": "panel:1:1:1:0:0", "image": "flat"}
CONFIGS = [None, {"_name": "dense"}, CPU]


def name_of(config):
    return config["_name"] if config else "untuned"


def made(dense, config=None, size=9, density=0.4):
    """A sparse layer, a mask, and the dense layer in float64 with the same weights."""
    torch.manual_seed(1)
    mask = torch.rand(dense.weight.shape) < density
    one_dim = isinstance(dense, nn.Conv1d)
    layer = (SparseConv1d if one_dim else SparseConv2d)(dense, mask)
    if config is not None:
        x = torch.randn(2, dense.in_channels, *[size] * (1 if one_dim else 2))
        if not layer.get_search_space(x).includes(config):
            pytest.skip(f"{config['_name']} is not available here")
        layer.build((x,), config)
    return layer, mask, copy.deepcopy(dense).double()


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize(
    "fields",
    [
        {"padding": 1},
        {"padding": "same", "dilation": 2},
        {"padding": "same", "kernel_size": 4},
        {"padding": (2, 1), "stride": (2, 3), "groups": 2},
        {"groups": 6, "bias": False},
    ],
    ids=str,
)
def test_any_geometry_batch_and_size_after_build(config, mode, fields):
    layer, _, exact = made(nn.Conv2d(6, 12, **{"kernel_size": 3, "padding_mode": mode, **fields}), config)
    for x in (torch.randn(2, 6, 9, 9), torch.randn(6, 8, 15), torch.randn(2, 1, 3, 6, 7, 7), torch.randn(0, 6, 9, 9)):
        for training in (True, False):
            y = layer.train(training)(x)
            truth = exact(x.double().reshape(-1, *x.shape[-3:]))
            assert y.shape == (*x.shape[:-3], *truth.shape[1:])
            check(y.reshape(truth.shape), truth, reduction=54)
    wide = torch.randn(2, 6, 9, 9).contiguous(memory_format=torch.channels_last)
    check(layer(wide), exact(wide.double()), reduction=54)


@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
@pytest.mark.parametrize("mode", ["zeros", "circular"])
def test_one_dim(config, mode):
    layer, _, exact = made(nn.Conv1d(6, 12, 4, stride=2, padding=3, groups=3, padding_mode=mode), config)
    for x in (torch.randn(2, 6, 9), torch.randn(6, 31), torch.randn(2, 3, 6, 20)):
        check(layer(x), exact(x.double().reshape(-1, *x.shape[-2:])).reshape(*x.shape[:-2], 12, -1), reduction=54)


@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("fields", [{"padding": 1, "stride": 2}, {"padding": "same", "kernel_size": 4, "groups": 2}])
def test_gradients_are_those_of_the_masked_dense_layer_and_zero_where_pruned(config, fields):
    layer, mask, exact = made(nn.Conv2d(6, 12, **{"kernel_size": 3, **fields}), config)
    x = torch.randn(2, 6, 9, 9, requires_grad=True)
    layer(x).square().sum().backward()
    true_x = x.detach().double().requires_grad_()
    exact(true_x).square().sum().backward()
    check(x.grad, true_x.grad, reduction=500)
    check(layer.weight.grad, torch.where(mask, exact.weight.grad, 0.0), reduction=500)
    check(layer.bias.grad, exact.bias.grad, reduction=500)


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_the_op_has_gradients_through_its_epilogue(activation):
    mask, weight = torch.rand(8, 4, 3) < 0.5, torch.randn(8, 4, 3)
    epilogue = Epilogue(bias=True, activation=activation, residual=True)
    spec = conv_spec(TeSA.from_mask(mask), (2, 4, 9), torch.float32, epilogue=epilogue)
    state = ConvState(spec, build(spec, {"_name": "dense"}))
    tensors = [torch.randn(2, 4, 9), weight, torch.randn(8), torch.randn(2, 8, 7)]
    ours = [t.clone().requires_grad_() for t in tensors]
    torch.ops.sparta.conv(*ours, state.handle, False).square().sum().backward()
    exact = [t.double().requires_grad_() for t in tensors]
    before = nn.functional.conv1d(exact[0], exact[1] * mask, exact[2])
    (getattr(nn.functional, activation)(before) + exact[3]).square().sum().backward()
    for mine, truth in zip(ours, exact, strict=True):
        check(mine.grad, truth.grad, reduction=500)
    handle = state.handle
    del state
    with pytest.raises(SpartaError, match="are gone"):
        torch.ops.sparta.conv(*tensors, handle, False)


@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
def test_pruned_weights_stay_zero_through_training(config):
    layer, mask, _ = made(nn.Conv2d(6, 12, 3, padding=1), config)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.05, weight_decay=0.1)
    x, target = torch.randn(4, 6, 9, 9), torch.randn(4, 12, 9, 9)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = (layer(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert torch.equal(layer.weight[~mask], torch.zeros(int((~mask).sum())))


@pytest.mark.parametrize("config", CONFIGS[1:], ids=name_of)
def test_evaluation_sees_every_change_and_copies_are_independent(config):
    layer, _, exact = made(nn.Conv2d(6, 12, 3), config)
    layer.eval()
    x = torch.randn(2, 6, 9, 9)
    twin, before = copy.deepcopy(layer), layer(x)
    with torch.no_grad():
        for module in (layer, exact):
            module.weight.mul_(-0.5)
    check(layer(x), exact(x.double()), reduction=54)
    assert torch.equal(twin(x), before)


@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
def test_torch_compile_takes_it_whole(config):
    layer, mask, exact = made(nn.Conv2d(6, 12, 3, padding=1), config)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 6, 9, 9, requires_grad=True)
    y = compiled(x)
    check(y, exact(x.double()), reduction=54)
    y.sum().backward()
    assert torch.equal(layer.weight.grad[~mask], torch.zeros(int((~mask).sum())))


def test_a_new_mask_keeps_values_and_parameter_and_runs_dense_again():
    layer, mask, _ = made(nn.Conv2d(6, 12, 3), CONFIGS[1])
    parameter, before = layer.weight, layer.weight.detach().clone()
    half = mask & (torch.rand(mask.shape) < 0.5)
    layer.update_mask(TeSA.from_mask(half))
    assert layer.weight is parameter
    assert torch.equal(layer.weight, torch.where(half, before, 0.0))
    assert not layer.ready


def test_state_dict_round_trip():
    layer, mask, exact = made(nn.Conv2d(6, 12, 3), CONFIGS[1])
    other, _, _ = made(nn.Conv2d(6, 12, 3), CONFIGS[1], density=1.0)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.weight_mask, mask)
    assert not other.ready  # it was built for another mask
    same, _, _ = made(nn.Conv2d(6, 12, 3), CONFIGS[1])
    same.load_state_dict(layer.state_dict())
    assert same.ready
    x = torch.randn(1, 6, 9, 9)
    check(same(x), exact(x.double()), reduction=54)


def test_to_another_dtype():
    layer, _, exact = made(nn.Conv2d(6, 12, 3), CONFIGS[1])
    x = torch.randn(1, 6, 9, 9, dtype=torch.float64)
    check(layer.to(torch.float64)(x), exact(x), reduction=54)


def test_tuning_a_model_of_swapped_layers():
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 1), nn.Flatten(2), nn.Conv1d(8, 4, 3))
    sparta.Spec.from_pattern(model, sparta.Unstructured(), 0.8).apply(model)
    exact = copy.deepcopy(model).double()
    assert sorted(swap(model)) == ["0", "2", "4"]
    x = torch.randn(1, 3, 12, 12)
    configs = sparta.nn.tune(model, x, max_trials=2)
    assert set(configs) == {"0", "2", "4"}
    check(model(x), exact(x.double()), reduction=200)
    sparta.nn.build(model, x, configs)
    check(model(x), exact(x.double()), reduction=200)


def test_a_subclass_is_not_swapped():
    class Mine(nn.Conv2d):
        pass

    model = nn.Sequential(Mine(3, 4, 1))
    sparta.Spec.from_pattern(model, sparta.Unstructured(), 0.5).apply(model)
    assert swap(model) == {}


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: SparseConv2d(nn.Conv1d(2, 2, 1), torch.ones(2, 2, 1)), SpartaError, "Conv2d"),
        (lambda: SparseConv2d(nn.LazyConv2d(2, 1), torch.ones(2, 2, 1, 1)), ValueRangeError, "with weights"),
        (lambda: SparseConv2d(nn.Conv2d(2, 2, 3), torch.ones(2, 2, 1, 1)), ShapeError, "weight_mask of shape"),
        (lambda: SparseConv2d(nn.Conv2d(2, 2, 1), torch.full((2, 2, 1, 1), 0.5)), ValueRangeError, "0 and 1|neither"),
        (lambda: made(nn.Conv2d(2, 2, 1))[0](torch.randn(3, 3, 3)), ShapeError, "an input of shape"),
        (lambda: made(nn.Conv2d(2, 2, 1))[0](torch.randn(2, 3)), ShapeError, "an input of shape"),
        (lambda: made(nn.Conv2d(2, 2, 1))[0].tune(torch.randn(3, 3, 3)), ShapeError, "an example input"),
        (lambda: made(nn.Conv2d(2, 2, 1))[0].build(torch.randn(2, 3, 3), {"_name": "x"}), ValueRangeError, "space"),
    ],
)
def test_wrong_inputs_say_what_is_allowed(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_it_prints_what_runs():
    layer, _, _ = made(nn.Conv2d(6, 12, 3, padding=1, padding_mode="reflect"))
    assert "dense until tuned" in repr(layer)
    assert "reflect" in repr(layer)


@pytest.mark.parametrize("bias", [True, False])
def test_calls_that_repeat_see_all_that_changed_between_them(bias):
    layer, mask, _ = made(nn.Conv2d(6, 12, 3, padding=1, bias=bias), CPU)
    layer.eval()

    def right(x):
        with torch.no_grad():
            for _ in range(2):  # what the first call finds out, the second one uses
                truth = torch.where(mask, layer.weight.double(), 0.0)
                shift = None if layer.bias is None else layer.bias.double()
                check(layer(x), nn.functional.conv2d(x.double(), truth, shift, padding=1), reduction=54)

    x = torch.randn(2, 6, 9, 9)
    right(x)
    assert layer._state.fast_path is not None
    changes = [
        lambda: layer.weight.mul_(2.0),
        lambda: setattr(layer.weight, "data", torch.randn(12, 6, 3, 3) * mask),
        lambda: setattr(layer, "weight", nn.Parameter(torch.randn(12, 6, 3, 3) * mask)),
    ]
    if bias:
        changes += [
            lambda: layer.bias.add_(1.0),
            lambda: setattr(layer.bias, "data", torch.randn(12)),
            lambda: setattr(layer, "bias", None),
        ]
    for change in changes:
        with torch.no_grad():
            change()
        right(x)
    for other in (
        torch.randn(1, 6, 5, 7),
        torch.randn(6, 9, 9),
        torch.randn(2, 6, 9, 9, dtype=torch.float64).float().contiguous(memory_format=torch.channels_last),
        torch.randn(0, 6, 9, 9),
        torch.randn(2, 6, 9, 9, requires_grad=True),
    ):
        right(other)
    with pytest.raises(ShapeError):
        layer(torch.randn(2, 5, 9, 9))
    twin = copy.deepcopy(layer)
    twin.weight.data.zero_()
    right(x)
    grown = layer(x.requires_grad_())
    grown.sum().backward()
    assert x.grad is not None
    right(x.detach())

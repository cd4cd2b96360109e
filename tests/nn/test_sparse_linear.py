"""SparseLinear is a drop-in: same results, same parameters, masked gradients, whatever kernel was chosen."""

import copy

import pytest
import torch
from torch import nn

import sparta
from sparta.errors import ShapeError, SpartaError, ValueRangeError
from sparta.nn import SparseLinear, build, tune
from sparta.testing import block_mask, check, linear_reference

K, N = 48, 40
CONFIGS = [{"_name": "dense"}, {"_name": "torch-csr"}, {"_name": "cpu", "tile": "panel:1:1:4:0:0"}]


@pytest.fixture
def mask():
    return block_mask((N, K), (1, 1), 0.8, seed=1)


def made(mask, config=None, rows=7, *, bias=True):
    layer = SparseLinear(nn.Linear(K, N, bias=bias), weight_mask=mask)
    if config is not None:
        if not layer.get_search_space(torch.randn(rows, K)).includes(config):
            pytest.skip(f"{config['_name']} is not available here")
        layer.build((torch.randn(rows, K),), config)
    return layer


def test_the_sample_of_the_overview_runs():
    M, N, K, sparsity = 64, 128, 96, 0.5  # noqa: N806 - as printed
    A = torch.randn((M, K))  # noqa: N806
    w_mask = sparta.testing.block_mask(shape=(N, K), block=(32, 32), sparsity=sparsity, algo="rand")
    dense_op = torch.nn.Linear(K, N)
    with torch.no_grad():
        dense_op.weight *= w_mask
    sparse_op = sparta.nn.SparseLinear(dense_op, weight_mask=w_mask)
    sparse_op.tune(inputs=(A))
    torch.testing.assert_close(sparse_op(A), dense_op(A), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("config", [None, *CONFIGS], ids=lambda c: c["_name"] if c else "untuned")
@pytest.mark.parametrize("shape", [(7, K), (2, 3, K), (K,), (0, K), (1, K), (130, K)])
@pytest.mark.parametrize("bias", [True, False])
def test_any_number_of_rows_and_dims_after_build(mask, config, shape, bias):
    layer = made(mask, config, bias=bias)
    x = torch.randn(shape)
    for training in (True, False):
        layer.train(training)
        y = layer(x)
        assert y.shape == (*shape[:-1], N)
        expected = linear_reference(x, layer.weight, layer.bias, weight_mask=mask)
        check(y, expected, reduction=K) if y.numel() else None


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c["_name"])
def test_strided_inputs(mask, config):
    layer = made(mask, config)
    x = torch.randn(K, 14).t()[::2]
    check(layer(x), linear_reference(x, layer.weight, layer.bias, weight_mask=mask), reduction=K)


@pytest.mark.parametrize("config", [None, *CONFIGS], ids=lambda c: c["_name"] if c else "untuned")
def test_gradients_are_those_of_the_masked_dense_layer_and_zero_where_pruned(mask, config):
    layer = made(mask, config)
    x = torch.randn(7, K, requires_grad=True)
    weight = (layer.weight.detach().double() * mask).requires_grad_()
    bias = layer.bias.detach().double().requires_grad_()
    exact = x.detach().double().requires_grad_()
    nn.functional.linear(exact, weight * mask, bias).square().sum().backward()
    layer(x).square().sum().backward()
    check(x.grad, exact.grad, reduction=N * K)
    check(layer.weight.grad, weight.grad, reduction=N * K)
    check(layer.bias.grad, bias.grad, reduction=N * K)
    assert torch.equal(layer.weight.grad[~mask], torch.zeros(int((~mask).sum())))


@pytest.mark.parametrize("config", [None, *CONFIGS], ids=lambda c: c["_name"] if c else "untuned")
def test_pruned_weights_stay_zero_through_training(mask, config):
    layer = made(mask, config)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.05, weight_decay=0.1)
    x, target = torch.randn(64, K), torch.randn(64, N)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = (layer(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert torch.equal(layer.weight[~mask], torch.zeros(int((~mask).sum())))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c["_name"])
def test_evaluation_sees_every_change_of_the_weight(mask, config):
    layer = made(mask, config).eval()
    x = torch.randn(7, K)
    with torch.no_grad():
        for factor in (1.0, 2.0, -0.5):
            layer.weight.mul_(factor)
            check(layer(x), linear_reference(x, layer.weight, layer.bias, weight_mask=mask), reduction=K)
        layer.weight = nn.Parameter(torch.randn(N, K) * mask)
        check(layer(x), linear_reference(x, layer.weight, layer.bias, weight_mask=mask), reduction=K)


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("bias", [True, False])
def test_calls_that_repeat_see_all_that_changed_between_them(mask, rows, bias):
    layer, x = made(mask, bias=bias).eval(), torch.randn(rows, K)
    config = next((s for s in layer.get_search_space(x).samples() if s["_name"] == "cpu"), None)
    if config is None:
        pytest.skip("there are no C++ kernels here")
    layer.build((x,), config)

    def right(x):
        with torch.no_grad():
            for _ in range(2):  # what the first call finds out, the second one uses
                check(layer(x), linear_reference(x, layer.weight, layer.bias, weight_mask=mask), reduction=K)

    right(x)
    assert layer._state.fast_path is not None
    changes = [
        lambda: layer.weight.mul_(2.0),
        lambda: setattr(layer.weight, "data", torch.randn(N, K) * mask),
        lambda: setattr(layer, "weight", nn.Parameter(torch.randn(N, K) * mask)),
        lambda: layer.load_state_dict({name: 3 * value for name, value in layer.state_dict().items()}, strict=False),
    ]
    if bias:
        changes += [
            lambda: layer.bias.add_(1.0),
            lambda: setattr(layer.bias, "data", torch.randn(N)),
            lambda: setattr(layer, "bias", nn.Parameter(torch.randn(N))),
            lambda: setattr(layer, "bias", None),
        ]
    for change in changes:
        with torch.no_grad():
            change()
        right(x)
    for other in (
        torch.randn(2, 3, K),
        torch.randn(K, 5).t(),
        torch.randn(0, K),
        torch.randn(2, K, requires_grad=True),
    ):
        right(other)
    twin = copy.deepcopy(layer)
    twin.weight.data.zero_()
    right(x)
    assert layer(x).grad_fn is not None  # gradients are recorded where they are asked for
    with torch.inference_mode(), pytest.raises(ShapeError):
        layer(x[:, :5])
    if rows == 1 and bias:
        with torch.no_grad():
            assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c["_name"])
def test_torch_compile_takes_it_whole(mask, config):
    layer = made(mask, config)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(7, K, requires_grad=True)
    y = compiled(x)
    check(y, linear_reference(x, layer.weight, layer.bias, weight_mask=mask), reduction=K)
    y.sum().backward()
    assert torch.equal(layer.weight.grad[~mask], torch.zeros(int((~mask).sum())))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c["_name"])
def test_copies_are_independent(mask, config):
    layer = made(mask, config).eval()
    x = torch.randn(7, K)
    before = layer(x)
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        twin.weight.mul_(2.0)
        twin.bias.zero_()
    check(twin(x), linear_reference(x, twin.weight, twin.bias, weight_mask=mask), reduction=K)
    assert torch.equal(layer(x), before)
    del layer
    assert torch.isfinite(twin(x)).all()


def test_parameters_are_the_dense_layers_own(mask):
    dense = nn.Linear(K, N)
    layer = SparseLinear(dense, weight_mask=mask)
    assert layer.weight is dense.weight
    assert layer.bias is dense.bias
    assert int((dense.weight != 0).sum()) == int(mask.sum())


def test_a_new_mask_keeps_values_and_parameter_and_runs_dense_again(mask):
    layer = made(mask, CONFIGS[0])
    parameter, before = layer.weight, layer.weight.detach().clone()
    half = mask & (torch.rand(N, K) < 0.5)
    layer.update_mask(weight_mask=half)
    assert layer.weight is parameter
    assert torch.equal(layer.weight[half], before[half])
    assert not layer.ready
    x = torch.randn(3, K)
    check(layer(x), linear_reference(x, before, layer.bias, weight_mask=half), reduction=K)


def test_state_dict_round_trip(mask):
    layer, other = made(mask, CONFIGS[1]), made(torch.ones(N, K, dtype=torch.bool), CONFIGS[0])
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.weight_mask, mask)
    assert not other.ready  # it was built for another mask
    x = torch.randn(3, K)
    check(other(x), linear_reference(x, layer.weight, layer.bias, weight_mask=mask), reduction=K)
    same = made(mask, CONFIGS[1])
    same.load_state_dict(layer.state_dict())
    assert same.ready


def test_a_whole_model_is_tuned_and_built_from_what_was_tuned(mask):
    def model():
        torch.manual_seed(1)
        second = SparseLinear(nn.Linear(N, K), weight_mask=mask.t())
        return nn.Sequential(SparseLinear(nn.Linear(K, N), weight_mask=mask), nn.ReLU(), second)

    x = torch.randn(5, K)
    first, second = model(), model()
    seen = []
    configs = tune(first, (x,), max_trials=3, backward=True, progress=lambda step: seen.append(step.name))
    assert seen == ["0", "2"]
    build(second, x, configs)
    assert all(layer.ready for layer in (second[0], second[2]))
    check(first(x), second(x).double(), reduction=K)
    with pytest.raises(KeyError, match="unknown sparse module"):
        build(second, x, {"7": {"_name": "dense"}})
    with pytest.raises(ValueRangeError, match="without sparse modules"):
        tune(nn.Linear(2, 2), torch.randn(1, 2))


def test_backward_kernels_give_the_same_gradients(mask):
    layer = made(mask)
    layer.tune(inputs=(torch.randn(7, K),), backward=True, max_trials=2)
    x = torch.randn(7, K, requires_grad=True)
    layer(x).sum().backward()
    exact = x.detach().double().requires_grad_()
    (exact @ (layer.weight.double() * mask).t()).sum().backward()
    check(x.grad, exact.grad, reduction=N)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda m: SparseLinear(nn.Linear(K, N)), ValueRangeError, "exactly one"),
        (lambda m: SparseLinear(nn.Linear(K, N), weight_mask=m, input_mask=m), ValueRangeError, "exactly one"),
        (lambda m: SparseLinear(nn.Linear(K, N), weight_mask=m.t()), ShapeError, "weight_mask of shape"),
        (lambda m: SparseLinear(nn.Linear(K, N), weight_mask=m * 0.5), ValueRangeError, "0 and 1|neither"),
        (lambda m: SparseLinear(nn.Conv1d(1, 1, 1), weight_mask=m), SpartaError, "Linear"),
        (lambda m: made(m).tune(inputs=(torch.randn(3, K + 1),)), ShapeError, "example input"),
        (lambda m: made(m).tune(inputs=(1, 2)), ValueRangeError, "tuple of 1"),
        (lambda m: made(m).build(torch.randn(3, K), {"_name": "dense", "x": 1}), ValueRangeError, "search space"),
        (lambda m: made(m, CONFIGS[0])(torch.randn(3, K + 1)), ShapeError, "an input of shape"),
    ],
)
def test_wrong_inputs_say_what_is_allowed(mask, call, error, text):
    with pytest.raises(error, match=text):
        call(mask)


def test_it_prints_what_runs(mask):
    assert "dense until tuned" in repr(made(mask))
    assert "built as given" in repr(made(mask, CONFIGS[0]))

"""Ops beyond the usual: quantise and dequantise with their bit formats, probed black boxes, indices, experts."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from propagation.test_exactness import Calls, honest, zeroed
from sparta import Spec, TeSA
from sparta.propagation import propagate


class Quantized(nn.Module):
    """A linear layer on quantised activations, with weights quantised channel by channel."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)
        self.register_buffer("scale", torch.rand(3) * 0.1 + 0.01)
        self.register_buffer("zero", torch.zeros(3, dtype=torch.int32))

    def forward(self, x):
        y = torch.relu(self.first(x)).reshape(-1, 2, 3).reshape(-1, 6)
        y = torch.fake_quantize_per_tensor_affine(y, 0.1, 3, 0, 255)
        weight = torch.fake_quantize_per_channel_affine(self.last.weight, self.scale, self.zero, 0, -8, 7)
        return functional.linear(y, weight, self.last.bias)


def test_quantized_constants_are_exact_and_cut():
    model, x = Quantized(), torch.randn(5, 4)
    with torch.no_grad():
        model.first.weight[1:3] = 0
        model.first.bias[1:3] = -1  # which the activation makes 0
        model.last.weight[:, 4] = 0
    result = propagate(model, x)
    assert honest(result, x) > 0
    small = result.compact()
    torch.testing.assert_close(small(x), model(x))
    assert small.get_parameter("first.weight").shape == (4, 4)  # the same position of both rows
    assert small.get_parameter("last.weight").shape == (3, 4)


def test_bit_formats_flow_forwards_and_backwards():
    model = Quantized()
    result = propagate(model, torch.randn(5, 4))
    found = {name: str(tesa.format) for name, tesa in result.activations.items()}
    assert found["fake_quantize_per_tensor_affine"] == "uint8"
    assert found["linear"] == found["relu"] == found["reshape"] == "uint8"  # no one sees more of them
    assert found["x"] == found["linear_1"] == "fp32"
    assert str(result.spec["last.weight"].format) == "int4"
    assert str(result.spec["first.weight"].format) == "fp32"
    assert str(result.spec["scale"].format) == "fp32"


def test_a_value_that_someone_sees_in_full_keeps_its_bits():
    def function(m, x):
        y = x * m.w
        return torch.fake_quantize_per_tensor_affine(y, 0.1, 0, -128, 127), y

    result = propagate(Calls(function, w=torch.rand(3)), torch.randn(2, 3))
    assert str(result.activations["mul"].format) == "fp32"


def test_a_given_format_stands():
    model = Quantized()
    spec = Spec({"last.weight": TeSA.dense((3, 6)).with_format("int8", scale=0.1)})
    assert str(propagate(model, torch.randn(5, 4), spec).spec["last.weight"].format) == "int8"


def test_decomposed_quantization():
    pytest.importorskip("torch.ao.quantization.fx._decomposed")
    ops = torch.ops.quantized_decomposed

    def function(m, x):
        y = torch.sigmoid(x @ m.w)
        code = ops.quantize_per_tensor(y, 0.01, 0, -128, 127, torch.int8)
        z = ops.dequantize_per_tensor(code, 0.01, 0, -128, 127, torch.int8)
        return z @ m.v

    model = Calls(function, w=zeroed(4, 6, columns=[1, 3]), v=zeroed(6, 3, rows=[2]))
    x = torch.randn(5, 4)
    result = propagate(model, x)
    assert honest(result, x) > 0
    assert str(result.activations["dequantize_per_tensor"].format) == "int8"
    small = result.compact()
    torch.testing.assert_close(small(x), model(x))
    assert small.get_parameter("w").shape == (4, 5)


# ---------------------------------------------------------------------- probing


@torch.library.custom_op("sparta_test::running", mutates_args=())
def running(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.cumsum(x * w, 0) + 1


@running.register_fake
def _(x, w):
    return torch.empty_like(x + w)


class Boxed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.w, self.last = nn.Linear(4, 6, bias=False), nn.Parameter(torch.rand(6)), nn.Linear(6, 3)
        with torch.no_grad():
            self.first.weight[1] = 0
            self.last.weight[:, 4] = 0

    def forward(self, x):
        return self.last(torch.ops.sparta_test.running(self.first(x), self.w))


def test_a_black_box_is_conservative_until_probing_is_asked_for():
    model, x = Boxed(), torch.randn(5, 4)
    assert propagate(model, x).compact().get_parameter("w").shape == (6,)
    assert propagate(model, x, probe=["other.op"]).compact().get_parameter("w").shape == (6,)
    for probe in (True, "sparta_test.running", ["sparta_test.running.default"]):
        result = propagate(model, x, probe=probe)
        assert honest(result, x) > 5
        assert "probed" in str(result)
        small = result.compact()
        assert small.get_parameter("w").shape == (4,)  # channel 1 became the constant 1, channel 4 is dead
        torch.testing.assert_close(small(x), model(x))


def test_probing_sees_that_an_op_mixes_a_dim():
    def function(m, x):
        return torch.cumprod(x @ m.w, 1) @ m.v

    model = Calls(function, w=zeroed(4, 6, columns=[2]), v=zeroed(6, 3, rows=[5]))
    x = torch.randn(5, 4)
    result = propagate(model, x, probe=True)
    assert honest(result, x) > 0
    assert result.activations["cumprod"].states()[0].tolist() == [0, 0, 1, 1, 1, 1]  # zero from the third on
    small = result.compact()
    assert small.get_parameter("w").shape == (4, 6)
    torch.testing.assert_close(small(x), model(x))


def test_of_two_zeros_that_hide_each_other_one_is_kept_when_probed():
    torch.library.define("sparta_test::times", "(Tensor a, Tensor b) -> Tensor")
    torch.library.impl("sparta_test::times", "CompositeExplicitAutograd", lambda a, b: a * b)
    torch.library.register_fake("sparta_test::times", lambda a, b: torch.empty_like(a))
    model = Calls(
        lambda m, x: torch.ops.sparta_test.times(x * m.a, x * m.b),
        a=torch.tensor([0.0, 1, 0]),
        b=torch.tensor([0.0, 0, 1]),
    )
    x = torch.randn(4, 3)
    result = propagate(model, x, probe=True)
    assert honest(result, x) > 0


def test_whole_numbers_are_not_probed():
    torch.library.define("sparta_test::shifted", "(Tensor a) -> Tensor")
    torch.library.impl("sparta_test::shifted", "CompositeExplicitAutograd", lambda a: a + 1)
    torch.library.register_fake("sparta_test::shifted", torch.empty_like)
    model = Calls(lambda m, x: torch.ops.sparta_test.shifted(x.argmax(1)) * m.w, w=torch.rand(4))
    assert propagate(model, torch.randn(4, 3), probe=True).spec["w"].count("live") == 4


# ---------------------------------------------------------------------- indices

INDICES = {
    "index": lambda m, x: torch.tanh(x @ m.w)[:, torch.tensor([5, 0, 2, 2])] @ m.v[:4],
    "index at run time": lambda m, x: (x @ m.w)[x.argmax(1)] @ m.v,
    "two indices": lambda m, x: torch.tanh((x @ m.w)[:, None])[x.argmax(1), torch.zeros(5).long()] @ m.v,
    "apart": lambda m, x: (
        (x @ m.w)[:, None, :, None].expand(5, 2, 6, 3)[torch.arange(5), :, :, x.argmax(1) % 3].sum(1) @ m.v
    ),
    "gather": lambda m, x: (x @ m.w).gather(0, x.argmax(1)[:, None].expand(5, 6)) @ m.v,
    "scatter": lambda m, x: torch.zeros(5, 6).scatter(0, x.argmax(1)[:, None].expand(5, 6), x @ m.w) @ m.v,
    "scatter value": lambda m, x: (x @ m.w).scatter(0, x.argmax(1)[:, None].expand(5, 6), 0.0) @ m.v,
    "index add": lambda m, x: torch.zeros(5, 6).index_add(0, x.argmax(1), x @ m.w) @ m.v,
    "index put": lambda m, x: torch.zeros(5, 6).index_put((x.argmax(1),), x @ m.w) @ m.v,
    "top": lambda m, x: (x @ m.w).topk(2, 0)[0] @ m.v,
    "sorted": lambda m, x: (x @ m.w).sort(0)[0] @ m.v,
    "largest": lambda m, x: (x @ m.w).max(0)[0] @ m.v,
    "flip": lambda m, x: torch.sigmoid(x @ m.w).flip(1) @ m.v,
    "roll": lambda m, x: torch.sigmoid(x @ m.w).roll(2, 1) @ m.v,
    "roll as one line": lambda m, x: (x @ m.w).roll(2) @ m.v,
    "steps": lambda m, x: torch.sigmoid(x @ m.w)[:, ::2] @ m.v[:3],
    "zeros": lambda m, x: (torch.zeros(x.shape[0], 6) + x @ m.w) @ m.v,
}
WHOLE = {"roll as one line"}  # nothing can be cut there


@pytest.mark.parametrize("kind", INDICES)
def test_picking_and_placing_is_honest_and_compacts(kind):
    model = Calls(INDICES[kind], w=zeroed(4, 6, columns=[1, 3]), v=zeroed(6, 3, rows=[2, 4]))
    x = torch.randn(5, 4)
    result = propagate(model, x)
    honest(result, x)
    small = result.compact()
    y = torch.randn(5, 4)
    torch.testing.assert_close(small(y), model(y))
    data = result.to_dict()
    assert (data["parameters_compact"] < data["parameters"]) == (kind not in WHOLE)


def test_picking_by_a_mask_is_conservative():
    model = Calls(lambda m, x: ((x @ m.w) * (x.sum(1) > 0)[:, None]) @ m.v, w=zeroed(4, 6, columns=[1]), v=zeroed(6, 3))
    x = torch.randn(5, 4)
    result = propagate(model, x)
    honest(result, x)
    torch.testing.assert_close(result.compact()(x), model(x))


def test_dropout_and_batch_norm_in_train_mode():
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 2))
    with torch.no_grad():
        model[0].weight[1] = 0
        model[1].bias.fill_(-1.0)
        model[4].weight[:, 3] = 0
    x = torch.randn(8, 4)
    before = model[1].running_mean.clone()
    small = propagate(model, x, train=True).compact()
    assert torch.equal(model[1].running_mean, before)
    assert small.get_parameter("1.weight").shape == (4,)
    assert torch.equal(small.get_buffer("1.running_mean"), before[:4] * 0)
    torch.manual_seed(0)
    assert not torch.equal(small(x), small(x))  # dropout is on again after the check
    model.train()
    model(x)
    assert small.get_buffer("1.num_batches_tracked") == 2
    in_eval = propagate(model, x).compact()
    assert torch.equal(in_eval(x), in_eval(x))

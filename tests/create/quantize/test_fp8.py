"""Training for 8-bit floating point: the grid is e4m3, gradients pass, and the result keeps bits and pattern."""

import pytest
import torch
from torch import nn

import sparta
from sparta.create import quantize
from sparta.create.quantize.fake_quantize import fake_quantize
from sparta.create.quantize.scheme import QuantizationArgs, Scheme
from sparta.errors import NameNotFoundError, ValueRangeError
from sparta.precision.trained import from_training


def test_numbers_lie_on_e4m3_and_gradients_pass_inside():
    args = QuantizationArgs(kind="float")
    x = torch.tensor([0.0, 0.26, -1.06, 447.0, 500.0, -1e9], requires_grad=True)
    y = fake_quantize(x, torch.tensor(1.0), torch.tensor(0), args)
    assert y.tolist() == [0.0, 0.25, -1.0, 448.0, 448.0, -448.0]
    y.sum().backward()
    assert x.grad.tolist() == [1.0, 1.0, 1.0, 1.0, 0.0, 0.0]
    assert (str(args), str(args.format), args.dtype) == ("8 bits e4m3 per tensor", "fp8_e4m3", torch.float8_e4m3fn)


def test_a_model_trains_and_keeps_its_pattern(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    spec = sparta.Spec.from_pattern(model, sparta.Block(4, 1), 0.5)
    spec.apply(model)
    masks = {name: spec[name].mask() for name in spec}
    quantize.prepare(model, "fp8")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x, y = torch.randn(64, 32), torch.randint(0, 4, (64,))
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for name, mask in masks.items():
                model.get_parameter(name).mul_(mask)
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    exported = quantize.export(model, spec=spec)
    weight = exported.weights["0.weight"]
    assert weight.integers.dtype == torch.float8_e4m3fn
    assert torch.equal(weight.dequantized(), exported.model[0].weight)
    assert str(exported.spec["0.weight"].format) == "fp8_e4m3"
    assert torch.equal(exported.spec["0.weight"].mask(), masks["0.weight"])
    exported.save(tmp_path / "model.safetensors")
    fresh = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    again = quantize.load_exported(tmp_path / "model.safetensors", fresh)
    assert torch.equal(again.model(x), exported.model(x))
    assert again.spec == exported.spec
    found = from_training(model, [x])
    assert found.report.precision == "fp8"
    assert found.activations["0.input"].scale == exported.activations["0.input"].scale
    with pytest.raises(ValueRangeError, match="in fp8"):
        quantize.to_onnx(exported, (x,), tmp_path / "model.onnx")


def test_norms_fold_into_weights_of_fp8():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    with torch.no_grad():
        model[1].weight.copy_(torch.tensor([1.0, -2.0, 0.0, 0.5]))
        model[1].running_var.uniform_(0.5, 2)
    x = torch.randn(2, 3, 6, 6)
    quantize.prepare(model, Scheme(QuantizationArgs(strategy="channel", kind="float")))
    expected = model(x)
    exported = quantize.export(model)
    torch.testing.assert_close(exported.model(x), expected, rtol=1e-4, atol=1e-5)
    assert exported.spec["0.weight"].density == 0.75  # a norm of scale 0 hides its channel


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"kind": "fp8"}, NameNotFoundError),
        ({"kind": "float", "num_bits": 4}, ValueRangeError),
        ({"kind": "float", "symmetric": False}, ValueRangeError),
    ],
)
def test_wrong_kinds_are_refused(wrong, error):
    with pytest.raises(error):
        QuantizationArgs(**wrong)

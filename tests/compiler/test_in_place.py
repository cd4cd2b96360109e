"""`optimize` keeps the model object, its class and its state, and makes layers sparse where that is right."""

import pytest
import torch
from torch import nn

import sparta
from compiler import nets
from sparta.errors import ValueRangeError
from sparta.nn import SparseLinear
from sparta.specialize.tuning.select import Choice


@pytest.fixture
def kernels(monkeypatch):
    """Let `build` find a C++ kernel for every linear layer."""
    monkeypatch.setattr(
        "sparta.nn.operator.choose", lambda spec, _store=None: Choice("cpu-generated", {}, "forced", None)
    )


def test_the_model_stays_itself(kernels):
    model, x = nets.pruned(nets.Mlp()), torch.randn(4, 32)
    keys, parameters, expected = set(model.state_dict()), dict(model.named_parameters()), model(x)
    assert sparta.optimize(model, x, tune="off") is model
    assert type(model) is nets.Mlp
    assert isinstance(model.second, SparseLinear)
    assert set(model.state_dict()) == keys
    assert all(parameters[name] is tensor for name, tensor in model.named_parameters())
    torch.testing.assert_close(model(x), expected, atol=1e-5, rtol=1e-4)


def test_layers_that_dense_runs_faster_are_what_they_were():
    model, x = nets.pruned(nets.Mlp()), torch.randn(4, 32)
    layers = dict(model.named_modules())
    sparta.optimize(model, {"x": x}, tune="off")
    assert all(type(layer) is not SparseLinear or layer.ready for layer in model.modules())
    kept = [name for name, layer in model.named_modules() if layer is layers[name]]
    assert "first" in kept or isinstance(model.first, SparseLinear)


def test_code_that_asks_for_the_dense_class_keeps_it(kernels):
    class Picky(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(32, 8)

        def forward(self, x):
            if type(self.linear) is not nn.Linear:
                raise TypeError("not mine")
            return self.linear(x)

    model, x = nets.pruned(Picky()), torch.randn(4, 32)
    sparta.optimize(model, x, tune="off")
    assert type(model.linear) is nn.Linear
    model(x)


def test_wrong_arguments_raise():
    with pytest.raises(ValueRangeError, match="Module"):
        sparta.optimize(3, torch.randn(2))
    with pytest.raises(ValueRangeError, match="does not run"):
        sparta.optimize(nn.Linear(3, 2), torch.randn(2, 4))

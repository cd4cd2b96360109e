"""`torch.compile(model, backend="sparta")`: the same numbers, our kernels, and no stale weights."""

import pytest
import torch

from compiler import nets
from sparta.compiler import backend


@pytest.fixture
def compiled_models(forced, monkeypatch):
    """Collect the models that the back end compiles."""
    torch._dynamo.reset()
    made = []

    def compile_model(*args, **kwargs):
        made.append(real(*args, **kwargs))
        return made[-1]

    real = backend.compile_model
    monkeypatch.setattr(backend, "compile_model", compile_model)
    yield made
    torch._dynamo.reset()


def test_a_model_runs_with_our_kernels_at_any_size(compiled_models):
    model = nets.pruned(nets.Mlp())
    fast = torch.compile(model, backend="sparta", options={"tune": "off"})
    with torch.no_grad():
        for rows in (6, 3, 9, 3):
            x = torch.randn(rows, 32)
            torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
    assert len(compiled_models) == 3
    assert all(made.kernels for made in compiled_models)
    assert {layer.name for layer in compiled_models[0].report.plan.layers} == {"first", "second", "last"}


def test_buffers_are_fixed_too(compiled_models):
    model, x = nets.pruned(nets.Cnn()), torch.randn(2, 3, 16, 16)
    fast = torch.compile(model, backend="sparta", options={"tune": "off"})
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
    assert "BatchNorms were folded" in compiled_models[0].report.full


def test_changed_weights_are_seen(compiled_models):
    model, x = nets.pruned(nets.Mlp()), torch.randn(6, 32)
    fast = torch.compile(model, backend="sparta", options={"tune": "off"})
    with torch.no_grad():
        fast(x)
        model.first.weight.mul_(2)
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)


def test_training_runs_as_it_is_and_says_so(compiled_models):
    model, x = nets.pruned(nets.Mlp()), torch.randn(6, 32)
    fast = torch.compile(model, backend="sparta")
    with pytest.warns(UserWarning, match="no_grad"):
        fast(x).sum().backward()
    assert model.first.weight.grad is not None
    assert not compiled_models


def test_wrong_options_are_named():
    torch._dynamo.reset()
    fast = torch.compile(nets.Mlp(), backend="sparta", options={"tun": "off"})
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="did you mean 'tune'"), torch.no_grad():
        fast(torch.randn(6, 32))
    torch._dynamo.reset()

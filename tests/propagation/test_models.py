"""Real kinds of models: the compact model is the masked one, smaller where it must be, and a module like any other."""

import pytest
import torch
from safetensors.torch import load, save
from torch import nn

from propagation.models import MODELS, Llama, planted
from sparta import Spec, TeSA
from sparta.propagation import compact, propagate


def other_input(x):
    return torch.randn_like(x) if x.is_floating_point() else x.flip(0)


@pytest.mark.parametrize("name", MODELS)
def test_compact_equals_masked(name):
    model, x, smaller = planted(name)
    result = propagate(model, x)
    small = result.compact()
    y = other_input(x)
    torch.testing.assert_close(small(y), model(y), rtol=1e-4, atol=1e-5)
    sizes = {key: p.numel() for key, p in model.named_parameters()}
    for key in smaller:
        assert small.get_parameter(key).numel() < sizes[key], key
    data = result.to_dict()
    assert data["parameters_compact"] < data["parameters"]
    assert (
        sum(t.numel() for t in {**dict(small.named_parameters()), **dict(small.named_buffers())}.values())
        >= (data["parameters_compact"])
    )
    for key, parameter in small.named_parameters():
        assert parameter.requires_grad
        if small.mapping[key].name == key and "bias" not in key:
            torch.testing.assert_close(small.mapping[key].take(model.get_parameter(key)), parameter)


def test_dynamic_batch_and_length():
    model, x, _ = planted("llama")
    dim = torch.export.Dim.DYNAMIC
    small = compact(model, {"ids": x}, dynamic_shapes={"ids": {0: dim, 1: dim}})
    y = torch.randint(0, 20, (3, 9))
    torch.testing.assert_close(small(ids=y), model(y), rtol=1e-4, atol=1e-5)
    assert small.get_parameter("q.weight").shape == (16, 32)


def test_the_result_is_a_module_like_any_other():
    model, x, _ = planted("residual")
    small = compact(model, x)
    loss = small.train()(x).square().sum()
    loss.backward()
    assert all(p.grad is not None for p in small.parameters())
    optimizer = torch.optim.SGD(small.parameters(), 0.01)
    optimizer.step()
    small.eval()
    again = compact(model, x)
    again.load_state_dict(load(save({k: v.contiguous() for k, v in small.state_dict().items()})))
    torch.testing.assert_close(again(x), small(x))
    exported = torch.export.export(small, (x,), strict=False)
    torch.testing.assert_close(exported.module()(x), small(x))
    assert {name.split(".")[0] for name, _ in small.named_parameters()} == {
        n for n, c in model.named_children() if n != "act"
    }


def test_it_compiles_without_a_graph_break():
    model, x, _ = planted("encoder")
    small = compact(model, x)
    compiled = torch.compile(small, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), small(x))
    torch._dynamo.reset()


def test_rounding_up_widths():
    model, x, _ = planted("mlp")
    small = propagate(model, x).compact(round_to=4)
    assert small.get_parameter("0.weight").shape == (8, 6)
    torch.testing.assert_close(small(x), model(x))


def test_a_residual_keeps_a_channel_that_one_branch_needs_and_says_who():
    class Skip(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x):
            y = self.first(x)
            return self.out(y + self.second(y))

    model = Skip()
    with torch.no_grad():
        model.second.weight[1:3] = 0
    result = propagate(model, torch.randn(3, 4))
    assert result.compact().get_parameter("second.weight").shape == (4, 4)
    assert "indices 1-2" in result.why("second.weight")
    assert "add" in result.why("second.weight")
    with torch.no_grad():
        model.first.weight[1] = 0
    assert propagate(model, torch.randn(3, 4)).compact().get_parameter("second.weight").shape == (3, 3)


def test_tied_weights_are_one_tensor():
    model, x, _ = planted("llama")
    result = propagate(model, x)
    assert result.spec["embedding.weight"] == result.spec["head.weight"]
    assert result.why("embedding.weight") == result.why("head.weight")


def test_a_model_without_values_needs_a_spec():
    with torch.device("meta"):
        model = Llama()
    kept = torch.arange(24) % 3 > 0
    spec = Spec({"down.weight": TeSA.from_mask(kept.expand(32, 24))})
    result = propagate(model.eval(), torch.zeros(2, 5, dtype=torch.long, device="meta"), spec)
    small = result.compact()
    assert small.get_parameter("gate.weight").shape == (16, 32)
    assert small.get_parameter("gate.weight").is_meta


def test_finer_masks_pass_through_unchanged():
    model, x, _ = planted("mlp")
    mask = torch.rand(7, 9) < 0.5
    spec = Spec({"2.weight": TeSA.from_mask(mask)})
    result = propagate(model, x, spec)
    assert torch.equal(result.spec["2.weight"].mask() & ~mask, torch.zeros_like(mask))
    small = result.compact()
    masked = nn.Sequential(*model)
    spec.apply(masked)
    torch.testing.assert_close(small(x), masked(x))


def test_every_tensor_of_the_model_is_in_the_completed_spec():
    model, x, _ = planted("residual")
    result = propagate(model, x)
    used = {name for name, _ in model.named_parameters()}
    assert used <= set(result.spec)
    assert {**result.to_dict()["tensors"]}.keys() <= set(dict(model.named_parameters()) | dict(model.named_buffers()))

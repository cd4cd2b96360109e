"""Layers that read one tensor may run as one product: exact, chosen by measurement, told and saved by their names."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import sparta
from compiler.clocks import Clock, compiled, plain_cost
from compiler.conftest import choosing, chosen
from sparta.compiler.choose import siblings
from sparta.compiler.job import Job
from sparta.compiler.lower.joined import join
from sparta.compiler.lower.joined import siblings as groups_of
from sparta.compiler.lower.subgraph import is_joined
from sparta.compiler.run.kernel_module import KernelModule
from sparta.compiler.session import Session
from sparta.compiler.variant import Variant
from sparta.precision.api import quantize
from sparta.specialize.tuning.select import Choice
from sparta.specialize.tuning.store import Entry


class Block(nn.Module):
    """An attention of grouped keys and a gated layer, with biases on some of the layers."""

    def __init__(self, width=32, heads=4, hidden=48):
        super().__init__()
        self.heads = heads
        self.query, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.key, self.value = nn.Linear(width, width // 2, bias=False), nn.Linear(width, width // 2)
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        b, t, c = x.shape
        h = self.norm(x)
        q = self.query(h).view(b, t, self.heads, -1).transpose(1, 2)
        k, v = (f(h).view(b, t, self.heads // 2, -1).transpose(1, 2) for f in (self.key, self.value))
        y = nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.down(nn.functional.silu(self.gate(x)) * self.up(x)), v


def block(pattern=None, sparsity=0.75, seed=0):
    torch.manual_seed(seed)
    model = Block().eval()
    if sparsity:
        sparta.Spec.from_pattern(model, pattern or sparta.Block(4, 1), sparsity).apply(model)
    return model, torch.randn(2, 6, 32)


def timed(spec):
    """Return a choice whose kernel takes as long to start as 32 outputs to compute."""
    choice = chosen(spec)
    milliseconds = 32 + spec["weight"].shape[0]
    return replace(choice, entry=Entry(choice.implement, choice.params, milliseconds, 2.0 * milliseconds))


@pytest.fixture
def anywhere(monkeypatch, own_stores):
    """Let siblings compete on a CPU, with kernels that are chosen without measuring."""
    monkeypatch.setattr(siblings, "_DEVICES", frozenset({"cpu"}))
    choosing(monkeypatch, timed)


def products(fast):
    """Return the numbers of outputs of the kernels of a compiled model."""
    return sorted(m.fused.weight.shape[0] for m in fast.graph.modules() if isinstance(m, KernelModule))


def costs(joined):
    """Return what variants take, with siblings as one product so many milliseconds, and 4 without."""
    plain = plain_cost()
    return lambda key: joined if is_eager(key) and any(map(is_joined, key.kernels)) else plain(key)


def is_eager(key):
    return isinstance(key, Variant) and key.host.value == "eager"


def test_what_reads_one_tensor_is_a_group():
    model, x = block()
    job = Job.started(model, x, None, None, (), Session())
    names = [[part.name for part in group] for group in groups_of(job.subgraphs)]
    assert names == [["query", "key", "value"], ["gate", "up"]]


@pytest.mark.parametrize("pattern", [sparta.Block(4, 1), sparta.NM(2, 4), sparta.Unstructured()], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_product_is_its_parts(pattern, dtype):
    model, x = block(pattern, 0.5)
    model, x = model.to(dtype), x.to(dtype)
    job = Job.started(model, x, None, None, (), Session())
    for group in groups_of(job.subgraphs):
        whole = join(group)
        assert torch.equal(whole.tesa.mask(), torch.cat([part.tesa.mask() for part in group]))
        assert whole.tesa.describe_pattern() == group[0].tesa.describe_pattern()
        seen = job.samples[0].values[group[0]][0]
        y = whole.lowering.dense(whole.weight, seen, whole.bias, {})
        for part, (_, first, end) in zip(group, whole.outputs, strict=True):
            expected = part.lowering.dense(part.weight, seen, part.bias, {})
            torch.testing.assert_close(y[..., first:end], expected)


def test_a_product_in_fp8_has_the_scales_of_its_parts():
    model, x = block(sparta.NM(2, 4), 0.5)
    model, x = model.bfloat16(), x.bfloat16()
    found = quantize(model, [x], "fp8", dynamic=True)
    job = Job.started(found.model, x, found.spec, None, (), Session()).calibrated(found.activations)
    groups = groups_of(job.subgraphs)
    assert len(groups) == 2
    for group in groups:
        whole = join(group)
        assert str(whole.tesa.format) == "fp8_e4m3"
        assert torch.equal(whole.tesa.scale.dense(), torch.cat([part.tesa.scale.dense() for part in group]))
        assert whole.tesa.density == pytest.approx(0.5)


def test_siblings_run_as_one_product_where_that_is_faster(anywhere, tmp_path):
    model, x = block()
    fast = compiled(model, x, Clock(costs(joined=3.0)))
    assert products(fast) == [32, 32, 64, 96]
    torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
    layers = {layer.name: layer for layer in fast.report.plan.layers}
    assert sorted(layers) == ["down", "gate", "key", "out", "query", "up", "value"]
    assert layers["key"].joined == ("query", "key", "value")
    assert layers["out"].joined == ()
    assert "one product with query, value" in layers["key"].first.reason
    together = sum(layers[name].first.entry.milliseconds for name in ("query", "key", "value"))
    assert together == pytest.approx(32 + 64)
    fast.save(tmp_path / "model.sparta")
    again = sparta.load(tmp_path / "model.sparta")
    assert products(again) == products(fast)
    assert again.report.plan.layers == fast.report.plan.layers
    torch.testing.assert_close(again(x), fast(x))


def test_siblings_run_one_by_one_where_that_is_faster(anywhere):
    model, x = block()
    fast = compiled(model, x, Clock(costs(joined=5.0)))
    assert products(fast) == [16, 16, 32, 32, 32, 48, 48]
    assert not any(layer.joined for layer in fast.report.plan.layers)
    torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)


def test_a_product_that_takes_longer_than_its_parts_does_not_compete(anywhere, monkeypatch):
    def slower(spec):
        choice = chosen(spec)
        milliseconds = spec["weight"].shape[0] ** 2
        return replace(choice, entry=Entry(choice.implement, choice.params, milliseconds, 2.0 * milliseconds))

    choosing(monkeypatch, slower)
    model, x = block()
    fast = compiled(model, x, Clock(costs(joined=3.0)))
    assert products(fast) == [16, 16, 32, 32, 32, 48, 48]


@pytest.mark.parametrize(("joined", "expected"), [(3.0, [32, 32, 64, 96]), (5.0, [16, 16, 32, 32, 32, 48, 48])])
@pytest.mark.parametrize("unmeasured", [(64, 96), (16, 32, 48, 64, 96)], ids=["products", "all"])
def test_what_nobody_had_time_for_competes_as_its_layers_run(anywhere, monkeypatch, unmeasured, joined, expected):
    def hurried(spec):
        choice = timed(spec)
        return replace(choice, entry=None) if spec["weight"].shape[0] in unmeasured else choice

    choosing(monkeypatch, hurried)
    model, x = block()
    fast = compiled(model, x, Clock(costs(joined=joined)))
    assert products(fast) == expected
    layers = {layer.name: layer for layer in fast.report.plan.layers}
    assert ("as its layers: the time was up" in layers["key"].first.reason) == (joined < 4)
    torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)


def test_dense_siblings_are_one_product_as_well(anywhere, monkeypatch):
    choosing(monkeypatch, lambda spec: Choice("dense", {}, "dense: forced"))
    model, x = block(sparsity=0)
    fast = compiled(model, x, Clock(costs(joined=3.0)))
    assert products(fast) == [64, 96]
    torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)


def test_products_take_inputs_of_any_size(anywhere):
    model, x = block()
    fast = compiled(model, x, Clock(costs(joined=3.0)), dynamic_shapes="auto")
    assert products(fast) == [32, 32, 64, 96]
    other = torch.randn(3, 9, 32)
    torch.testing.assert_close(fast(other), model(other), rtol=1e-4, atol=1e-5)
    fast.tune(other)
    torch.testing.assert_close(fast(other), model(other), rtol=1e-4, atol=1e-5)
    layers = {layer.name: layer for layer in fast.report.plan.layers}
    assert layers["query"].choices.keys() == layers["key"].choices.keys() == {12, 27}


def test_on_a_cpu_layers_run_one_by_one(forced, own_stores):
    model, x = block()
    fast = compiled(model, x, Clock(costs(joined=3.0)))
    assert products(fast) == [16, 16, 32, 32, 32, 48, 48]

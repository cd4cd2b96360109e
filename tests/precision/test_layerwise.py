"""Models that round are verified layer by layer: legitimate roundings never fail, and small faults never pass."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import sparta
from compiler.conftest import forcing
from sparta.compiler import settle
from sparta.compiler.layerwise import LayerByLayer, _nearest
from sparta.compiler.run.chain import trace as tracing
from sparta.compiler.run.host import Host, hosted
from sparta.compiler.run.kernel_module import KernelModule
from sparta.compiler.verify import Difference, verify
from sparta.errors import CheckError
from sparta.measure.machine import probe_compiler
from sparta.precision import quantize
from sparta.specialize.int8_linear.quantization import Quantization

pytestmark = pytest.mark.skipif(probe_compiler()[0] is None, reason="needs a C++ compiler")


@pytest.fixture(autouse=True)
def _attention_in_32_bits(monkeypatch):
    """Processors with AMX attend in bf16, which has a tolerance and a test of its own."""
    monkeypatch.setattr(tracing, "attends_by_blocks", lambda: False)
    monkeypatch.setattr("sparta.compiler.layerwise.attends_by_blocks", lambda: False)


class Block(nn.Module):
    """An encoder layer: attention and a feed-forward, with a norm after each."""

    def __init__(self, width=16):
        super().__init__()
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, tokens, width)
        x = self.before(x + self.join(mixed))
        return self.after(x + self.down(functional.gelu(self.up(x))))


class Images(nn.Module):
    """Convolutions with a residual that is rounded too."""

    def __init__(self, width=8):
        super().__init__()
        self.enter = nn.Conv2d(4, width, 3, padding=1)
        self.one, self.two, self.side = (nn.Conv2d(width, width, 3, padding=1) for _ in range(3))

    def forward(self, x):
        x = torch.relu(self.enter(x))
        return torch.relu(self.two(torch.relu(self.one(x))) + x) + self.side(x)


class Plain(nn.Module):
    """Layers that hand each other integers."""

    def __init__(self, width=24):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        return self.c(torch.relu(self.b(torch.relu(self.a(x)))))


NETS = {
    "blocks": (lambda: nn.Sequential(*(Block() for _ in range(4))), (2, 32, 16)),
    "images": (Images, (2, 4, 8, 8)),
    "plain": (Plain, (6, 24)),
}


def rounded(kind, *, coarse=False):
    """Return a model on int8 grids, its spec, its grids and its data; coarse ones let few roundings matter much."""
    torch.manual_seed(0)
    make, shape = NETS[kind]
    model, data = make().eval(), [torch.randn(shape) for _ in range(2)]
    if coarse:
        with torch.no_grad():
            for weight in (each for each in model.parameters() if each.dim() > 1):
                weight.mul_(4)
    found = quantize(model, data)
    grids = found.activations
    if coarse:
        grids = {
            name: grid if name.startswith("0.") else Quantization(0.5, 128, "uint8") for name, grid in grids.items()
        }
    return found.model, found.spec, grids, data


def compiled(monkeypatch, kind, *, coarse=False):
    """Return a model compiled with int8 kernels, and what was verified of it: the job, the contest, the outcome."""
    from sparta.compiler import api

    seen, verified = [], api.verified

    def spy(job, contest, outcome, *, check):
        seen.append((job, contest, outcome))
        return verified(job, contest, outcome, check=check)

    monkeypatch.setattr(api, "verified", spy)
    model, spec, grids, data = rounded(kind, coarse=coarse)
    with forcing("cpu-int8"):
        fast = sparta.compile(model, data[0], spec, activations=grids, tune="off")
    return fast, seen[-1], data


def changing(monkeypatch, change, names=None):
    """Let kernels change their results in place: those of these layers, or all, however they are called."""
    run, fast_path = KernelModule.run, KernelModule.fast_path

    def mine(layer):
        return names is None or layer.fused.weight.shape in names

    def changed(layer, x, residual):
        y = run(layer, x, residual)
        return change(y) if mine(layer) else y

    def short(layer, size=None):
        return (lambda x, residual=None: changed(layer, x, residual)) if mine(layer) else fast_path(layer, size)

    monkeypatch.setattr(KernelModule, "run", changed)
    monkeypatch.setattr(KernelModule, "fast_path", short)


def other_roundings(y):
    """Return results that are as close to right as real numbers must be, and round otherwise here and there."""
    if not y.is_floating_point():
        return y
    return y * (1 + 1e-5 * torch.randn(y.shape, generator=torch.Generator().manual_seed(0)))


def test_a_number_on_an_edge_may_fall_to_either_side(monkeypatch):
    changing(monkeypatch, other_roundings)
    fast, (job, contest, outcome), data = compiled(monkeypatch, "blocks", coarse=True)
    assert {layer.first.implement for layer in fast.report.plan.layers} == {"cpu-int8"}
    assert "sizes: the example's only" not in fast.report.full
    certificate = fast.report.certificate
    assert certificate.passed
    assert certificate.error < certificate.tolerance < 1e-3
    # The ends of two runs that are both right are far apart, which no tolerance for ends could tell from a fault.
    simulated = LayerByLayer(job.reduced, fast.graph, kernels_of(contest, outcome), Host.EAGER)._simulated
    with torch.no_grad():
        other = simulated(*job.inputs[0])[0]
        assert float((fast(data[0]) - other).norm() / other.norm()) > 5 / 255


def kernels_of(contest, outcome):
    return contest.workshop.kernels(outcome.plans, outcome.variant.kernels)


@pytest.mark.parametrize("kind", NETS)
@pytest.mark.parametrize("fault", [1.004, 0.997])
def test_a_kernel_that_is_a_little_wrong_is_found_and_replaced(monkeypatch, kind, fault):
    wrong = {"blocks": (64, 16), "images": (8, 4, 3, 3), "plain": (24, 24)}[kind]

    def scaled(y):
        return y * fault if y.is_floating_point() else y + 1

    changing(monkeypatch, scaled, [wrong])
    fast, _, data = compiled(monkeypatch, kind)
    layers = {layer.name: layer.first.implement for layer in fast.report.plan.layers}
    assert "dense" in layers.values()
    assert "computed wrong numbers" in fast.report.full or "did not agree" in fast.report.full
    assert fast.report.certificate.passed
    model, *_ = rounded(kind)
    exact = model(data[0]).detach()
    assert float((fast(data[0]) - exact).norm() / exact.norm()) < 0.05


def test_one_wrong_number_in_a_batch_is_found(monkeypatch):
    def spoilt(y):
        y = y.clone()
        y.view(-1)[0] += 0.02 * y.abs().max()
        return y

    changing(monkeypatch, spoilt, [(64, 16)])
    fast, _, _ = compiled(monkeypatch, "blocks")
    assert {layer.first.implement for layer in fast.report.plan.layers if layer.name.endswith("up")} == {"dense"}
    assert "computed wrong numbers" in fast.report.full


@pytest.mark.parametrize("kind", NETS)
@pytest.mark.parametrize("host", [Host.EAGER, Host.CHAIN])
def test_a_host_is_compared_stretch_by_stretch(monkeypatch, kind, host):
    fast, (job, contest, outcome), data = compiled(monkeypatch, kind)
    layers = LayerByLayer(job.reduced, fast.graph, kernels_of(contest, outcome), host)
    for batch in data:
        found = layers(hosted(fast.graph, host), [batch])
        assert found.relative < 1e-5
        assert found.allowed < 1e-3


@pytest.mark.parametrize("kind", ["blocks"])
def test_a_wrong_step_of_a_chain_is_found(monkeypatch, kind):
    from sparta.compiler.run.chain import native

    fast, (job, contest, outcome), data = compiled(monkeypatch, kind)
    right = native.norm_call

    def wrong(rows, width, strides, weight, bias, eps):
        return right(rows, width, strides, weight, bias, eps + 0.01)

    monkeypatch.setattr(native, "norm_call", wrong)
    layers = LayerByLayer(job.reduced, fast.graph, kernels_of(contest, outcome), Host.CHAIN)
    with pytest.raises(CheckError, match=r"what 0\.up reads"):
        layers(hosted(fast.graph, Host.CHAIN), [data[0]])


def test_attention_that_a_chain_computes_in_bf16_has_its_own_tolerance(monkeypatch):
    monkeypatch.setattr(tracing, "attends_by_blocks", lambda: True)
    monkeypatch.setattr("sparta.compiler.layerwise.attends_by_blocks", lambda: True)
    monkeypatch.setattr(tracing, "_MANY_QUERIES", 1)
    fast, (job, contest, outcome), data = compiled(monkeypatch, "blocks")
    layers = LayerByLayer(job.reduced, fast.graph, kernels_of(contest, outcome), Host.CHAIN)
    found = layers(hosted(fast.graph, Host.CHAIN), [data[0]])
    assert 1e-4 < found.relative < found.allowed < 0.03


def test_what_takes_long_to_prepare_is_compared_as_a_whole(monkeypatch):
    """Its own roundings may lead it as far away as nudges lead the simulated model; a fault leads further."""
    monkeypatch.setattr("sparta.compiler.layerwise._NUDGE", 100.0)
    fast, (job, contest, outcome), data = compiled(monkeypatch, "blocks", coarse=True)
    layers = LayerByLayer(job.reduced, fast.graph, kernels_of(contest, outcome), Host.INDUCTOR)
    assert layers(hosted(fast.graph, Host.CHAIN), [data[0]]).outputs == 1
    with monkeypatch.context() as patch:
        changing(patch, other_roundings)
        nudged = [y.clone() for y in hosted(fast.graph, Host.EAGER)(data[0])]
    assert layers(lambda _: nudged, [data[0]]).relative > 5 / 255
    with pytest.raises(CheckError, match="differs"):
        layers(lambda x: [3 * y for y in fast.graph(x)], [data[0]])


def test_a_graph_in_real_numbers_that_is_wrong_is_found(monkeypatch):
    from sparta.compiler import job

    found = job.fold_constants

    def wrong(program):
        program, masks = found(program)
        tensors = {name: t * 1.01 if name.endswith("norm.weight") else t for name, t in program.tensors.items()}
        return type(program)(program.graph, tensors, program.origins), masks

    monkeypatch.setattr(job, "fold_constants", wrong)

    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.fc = nn.LayerNorm(16), nn.Linear(16, 16)

        def forward(self, x):
            return self.fc(self.norm(x))

    model, x = Normed(), torch.randn(6, 16)
    with forcing("cpu-int8"):
        fast = sparta.compile(model, x, precision="int8", tune="off")
    exact = model(x).detach()
    assert "did not agree" in fast.report.full
    assert float((fast(x) - exact).norm() / exact.norm()) < 0.01  # rounded weights, nothing else


def test_integers_are_right_within_half_a_step_and_beyond_the_ends():
    grid = Quantization(0.5, 10, "uint8")
    real = torch.tensor([-100.0, -5.0, 0.2, 0.26, 0.3, 1e6, 1.0])
    integers = torch.tensor([0, 0, 10, 10, 11, 255, 14], dtype=torch.uint8)
    found = _nearest(real, integers, grid)
    assert found.tolist() == pytest.approx([-100.0, -5.0, 0.2, 0.25, 0.3, 1e6, 1.75])


def test_a_slow_model_is_compared_layer_by_layer_once():
    """Each comparison takes as long as many calls, and would be most of a budget in seconds."""
    seen = []

    def layers(_run, inputs):
        seen.append(inputs)
        return Difference(outputs=1)

    example = [torch.randn(3)]
    brief = verify(None, torch.relu, [example], layers=layers, brief=True)
    assert len(seen) == 1
    assert torch.equal(seen[0][0], example[0])
    assert str(brief).endswith("inputs of the example")
    thorough = verify(None, torch.relu, [example], layers=layers)
    assert len(seen) == 1 + 1 + len(thorough.seeds)


def test_the_original_runs_once_for_the_check_of_rounding_layers(monkeypatch):
    _, (job, contest, outcome), _ = compiled(monkeypatch, "plain")
    calls = []
    job.model.register_forward_hook(lambda *_: calls.append(1))
    settle.verified(job, contest, outcome, check=True)
    assert len(calls) == 1

"""Networks of images in bf16: results, residuals and poolings stay in bf16 from layer to layer."""

from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional

import sparta
from compiler.conftest import forcing
from compiler.run.test_chain_places import Block, Inverted, Net, TwoResults
from sparta.compiler.choose.integers import in_integers
from sparta.compiler.precise import _cast
from sparta.compiler.run.chain.chained import Chained
from sparta.compiler.run.chain.layouts import fuse
from sparta.compiler.run.chain.places import hand_over_bytes
from sparta.compiler.run.chain.trace import ImageItem, Native, Trace
from sparta.compiler.run.kernel_module import KernelModule
from sparta.measure.machine import probe_compiler, probe_cpu
from sparta.specialize.conv import cpu_bf16
from sparta.specialize.cpu.chain import IN_BF16, StepKind

pytestmark = pytest.mark.skipif(probe_compiler()[0] is None, reason="needs a C++ compiler")
BATCHES = [torch.randn(2, 3, 37, 41, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]


@pytest.fixture(autouse=True)
def any_processor(monkeypatch):
    """Kernels without instructions for bf16 compute the same."""
    monkeypatch.setattr(cpu_bf16, "_FLAG", next(iter(probe_cpu().vector_isa), ""))


def compiled(model, name="cpu-bf16"):
    torch.manual_seed(3)
    for tensor in model.parameters():
        nn.init.uniform_(tensor, -0.3, 0.4)
    spec = sparta.Spec.from_pattern(model, sparta.Unstructured(), 0.4)
    spec.apply(model)
    with forcing(name):
        return sparta.compile(_cast(model), BATCHES[0], spec, tune="off")


def items_of(graph):
    trace = Trace(graph, (BATCHES[0].bfloat16(),), 1)
    fuse(trace)
    hand_over_bytes(trace)
    return trace.items


@pytest.mark.parametrize("model", [Net, Inverted, TwoResults])
def test_networks_in_bf16_compute_what_their_layers_do(model):
    fast = compiled(model().eval())
    chain = Chained(fast.graph)
    with torch.no_grad():
        for batch in (*BATCHES, 30 * BATCHES[0]):
            handed = chain(batch.bfloat16())
            with mock.patch("sparta.compiler.run.chain.program.hand_over_bytes", return_value=0):
                apart = Chained(fast.graph)(batch.bfloat16())
            for one, two in zip(handed, apart, strict=True):
                assert one.dtype == two.dtype
                error = (one.float() - two.float()).norm() / two.float().norm()
                assert error < 0.01  # what is added is rounded to bf16 where it is handed over
    assert not [note for note in fast.report.notes if "agree" in note]


def test_residuals_and_poolings_are_in_bf16_and_in_nothing_else():
    items = items_of(compiled(Net().eval()).graph)
    layers = [item for item in items if isinstance(item, ImageItem)]
    assert {item.product.step.kind for item in layers} == {StepKind.BF16_CONV}
    assert [item.call.step.kind for item in items if isinstance(item, Native)] == [StepKind.BF16_POOL]
    assert sum(item.residual_bytes is not None for item in layers) == 3
    assert all(item.in_bytes in (None, item.result.source) for item in layers)
    assert sum(item.from_bytes is None for item in layers) == 1  # the stem reads the image


def test_depthwise_layers_take_and_hand_on_bf16():
    layers = [item for item in items_of(compiled(Inverted().eval()).graph) if isinstance(item, ImageItem)]
    kinds = [item.product.step.kind for item in layers]
    assert kinds.count(StepKind.BF16_DEPTHWISE) == 1  # the other has two results for each plane
    assert all(item.to_bytes in (None, IN_BF16) for item in layers)


def test_files_keep_layers_in_bf16(tmp_path):
    fast = compiled(nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), Block(8, 8)).eval())
    fast.save(tmp_path / "net.sparta")
    again = sparta.load(tmp_path / "net.sparta")
    assert {layer.first.implement for layer in again.report.plan.layers} == {"cpu-bf16"}
    with torch.no_grad():
        assert torch.equal(again(BATCHES[1]), fast(BATCHES[1]))


def test_all_convolutions_of_a_bf16_model_are_proposed_in_bf16():
    fast = compiled(Net().eval(), "cpu")
    plans = fast.report.plan.layers
    modules = {
        name.removesuffix(".weight_kernel"): module
        for name, module in fast.graph.named_modules()
        if isinstance(module, KernelModule)
    }
    specs = {name: {size: spec for size, (spec, _) in m.choices.items()} for name, m in modules.items()}
    other = in_integers(plans, specs)
    assert len(other) == 11
    assert all(choice.implement == "cpu-bf16" for plan in other for choice in plan.choices.values())
    assert all("hand over bf16" in choice.reason for plan in other for choice in plan.choices.values())


def test_pooling_in_bf16_is_pytorchs():
    x = torch.randn(2, 6, 9, 11).bfloat16()
    x[0, 0, 3, 3] = float("nan")
    model = nn.Sequential(nn.Conv2d(3, 6, 1), nn.MaxPool2d(3, 2, 1), nn.Conv2d(6, 4, 1)).eval()
    fast = compiled(model)
    with torch.no_grad():
        truth = _cast(model)(BATCHES[0]).float()
        y = Chained(fast.graph)(BATCHES[0].bfloat16())[0].float()
    assert (y - truth).norm() < 0.02 * truth.norm()
    assert functional.max_pool2d(x, 3, 2, 1).isnan().any()

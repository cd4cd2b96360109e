"""On CUDA, `precision="fp8"` runs layers with weights in fp8, keeps the interface, and says what it costs."""

import pytest
import torch
from torch import nn

import sparta
from sparta.errors import ValueRangeError
from sparta.specialize.scaled_linear.spec import OP

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="needs a GPU with fp8"
)


def pruned(pattern, sparsity):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512)).cuda()
    spec = sparta.Spec.from_pattern(model, pattern, sparsity)
    spec.apply(model)
    return model, spec


@pytest.mark.parametrize(("pattern", "sparsity"), [(sparta.Block(64, 64), 0.8), (sparta.NM(2, 4), 0.5)])
@pytest.mark.parametrize("rows", [1, 256])
def test_a_model_in_fp8(pattern, sparsity, rows, tmp_path):
    model, spec = pruned(pattern, sparsity)
    data = [torch.randn(rows, 512, device="cuda") for _ in range(2)]
    fast = sparta.compile(model, data[0], spec, precision="fp8", calibration=data, budget_s=30)
    assert {layer.op for layer in fast.report.plan.layers} == {OP}
    assert fast(data[1]).dtype == torch.float32
    exact = model(data[1]).detach()
    change = float((fast(data[1]) - exact).norm() / exact.norm())
    assert 0 < change < 0.1
    assert fast.report.precision.measured
    assert fast.report.precision.change < 0.1
    fast.save(tmp_path / "model.sparta")
    torch.testing.assert_close(sparta.load(tmp_path / "model.sparta")(data[1]), fast(data[1]), rtol=0.02, atol=0.02)


def test_norms_that_are_folded_in_keep_the_scales():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 256)).cuda().eval()
    model[1].running_var.uniform_(0.5, 2.0)
    model[1].running_mean.normal_()
    spec = sparta.Spec.from_pattern(model, sparta.Block(64, 64), 0.75)
    spec.apply(model)
    data = [torch.randn(64, 256, device="cuda") for _ in range(2)]
    fast = sparta.compile(model, data[0], spec, precision="fp8", calibration=data, budget_s=20)
    assert {layer.op for layer in fast.report.plan.layers} == {OP}


def test_large_layers_run_sparse_in_fp8_within_a_budget():
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = nn.Sequential(nn.Linear(4096, 8192, bias=False), nn.SiLU(), nn.Linear(8192, 4096, bias=False))
        x = torch.randn(2048, 4096).bfloat16()
    model = model.bfloat16().eval()
    sparta.Spec.from_pattern(model, sparta.Block(64, 64), 0.9).apply(model)
    fast = sparta.compile(model, x, precision="fp8", calibration=[x], budget_s=30, dynamic_shapes=None)
    assert {layer.first.implement for layer in fast.report.plan.layers} == {"triton-block-fp8"}


def test_int8_is_refused_with_advice():
    model, spec = pruned(sparta.Block(64, 64), 0.8)
    with pytest.raises(ValueRangeError, match="precision='fp8'"):
        sparta.compile(model, torch.randn(4, 512, device="cuda"), spec, precision="int8")

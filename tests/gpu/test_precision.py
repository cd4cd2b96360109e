"""On CUDA, `precision="fp8"` runs layers with weights in fp8, keeps the interface, and says what it costs."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import sparta
from compiler.conftest import forcing
from sparta.compiler.run.host import Host, hosted
from sparta.compiler.run.rounding import ROUNDING_CALLS, rounded_tokens, traced_rounding, with_shared_rounding
from sparta.errors import ValueRangeError
from sparta.specialize.scaled_linear.inputs import rounded_once, shared_rounding
from sparta.specialize.scaled_linear.producers import rounded_gate, rounded_norm
from sparta.specialize.scaled_linear.spec import OP, fp8_rows

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
    assert {layer.first.implement for layer in fast.report.plan.layers} <= {"cuda-block-fp8", "triton-block-fp8"}


class Gated(nn.Module):
    """Attention and a gated layer: five layers read two activations."""

    def __init__(self, width=512):
        super().__init__()
        self.query, self.key, self.value, self.out, self.gate, self.up, self.down = (
            nn.Linear(width, width, bias=False) for _ in range(7)
        )
        self.first, self.second = nn.RMSNorm(width), nn.RMSNorm(width)

    def forward(self, x):
        b, t, c = x.shape
        h = self.first(x)
        q, k, v = (each(h).reshape(b, t, 4, -1).transpose(1, 2) for each in (self.query, self.key, self.value))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        h = self.second(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


@pytest.mark.filterwarnings("ignore")  # Inductor's own
@pytest.mark.parametrize("host", ["eager", "graph", "inductor", "inductor graph"])
def test_activations_are_rounded_once_under_every_host(host):
    torch.manual_seed(0)
    model = nn.Sequential(Gated(), Gated()).to("cuda", torch.bfloat16).eval()
    x = torch.randn(2, 64, 512, device="cuda").bfloat16()
    sparta.Spec.from_pattern(model, sparta.Block(64, 64), 0.5).apply(model)  # no channel is dead
    with forcing("triton-block-fp8"):
        fast = sparta.compile(model, x, precision="fp8", calibration=[x], tune="off", dynamic_shapes=None)
    assert len(fast.kernels) == 8, str(fast.report)  # queries, keys and values are one product, gates as well
    shared = with_shared_rounding(fast.graph)
    assert sum(node.target in ROUNDING_CALLS for node in shared.graph.nodes) == 8  # 4 in each block, of 7 layers
    run = hosted(fast.graph, Host.from_text(host))
    with torch.no_grad():
        for seed in range(3):
            torch.manual_seed(seed)
            other = torch.randn_like(x)
            exact, found = fast.graph(other)[0].float(), run(other)[0].float()
            assert float((found - exact).norm() / exact.norm()) < 0.02
        if host == "graph":  # the same kernels, so the same bits
            plain = hosted(fast.graph, Host.EAGER)
            for seed in range(10):
                torch.manual_seed(seed)
                other = torch.randn_like(x)
                assert torch.equal(run(other)[0], plain(other)[0]), seed
    assert not getattr(run, "problem", "")


def test_a_tensor_that_is_read_again_within_a_call_is_rounded_once():
    x = torch.randn(4, 512, device="cuda").bfloat16()
    with shared_rounding():
        first = rounded_once(x, None)
        assert rounded_once(x, None)[0] is first[0]
        assert rounded_once(x, 0.5)[0] is not first[0]
        again = rounded_once(x, None)
        with torch.cuda.stream(torch.cuda.Stream()):
            assert rounded_once(x, None)[0] is not again[0]
        x.mul_(2)
        codes, scales = rounded_once(x, None)
    assert torch.equal(codes.float(), first[0].float())
    assert torch.equal(scales, 2 * first[1])
    assert rounded_once(x, None)[0] is not codes


@pytest.mark.parametrize("scale", [None, 2**-5])
def test_norms_and_gates_round_what_they_make(scale):
    torch.manual_seed(0)
    x, up = torch.randn(2, 5, 2 * 1000, device="cuda").bfloat16().split(1000, -1)
    weight, bias = torch.rand(2, 1000, device="cuda").bfloat16()
    made = [
        (
            rounded_norm(x, weight, None, 1e-5, rms=True, scale=scale, keep=True),
            functional.rms_norm(x, (1000,), weight, 1e-5),
        ),
        (
            rounded_norm(x, weight, bias, 1e-5, rms=False, scale=scale, keep=True),
            functional.layer_norm(x, (1000,), weight, bias),
        ),
        (rounded_gate(x, up, activate=True, scale=scale, keep=True), functional.silu(x) * up),
        (rounded_gate(x, up, activate=False, scale=scale, keep=True), x * up),
    ]
    for (codes, scales, kept), expected in made:
        torch.testing.assert_close(kept, expected, rtol=0.02, atol=0.02)
        exact, others = fp8_rows(kept, scale)  # of what it made itself: to the last bit, but for the edges
        torch.testing.assert_close(scales, others.flatten())
        assert float((codes.float() != exact.float()).float().mean()) < 1e-3
    x[0, 0, 3], x[0, 1, 5], x[0, 2] = torch.nan, -torch.inf, 0
    for codes, scales in (rounded_tokens(x, scale), rounded_gate(x, up, activate=False, scale=scale)[:2]):
        wanted, others = fp8_rows(x, scale)
        assert torch.equal(codes.float().isnan()[0, :3], wanted.float().isnan()[0, :3])
        assert torch.equal(scales.isnan(), others.flatten().isnan())


@pytest.mark.parametrize("rounding", [traced_rounding, rounded_tokens])
def test_codes_lie_row_by_row_in_memory(rounding):
    for x in (torch.randn(512, 32, device="cuda").t(), torch.randn(2, 512, 8, device="cuda").transpose(1, 2)):
        codes, scales = rounding(x, None)
        assert codes.is_contiguous()
        expected, others = rounding(x.contiguous(), None)
        assert torch.equal(codes.float(), expected.float())
        assert torch.equal(scales, others)


def test_what_writes_unseen_to_an_input_is_seen():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)).to("cuda", torch.bfloat16).eval()
    sparta.Spec.from_pattern(model, sparta.Block(64, 64), 0.5).apply(model)
    x, other = torch.randn(2, 64, 512, device="cuda").bfloat16().unbind()
    with forcing("triton-block-fp8"):
        fast = sparta.compile(model, x, precision="fp8", calibration=[x], tune="off")
    with torch.no_grad():
        expected = fast.graph(other)[0]
        held = x.clone()
        fast.graph(held)
        held.data.copy_(other)
        assert torch.equal(fast.graph(held)[0], expected)


def test_int8_is_refused_with_advice():
    model, spec = pruned(sparta.Block(64, 64), 0.8)
    with pytest.raises(ValueRangeError, match="precision='fp8'"):
        sparta.compile(model, torch.randn(4, 512, device="cuda"), spec, precision="int8")

"""What competes for a layer in fp8 on a Hopper GPU, as far as that can be told without one."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import sparta
from sparta.compiler.job import Job
from sparta.compiler.session import Session
from sparta.precision.api import quantize
from sparta.specialize.cuda import device, few_tokens
from sparta.specialize.implement import supported
from sparta.specialize.tuning.select import _starting_points


class Gated(nn.Module):
    """The half of a decoder layer in which two layers read one norm, and a third adds to what came in."""

    def __init__(self, width=256, hidden=512):
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        h = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


@pytest.fixture
def hopper(monkeypatch):
    """Let predicates believe that there is a Hopper GPU with all tools."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device=None: "a GPU")
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _device=None: SimpleNamespace(multi_processor_count=132)
    )
    monkeypatch.setattr(few_tokens, "nvrtc_obstacle", lambda: "")
    monkeypatch.setattr(device, "_has_triton", lambda: True)
    device.capability.cache_clear()
    yield
    device.capability.cache_clear()


def specs_of(pattern, sparsity, rows):
    """Return the kernel specs of a model in fp8, as they are on CUDA."""
    torch.manual_seed(0)
    model = Gated().bfloat16().eval()
    sparta.Spec.from_pattern(model, pattern, sparsity).apply(model)
    x = torch.randn(rows, 256).bfloat16()
    found = quantize(model, [x], "fp8", dynamic=True)
    job = Job.started(found.model, x, found.spec, None, (), Session()).calibrated(found.activations)
    return {g.name: replace(g.spec(job.samples[0].values[g][0]), device="cuda") for g in job.subgraphs}


@pytest.mark.parametrize(
    ("pattern", "sparsity", "rows", "kernels"),
    [
        (sparta.NM(2, 4), 0.5, 1, {"cuda-24"}),
        (sparta.NM(2, 4), 0.5, 64, {"cuda-24", "cuda-24-matrix-fp8"}),
        (sparta.NM(2, 4), 0.5, 512, {"cuda-24-matrix-fp8"}),
        (sparta.Block(64, 64), 0.75, 1, {"cuda-block-few", "triton-block", "triton-block-fp8"}),
        (sparta.Block(64, 64), 0.75, 512, {"cuda-block-fp8", "triton-block-fp8"}),
    ],
    ids=lambda value: " ".join(sorted(value)) if isinstance(value, set) else str(value),
)
def test_sparse_and_dense_kernels_compete_in_fp8(pattern, sparsity, rows, kernels, request):
    specs = specs_of(pattern, sparsity, rows)
    request.getfixturevalue("hopper")
    assert sorted(specs) == ["down", "gate", "up"]
    for spec in specs.values():
        able = {implement.name for implement in supported(spec)[0]}
        assert kernels | {"dense", "dense-fp8"} <= able
        order = [point["_name"] for point in _starting_points(spec)]
        assert order[-2:] == ["dense-fp8", "dense"]  # a search without time ends with the first of them
        assert spec["weight"].density <= 0.5  # what was pruned is known after rounding, too

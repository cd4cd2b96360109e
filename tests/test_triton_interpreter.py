"""The tier in which Triton kernels are tested without a GPU: the interpreter runs them."""

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed on this platform")
tl = pytest.importorskip("triton.language")


@triton.jit
def masked_scale(x, mask, out, count, factor, SIZE: tl.constexpr):  # noqa: N803 - a Triton constant
    offset = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = offset < count
    value = tl.load(x + offset, mask=inside)
    kept = tl.load(mask + offset, mask=inside)
    tl.store(out + offset, tl.where(kept != 0, value * factor, 0.0), mask=inside)


def test_a_kernel_runs_on_a_ragged_length():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, mask = torch.randn(100, device=device), (torch.rand(100, device=device) < 0.5).to(torch.uint8)
    out = torch.full_like(x, torch.nan)
    masked_scale[(2,)](x, mask, out, 100, 3.0, SIZE=64)
    assert torch.equal(out, torch.where(mask.bool(), x * 3.0, 0.0))

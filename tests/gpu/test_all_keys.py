"""On CUDA, attention of many queries: what the kernel computes is attention in float64, also in a graph."""

import pytest
import torch
from torch.nn import functional

from sparta.specialize.attention.unmasked import unmasked_attention
from sparta.specialize.cuda.device import HOPPER, capability

if capability() < HOPPER:
    pytest.skip("for others it is PyTorch's own attention", allow_module_level=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("batches", "heads", "groups", "queries", "keys"),
    [(8, 16, 1, 512, 512), (3, 4, 1, 197, 197), (2, 2, 4, 100, 1), (1, 1, 3, 64, 77)],
)
def test_it_is_attention(batches, heads, groups, queries, keys, dtype):
    wide = torch.randn(batches, queries, 3 * heads * groups * 64, device="cuda").to(dtype)[..., : heads * groups * 64]
    q = wide.unflatten(2, (heads * groups, 64)).transpose(1, 2)
    k, v = (torch.randn(batches, keys, heads, 64, device="cuda").to(dtype).transpose(1, 2) for _ in range(2))
    exact = [each.double().repeat_interleave(groups, 1) for each in (k, v)]
    y = unmasked_attention(q, k, v, shared=True)
    assert y.transpose(1, 2).is_contiguous()
    expected = functional.scaled_dot_product_attention(q.double(), *exact)
    torch.testing.assert_close(y.double(), expected, atol=8e-3, rtol=8e-3)
    v[-1, -1, keys // 2] = torch.nan
    y = unmasked_attention(q, k, v, shared=True)
    assert y[-1, -groups:].isnan().all()
    assert y[:-1].isfinite().all()


def test_kernels_that_begin_early_wait_for_what_they_read():
    q, k, v = (torch.randn(2, 4, 200, 64, device="cuda").bfloat16() for _ in range(3))
    unmasked_attention(q, k, v)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [unmasked_attention(q + i, k * (i + 1), v - i) for i in range(10)]
    for each in (q, k, v):
        each.copy_(torch.randn_like(each))
    for _ in range(3):
        graph.replay()
    for i, y in enumerate(results):
        assert torch.equal(y, unmasked_attention(q + i, k * (i + 1), v - i)), i

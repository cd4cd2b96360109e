"""On CUDA, attention of one query: what the kernels compute is attention in float64, also in a graph of many calls."""

import pytest
import torch
from torch.nn import functional

from sparta.specialize.attention.one_query import attention_of_one_query


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("batches", "heads", "groups", "keys", "width"),
    [(1, 8, 4, 1024, 128), (2, 1, 1, 1, 64), (2, 8, 4, 1000, 128), (3, 2, 16, 77, 64), (1, 2, 5, 40000, 128)],
)
def test_it_is_attention(batches, heads, groups, keys, width, dtype):
    q = torch.randn(batches, 1, heads * groups, width, device="cuda").to(dtype).transpose(1, 2)
    k, v = (torch.randn(batches, keys, heads, width, device="cuda").to(dtype).transpose(1, 2) for _ in range(2))
    wide = [each.double().repeat_interleave(groups, 1) for each in (k, v)]
    y = attention_of_one_query(q, k, v, shared=True)
    expected = functional.scaled_dot_product_attention(q.double(), *wide)
    torch.testing.assert_close(y.double(), expected, atol=8e-3, rtol=8e-3)
    v[:, :, keys // 2] = torch.nan
    assert attention_of_one_query(q, k, v, shared=True).isnan().all()


def test_kernels_that_begin_early_wait_for_what_they_read():
    q, k, v = (torch.randn(1, heads, n, 128, device="cuda").bfloat16() for heads, n in ((32, 1), (8, 999), (8, 999)))
    attention_of_one_query(q, k, v, shared=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [attention_of_one_query(q + i, k * (i + 1), v - i, shared=True) for i in range(10)]
    for each in (q, k, v):
        each.copy_(torch.randn_like(each))
    for _ in range(3):
        graph.replay()
    for i, y in enumerate(results):
        assert torch.equal(y, attention_of_one_query(q + i, k * (i + 1), v - i, shared=True)), i

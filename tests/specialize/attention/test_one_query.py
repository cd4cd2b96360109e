"""Attention of one query, run by Triton's interpreter, is PyTorch's attention, whatever is shared out how."""

import pytest
import torch
from torch.nn import functional

from sparta.specialize.attention.one_query import attention_of_one_query

kernels = pytest.importorskip("sparta.specialize.attention.one_query_kernels", reason="Triton is not installed")
pytestmark = pytest.mark.skipif(not kernels.INTERPRETED, reason="needs Triton's interpreter")


@pytest.mark.parametrize(
    ("batches", "heads", "groups", "keys", "width"),
    [(1, 2, 4, 300, 64), (2, 1, 1, 1, 64), (1, 1, 16, 64, 128), (3, 2, 2, 129, 64)],
)
def test_all_shares_count(batches, heads, groups, keys, width):
    torch.manual_seed(0)
    q = torch.randn(batches, 1, heads * groups, width, dtype=torch.float16).transpose(1, 2)
    k, v = (torch.randn(batches, keys, heads, width, dtype=torch.float16).transpose(1, 2) for _ in range(2))
    y = kernels.one_query_on_gpu(q, k, v, 0.3)
    wide = [each.double().repeat_interleave(groups, 1) for each in (k, v)]
    expected = functional.scaled_dot_product_attention(q.double(), *wide, scale=0.3)
    torch.testing.assert_close(y.double(), expected, atol=2e-3, rtol=2e-3)


def test_what_kernels_do_not_take_is_pytorchs():
    q, k = torch.randn(2, 4, 3, 40), torch.randn(2, 2, 7, 40)
    expected = functional.scaled_dot_product_attention(q, k, k, enable_gqa=True)
    assert torch.equal(attention_of_one_query(q, k, k, shared=True), expected)

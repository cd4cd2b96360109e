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


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of rows that fill a tile up and are not stored
def test_keys_without_any_weight_do_not_spoil_the_others():
    torch.manual_seed(0)
    q, k, v = torch.rand(1, 1, 1, 64) + 0.5, torch.randn(1, 1, 200, 64), torch.randn(1, 1, 200, 64)
    k[..., :130, 3] = -torch.inf  # more than two blocks of keys, and a whole share
    y = kernels.one_query_on_gpu(q, k, v, 0.3)
    expected = functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), scale=0.3)
    assert expected.isfinite().all()
    torch.testing.assert_close(y.double(), expected, atol=1e-4, rtol=1e-4)


def test_what_kernels_do_not_take_is_pytorchs():
    q, k = torch.randn(2, 4, 3, 40), torch.randn(2, 2, 7, 40)
    expected = functional.scaled_dot_product_attention(q, k, k, enable_gqa=True)
    assert torch.equal(attention_of_one_query(q, k, k, shared=True), expected)

"""Attention of all queries to all keys, run by Triton's interpreter, is PyTorch's attention."""

import pytest
import torch
from torch.nn import functional

kernels = pytest.importorskip("sparta.specialize.attention.all_keys_kernels", reason="Triton is not installed")
pytestmark = pytest.mark.skipif(not kernels.INTERPRETED, reason="needs Triton's interpreter")


@pytest.mark.parametrize(
    ("batches", "heads", "groups", "queries", "keys", "width"),
    [(2, 2, 1, 130, 130, 64), (1, 1, 3, 17, 200, 128), (2, 1, 2, 256, 64, 64), (1, 2, 1, 5, 1, 64)],
)
def test_it_is_attention(batches, heads, groups, queries, keys, width):
    torch.manual_seed(0)
    q = torch.randn(batches, queries, 3 * heads * groups * width, dtype=torch.float16)[..., : heads * groups * width]
    q = q.unflatten(2, (heads * groups, width)).transpose(1, 2)
    k, v = (torch.randn(batches, keys, heads, width, dtype=torch.float16).transpose(1, 2) for _ in range(2))
    wide = [each.double().repeat_interleave(groups, 1) for each in (k, v)]
    expected = functional.scaled_dot_product_attention(q.double(), *wide, scale=0.3)
    y = kernels.all_keys_on_gpu(q, k, v, 0.3)
    assert y.transpose(1, 2).is_contiguous()
    torch.testing.assert_close(y.double(), expected, atol=2e-3, rtol=2e-3)
    v[-1, -1, keys // 2] = torch.nan
    y = kernels.all_keys_on_gpu(q, k, v, 0.3)
    assert y[-1, -groups:].isnan().all()
    assert y[:-1].isfinite().all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of rows that fill a tile up and are not stored
def test_keys_without_any_weight_do_not_spoil_the_others():
    torch.manual_seed(0)
    q, k, v = torch.rand(1, 1, 3, 64) + 0.5, torch.randn(1, 1, 200, 64), torch.randn(1, 1, 200, 64)
    k[..., :130, 3] = -torch.inf  # more than two tiles of keys
    y = kernels.all_keys_on_gpu(q, k, v, 0.3)
    expected = functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), scale=0.3)
    torch.testing.assert_close(y.double(), expected, atol=1e-4, rtol=1e-4)

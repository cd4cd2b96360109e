"""Attention by blocks of bf16 against float64: lengths, heads, widths and masks; AMX's kernel, built of plain loops."""

import ctypes

import pytest
import torch

from sparta.specialize.cpu.chain import attention_call
from sparta.specialize.cpu.toolchain import build

SOURCE = """
#include "attention_bf16.h"
extern "C" __attribute__((visibility("default"))) int attend(const sparta::AttentionCall* given, const float* q,
    const float* k, const float* v, float* y, const void* mask, int threads) {
  sparta::AttentionCall call = *given;
  call.q = q;
  call.k = k;
  call.v = v;
  call.y = y;
  call.mask = mask;
  call.threads = threads;
  return sparta::attend_in_bf16(call) ? 0 : 1;
}
"""


@pytest.fixture(scope="module")
def attend():
    function = ctypes.CDLL(str(build("portable", SOURCE))).attend
    function.argtypes = (ctypes.c_char_p, *[ctypes.c_void_p] * 5, ctypes.c_int)

    def call(q, k, v, mask=None, *, causal=False, threads=1):
        y = torch.full((q.shape[0], q.shape[2], q.shape[1], v.shape[3]), 7.0).transpose(1, 2)
        wide = None if mask is None else mask.expand(*q.shape[:3], k.shape[2])
        step = attention_call(q, k, v, y, wide, 0.3, causal=causal)
        where = 0 if mask is None else mask.data_ptr()
        assert function(step.call, q.data_ptr(), k.data_ptr(), v.data_ptr(), y.data_ptr(), where, threads) == 0
        return y

    return call


def tensors(batch, heads, kv_heads, queries, keys, width, value_width):
    generator = torch.Generator().manual_seed(queries * keys)
    sizes = ((heads, queries, width), (kv_heads, keys, width), (kv_heads, keys, value_width))
    return [
        torch.randn(batch, length, each, last, generator=generator).bfloat16().float().transpose(1, 2)
        for each, length, last in sizes
    ]


def exact(q, k, v, mask=None, *, causal=False):
    repeat = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(repeat, 1), v.double().repeat_interleave(repeat, 1)
    scores = q @ k.mT * 0.3
    if mask is not None:
        scores = scores + (mask if mask.is_floating_point() else torch.where(mask, 0.0, -torch.inf))
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return torch.softmax(scores, -1).nan_to_num(0.0) @ v


def near(y, truth):
    """Within the rounding of the weights of keys."""
    assert (y.double() - truth).norm() <= 2**-8 * truth.norm() + 1e-6


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1, 1, 1, 1), (2, 4, 2, 70, 33, 40, 17), (1, 2, 2, 17, 128, 64, 64)])
def test_lengths_heads_and_widths(attend, sizes):
    q, k, v = tensors(*sizes)
    near(attend(q, k, v), exact(q, k, v))
    assert torch.equal(attend(q, k, v, threads=3), attend(q, k, v))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["padding", "added", "own"])
def test_masks(attend, kind, causal):
    q, k, v = tensors(2, 2, 2, 20, 20, 32, 32)
    mask = {
        "padding": torch.rand(2, 1, 1, 20) < 0.6,
        "added": torch.randn(2, 1, 1, 20),
        "own": torch.randn(2, 1, 20, 20),  # for each query
    }[kind]
    near(attend(q, k, v, mask, causal=causal), exact(q, k, v, mask, causal=causal))


@pytest.mark.parametrize("queries", [70, 200])
@pytest.mark.parametrize("heads", [1, 2])
def test_masks_of_queries_are_turned_once_for_heads_that_share_them(attend, queries, heads):
    q, k, v = tensors(2, 2, 2, queries, 40, 16, 16)
    mask = torch.rand(2, heads, queries, 40) < 0.7
    mask[..., 0] = True
    for each in (mask, torch.where(mask, torch.randn(mask.shape), -torch.inf), mask.mT.contiguous().mT):
        near(attend(q, k, v, each), exact(q, k, v, each))
        assert torch.equal(attend(q, k, v, each, threads=3), attend(q, k, v, each))
    long = torch.rand(1, 1, 70, 2000) < 0.5  # too many keys for more than one tile to be kept
    q, k, v = tensors(1, 2, 1, 70, 2000, 8, 8)
    near(attend(q, k, v, long), exact(q, k, v, long))


def test_queries_that_see_nothing_get_zeros_and_what_is_no_number_stays_so(attend):
    q, k, v = tensors(1, 2, 2, 9, 12, 16, 16)
    assert not attend(q, k, v, torch.zeros(1, 1, 1, 12, dtype=torch.bool)).any()
    q[0, 0, 3, 2], v[0, 1, 0, 5] = torch.nan, torch.nan
    found = attend(q, k, v).isnan()
    assert bool(found[0, 0, 3].all())
    assert bool(found[0, 1, :, 5].all())
    assert int(found.sum()) == 16 + 9

"""SeqlenDynamicSparseAttention attends within the length of each sequence; padding is 0 and never matters."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparta.errors import ShapeError, ValueRangeError
from sparta.nn import SeqlenDynamicSparseAttention, build, tune
from sparta.testing import attention_reference, check

CONFIGS = [None, {"_name": "dense"}, *({"_name": "lengths", "step": step} for step in (1, 16, 64))]
NAMES = ["untuned", "dense", "step 1", "step 16", "step 64"]


@pytest.fixture(autouse=True)
def _forget_lengths():
    yield
    SeqlenDynamicSparseAttention.set_global_seqlens(None)


def compare(op, q, k, v, lengths):
    """Compare the result and the three gradients with float64; the padding may hold anything."""
    inside = torch.arange(q.shape[2]) < torch.as_tensor(lengths)[:, None]
    row = inside[:, None, :, None]
    leaves = [torch.where(row, x, math.nan).requires_grad_() for x in (q, k, v)]
    exact = [torch.where(row, x, 0.0).double().requires_grad_() for x in (q, k, v)]
    y, expected = op(*leaves, lengths), attention_reference(*exact, seqlens=lengths)
    cotangent = torch.randn_like(expected)
    y.backward(cotangent.to(y.dtype))
    expected.backward(cotangent)
    assert not y.masked_select(~row).any()
    check(y, expected.detach(), reduction=4 * q.shape[2]) if y.numel() else None
    for leaf, reference in zip(leaves, exact, strict=True):
        assert not leaf.grad.masked_select(~row).any()
        check(leaf.grad, reference.grad, reduction=40 * q.shape[2], atol=1e-6) if leaf.numel() else None


def tensors(batch=4, size=21, *, heads=4, kv_heads=4, width=8):
    return tuple(torch.randn(batch, count, size, width) for count in (heads, kv_heads, kv_heads))


@pytest.mark.parametrize("config", CONFIGS, ids=NAMES)
@pytest.mark.parametrize("lengths", [[21, 3, 0, 14], [5, 5, 5, 5], [0, 0, 0, 0], [21, 21, 21, 21]], ids=str)
def test_result_and_gradients(config, lengths):
    op, qkv = SeqlenDynamicSparseAttention(global_mode=False), tensors(kv_heads=2)
    if config is not None:
        op.build((*qkv, torch.tensor(lengths)), config)
    compare(op, *qkv, torch.tensor(lengths))


@given(st.lists(st.integers(0, 19), max_size=6), st.integers(19, 24), st.sampled_from(CONFIGS))
@settings(max_examples=30)
def test_any_lengths(lengths, size, config):
    op, lengths = SeqlenDynamicSparseAttention(global_mode=False), torch.tensor(lengths, dtype=torch.int32)
    qkv = tensors(len(lengths), size, heads=2, kv_heads=2, width=3)
    if config is not None:
        op.build((*qkv, lengths), config)
    compare(op, *qkv, lengths)


def test_lengths_and_batch_may_change_after_build():
    op = SeqlenDynamicSparseAttention(global_mode=False)
    op.build((*tensors(), torch.tensor([21, 3, 0, 14])), CONFIGS[2])
    compare(op, *tensors(2, 30), [30, 7])
    assert op.ready


def test_global_lengths_serve_all_modules():
    modules, qkv = [SeqlenDynamicSparseAttention() for _ in range(2)], tensors()
    SeqlenDynamicSparseAttention.set_global_seqlens(torch.tensor([1, 2, 3, 21], dtype=torch.uint8))
    expected = attention_reference(*qkv, seqlens=[1, 2, 3, 21])
    for module in (*modules, copy.deepcopy(modules[0])):
        check(module(*qkv), expected, reduction=21)
    modules[0].set_global_seqlens([4, 4, 4, 4])
    check(modules[1](*qkv), attention_reference(*qkv, seqlens=[4, 4, 4, 4]), reduction=21)
    check(modules[1](*qkv, [9, 9, 9, 9]), attention_reference(*qkv, seqlens=[9, 9, 9, 9]), reduction=21)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_dtypes_and_strides(dtype):
    q, k, v = torch.randn(3, 4, 21, 2, 8, dtype=dtype).transpose(2, 3)
    op = SeqlenDynamicSparseAttention(global_mode=False)
    op.build((q, k, v, torch.tensor([1, 8, 21, 8])), CONFIGS[2])
    y = op(q, k, v, [1, 8, 21, 8])
    assert y.dtype == dtype
    expected = attention_reference(q, k, v, seqlens=[1, 8, 21, 8])
    check(y, expected, reduction=21, atol=0.0 if dtype == torch.float64 else 2e-2)


def test_torch_compile_takes_the_dense_one_whole():
    op, qkv, lengths = SeqlenDynamicSparseAttention(global_mode=False), tensors(), torch.tensor([21, 3, 0, 14])
    compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
    check(compiled(*qkv, lengths), attention_reference(*qkv, seqlens=lengths), reduction=21)
    torch._dynamo.reset()


def test_a_model_is_tuned_with_the_lengths_it_passes():
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = SeqlenDynamicSparseAttention(global_mode=False)

        def forward(self, x, lengths):
            return self.attention(x, k=x, v=x, seqlens=lengths)

    model, other, lengths = Layer(), Layer(), torch.tensor([21, 1, 1, 1])
    x = tensors()[0]
    configs = tune(model, (x, lengths), max_trials=3, backward=True)
    build(other, (x, lengths), configs)
    assert other.attention.ready
    check(other(x, lengths), attention_reference(x, x, x, seqlens=lengths), reduction=21)
    model(x, [21, 2, 2, 2])
    tune(model, (x, [21, 2, 2, 2]), max_trials=1)


QKV = tensors(2, 6)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda op: op(*QKV), ValueRangeError, "pass seqlens"),
        (lambda op: SeqlenDynamicSparseAttention()(*QKV), ValueRangeError, "set_global_seqlens first"),
        (lambda op: op(*QKV, [1, 2, 3]), ShapeError, r"\(2,\), one per sequence"),
        (lambda op: op(*QKV, [1, 7]), ValueRangeError, "to 7"),
        (lambda op: op(*QKV, [-1, 2]), ValueRangeError, "from -1"),
        (lambda op: op(*QKV, torch.tensor([0.5, 1.0])), ShapeError, "integers"),
        (lambda op: op(*QKV, torch.ones(2, 6, dtype=torch.bool)), ShapeError, "mask.sum"),
        (lambda op: op(*(x[0] for x in QKV), [1]), ShapeError, "heads, N, E"),
        (lambda op: op(QKV[0][:, :, :3], *QKV[1:], [1, 1]), ShapeError, "SparseAttention takes others"),
        (lambda op: op.tune(QKV[:2]), ValueRangeError, "and up to 1 more"),
    ],
)
def test_wrong_inputs_say_what_is_allowed(call, error, text):
    with pytest.raises(error, match=text):
        call(SeqlenDynamicSparseAttention(global_mode=False))


def test_it_prints_what_runs():
    assert "global_mode=True, dense until tuned" in repr(SeqlenDynamicSparseAttention())

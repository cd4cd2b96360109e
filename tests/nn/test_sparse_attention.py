"""SparseAttention attends to the kept pairs of query and key, and to nothing else, whatever kernel was chosen."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparta.errors import ShapeError, ValueRangeError
from sparta.nn import SparseAttention
from sparta.specialize.tuning.store import TuningStore
from sparta.testing import attention_reference, block_mask, check

N, E = 40, 16
CONFIGS = [
    None,
    {"_name": "dense"},
    {"_name": "blocks", "tile": (8, 8), "inner": "fused"},
    {"_name": "blocks", "tile": (16, 16), "inner": "products"},
]
NAMES = ["untuned", "dense", "fused", "products"]


def compare(op, mask, q, k, v):
    """Compare the result and the three gradients with float64."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    y, expected = op(*leaves), attention_reference(*exact, mask)
    assert y.shape == expected.shape
    cotangent = torch.randn_like(expected)
    y.backward(cotangent.to(y.dtype))
    expected.backward(cotangent)
    reduction = 4 * (mask.shape[-1] + q.shape[-1])
    if y.numel():
        check(y, expected.detach(), reduction=reduction)
    for leaf, reference in zip(leaves, exact, strict=True):
        if leaf.numel():
            check(leaf.grad, reference.grad, reduction=10 * reduction, atol=1e-6)


@pytest.mark.parametrize("config", CONFIGS, ids=NAMES)
@pytest.mark.parametrize("lead", [(), (4,), (2, 1)], ids=["one mask", "by head", "by batch"])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_result_and_gradients(config, lead, kv_heads):
    mask = block_mask((*lead, N, N), (8, 8), 0.8, seed=1)
    q, k, v = (torch.randn(2, heads, N, E) for heads in (4, kv_heads, kv_heads))
    op = SparseAttention(mask)
    if config is not None:
        op.build((q, k, v), config)
    compare(op, mask, q, k, v)


@st.composite
def problems(draw):
    queries, keys = draw(st.integers(0, 37)), draw(st.integers(0, 37))
    heads, groups = draw(st.sampled_from([(2, 1), (3, 3)]))
    lead = draw(st.sampled_from([(), (heads,), (2, heads)]))
    mask_lead = tuple(draw(st.sampled_from([1, size])) for size in lead[draw(st.integers(0, len(lead))) :])
    kept = draw(st.sampled_from([0.0, 0.05, 0.5, 1.0]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    mask = torch.rand(*mask_lead, queries, keys, generator=generator) < kept
    kv_lead = (*lead[:-1], groups) if lead else ()
    width, features = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    return (
        mask,
        torch.randn(*lead, queries, width),
        torch.randn(*kv_lead, keys, width),
        torch.randn(*kv_lead, keys, features),
    )


@given(problems(), st.sampled_from([None, "dense", "blocks"]), st.integers(0, 7))
@settings(max_examples=30)
def test_any_size_and_mask(problem, implement, tile):
    mask, *qkv = problem
    op = SparseAttention(mask)
    if implement is not None:
        space = [config for config in op.get_search_space(qkv).samples() if config["_name"] == implement]
        if space:
            op.build(qkv, space[tile % len(space)])
    compare(op, mask, *qkv)


@pytest.mark.parametrize("config", CONFIGS, ids=NAMES)
@pytest.mark.parametrize(("queries", "keys"), [(0, 5), (5, 0), (0, 0)])
def test_the_library_is_never_asked_about_nothing(config, queries, keys, monkeypatch):
    def asked(q, k, *rest, **options):
        assert q.numel()
        assert k.numel()
        return fused(q, k, *rest, **options)

    fused = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", asked)
    mask = torch.zeros(queries, keys, dtype=torch.bool)
    qkv = torch.randn(2, queries, E), torch.randn(2, keys, E), torch.randn(2, keys, E)
    op = SparseAttention(mask)
    if config is not None and (config["_name"] != "blocks" or mask.numel()):
        op.build(qkv, config)
    compare(op, mask, *qkv)


@pytest.mark.parametrize("config", CONFIGS, ids=NAMES)
def test_what_no_query_sees_never_matters(config):
    mask = block_mask((N, N), (8, 8), 0.5, seed=1)
    mask[:, 5], mask[9] = False, False
    q, k, v = (torch.randn(2, N, E) for _ in range(3))
    op = SparseAttention(mask)
    if config is not None:
        op.build((q, k, v), {**config, "tile": (16, 16)} if "tile" in config else config)
    expected = attention_reference(q, k, v, mask)
    q[:, 9], k[:, 5], v[:, 5] = math.nan, math.nan, math.inf
    leaves = [x.requires_grad_() for x in (q, k, v)]
    y = op(*leaves)
    check(y, expected, reduction=N)
    assert not y[:, 9].any()
    y.sum().backward()
    assert all(torch.isfinite(leaf.grad).all() for leaf in leaves)
    assert not torch.stack([q.grad[:, 9], k.grad[:, 5], v.grad[:, 5]]).any()


@pytest.mark.parametrize("config", CONFIGS, ids=NAMES)
@pytest.mark.parametrize("full", [True, False])
def test_causal(config, full):
    mask = torch.ones(N, N, dtype=torch.bool) if full else block_mask((N, N), (8, 8), 0.5, seed=1)
    op = SparseAttention(mask, causal=True)
    q, k, v = (torch.randn(2, 3, N, E) for _ in range(3))
    if config is not None:
        config = {**config, "tile": (16, 16)} if "tile" in config else config
        op.build((q, k, v), config)
    check(op(q, k, v), attention_reference(q, k, v, mask, causal=True), reduction=N)
    op.update_mask(mask)
    check(op(q, k, v), attention_reference(q, k, v, mask, causal=True), reduction=N)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_dtypes_and_strides(dtype):
    mask = block_mask((N, N), (8, 8), 0.7, seed=1)
    q, k, v = torch.randn(2, N, 3, 3, E, dtype=dtype).permute(2, 0, 3, 1, 4)
    op = SparseAttention(mask)
    op.build((q, k, v), CONFIGS[2])
    y = op(q, k, v)
    assert y.dtype == dtype
    # half precision rounds the probabilities once more
    check(y, attention_reference(q, k, v, mask), reduction=N, atol=0.0 if dtype == torch.float64 else 2e-2)


def test_any_batch_after_build():
    mask = block_mask((N, N), (8, 8), 0.7, seed=1)
    op = SparseAttention(mask)
    op.build([torch.randn(2, N, E)] * 3, CONFIGS[2])
    for lead in ((), (5,), (0, 2), (2, 2)):
        q, k, v = (torch.randn(*lead, N, 8) for _ in range(3))
        compare(op, mask, q, k, v)


@pytest.mark.parametrize("inner", ["fused", "products"])
def test_rows_of_many_different_lengths(inner):
    mask = torch.ones(230, 230, dtype=torch.bool).tril()  # 15 rows of tiles, each longer than the last
    op, qkv = SparseAttention(mask), [torch.randn(230, 8) for _ in range(3)]
    op.build(qkv, {"_name": "blocks", "tile": (16, 16), "inner": inner})
    compare(op, mask, *qkv)


def test_many_heads_are_computed_in_chunks(monkeypatch):
    monkeypatch.setattr("sparta.specialize.attention.spec._CHUNK_BYTES", {"cpu": 1})
    mask = block_mask((N, N), (8, 8), 0.7, seed=1)
    op = SparseAttention(mask)
    q, k, v = (torch.randn(2, 3, N, E) for _ in range(3))
    op.build((q, k, v), CONFIGS[2])
    compare(op, mask, q, k, v)


def test_masks_change_copy_and_load():
    first, second = block_mask((N, N), (8, 8), 0.7, seed=1), block_mask((N, N), (4, 4), 0.5, seed=2)
    op, qkv = SparseAttention(first), [torch.randn(2, N, E) for _ in range(3)]
    op.build(qkv, CONFIGS[2])
    twin, causal = copy.deepcopy(op), SparseAttention(first, causal=True)
    op.update_mask(second)
    assert not op.ready
    compare(op, second, *qkv)
    assert twin.ready
    compare(twin, first, *qkv)
    twin.load_state_dict(op.state_dict())
    assert not twin.ready
    compare(twin, second, *qkv)
    causal.load_state_dict(op.state_dict())
    compare(causal, second.tril(), *qkv)
    op.update_mask(second[:8])  # of another size
    compare(op, second[:8], qkv[0][:, :8], *qkv[1:])


@pytest.mark.parametrize("config", CONFIGS, ids=NAMES)
def test_torch_compile_takes_it_whole(config):
    mask = block_mask((N, N), (8, 8), 0.7, seed=1)
    op, qkv = SparseAttention(mask), [torch.randn(2, 2, N, E, requires_grad=True) for _ in range(3)]
    if config is not None:
        op.build(qkv, config)
    y = torch.compile(op, fullgraph=True, backend="aot_eager")(*qkv)
    check(y, attention_reference(*qkv, mask), reduction=N)
    y.sum().backward()
    assert all(torch.isfinite(x.grad).all() for x in qkv)
    torch._dynamo.reset()


def test_tuning_keeps_what_is_right(tmp_path):
    mask = block_mask((2, N, N), (8, 8), 0.9, seed=1)
    op, qkv = SparseAttention(mask), [torch.randn(3, 2, N, E) for _ in range(3)]
    store = TuningStore(tmp_path)
    choice = op.tune(qkv, max_trials=4, store=store, backward=True)
    assert op.tune(qkv, store=store, backward=True).implement == choice.implement
    assert len(store) == 1
    compare(op, mask, *qkv)


MASK = torch.ones(4, 6, dtype=torch.bool)
Q, KV = torch.ones(2, 4, 8), torch.ones(2, 6, 8)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: SparseAttention(MASK[0]), ShapeError, "mask of shape"),
        (lambda: SparseAttention(MASK)(Q, KV[..., :5], KV), ShapeError, "E"),
        (lambda: SparseAttention(MASK)(Q, KV, KV[:1]), ShapeError, "kv_heads, N, F"),
        (lambda: SparseAttention(MASK)(torch.ones(3, 4, 8), KV, KV), ShapeError, "a multiple of kv_heads"),
        (lambda: SparseAttention(MASK)(KV, Q, Q), ShapeError, "6 queries and 4 keys"),
        (lambda: SparseAttention(MASK.expand(3, 4, 6))(Q, KV, KV), ShapeError, "leading dims"),
        (lambda: SparseAttention(MASK).tune((Q, KV)), ValueRangeError, "tuple of 3"),
    ],
)
def test_wrong_inputs_say_what_is_allowed(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_it_prints_what_runs():
    assert "density 0.417, causal, dense until tuned" in repr(SparseAttention(MASK, causal=True))

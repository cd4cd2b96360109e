"""The grids of the original's unit tests, whole, on CUDA: the same choices and sizes, compared with float64.

Beside the original's float32 there is float16, gradients are compared everywhere, and the mask holds to the element.
"""

import itertools
import math

import pytest
import torch
from torch import nn

from sparta.nn import (
    DynamicSparseMoE,
    SeqlenDynamicSparseAttention,
    SparseAttention,
    SparseBatchMatMul,
    SparseLinear,
    SparseSoftmax,
)  # fmt: skip
from sparta.specialize.implement import implement_named
from sparta.tesa.formats.functions import get_bcs_function
from sparta.testing import attention_reference, block_mask, check, linear_reference, matmul_reference, moe_reference
from specialize.unit_cases import ProductCase, run_product, run_softmax

MODES = ["sdd", "dsd", "dds"]
DTYPES = [torch.float32, torch.float16]
TILES = {
    "triton-block": {"tile": "height=32,width=32,free=32,depth=32,stages=2,warps=4"},
    "blocks": {"tile": (32, 32)},
}
SEEDS = (0, 1, 2)
ON_OFF = (False, True)


def grid(*choices):
    return list(itertools.product(*choices))


def draw(*shape, dtype=torch.float32):
    return torch.randn(*shape, device="cuda").to(dtype)


def built(op, inputs, name="triton-block"):
    """Build a module with one implement's first guess."""
    spec = op._spec(inputs)
    op.build({"_name": name, **implement_named(name, spec.op).default(spec)}, inputs)
    return op


def compare(y, expected, leaves, exact, *, reduction, atol=None):
    """Compare a result and all gradients."""
    dtype = y.dtype
    check(y, expected.detach(), reduction=reduction)
    slope = draw(*y.shape, dtype=dtype)
    grads = torch.autograd.grad(y, leaves, slope)
    right = torch.autograd.grad(expected, exact, slope.double())
    for grad, reference in zip(grads, right, strict=True):
        check(grad, reference, reduction=8 * reduction, dtype=dtype, atol=1e-5 if atol is None else atol)


# ---------------------------------------------------------------------- products: 48 + 96 + 48 (x 2) + 24 cases


@pytest.mark.parametrize(("mode", "first", "second", "compressed", "backward"), grid(MODES, *[ON_OFF] * 4))
def test_search_spaces(mode, first, second, compressed, backward):
    case = ProductCase(mode, first, second, compressed)
    which = "ABC"[MODES.index(mode)]
    op = SparseBatchMatMul(**{f"{which}_mask": case.mask()}, **case.transposes, compressed=compressed)
    inputs = [draw(4, *case.shapes[name]) for name in "AB"]
    if compressed and which != "C":
        inputs["AB".index(which)] = op.indexes.convert(inputs["AB".index(which)])
    spec = op._spec(inputs, backward=backward)
    space = op.get_search_space(inputs)
    for name in ("triton-block", "blocks", "dense"):
        assert space.includes({"_name": name, **implement_named(name, "batch_matmul").default(spec)})


@pytest.mark.parametrize(
    ("implement", "mode", "biased", "first", "second", "compressed"), grid(TILES, MODES, *[ON_OFF] * 4)
)
def test_product_kernels(implement, mode, biased, first, second, compressed):
    case = ProductCase(mode, first, second, compressed, biased)
    run_product(case, implement, TILES[implement], gradients=False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("mode", "biased", "first", "second", "compressed"), grid(MODES, *[ON_OFF] * 4))
def test_product_functions(mode, biased, first, second, compressed, dtype):
    run_product(ProductCase(mode, first, second, compressed, biased, dtype), params=TILES["triton-block"])


@pytest.mark.parametrize("block", [(16, 16), (32, 32), (32, 64), (64, 32), (64, 64), (128, 128)], ids=str)
@pytest.mark.parametrize(("mode", "compressed"), grid(MODES, ON_OFF))
def test_product_blocks(mode, compressed, block):
    run_product(ProductCase(mode, compressed=compressed, dtype=torch.float16, block=block, sparsity=0.6))


@pytest.mark.parametrize(("mode", "first", "second", "compressed"), grid(MODES, *[ON_OFF] * 3))
def test_product_operators_follow_their_mask(mode, first, second, compressed):
    which, op = "ABC"[MODES.index(mode)], None
    for seed in SEEDS:
        case = ProductCase(mode, first, second, compressed, seed=seed)
        mask = case.mask()
        if op is None:
            op = SparseBatchMatMul(**{f"{which}_mask": mask}, **case.transposes, compressed=compressed)
        else:
            op.update_mask(**{f"{which}_mask": mask})
        whole = [draw(4, *case.shapes[name]) for name in "AB"]
        inputs = list(whole)
        if compressed and which != "C":
            inputs["AB".index(which)] = op.indexes.convert(inputs["AB".index(which)])
        y = built(op, inputs)(*inputs)
        y = op.indexes.inverse(y) if compressed and which == "C" else y
        check(y, matmul_reference(*whole, **{f"{which}_mask": mask}, **case.transposes), reduction=256)


# ---------------------------------------------------------------------- linear: 6 cases (x 2 dtypes)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "biased"), grid(["input_mask", "weight_mask", "output_mask"], ON_OFF))
def test_linear_layers_follow_their_mask(name, biased, dtype):
    shape = {"input_mask": (128, 256), "weight_mask": (192, 256), "output_mask": (128, 192)}[name]
    layer = None
    for seed in SEEDS:
        mask = block_mask(shape, (8, 8), 0.9, seed=seed, device="cuda")
        if layer is None:
            layer = SparseLinear(nn.Linear(256, 192, bias=biased).cuda().to(dtype), **{name: mask})
        else:
            layer.update_mask(**{name: mask})
        parameters = [p for p in (layer.weight, layer.bias) if p is not None]
        x = draw(128, 256, dtype=dtype).requires_grad_()
        built(layer, (x.detach(),))
        exact = [t.detach().double().requires_grad_() for t in (x, *parameters)]
        expected = linear_reference(*exact, **{name: mask})
        compare(layer(x), expected, [x, *parameters], exact, reduction=256)


# ---------------------------------------------------------------------- softmax: 2 + 2 + 4 cases


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("compressed", "batch"), grid(ON_OFF, [None, 4]))
def test_softmax(compressed, batch, dtype):
    for seed in SEEDS:
        mask = block_mask((128, 256), (8, 8), 0.9, seed=seed, device="cuda")
        x = draw(*([] if batch is None else [batch]), 128, 256, dtype=dtype)
        run_softmax(mask, x, math.sqrt(256), compressed=compressed)


@pytest.mark.parametrize("compressed", ON_OFF)
@pytest.mark.parametrize("implement", ["triton-block", "blocks"])
def test_softmax_kernels(implement, compressed):
    mask = block_mask((128, 256), (8, 8), 0.9, device="cuda")
    params = {"tile": "height=32,width=32,rows=4,warps=4"} if implement == "triton-block" else {"tile": (32, 32)}
    run_softmax(mask, draw(128, 256), 16.0, compressed=compressed, implement=implement, params=params)


# ---------------------------------------------------------------------- attention: 54 + 2 cases


@pytest.mark.parametrize(("heads", "keys", "queries", "width"), grid([1, 4], *[[256, 512, 1024]] * 3))
def test_attention(heads, keys, queries, width):
    for seed in SEEDS:
        mask = block_mask((queries, keys), (8, 8), 0.95, seed=seed, device="cuda")
        q, k, v = (draw(heads, n, width).requires_grad_() for n in (queries, keys, keys))
        exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
        expected = attention_reference(*exact, mask)
        fits = width <= 256 and seed == 0  # wider heads do not fit on chip
        if fits:
            fused = built(SparseAttention(mask), (q, k, v), "triton-flash")
            compare(fused(q, k, v), expected, [q, k, v], exact, reduction=max(keys, width))
            expected = attention_reference(*exact, mask)
        scores = SparseBatchMatMul(C_mask=mask, transpose_B=True)
        weights = SparseSoftmax(mask, math.sqrt(width), compressed=True)
        out = SparseBatchMatMul(A_mask=mask)
        values = built(scores, (q, k))(q, k)
        values = built(weights, (values,))(values)
        y = built(out, (values.detach(), v.detach()))(values, v)
        compare(y, expected, [q, k, v], exact, reduction=4 * max(keys, width))


@pytest.mark.parametrize("global_mode", ON_OFF)
def test_attention_of_sequences(global_mode):
    q, k, v = (draw(12, 20, 256, 64).requires_grad_() for _ in range(3))
    lengths = torch.randint(128, 257, (12,))
    attention = built(SeqlenDynamicSparseAttention(global_mode=False), (q, k, v, lengths), "triton-flash")
    attention.global_mode = global_mode
    SeqlenDynamicSparseAttention.set_global_seqlens(lengths.cuda())
    try:
        y = attention(q, k, v) if global_mode else attention(q, k, v, lengths)
    finally:
        SeqlenDynamicSparseAttention.set_global_seqlens(None)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    compare(y, attention_reference(*exact, seqlens=lengths.cuda()), [q, k, v], exact, reduction=256)


# ---------------------------------------------------------------------- experts: 2 cases


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_experts(dtype):
    moe = DynamicSparseMoE([nn.Linear(3072, 768) for _ in range(8)]).cuda().to(dtype)
    tokens = draw(32 * 128, 3072, dtype=dtype).requires_grad_()
    for seed in SEEDS:
        ids = torch.randint(0, 8, (32 * 128,), generator=torch.Generator().manual_seed(seed)).cuda()
        if seed == 0:
            built(moe, (tokens.detach(), ids), "triton-ragged")
        exact = [tokens.detach().double().requires_grad_()]
        weights, biases = ([getattr(e, name).detach() for e in moe.experts] for name in ("weight", "bias"))
        expected = moe_reference(exact[0], ids, weights, biases)
        compare(moe(tokens, ids), expected, [tokens], exact, reduction=3072)


# ---------------------------------------------------------------------- indexes: 108 cases


@pytest.mark.parametrize(("height", "width"), grid(*[[4, 8, 16, 32, 64, 128]] * 2))
@pytest.mark.parametrize(("rows_first", "columns_first"), [(True, False), (False, True), (True, True)])
def test_block_indexes(rows_first, columns_first, height, width):
    mask = block_mask((1024, 768), (1, 1), 0.999, seed=1, device="cuda")
    indexes = get_bcs_function(height, width, rows_first, columns_first).build_indexes(mask)
    kept = mask.reshape(1024 // height, height, 768 // width, width).any(3).any(1)
    assert torch.equal(indexes.get_block_mask(), kept)
    dense = draw(2, 1024, 768)
    values = indexes.convert(dense)
    inside = kept.repeat_interleave(height, 0).repeat_interleave(width, 1)
    assert values.shape == (2, int(kept.sum()) * height * width)
    assert torch.equal(indexes.inverse(values), torch.where(inside, dense, 0.0))
    for axis in (-1, -2):
        check(indexes.sum(values, axis), torch.where(inside, dense, 0.0).double().sum(axis), reduction=1024)


# ---------------------------------------------------------------------- tuning: 8 cases


@pytest.mark.parametrize("backward", ON_OFF)
@pytest.mark.parametrize("what", ["linear", "product", "softmax", "attention"])
def test_tuning(what, backward):
    pytest.importorskip("optuna")
    mask = block_mask((256, 256), (32, 32), 0.9, device="cuda")
    # Every query sees something: what dense attention gives the others is not the tuner's matter.
    mask |= torch.eye(8, dtype=torch.bool, device="cuda").repeat_interleave(32, 0).repeat_interleave(32, 1)
    x = draw(256, 256, dtype=torch.float16)
    op, inputs, expected = {
        "linear": lambda: (layer := SparseLinear(nn.Linear(256, 256).cuda().half(), weight_mask=mask), (x,), layer(x)),
        "product": lambda: (layer := SparseBatchMatMul(C_mask=mask), (x, x), layer(x, x)),
        "softmax": lambda: (layer := SparseSoftmax(mask), (x,), layer(x)),
        "attention": lambda: (layer := SparseAttention(mask), (x, x, x), layer(x, x, x)),
    }[what]()
    choice = op.tune(inputs, max_trials=4, budget_s=10, backward=backward)
    assert op.ready
    assert choice.implement
    check(op(*inputs), expected.detach().double(), reduction=2048)

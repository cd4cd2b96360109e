"""On CUDA, `triton-flash` computes what dense attention under the mask computes, and works inside PyTorch."""

import math

import pytest
import torch

from gpu.cases import draw
from sparta.nn import SeqlenDynamicSparseAttention, SparseAttention
from sparta.specialize.attention.spec import attention_spec
from sparta.specialize.attention.tile import AttentionTile
from sparta.specialize.attention.triton_flash import TritonFlash, TritonFlashSeqlen
from sparta.specialize.implement import implement_named
from sparta.testing import attention_reference, check

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def inputs_of(heads, kv_heads, m, n, e, f, dtype=torch.bfloat16, batch=1):
    shapes = ((batch, heads, m, e), (batch, kv_heads, n, e), (batch, kv_heads, n, f))
    return [draw(*shape, dtype=dtype) for shape in shapes]


def blocks(m, n, density, block=64, groups=()):
    coarse = torch.rand(*groups, -(-m // block), -(-n // block), device="cuda") < density
    return coarse.repeat_interleave(block, -2).repeat_interleave(block, -1)[..., :m, :n].contiguous()


def compare(mask, inputs, tile=None, *, gradients=True, trained=False):
    """Compare the result and the gradients with float64, on memory that held NaN."""
    spec = attention_spec(mask, *inputs, backward=trained)
    assert TritonFlash().supports(spec) or spec["mask"].density == 1.0
    kernel = TritonFlash().build(spec, {"tile": str(tile)} if tile else TritonFlash().default(spec))
    packed = kernel.pack(mask)
    leaves = [x.detach().requires_grad_(gradients) for x in inputs]
    with torch.no_grad():
        kernel.run(packed, *leaves).fill_(math.nan)  # the next run is given the same memory
    y = kernel.run(packed, *leaves)
    exact = [x.detach().double().requires_grad_(gradients) for x in inputs]
    expected = attention_reference(*exact, mask)
    terms = max(inputs[1].shape[-2], inputs[0].shape[-1])
    check(y, expected.detach(), reduction=terms)
    if gradients:
        cotangent = draw(*y.shape, dtype=y.dtype)
        y.backward(cotangent)
        expected.backward(cotangent.double())
        for leaf, reference in zip(leaves, exact, strict=True):
            check(leaf.grad, reference.grad, reduction=8 * terms, dtype=y.dtype, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("m", "n", "e", "f", "density"),
    [(256, 256, 64, 64, 0.5), (300, 500, 128, 128, 0.3), (513, 129, 40, 72, 0.7), (130, 130, 256, 256, 0.5)],
)
def test_ragged_shapes(m, n, e, f, density, dtype):
    compare(blocks(m, n, density), inputs_of(2, 1, m, n, e, f, dtype))


@pytest.mark.parametrize("density", [0.0, 0.01, 0.5, 1.0])
def test_masks_of_elements_by_batch_and_head(density):
    mask = torch.rand(2, 4, 200, 230, device="cuda") < density
    compare(mask, inputs_of(4, 2, 200, 230, 64, 64, batch=2))


@pytest.mark.parametrize("width", [64, 128])
def test_every_candidate_is_right(width):
    mask, inputs = blocks(512, 640, 0.5), inputs_of(4, 2, 512, 640, width, width)
    for tile in TritonFlash().space(attention_spec(mask, *inputs))["tile"].domain.values:
        compare(mask, inputs, tile)


@pytest.mark.parametrize(("m", "n"), [(512, 640), (500, 333), (130, 700)])
@pytest.mark.parametrize("causal", [False, True])
def test_every_candidate_for_gradients_is_right(m, n, causal):
    mask, inputs = blocks(m, n, 0.5), inputs_of(4, 2, m, n, 128, 128)
    if causal:
        mask = torch.ones(m, n, dtype=torch.bool, device="cuda").tril()
    for tile in TritonFlash().space(attention_spec(mask, *inputs, backward=True))["tile"].domain.values:
        compare(mask, inputs, tile, trained=True)


def test_causal_and_windows_with_global_tokens():
    causal = torch.ones(700, 700, dtype=torch.bool, device="cuda").tril()
    compare(causal, inputs_of(4, 4, 700, 700, 128, 128))
    window = causal & ~causal.tril(-130) | (torch.arange(700, device="cuda") < 20)
    compare(window, inputs_of(4, 1, 700, 700, 64, 64))


@pytest.mark.parametrize("queries", [1, 4, 17])
def test_few_queries_over_many_keys(queries):
    mask = blocks(queries, 9000, 0.3)
    compare(mask, inputs_of(8, 2, queries, 9000, 128, 128), gradients=queries == 4)


def test_nan_that_nobody_sees_stays_out():
    mask = torch.rand(300, 300, device="cuda") < 0.7
    mask[7], mask[:, 5] = False, False
    q, k, v = inputs_of(2, 2, 300, 300, 64, 64)
    q[:, :, 7], k[:, :, 5], v[:, :, 5] = math.nan, math.nan, math.inf
    module = SparseAttention(mask)
    module.build({"_name": "triton-flash", **TritonFlash().default(attention_spec(mask, q, k, v))}, (q, k, v))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    y = module(*leaves)
    assert y.isfinite().all()
    assert not y[:, :, 7].any()
    y.sum().backward()
    assert all(leaf.grad.isfinite().all() for leaf in leaves)


def test_strided_and_misaligned_inputs():
    mask = blocks(300, 300, 0.5)
    q, k, v = (draw(1, 300, 4, 64).transpose(1, 2) for _ in range(3))
    compare(mask, [q, k, v])
    compare(mask, [draw(1, 4, 300, 65)[..., 1:], draw(1, 4, 300, 65)[..., 1:], draw(1, 4, 64, 300).mT])


def test_the_same_bits_every_time():
    mask, inputs = blocks(1024, 1024, 0.4), inputs_of(8, 2, 1024, 1024, 128, 128)
    spec = attention_spec(mask, *inputs)
    kernel = TritonFlash().build(spec, TritonFlash().default(spec))
    packed, leaves = kernel.pack(mask), [x.requires_grad_() for x in inputs]
    runs = []
    for _ in range(3):
        y = kernel.run(packed, *leaves)
        runs.append((y, *torch.autograd.grad(y.sum(), leaves)))
    assert all(torch.equal(a, b) for other in runs[1:] for a, b in zip(runs[0], other, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sequences_of_several_lengths(dtype):
    lengths = torch.tensor([0, 1, 64, 100, 333, 400])
    row = (torch.arange(400, device="cuda") < lengths.cuda()[:, None])[:, None, :, None]
    inputs = inputs_of(4, 2, 400, 400, 64, 64, dtype, batch=6)
    module = SeqlenDynamicSparseAttention(global_mode=False)
    spec = module._spec((*inputs, lengths))
    module.build({"_name": "triton-flash", **TritonFlashSeqlen().default(spec)}, (*inputs, lengths))
    leaves = [torch.where(row, x, math.nan).requires_grad_() for x in inputs]
    y = module(*leaves, lengths)
    exact = [torch.where(row, x, 0.0).double().requires_grad_() for x in inputs]
    expected = attention_reference(*exact, seqlens=lengths.cuda())
    check(y, expected.detach(), reduction=400)
    cotangent = draw(*y.shape, dtype=dtype)
    y.backward(cotangent)
    expected.backward(cotangent.double())
    for leaf, reference in zip(leaves, exact, strict=True):
        check(leaf.grad, reference.grad, reduction=3200, dtype=dtype, atol=1e-5)


# ---------------------------------------------------------------------- inside PyTorch


@pytest.fixture
def built():
    """A module on the fused kernel, and inputs for it."""
    mask, inputs = blocks(256, 256, 0.5), inputs_of(4, 2, 256, 256, 64, 64)
    module = SparseAttention(mask)
    module.build({"_name": "triton-flash", **TritonFlash().default(attention_spec(mask, *inputs))}, inputs)
    return module, inputs


def test_torch_compile_takes_it_whole(built):
    module, inputs = built
    leaves = [x.requires_grad_() for x in inputs]
    y = torch.compile(module, fullgraph=True)(*leaves)
    check(y.detach(), attention_reference(*(x.detach() for x in inputs), module.mask), reduction=256)
    y.sum().backward()
    assert all(leaf.grad.isfinite().all() for leaf in leaves)


def test_a_cuda_graph_captures_and_replays_it(built):
    module, inputs = built
    with torch.no_grad():
        module(*inputs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = module(*inputs)
        for _ in range(2):
            for x in inputs:
                x.normal_()
            graph.replay()
            check(y, attention_reference(*inputs, module.mask), reduction=256)


def test_tuning_finds_it(built):
    pytest.importorskip("optuna")
    module, inputs = built
    choice = module.tune(inputs, max_trials=8, budget_s=20)
    assert "triton-flash" not in choice.refused
    check(module(*inputs), attention_reference(*inputs, module.mask), reduction=256)


def test_a_tile_that_does_not_fit_is_an_error_of_ours():
    mask, inputs = blocks(256, 256, 0.5), inputs_of(2, 2, 256, 256, 256, 256, torch.bfloat16)
    kernel = TritonFlash().build(attention_spec(mask, *inputs), {"tile": str(AttentionTile(128, 128, 4, 8, tma=1))})
    with pytest.raises(ValueError, match="needs more than the GPU has"):
        kernel.run(kernel.pack(mask), *inputs)


@pytest.mark.parametrize("name", ["dense", "blocks"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_query_that_sees_nothing_gives_zero_in_plain_pytorch_too(name, dtype):
    mask = blocks(128, 128, 0.5, block=32)
    mask[40:70] = False
    inputs = inputs_of(2, 2, 128, 128, 64, 64, dtype)
    spec, implement = attention_spec(mask, *inputs), implement_named(name, "attention")
    kernel = implement.build(spec, implement.default(spec))
    y = kernel.run(kernel.pack(mask), *inputs)
    assert not y[..., 40:70, :].any()
    check(y, attention_reference(*(x.double() for x in inputs), mask), reduction=128)

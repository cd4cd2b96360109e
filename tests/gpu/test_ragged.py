"""On CUDA, `triton-ragged` computes what every expert on its own computes, and works inside PyTorch."""

import copy
import math

import pytest
import torch
from torch import nn

from sparta.nn import DynamicSparseMoE
from sparta.specialize.moe.tile import RaggedTile
from sparta.specialize.moe.triton_ragged import TritonRagged
from sparta.testing import check, moe_reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def layer(experts, k, n, dtype, tokens, visits, tile=None, bias=True):
    """Return a module on the ragged kernel."""
    moe = DynamicSparseMoE([nn.Linear(k, n, bias=bias) for _ in range(experts)]).cuda().to(dtype)
    sample = (torch.zeros(tokens, k, device="cuda", dtype=dtype), torch.zeros(tokens, visits, dtype=torch.int64).cuda())
    spec = moe._spec(sample)
    assert TritonRagged().supports(spec)
    params = {"tile": str(tile)} if tile else TritonRagged().default(spec)
    moe._hold(TritonRagged().build(spec, params), None)
    return moe


def compare(moe, tokens, ids, gates):
    """Compare the result and all gradients with float64, on memory that held NaN."""
    with torch.no_grad():
        moe(tokens, ids, gates).fill_(math.nan)
    leaves = [None if x is None else x.detach().requires_grad_() for x in (tokens, gates)]
    y = moe(leaves[0], ids, leaves[1])
    exact = [None if x is None else x.detach().double().requires_grad_() for x in leaves]
    weights = [expert.weight.detach().double().requires_grad_() for expert in moe.experts]
    zero = torch.zeros(moe.out_features, device="cuda")
    biases = [
        (zero if expert.bias is None else expert.bias).detach().double().requires_grad_() for expert in moe.experts
    ]
    expected = moe_reference(exact[0], ids, weights, biases, exact[1])
    check(y, expected.detach(), reduction=8 * tokens.shape[1])
    cotangent = torch.randn_like(y)
    y.backward(cotangent)
    expected.backward(cotangent.double())
    pairs = [*zip(leaves, exact, strict=True)]
    pairs += [(expert.weight, weight) for expert, weight in zip(moe.experts, weights, strict=True)]
    pairs += [(expert.bias, bias) for expert, bias in zip(moe.experts, biases, strict=True)]
    for leaf, reference in pairs:
        if leaf is not None:
            right = torch.zeros_like(reference) if reference.grad is None else reference.grad
            check(leaf.grad, right, reduction=4096, dtype=tokens.dtype, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("tokens", "k", "n", "experts", "visits"),
    [(1, 256, 512, 8, 2), (100, 256, 320, 8, 2), (1000, 512, 384, 16, 4), (777, 130, 77, 5, 1), (300, 128, 192, 3, 3)],
)
def test_any_shape(tokens, k, n, experts, visits, dtype):
    moe = layer(experts, k, n, dtype, tokens, visits)
    ids = torch.randint(0, experts, (tokens, visits), device="cuda")
    compare(moe, torch.randn(tokens, k, device="cuda").to(dtype), ids, torch.rand(tokens, visits, device="cuda"))


@pytest.mark.parametrize("tokens", [2, 100, 2000])
def test_every_candidate_is_right(tokens):
    moe = layer(8, 512, 384, torch.bfloat16, tokens, 2)
    x = torch.randn(tokens, 512, device="cuda", dtype=torch.bfloat16)
    ids = torch.randint(0, 8, (tokens, 2), device="cuda")
    spec = moe._spec((x, ids))
    for tile in TritonRagged().space(spec)["tile"].domain.values:
        moe._hold(TritonRagged().build(spec, {"tile": tile}), None)
        for parameter in moe.parameters():
            parameter.grad = None
        compare(moe, x, ids, None)


def test_all_tokens_at_one_expert():
    moe = layer(8, 256, 256, torch.bfloat16, 1000, 1, bias=False)
    x = torch.randn(1000, 256, device="cuda", dtype=torch.bfloat16)
    ids = torch.full((1000, 1), 3, device="cuda")
    y = moe(x, ids)
    check(y, moe_reference(x, ids, [e.weight for e in moe.experts]), reduction=256)
    y.sum().backward()
    assert all(not expert.weight.grad.any() for number, expert in enumerate(moe.experts) if number != 3)


def test_overflow_stays_with_its_expert():
    moe = layer(4, 256, 256, torch.bfloat16, 400, 1)
    with torch.no_grad():
        moe.experts[2].weight.fill_(math.inf)
        y = moe(torch.rand(400, 256, device="cuda", dtype=torch.bfloat16), torch.arange(400, device="cuda") % 4)
    assert torch.equal(~y.isfinite().any(1), torch.arange(400, device="cuda") % 4 == 2)


def test_the_same_bits_every_time_and_after_a_copy():
    moe = layer(8, 512, 256, torch.bfloat16, 1000, 2)
    x = torch.randn(1000, 512, device="cuda", dtype=torch.bfloat16)
    ids, gates = torch.randint(0, 8, (1000, 2), device="cuda"), torch.rand(1000, 2, device="cuda")
    with torch.no_grad():
        first = moe(x, ids, gates)
        assert all(torch.equal(first, other(x, ids, gates)) for other in (moe, moe, copy.deepcopy(moe)))


def test_torch_compile_takes_it_whole():
    moe = layer(4, 256, 128, torch.bfloat16, 100, 2)
    x = torch.randn(100, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    ids = torch.randint(0, 4, (100, 2), device="cuda")
    y = torch.compile(moe, fullgraph=True)(x, ids)
    check(y.detach(), moe(x, ids).detach().double(), reduction=256)
    y.sum().backward()
    assert x.grad is not None


def test_a_cuda_graph_captures_it_and_follows_the_routing():
    moe = layer(8, 256, 128, torch.bfloat16, 500, 2)
    x = torch.randn(500, 256, device="cuda", dtype=torch.bfloat16)
    ids = torch.randint(0, 8, (500, 2), device="cuda")
    parameters = [tensor for expert in moe.experts for tensor in (expert.weight, expert.bias)]
    with torch.no_grad():
        moe._run(x, ids, None, *parameters)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = moe._run(x, ids, None, *parameters)
        for most in (8, 1, 3):
            x.normal_()
            ids.random_(0, most)
            graph.replay()
            expected = moe_reference(x, ids, parameters[::2], parameters[1::2])
            check(y, expected, reduction=512)


def test_a_tile_that_does_not_fit_is_an_error_of_ours():
    moe = layer(4, 256, 256, torch.bfloat16, 500, 1, RaggedTile(128, 256, 128, 8, 8, 1, 1))
    with pytest.raises(ValueError, match="needs more than the GPU has"), torch.no_grad():
        moe(torch.randn(500, 256, device="cuda", dtype=torch.bfloat16), torch.zeros(500, dtype=torch.int64).cuda())

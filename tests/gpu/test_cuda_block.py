"""On CUDA, blocks for many tokens: the kernel for warpgroups computes what the masked dense layer computes."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from gpu.cases import draw, run_poisoned
from sparta.nn import SparseLinear
from sparta.specialize.cuda.device import HOPPER, capability
from sparta.specialize.kernel_spec import Epilogue
from sparta.specialize.linear.cuda_block import BlockMatrixTile, CudaBlock
from sparta.specialize.linear.spec import linear_spec
from sparta.specialize.scaled_linear.cuda_block import Fp8CudaBlock
from sparta.specialize.scaled_linear.inputs import InputRounding
from sparta.specialize.scaled_linear.producers import norm
from sparta.specialize.scaled_linear.spec import FP8, reference, rounded_rows, scaled_linear_spec, scaled_weight
from sparta.tesa.attribute import TeSA
from sparta.testing import block_mask, check, linear_reference

if capability() != HOPPER:
    pytest.skip("these kernels are for Hopper GPUs", allow_module_level=True)


ACTIVATIONS = {None: lambda y: y, "relu": functional.relu, "gelu": functional.gelu, "silu": functional.silu}
TILES = [
    BlockMatrixTile(256, 2, 5), BlockMatrixTile(256, 2, 2, group=1), BlockMatrixTile(128, 3, 8),
    BlockMatrixTile(128, 3, 6, group=3), BlockMatrixTile(128, 2, 3, 64), BlockMatrixTile(256, 2, 7, 64),
    BlockMatrixTile(128, 3, 12, 64), BlockMatrixTile(64, 2, 4),
]  # fmt: skip
SHAPES = [
    (50, 264, 320), (256, 256, 512), (300, 136, 80), (1000, 520, 1040), (277, 1000, 2064), (4096, 1024, 1024),
    (4096, 2568, 512),
]  # fmt: skip


def mask_of(n, k, sparsity=0.7):
    """Blocks of 64; the first block row keeps nothing, the second all."""
    mask = block_mask((n, k), (64, 64), sparsity, seed=n)
    mask[:64], mask[64:128] = False, True
    return mask


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_every_tile_is_right(m, n, k, dtype):
    mask = mask_of(n, k)
    x, weight, bias = draw(m, k, dtype=dtype), draw(n, k, dtype=dtype), draw(n, dtype=dtype)
    spec = linear_spec(TeSA.from_mask(mask), m, dtype, epilogue=Epilogue(bias=True), device="cuda")
    assert CudaBlock().supports(spec), CudaBlock().supports(spec).reason
    expected = linear_reference(x, weight, bias, weight_mask=mask.cuda())
    for tile in [*CudaBlock().tiles(spec), *TILES]:
        y = run_poisoned(CudaBlock().build(spec, {"tile": str(tile)}), weight, x, bias, None)
        check(y, expected, reduction=k, what=str(tile))


@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_every_tile_is_right_in_fp8(m, n, k):
    mask = mask_of(n, k)
    weight, bias = torch.randn(n, k, device="cuda") * (torch.rand(n, 1, device="cuda") + 0.5), draw(n)
    tesa = scaled_weight(weight, TeSA.from_mask(mask))
    spec = scaled_linear_spec(tesa, m, activations=FP8, epilogue=Epilogue(bias=True))
    assert Fp8CudaBlock().supports(spec), Fp8CudaBlock().supports(spec).reason
    x = rounded_rows(draw(m, k))
    expected = reference(spec, weight, x, bias)
    for tile in [*Fp8CudaBlock().tiles(spec), *TILES]:
        y = run_poisoned(Fp8CudaBlock().build(spec, {"tile": str(tile)}), weight, x, bias, None)
        check(y, expected, reduction=k, what=str(tile))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("tile", [TILES[0], TILES[2]], ids=str)
def test_epilogue_strides_and_other_sizes(activation, tile):
    n, k, rows = 320, 512, 256
    mask = mask_of(n, k)
    epilogue = Epilogue(bias=True, activation=activation, residual=True)
    spec = linear_spec(TeSA.from_mask(mask), rows, torch.bfloat16, epilogue=epilogue, device="cuda")
    kernel = CudaBlock().build(spec, {"tile": str(tile)})
    weight, bias = draw(n, k), draw(n)
    for m in (rows, rows + 5, 1):
        for x in (draw(m, 2 * k)[:, ::2], draw(m, 2 * k)[:, k:], draw(m, k + 4)[:, 4:]):
            residual = draw(n, m).t()
            expected = linear_reference(x, weight, bias, weight_mask=mask.cuda())
            expected = ACTIVATIONS[activation](expected) + residual.double()
            check(run_poisoned(kernel, weight, x, bias, residual), expected, reduction=k)
    assert kernel.run(kernel.pack(weight), draw(0, k), bias, None).shape == (0, n)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gelu_of_any_number(dtype):
    """One input and the weight 1: results are GELU of x, rounded once."""
    mask = torch.zeros(64, 128, dtype=torch.bool)
    mask[:, :64] = True
    weight = torch.zeros(64, 128, device="cuda", dtype=dtype)
    weight[:, 0] = 1
    x = torch.zeros(4096, 128, device="cuda", dtype=dtype)
    x[:, 0] = torch.linspace(-9, 9, 4096, device="cuda").to(dtype)
    x[:3, 0] = torch.tensor([torch.inf, torch.nan, 300.0])
    epilogue = Epilogue(activation="gelu")
    spec = linear_spec(TeSA.from_mask(mask), 4096, dtype, epilogue=epilogue, device="cuda")
    kernel = CudaBlock().build(spec, CudaBlock().default(spec))
    y = kernel.run(kernel.pack(weight), x, None, None)[:, 5].double()
    expected = functional.gelu(x[:, 0].double())
    rounding = torch.finfo(dtype).eps / 2 + (9e-5 if dtype == torch.bfloat16 else 4e-6)
    torch.testing.assert_close(y, expected, rtol=rounding, atol=1.5e-6, equal_nan=True)


@pytest.mark.parametrize("fp8", [False, True])
def test_same_bits_twice_and_in_a_graph_of_many_calls(fp8):
    n, k, rows = 1024, 2048, 700
    mask = mask_of(n, k)
    weight, x = draw(n, k), draw(rows, k)
    if fp8:
        spec = scaled_linear_spec(scaled_weight(weight, TeSA.from_mask(mask)), rows, activations=FP8)
    else:
        spec = linear_spec(TeSA.from_mask(mask), rows, torch.bfloat16, device="cuda")
    implement = Fp8CudaBlock() if fp8 else CudaBlock()
    kernel = implement.build(spec, implement.default(spec))
    packed = kernel.pack(weight.float() if fp8 else weight)
    first = kernel.run(packed, x, None, None).clone()
    assert torch.equal(first, kernel.run(packed, x, None, None))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # Kernels that begin before the one ahead of them has ended must still wait for what it writes.
        results = [kernel.run(packed, x + i, None, None) for i in range(10)]
    x.copy_(torch.randn_like(x))
    for _ in range(3):
        graph.replay()
    for i, y in enumerate(results):
        assert torch.equal(y, kernel.run(packed, x + i, None, None)), i


def test_non_finite_inputs_reach_the_results_they_belong_to():
    mask = torch.zeros(128, 256, dtype=torch.bool)
    mask[:64, :64], mask[64:, 64:192] = True, True
    x, weight = draw(256, 256), draw(128, 256)
    x[1, 0], x[2, 2], x[3, 70], x[4, 200] = torch.nan, torch.inf, torch.nan, torch.nan
    spec = linear_spec(TeSA.from_mask(mask), 256, torch.bfloat16, device="cuda")
    kernel = CudaBlock().build(spec, CudaBlock().default(spec))
    y = kernel.run(kernel.pack(weight), x, None, None)
    assert y[1, :64].isnan().all()
    assert y[2, :64].isinf().all()
    assert y[1:3, 64:].isfinite().all()
    assert y[3, 64:].isnan().all()
    assert y[3, :64].isfinite().all()
    assert y[4].isfinite().all()  # it meets pruned weights only


def test_a_layer_trains_and_compiles_with_it():
    mask = block_mask((256, 512), (64, 64), 0.7, seed=0)
    layer = SparseLinear(nn.Linear(512, 256).cuda().bfloat16(), weight_mask=mask)
    x = draw(300, 512)
    spec = linear_spec(TeSA.from_mask(mask), 300, torch.bfloat16, epilogue=Epilogue(bias=True), device="cuda")
    layer.build({"_name": "cuda-block", **CudaBlock().default(spec)}, x)
    given = x.clone().requires_grad_()
    layer(given).float().square().sum().backward()
    assert not layer.weight.grad[~mask.cuda()].any()
    exact = [t.detach().double().requires_grad_() for t in (x, layer.weight, layer.bias)]
    functional.linear(*exact).square().sum().backward()
    check(given.grad, exact[0].grad, reduction=256, dtype=torch.bfloat16)
    check(layer.weight.grad, torch.where(mask.cuda(), exact[1].grad, 0.0), reduction=4096, dtype=torch.bfloat16)
    expected = linear_reference(x, layer.weight.detach(), layer.bias.detach(), weight_mask=mask.cuda())
    check(layer.eval()(x), expected, reduction=512)
    with torch.no_grad():
        check(torch.compile(layer, fullgraph=True)(x), expected, reduction=512)


def test_an_input_that_is_rounded_already_gives_the_same_bits():
    n, k, m = 256, 512, 300
    weight, x = torch.randn(n, k, device="cuda"), draw(m, k)
    spec = scaled_linear_spec(scaled_weight(weight, TeSA.from_mask(mask_of(n, k))), m, activations=FP8)
    kernel = Fp8CudaBlock().build(spec, Fp8CudaBlock().default(spec))
    packed = kernel.pack(weight)
    assert torch.equal(
        kernel.run(packed, x, None, None), kernel.run_rounded(packed, InputRounding(None)(x), None, None)
    )


@pytest.mark.parametrize("rms", [True, False])
def test_norms_are_what_they_are_defined_as_and_have_gradients(rms):
    x = draw(2, 77, 1000)
    x[0, 1, 3], x[0, 2, 4], x[1, 5] = torch.nan, torch.inf, 0
    weight, bias = draw(1000), None if rms else draw(1000)

    def own(x, weight, bias):
        if rms:  # by its definition: an infinite element makes itself NaN, and all others of its row 0
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight
        return functional.layer_norm(x, (1000,), weight, bias)

    y = norm(x, weight, bias, 1e-5, rms=rms)
    expected = own(x.double(), weight.double(), bias if bias is None else bias.double())
    torch.testing.assert_close(y.double(), expected, rtol=1e-2, atol=1e-2, equal_nan=True)
    other = weight.clone().requires_grad_()
    norm(x[1], other, bias, 1e-5, rms=rms).sum().backward()
    assert other.grad.any()

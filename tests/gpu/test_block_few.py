"""On CUDA, blocks for few tokens: the kernel that reads the weight into registers computes what dense computes."""

import pytest
import torch
from torch.nn import functional

from gpu.cases import draw, run_poisoned
from sparta.specialize.cuda.device import HOPPER, capability
from sparta.specialize.kernel_spec import Epilogue
from sparta.specialize.linear.cuda_block_few import CudaBlockFew, FewBlocksTile
from sparta.specialize.linear.spec import linear_spec
from sparta.specialize.scaled_linear.cuda_block_few import ScaledBlockFew
from sparta.specialize.scaled_linear.spec import FP8, reference, scaled_linear_spec, scaled_weight
from sparta.tesa.attribute import TeSA
from sparta.testing import block_mask, check, linear_reference

if capability() < HOPPER:
    pytest.skip("these kernels are for Hopper GPUs", allow_module_level=True)

ACTIVATIONS = {None: lambda y: y, "relu": functional.relu, "gelu": functional.gelu, "silu": functional.silu}
TILES = [
    FewBlocksTile(1, 1, 1, 6), FewBlocksTile(1, 4, 4, 2), FewBlocksTile(8, 2, 2, 3), FewBlocksTile(8, 1, 16, 1),
    FewBlocksTile(16, 4, 2, 1), FewBlocksTile(16, 2, 4, 2), FewBlocksTile(32, 1, 2, 2), FewBlocksTile(32, 2, 8, 2),
]  # fmt: skip
SHAPES = [(1, 256, 512), (3, 100, 72), (8, 1040, 1040), (17, 77, 333), (64, 300, 5000)]


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
    expected = linear_reference(x, weight, bias, weight_mask=mask.cuda())
    for tile in [*CudaBlockFew().tiles(spec), *TILES]:
        y = run_poisoned(CudaBlockFew().build(spec, {"tile": str(tile)}), weight, x, bias, None)
        check(y, expected, reduction=k, what=str(tile))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("format", [FP8, "int8"])
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_every_tile_is_right_in_8_bits(m, n, k, format, dtype):
    mask = mask_of(n, k)
    weight = torch.randn(n, k, device="cuda") * (torch.rand(n, 1, device="cuda") + 0.5)
    x, bias = draw(m, k, dtype=dtype), draw(n, dtype=dtype)
    tesa = scaled_weight(weight, TeSA.from_mask(mask), format)
    spec = scaled_linear_spec(tesa, m, dtype, epilogue=Epilogue(bias=True))
    expected = reference(spec, weight, x, bias)
    for tile in [*ScaledBlockFew().tiles(spec), *TILES]:
        y = run_poisoned(ScaledBlockFew().build(spec, {"tile": str(tile)}), weight, x, bias, None)
        check(y, expected, reduction=k, what=str(tile))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("tile", TILES[::2], ids=str)
def test_epilogue_strides_and_other_sizes(activation, tile):
    n, k, rows = 321, 512, 8
    mask = mask_of(n, k)
    epilogue = Epilogue(bias=True, activation=activation, residual=True)
    spec = linear_spec(TeSA.from_mask(mask), rows, torch.bfloat16, epilogue=epilogue, device="cuda")
    kernel = CudaBlockFew().build(spec, {"tile": str(tile)})
    weight, bias = draw(n, k), draw(n)
    for m in (rows, 70, 1):
        for x in (draw(m, 2 * k)[:, ::2], draw(m, 2 * k)[:, k:], draw(m, k + 4)[:, 4:]):
            residual = draw(n, m).t()
            expected = linear_reference(x, weight, bias, weight_mask=mask.cuda())
            expected = ACTIVATIONS[activation](expected) + residual.double()
            check(run_poisoned(kernel, weight, x, bias, residual), expected, reduction=k)
    assert kernel.run(kernel.pack(weight), draw(0, k), bias, None).shape == (0, n)


def test_same_bits_twice_and_in_a_graph_of_many_calls():
    n, k, rows = 1024, 2048, 16
    mask = mask_of(n, k)
    weight, x = draw(n, k), draw(rows, k)
    spec = linear_spec(TeSA.from_mask(mask), rows, torch.bfloat16, device="cuda")
    kernel = CudaBlockFew().build(spec, CudaBlockFew().default(spec))
    first = kernel.run(kernel.pack(weight), x, None, None).clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # What is asked for early must still be seen as the kernels before write it: the weight too.
        results = [kernel.run(kernel.pack(weight + i), x + i, None, None) for i in range(10)]
    for _ in range(3):
        graph.replay()
    assert torch.equal(first, results[0])
    x.copy_(torch.randn_like(x))
    weight.copy_(torch.randn_like(weight))
    graph.replay()
    for i, y in enumerate(results):
        assert torch.equal(y, kernel.run(kernel.pack(weight + i), x + i, None, None)), i


def test_non_finite_inputs_reach_the_results_they_belong_to():
    mask = torch.zeros(128, 256, dtype=torch.bool)
    mask[:64, :64], mask[64:, 64:192] = True, True
    x, weight = draw(8, 256), draw(128, 256)
    x[1, 0], x[2, 2], x[3, 70], x[4, 200] = torch.nan, torch.inf, torch.nan, torch.nan
    spec = linear_spec(TeSA.from_mask(mask), 8, torch.bfloat16, device="cuda")
    kernel = CudaBlockFew().build(spec, CudaBlockFew().default(spec))
    y = kernel.run(kernel.pack(weight), x, None, None)
    assert y[1, :64].isnan().all()
    assert y[2, :64].isinf().all()
    assert y[1:3, 64:].isfinite().all()
    assert y[3, 64:].isnan().all()
    assert y[3, :64].isfinite().all()
    assert y[4].isfinite().all()  # it meets pruned weights only
